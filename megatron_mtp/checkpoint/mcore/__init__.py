"""Distributed checkpoints of Megatron.

iterations.py  the newest whole iteration of a folder; the tracker
keys.py        norms that have two names
reader.py      tensors, piece by piece without a model; whole files; the MTP layers, counted
writer.py      the same, written
tokenizer.py   its tokenizer: kept beside the iterations, and found again
model.py       its model, built from its arguments: for proofs
"""
