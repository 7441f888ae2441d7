"""DFlash (arXiv:2602.06036): a block of tokens in one pass.

row.py      what it is called, reads and learns, and where its parts are
propose.py  how it drafts
folder.py   its folder for engines
"""
