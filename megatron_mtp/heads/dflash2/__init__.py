"""DFlash2 (z-lab): convolutions along a block, and a choice among likely tokens.

row.py      its table row: names, layers that it reads, loss, parts
block.py    its module in a model
propose.py  how it drafts
folder.py   its folder for engines
"""
