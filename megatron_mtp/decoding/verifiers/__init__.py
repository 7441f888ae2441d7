"""Verifiers (`types.Verifier`): pure functions from the target's logits and a draft to a verdict, each with its facts.

    lossless.py   rules that keep the target's distribution: greedy, rejection, block, spectr, specinfer
    lossy.py      rules that change it

A row of VERIFIERS is written as an entry point is, and imported when it is looked up, so that a list of names does not
wait for torch. Other packages add rows under the group `megatron_mtp.verifiers`.
"""

from typing import TYPE_CHECKING

from megatron_mtp.registry import Imported, Registry

if TYPE_CHECKING:
    from megatron_mtp.decoding.types import Verifier

VERIFIERS: "Registry[Verifier]" = Registry(
    "megatron_mtp.verifiers",
    Imported(
        {
            "greedy": "megatron_mtp.decoding.verifiers.lossless:greedy",
            "rejection": "megatron_mtp.decoding.verifiers.lossless:rejection",
            "block": "megatron_mtp.decoding.verifiers.lossless:block",
            "spectr": "megatron_mtp.decoding.verifiers.lossless:spectr",
            "specinfer": "megatron_mtp.decoding.verifiers.lossless:specinfer",
            "relaxed": "megatron_mtp.decoding.verifiers.lossy:relaxed",
            "joint": "megatron_mtp.decoding.verifiers.lossy:joint",
            "bild": "megatron_mtp.decoding.verifiers.lossy:bild",
        }
    ),
)
