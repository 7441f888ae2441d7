"""EAGLE (arXiv:2401.15077): one layer that reads the trunk's last state.

row.py      what it is called, reads and learns, and where its parts are
block.py    its module in a model
propose.py  how it drafts
folder.py   its folder for engines
"""
