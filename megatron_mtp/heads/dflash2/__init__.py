"""DFlash2 (z-lab): convolutions along a block, and a choice among likely tokens.

row.py      what it is called, reads and learns, and where its parts are
block.py    its module in a model
propose.py  how it drafts
folder.py   its folder for engines
"""
