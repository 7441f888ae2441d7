"""Tests the MTP loss and gradients of any Megatron installation, with its own block, schedule and DDP, at a tiny size.

shrink.py      shrinks the model of a launch line to a tiny one
cases.py       layouts, batches and options to test
worker.py      the ranks: a script independent of this package, which imports the user's Megatron
stand_ins.py   substitutes for CUDA and for modules that do not run on a CPU
reference.py   eq. 21-25 of arXiv:2412.19437 in float64, with rules that can be changed
hypotheses.py  known causes of wrong numbers, as changed rules
proving.py     runs the cases and judges them
grads.py       judges a step that the user's own loop has saved
script.py      judges two steps of the user's own training script
script_worker.py  process that runs the script and saves its steps
report.py      formats the verdicts as text, JSON and HTML
command.py     megatron-mtp prove
"""

from megatron_mtp.cli.verbs import Verb

VERB = Verb("check the MTP loss and gradients of the Megatron you already run", "megatron_mtp.extensions.prove.command")
"""`megatron-mtp prove`: reports for every layout of a launch line whether MTP is right or wrong, and the cause."""
