"""DSpark (arXiv:2607.05147): a block with a bias by the previous token, and a confidence.

row.py      its table row: names, layers that it reads, loss, parts
block.py    its module in a model
propose.py  how it drafts
folder.py   its folder for engines
"""
