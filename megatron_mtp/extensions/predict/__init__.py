"""Predict the acceptance of a checkpoint's drafts in other engines, and the cost of each engine rule.

engines.py     ENGINES: how each engine feeds the MTP layers of each family, with the source of every rule
rows.py        drafts made by such rules, for all positions of a document at once
acceptance.py  rounds of drafting and verifying: acceptance by position, and the cost of every rule
source.py      the given folder: a Megatron checkpoint or a Hugging Face one, its family, prompts and continuations
predict.py     predict acceptance by position, with causes, from a checkpoint and an engine
report.py      the result as a table and as JSON, including vLLM's synthetic acceptance
command.py     megatron-mtp predict
"""

from megatron_mtp.cli.verbs import Verb

VERB = Verb(
    "predict acceptance in other engines, and explain differences",
    "megatron_mtp.extensions.predict.command",
)
