"""Proposers: each drafts in its own way, and states its facts and settings in its own file (`types.Proposer`).

    mtp.py          trained depths: sequential, one reused, parallel heads; EAGLE-3
    tree.py         trees and beams of the first depth's or an EAGLE-3 drafter's tokens
    block_drafter.py  blocks of tokens in one pass of a drafter
    ngram.py        what followed the same tokens before; n-grams from the trunk's own guesses
    draft_model.py  a smaller model

A row of PROPOSERS is written as an entry point is, and imported when it is looked up, so that a list of names does not
wait for torch. Other packages add rows under the group `megatron_mtp.proposers`.
"""

from typing import TYPE_CHECKING

from megatron_mtp.registry import Imported, Registry

if TYPE_CHECKING:
    from megatron_mtp.decoding.types import Proposer

PROPOSERS: "Registry[type[Proposer]]" = Registry(
    "megatron_mtp.proposers",
    Imported(
        {
            "mtp": "megatron_mtp.decoding.proposers.mtp:Vanilla",
            "mtp_eagle": "megatron_mtp.decoding.proposers.mtp:Eagle",
            "mtp_tree": "megatron_mtp.decoding.proposers.tree:Tree",
            "mtp_beam": "megatron_mtp.decoding.proposers.tree:Beam",
            "eagle3": "megatron_mtp.decoding.proposers.mtp:Eagle3",
            "eagle3_tree": "megatron_mtp.decoding.proposers.tree:Eagle3Tree",
            "dflash": "megatron_mtp.decoding.proposers.block_drafter:DFlash",
            "dspark": "megatron_mtp.decoding.proposers.block_drafter:DSpark",
            "parallel_heads": "megatron_mtp.decoding.proposers.mtp:ParallelHeads",
            "draft_model": "megatron_mtp.decoding.proposers.draft_model:DraftModel",
            "ngram": "megatron_mtp.decoding.proposers.ngram:Ngram",
            "lookahead": "megatron_mtp.decoding.proposers.ngram:Lookahead",
            "plain": "megatron_mtp.decoding.types:Plain",
        }
    ),
)
