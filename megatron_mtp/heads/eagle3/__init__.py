"""EAGLE-3 (arXiv:2503.01840): one layer that reads the states of three trunk layers.

row.py      its table row: names, layers that it reads, loss, parts
block.py    its module in a model
propose.py  how it drafts
folder.py   its folder for engines
"""
