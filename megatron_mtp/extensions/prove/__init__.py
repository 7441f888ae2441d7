"""Whether the MTP of the Megatron that a lab already runs is right: its own block, schedule and DDP, at a tiny size.

shrink.py      the flags of a launch line as a tiny model
cases.py       layouts, batches and options that are tried
worker.py      the ranks: a script without this package, which imports the user's Megatron
stand_ins.py   CUDA and modules that a CPU lacks, for them
reference.py   eq. 21-25 of arXiv:2412.19437 in float64, with rules that can be bent
hypotheses.py  known causes of wrong numbers, as such rules
proving.py     run the cases and judge them
grads.py       a step that the user's own loop has written
script.py      two steps of the user's own training script
script_worker.py  its process, which writes them
report.py      the verdicts as text, JSON and HTML
command.py     megatron-mtp prove
"""

from megatron_mtp.cli.verbs import Verb

VERB = Verb("check the MTP loss and gradients of the Megatron you already run", "megatron_mtp.extensions.prove.command")
"""`megatron-mtp prove`: a launch line in; for every layout right or wrong, with the cause."""
