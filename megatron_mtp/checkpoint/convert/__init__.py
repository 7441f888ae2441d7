"""Conversions between Hugging Face folders and Megatron checkpoints, independent of their proof.

plan.py            names and shapes of both sides, checked before a tensor is read
megatron_flags.py  the arguments of Megatron that describe a converted model
passes.py          how a repeated layer was trained (--mtp-unroll), in config.json
streaming.py       layers by several workers, written beside and renamed, resumed
writing.py         a distributed checkpoint by several workers
options.py         how to convert, and what was done
importing.py       hf-to-mcore
hf_tokens.py       vocabulary and special tokens of an export: the rows that pad the vocabulary are left out
hf_form.py         the Hugging Face form of a model that Megatron trained
names.py           Hugging Face name and Megatron key of every tensor
computation.py     whether arguments and a config.json describe the same computation
exporting.py       mcore-to-hf
fitting.py         eh_proj of new depths, fitted to text
depths.py          attach-mtp and drop-mtp
drafts.py          draft-vocab
pattern.py         a GPT's layers as the pattern of a hybrid, and back
halves.py          keys of a GPT's tensors in a hybrid, and back
migrating.py       gpt-to-hybrid and hybrid-to-gpt
dry_run.py         what a conversion would do (--dry-run)
"""
