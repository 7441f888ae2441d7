"""Conversions between Hugging Face folders and Megatron checkpoints, independent of their proof.

carried.py          tensors that no rule describes, compared with transformers' class
plan.py             names and shapes of both sides, checked before a tensor is read
stream.py           a conversion: described, or written in one pass by several workers
partial_folder.py   the folder beside the target: resumed, renamed when whole
import_hf.py        hf-to-mcore
computation.py      whether arguments and a config.json describe the same computation
quantizing.py       which weights an export quantizes (--quantize), and what its config says of them
tokens.py           the vocabulary of a model, from its tokenizer and Megatron's arguments
hf_form.py          the form of the folder that an export makes: config, files and names of tensors
export_hf.py        mcore-to-hf; an export leaves out the rows that pad the vocabulary
live.py             the same of a model in memory, without a checkpoint
live_drafter.py     the folder of a drafter that is attached to a model in memory
fitting.py          eh_proj of new MTP layers, fitted to text
fitting_drafter.py  fit-drafter: an EAGLE-3 drafter, fitted to text
edit.py             attach-mtp, drop-mtp and draft-vocab
graft.py            the MTP layers of a donor on another trunk
drafter_codec.py    keys and tensors of a drafter's folder: what the forms of all kinds share
drafter_views.py    what a drafter's layers attend to, by the keys of its config
drafter_form.py     the form of a drafter's folder, read and checked, and its rules
drafters.py         drafter-to-hf and attach-drafter
hybrid.py           gpt-to-hybrid and hybrid-to-gpt
"""
