"""Acceptance of a checkpoint's drafts in another engine, and the cost of each of its rules.

engines.py     ENGINES: how each engine feeds the MTP layers of each family, with the source of every rule
rows.py        drafts made by such rules, for all positions of a text at once
acceptance.py  rounds of drafting and verifying: acceptance by position, and what every rule costs
source.py      the given folder: a Megatron checkpoint or a Hugging Face one, its family, prompts and continuations
predict.py     a checkpoint and an engine in, acceptance by position and its causes out
report.py      the answer as a table and as JSON, with the form of vLLM's synthetic acceptance
command.py     megatron-mtp predict
"""

from megatron_mtp.cli.verbs import Verb

VERB = Verb(
    "predict acceptance in other engines, and explain differences",
    "megatron_mtp.extensions.predict.command",
)
