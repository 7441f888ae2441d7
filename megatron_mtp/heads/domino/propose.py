"""Drafting with Domino: a block from left to right, with a recurrent state over its tokens.

Letters in names: B batch, M rank of the bias, H hidden, G size of the state, V vocabulary.
"""

from typing import TYPE_CHECKING, override

import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_mtp.decoding.draft import Draft, Round
from megatron_mtp.decoding.proposers.blocks import LeftToRight

if TYPE_CHECKING:
    from megatron_mtp.decoding.sequences import Sequences


class Domino(LeftToRight):
    """Drafts tokens one by one; the first one has no bias."""

    line = "a Domino drafter, whose drafts know all tokens before them in the block; K is at most that of its training"
    depths = "domino"

    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        return self.in_turn(sequences, round, count)[0]

    @override
    def before(self, state_BH: Tensor, token_B: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        layer, model = self.runner.model.mtp.layer, self.runner.model
        embedded_BH = model.embedding(input_ids=token_B.unsqueeze(1), position_ids=None)[0]
        after_BG = layer.after(embedded_BH, memory)
        read_BM: Tensor = layer.biased_by(state_BH, after_BG)
        return torch.zeros_like(read_BM) if memory is None else read_BM, after_BG

    @override
    def biased(self, logits_BV: Tensor, before_BM: Tensor) -> Tensor:
        return logits_BV + linear(before_BM, self.runner.model.mtp.layer.bias_output)[:, : self.runner.vocab_size]
