"""Proposers: what they draft from, and whether a K has a limit.

base.py         Proposer
mtp.py          the trained depths: sequential, one repeated layer, on the trunk's states, parallel heads
tree.py         trees and beams of the depths' drafts
ngram.py        what followed the same tokens before
lookahead.py    n-grams from the trunk's own guesses
draft_model.py  a smaller model
"""

from collections.abc import Callable

from megatron_mtp.drafting.config import SpeculativeConfig
from megatron_mtp.drafting.proposers.base import Proposer
from megatron_mtp.drafting.proposers.draft_model import DraftModel
from megatron_mtp.drafting.proposers.lookahead import Lookahead
from megatron_mtp.drafting.proposers.mtp import Eagle, ParallelHeads, TrunkStates, Vanilla
from megatron_mtp.drafting.proposers.ngram import Ngram
from megatron_mtp.drafting.proposers.tree import Beam, Tree
from megatron_mtp.drafting.runner import Runner

PROPOSERS: dict[str, Callable[[Runner, SpeculativeConfig], Proposer]] = {
    "mtp": Vanilla,
    "mtp_eagle": Eagle,
    "mtp_trunk_states": TrunkStates,
    "mtp_tree": Tree,
    "mtp_beam": Beam,
    "parallel_heads": ParallelHeads,
    "ngram": Ngram,
    "lookahead": Lookahead,
}
"""Name to proposer; `draft_model` needs a second model and is made beside this table (`make_proposer`)."""

__all__ = ["PROPOSERS", "DraftModel", "Proposer"]
