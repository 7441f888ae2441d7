"""The table of acceptance: what the depths of many checkpoints draft here, and what engines will accept of them.

rows.py       what a row depends on, and the file in which a finished one is kept
measuring.py  a row: the checkpoint drafts, and engines' rules are run on its texts
shown.py      rows for a terminal and as JSON
flags.py      the flags, for a parser that must not wait for torch
"""
