"""EAGLE-3 (arXiv:2503.01840): one layer that reads three of the trunk's layers.

row.py      what it is called, reads and learns, and where its parts are
block.py    its module in a model
propose.py  how it drafts
folder.py   its folder for engines
"""
