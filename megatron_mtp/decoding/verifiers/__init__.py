"""Verifiers: pure functions from the target's logits and a draft to a verdict, each with its facts beside it.

    base.py       Verifier: a rule with its facts
    greedy.py     the target's most probable token
    rejection.py  accept with min(1, p / q), several candidates a position too
    block.py      a chain judged as a whole
    spectr.py     several candidates by optimal transport
    lossy.py      rules that change the distribution
    walk.py       the accepted path through a tree

A row of VERIFIERS is written as an entry point is, and imported when it is looked up, so that a list of names does not
wait for torch. Other packages add rows under the group `megatron_mtp.verifiers`.
"""

from typing import TYPE_CHECKING

from megatron_mtp.registry import Imported, Registry

if TYPE_CHECKING:
    from megatron_mtp.decoding.verifiers.base import Verifier

VERIFIERS: "Registry[Verifier]" = Registry(
    "megatron_mtp.verifiers",
    Imported(
        {
            "greedy": "megatron_mtp.decoding.verifiers.greedy:greedy",
            "rejection": "megatron_mtp.decoding.verifiers.rejection:rejection",
            "block": "megatron_mtp.decoding.verifiers.block:block",
            "spectr": "megatron_mtp.decoding.verifiers.spectr:spectr",
            "specinfer": "megatron_mtp.decoding.verifiers.rejection:specinfer",
            "relaxed": "megatron_mtp.decoding.verifiers.lossy:relaxed",
            "joint": "megatron_mtp.decoding.verifiers.lossy:joint",
            "bild": "megatron_mtp.decoding.verifiers.lossy:bild",
        }
    ),
)
