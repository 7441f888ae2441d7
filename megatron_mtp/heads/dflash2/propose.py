"""Drafting with DFlash2: a block from left to right, each token chosen among likely ones by the previous token.

Letters in names: B batch, M rank of the bias, C candidates, V vocabulary.
"""

from typing import TYPE_CHECKING, override

import torch
from torch import Tensor

from megatron_mtp.decoding.draft import Draft, Round
from megatron_mtp.decoding.proposers.blocks import LeftToRight
from megatron_mtp.heads.dflash2.row import CANDIDATES

if TYPE_CHECKING:
    from megatron_mtp.decoding.sequences import Sequences


class DFlash2(LeftToRight):
    """Drafts with K + 1 rows; chooses each token among those with the largest logits, by the logits with bias."""

    line = "a DFlash2 drafter, which chooses among likely tokens from left to right; K is at most that of its training"
    depths = "dflash2"

    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        return self.in_turn(sequences, round, count)[0]

    @override
    def biased(self, logits_BV: Tensor, before_BM: Tensor) -> Tensor:
        """Return logits of the candidates with the bias; all other tokens get probability 0."""
        unary_BC, token_BC = logits_BV.topk(min(CANDIDATES, logits_BV.size(-1)))
        chosen_BCM = self.runner.model.mtp.layer.markov_w2[token_BC]
        scores_BC = unary_BC + (chosen_BCM @ before_BM.unsqueeze(-1)).squeeze(-1)
        return torch.full_like(logits_BV, -torch.inf).scatter_(1, token_BC, scores_BC)
