"""What MTP layers and draft heads are, as plain data: nothing here imports torch, nor any other part of the package.

config.py        MTPConfig: every setting of the MTP layers, whose fields become the --mtp-* flags
head.py          HeadSpec: a drafter with a value for every setting, which are given and checked here alone
attached.py      Head: a draft head to attach to a model that exists, and what none can have
kinds.py         kinds of drafters, a row of facts each
attention.py     sizes, positions and windows of a drafter's attention
rope_scaling.py  scalings of rotary positions, by the keys of a config.json
registry.py      tables to which other packages add rows: losses, proposers, verifiers, families
"""
