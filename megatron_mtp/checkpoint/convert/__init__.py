"""Conversions between Hugging Face folders and Megatron checkpoints, independent of their verification.

carried.py          tensors without a rule, compared with transformers' class
plan.py             rules of a folder, checked by names and shapes before a tensor is read
stored.py           rules against what a checkpoint stores
rule_sides.py       the tensors of a rule on both sides, and what each converts to
stream.py           a conversion: described, or written in one pass by several workers
partial_folder.py   the temporary folder next to the target: resumable, renamed when complete
import_hf.py        hf-to-mcore
computation.py      whether arguments and a config.json describe the same computation
quantizing.py       which weights an export quantizes (--quantize), and the matching config
tokens.py           the vocabulary of a model, from its tokenizer and Megatron's arguments
hf_form.py          the form of an exported folder: config, files and tensor names
export_hf.py        mcore-to-hf; an export leaves out vocabulary padding
live.py             the same for a model in memory, without a checkpoint
live_drafter.py     the folder of a drafter that is attached to a model in memory
fitting.py          eh_proj of new MTP layers, fitted to text
fitting_drafter.py  fit-drafter: an EAGLE-3 drafter, fitted to text
edit.py             attach-mtp, drop-mtp and draft-vocab
graft.py            the MTP layers of a donor on another trunk
drafter_codec.py    config keys and tensors of a drafter's folder: base classes of all kinds
drafter_views.py    what a drafter's layers attend to, by the keys of its config
drafter_form.py     the form of a drafter's folder, read and checked, and its rules
drafters.py         drafter-to-hf and attach-drafter
hybrid.py           gpt-to-hybrid and hybrid-to-gpt
"""
