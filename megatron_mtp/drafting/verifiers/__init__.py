"""Verifiers: pure functions from the target's logits and a draft to a verdict.

greedy.py     the target's most probable token
rejection.py  accept with min(1, p / q), several candidates a position too
block.py      a chain judged as a whole
spectr.py     several candidates by optimal transport
lossy.py      rules that change the distribution
mtjd.py       the joint optimum, an oracle for tests
walk.py       the way of a verdict through a tree
"""

from collections.abc import Callable

from torch import Tensor

from megatron_mtp.drafting.types import Draft, Round, Verdict
from megatron_mtp.drafting.verifiers.block import block
from megatron_mtp.drafting.verifiers.greedy import greedy
from megatron_mtp.drafting.verifiers.lossy import bild, joint, relaxed
from megatron_mtp.drafting.verifiers.rejection import rejection
from megatron_mtp.drafting.verifiers.spectr import spectr

Verifier = Callable[[Tensor, Draft, Round], Verdict]

VERIFIERS: dict[str, Verifier] = {
    "greedy": greedy,
    "rejection": rejection,
    "specinfer": rejection,  # the same rule, with several candidates a position
    "block": block,
    "spectr": spectr,
    "relaxed": relaxed,
    "joint": joint,
    "bild": bild,
}
"""Name to rule; `relaxed`, `joint` and `bild` change the distribution."""

CHAINS_ONLY = ("block", "joint", "bild")
"""Rules that judge a whole chain, and cannot see a tree."""

__all__ = ["CHAINS_ONLY", "VERIFIERS", "Verifier", "bild", "block", "greedy", "joint", "rejection", "relaxed", "spectr"]
