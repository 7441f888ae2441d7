"""Foretelling what another engine will accept of a checkpoint's drafts, and which of its rules costs how much.

engines.py     ENGINES: how each engine feeds the depths of each family, with the source of every rule
rows.py        drafts made by such rules, for all positions of a text at once
acceptance.py  rounds of drafting and verifying: acceptance by position, and what every rule costs
source.py      the given folder: a Megatron checkpoint or a Hugging Face one, its family, prompts and continuations
report.py      the answer as a table and as JSON, with the form of vLLM's synthetic acceptance
flags.py       the flags, for a parser that must not wait for torch
command.py     megatron-mtp foretell
table/         megatron-mtp tabulate: acceptance of many checkpoints, here and by engines' rules
"""
