"""dpace: cross-entropy weighted by the expected number of accepted drafts (speculators).

    loss      sum_k W_k ce_k,   W_k = sum_(j >= k) r_1 .. r_j,   r = (1 + exp(-ce)) / 2

The gradient treats the weights W as constants. A masked depth ends the chain, as a rejected draft does:

    probabilities of three labels   1    0    1      r   1  0.5  1        W   2  1  0.5
    the second is masked            1    -    1      r   1   0   1        W   1  0   0

Letters in names: N positions, D depths.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, override

import torch
from torch import Tensor

from megatron_mtp.losses.token_loss import CrossEntropy, Joined

if TYPE_CHECKING:
    from megatron_mtp.spec.config import MTPConfig


@dataclass(frozen=True)
class PacedCrossEntropy(CrossEntropy):
    """Cross-entropy of the labels, weighted by the expected number of accepted drafts from this depth on."""

    line = "cross-entropy on the labels, weighted by the expected number of accepted drafts from here on"
    weighs_depths = True

    @classmethod
    @override
    def of(cls, settings: "MTPConfig") -> Self:
        return cls()

    @override
    def joined(self, losses_ND: Tensor, weights_ND: Tensor) -> Joined:
        reached_ND = ((1 + torch.exp(-losses_ND)) / 2 * (weights_ND != 0)).cumprod(1)
        paced_ND = reached_ND.flip(1).cumsum(1).flip(1) * weights_ND
        return Joined((losses_ND * paced_ND).sum(1), paced_ND, losses_ND)
