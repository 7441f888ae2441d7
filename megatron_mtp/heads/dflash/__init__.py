"""DFlash (arXiv:2602.06036): drafts a block of tokens in one pass.

row.py      its table row: names, layers that it reads, loss, parts
propose.py  how it drafts
folder.py   its folder for engines
"""
