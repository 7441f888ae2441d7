"""Distributed checkpoints of Megatron.

iterations.py     the newest whole iteration of a folder; the tracker
integrity.py      are the files of a checkpoint whole
tensors.py        its tensors, read and written piece by piece without a model
stored_depths.py  the MTP layers that it holds, counted; its draft vocabulary
tokenizer.py      its tokenizer: kept beside the iterations, and found again
model.py          its model, built from its arguments: for proofs
"""
