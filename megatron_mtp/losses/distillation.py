"""The KL divergence of the depth's distribution q of a token from p, the trunk's, a chunk at a time.

    kd    t^2 KL(p || q), both at temperature t     gradient  t (q - p)          (Hinton et al., arXiv:1503.02531)

With a draft vocabulary q is a distribution over its tokens. kd then compares with p restricted to them and
renormalized, since log p - log q is infinite for the others.

Letters in names: N positions, V this rank's slice of the vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Self, override

import torch
from torch import Tensor

from megatron_mtp.config import MTPConfig
from megatron_mtp.losses.token_loss import Chunk, TokenLoss

LARGEST_GAP = 40.0
"""The largest log q - log p in the computation: where p is 0, its exponential would overflow float32. With q exp(-40)
in place of a smaller p, p (log p - log q) - p + q is the same to float64's last digit: it is q."""


@dataclass(frozen=True)
class Divergence(TokenLoss):
    """KL(p || q) of distributions at a temperature."""

    line = "the trunk's own distribution of the same token, by its KL divergence from the depth's"
    needs_teacher = True
    temperature: float = 1.0

    @classmethod
    @override
    def of(cls, settings: MTPConfig) -> Self:
        return cls(settings.mtp_temperature)

    @override
    def __call__(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        logits_NV, vocabulary = chunk.logits_NV, chunk.vocabulary
        assert chunk.teacher_NV is not None
        teacher_NV = vocabulary.drafted(chunk.teacher_NV)
        gap_NV = logits_NV.div_(self.temperature) - teacher_NV.div_(self.temperature)
        (q_NV, p_NV), normalizer_N2, _ = vocabulary.softmaxes_([logits_NV, teacher_NV])
        gap_NV += normalizer_N2.diff(dim=1)  # log q - log p
        gap_NV.clamp_(max=LARGEST_GAP)
        floor_NV = q_NV * math.exp(-LARGEST_GAP)
        terms_NV = torch.expm1(gap_NV).sub_(gap_NV)  # p (log p - log q) - p + q, where no terms cancel
        terms_NV.mul_(torch.maximum(p_NV, floor_NV, out=floor_NV))
        loss_N = vocabulary.sum(terms_NV)[:, 0]
        return self.temperature**2 * loss_N, q_NV.sub_(p_NV).mul_(self.temperature)
