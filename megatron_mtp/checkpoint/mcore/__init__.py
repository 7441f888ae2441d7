"""Distributed checkpoints of Megatron.

iterations.py  a folder's newest whole iteration, the tracker, and the tokenizer that is kept beside them
keys.py        the embedding's key, and norms that have two
reader.py      tensors, piece by piece without a model; whole files; the MTP layers, counted
writer.py      the same, written
model.py       its model, built from its arguments: for proofs
"""
