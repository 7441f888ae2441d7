"""EAGLE (arXiv:2401.15077): one layer that reads the trunk's last hidden state.

row.py      its table row: names, layers that it reads, loss, parts
block.py    its module in a model
propose.py  how it drafts
folder.py   its folder for engines
"""
