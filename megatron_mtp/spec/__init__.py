"""Settings of MTP layers and drafters as plain data. Nothing here imports torch or other parts of the package.

config.py        MTPConfig: all settings of the MTP layers; its fields become the --mtp-* flags
head.py          HeadSpec: a drafter with every setting resolved and checked; and the draft heads of a run
attached.py      Head: settings of a draft head for an existing model, and settings that none can have
kinds.py         kinds of drafters, one table row each, and the settings that only some of them read
attention.py     head counts, positions and windows of a drafter's attention
rope_scaling.py  RoPE scaling, by the keys of config.json
registry.py      tables that other packages can extend: losses, proposers, verifiers, families
"""
