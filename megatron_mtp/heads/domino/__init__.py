"""Domino (arXiv:2605.29707): a block with a bias by all previous tokens of it.

row.py        its table row: names, layers that it reads, loss, parts
block.py      its module in a model
propose.py    how it drafts
folder.py     its folder for engines
reference.py  reference implementation that runs from this folder alone
"""
