"""The verbs of `megatron-mtp VERB ...`: a table of all, and the verbs that belong to no other room.

line.py        megatron-mtp: VERBS is the table
evaluate.py    loss and acceptance of a checkpoint on a text
audit.py       what is in a checkpoint, and what differs between two
tabulate.py    a table of acceptance for many checkpoints, row by row
attach.py      depths for a Hugging Face model, step by step
doctor.py      what this machine has, and what the absence of a thing costs
completion.py  completion for bash and zsh
"""
