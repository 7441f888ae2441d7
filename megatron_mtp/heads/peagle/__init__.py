"""P-EAGLE: an EAGLE-3 drafter that drafts all tokens in one pass.

row.py        what it is called, reads and learns, and where its parts are
block.py      its module in a model
propose.py    how it drafts
folder.py     its folder for engines
reference.py  its computation from that folder alone
"""
