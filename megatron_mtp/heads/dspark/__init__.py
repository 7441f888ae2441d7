"""DSpark (arXiv:2607.05147): a block whose drafts know the token before, with a confidence.

row.py      what it is called, reads and learns, and where its parts are
block.py    its module in a model
propose.py  how it drafts
folder.py   its folder for engines
"""
