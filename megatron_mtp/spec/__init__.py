"""What draft heads are, as plain data: nothing here imports torch, nor any other part of the package.

head.py          HeadSpec: a drafter with a value for every setting, which are given and checked here alone
kinds.py         kinds of drafters, a row of facts each
attention.py     sizes, positions and windows of a drafter's attention
rope_scaling.py  scalings of rotary positions, by the keys of a config.json
"""
