"""Distillation losses: compare the trunk's distribution p of a token with the MTP layer's q, one chunk at a time.

    kd      t^2 KL(p || q), both at temperature t     gradient  t (q - p)          (Hinton et al., arXiv:1503.02531)

The others are functions of the overlap a = sum_v min(p, q): rejection sampling accepts a draft from q with probability
a (Leviathan et al., arXiv:2211.17192, corollary 3.6).

    tv      1 - a                             gradient  a g
    nla     -log a                            gradient  g         (LK losses, arXiv:2602.23881)
    lk      l kd + (1 - l) (1 - a),  l = exp(-eta a), treated as a constant in the gradient (arXiv:2602.23881)

    g = (q sum_u o_u - o) / t   with  o_v = [q_v < p_v] min(p_v, q_v) / a   and t the temperature of both

o is computed from logarithms, so o and log a stay accurate even if a underflows float32: where p and q barely overlap,
the gradient of nla is as large as elsewhere.

e2e_tv couples the depths (arXiv:2606.12370, eq. 13). With a_i the overlap at depth i, the drafts of depths 1 .. j are
all accepted with probability A_j:

    loss      sum_j w_j (1 - A_j),   A_j = a_1 a_2 .. a_j,   the weights w_j add to 1
    gradient  sum_{j>=i} w_j A_j  times the gradient of -log a_i, which is g

This form never divides by a_i; the derivative by a_i itself, sum_{j>=i} w_j A_j / a_i, is not needed.

With a draft vocabulary, q is a distribution over the draft tokens only. kd then compares it with p restricted to these
tokens and renormalized, because log p - log q is infinite for all others. The overlap uses p over all tokens: tokens
outside the draft vocabulary have q = 0 and add nothing, so 1 - a is still the rejection rate.

Letters in names: N positions, V this rank's slice of the vocabulary, D depths.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self, override

import torch
from torch import Tensor

from megatron_mtp.losses.token_loss import Chunk, Joined, TokenLoss

if TYPE_CHECKING:
    from megatron_mtp.spec.config import MTPConfig

LARGEST_GAP = 40.0
"""The largest log q - log p in the computation: where p is 0, its exponential would overflow float32. With q exp(-40)
in place of a smaller p, p (log p - log q) - p + q is the same to float64's last digit: it is q."""


@dataclass(frozen=True)
class TaughtLoss(TokenLoss):
    """Base class of the losses that compare with the trunk's distribution, at a common temperature."""

    needs_teacher = True
    temperature: float = 1.0

    @classmethod
    @override
    def of(cls, settings: "MTPConfig") -> Self:
        return cls(settings.mtp_temperature)


@dataclass(frozen=True)
class Divergence(TaughtLoss):
    """KL divergence KL(p || q) at a temperature."""

    line = "distillation: KL divergence to the trunk's distribution"

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


@dataclass(frozen=True)
class OfOverlap:
    """A loss as a function of the overlap and, optionally, of kd.

    Attributes:
        value_N: the loss.
        slope_N: its derivative by -log a; None for 1.
        divergence_slope_N: its derivative by kd; None for 0.
    """

    value_N: Tensor
    slope_N: Tensor | None = None
    divergence_slope_N: Tensor | None = None


@dataclass(frozen=True)
class OverlapLoss(TaughtLoss):
    """Base class of the losses of the overlap. They read the trunk's distribution over all tokens.

    Attributes:
        reads_divergence: whether the loss also depends on kd.
    """

    needs_whole_teacher = True
    knows_overlap = True
    reads_divergence: ClassVar[bool] = False

    @abstractmethod
    def of_overlap(self, log_overlap_N: Tensor, divergence_N: Tensor | None) -> OfOverlap:
        """Compute the loss from log a, and from kd if `reads_divergence`."""

    @override
    def __call__(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        divergence_N = divergence_NV = None
        if self.reads_divergence:
            assert chunk.teacher_NV is not None
            copied = replace(chunk, logits_NV=chunk.logits_NV.clone(), teacher_NV=chunk.teacher_NV.clone())
            divergence_N, divergence_NV = Divergence(self.temperature)(copied)
        log_overlap_N, gradient_NV = _negative_log_(chunk, self.temperature)
        if chunk.overlap_N is not None:
            chunk.overlap_N.copy_(log_overlap_N.exp())
        loss = self.of_overlap(log_overlap_N, divergence_N)
        if loss.slope_N is not None:
            gradient_NV.mul_(loss.slope_N.unsqueeze(1))
        if divergence_NV is not None and loss.divergence_slope_N is not None:
            gradient_NV.addcmul_(divergence_NV, loss.divergence_slope_N.unsqueeze(1))
        return loss.value_N, gradient_NV


@dataclass(frozen=True)
class TotalVariation(OverlapLoss):
    """Probability that a draft token sampled from q is rejected."""

    line = "distillation by total variation, the rejection rate of sampled drafts"

    @override
    def of_overlap(self, log_overlap_N: Tensor, divergence_N: Tensor | None) -> OfOverlap:
        return OfOverlap(-log_overlap_N.expm1(), log_overlap_N.exp())


@dataclass(frozen=True)
class NegativeLogOverlap(OverlapLoss):
    """Negative logarithm of the probability that a draft token sampled from q is accepted."""

    line = "negative log acceptance rate of sampled drafts"

    @override
    def of_overlap(self, log_overlap_N: Tensor, divergence_N: Tensor | None) -> OfOverlap:
        return OfOverlap(-log_overlap_N)


@dataclass(frozen=True)
class AdaptiveDivergence(OverlapLoss):
    """Blend of kd and tv that moves toward tv as the overlap grows."""

    line = "kd where few sampled drafts are accepted, tv where many are"
    reads_divergence = True
    eta: float = 3.0

    @classmethod
    @override
    def of(cls, settings: "MTPConfig") -> Self:
        return cls(settings.mtp_temperature, settings.mtp_lk_eta)

    @override
    def of_overlap(self, log_overlap_N: Tensor, divergence_N: Tensor | None) -> OfOverlap:
        assert divergence_N is not None
        overlap_N = log_overlap_N.exp()
        share_N = torch.exp(-self.eta * overlap_N)
        value_N = torch.lerp(-log_overlap_N.expm1(), divergence_N, share_N)
        return OfOverlap(value_N, (1 - share_N) * overlap_N, share_N)


@dataclass(frozen=True)
class AcceptedLength(NegativeLogOverlap):
    """Probability that sampled drafts up to each depth are not all accepted. Logs show each depth's own tv."""

    line = "expected accepted length of all MTP layers together, for sampled drafts"
    couples_depths = True

    @override
    def joined(self, losses_ND: Tensor, weights_ND: Tensor) -> Joined:
        logs_ND = -losses_ND.cumsum(1)
        slopes_ND = (weights_ND * logs_ND.exp()).flip(1).cumsum(1).flip(1)
        return Joined(-(weights_ND * logs_ND.expm1()).sum(1), slopes_ND, -(-losses_ND).expm1())


def _negative_log_(chunk: Chunk, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log a, [N], and g, the gradient of -log a by the depth's logits; overwrite both logits."""
    vocabulary = chunk.vocabulary
    assert chunk.teacher_NV is not None
    logits = chunk.logits_NV.div_(temperature), chunk.teacher_NV.div_(temperature)
    log_q_NV, log_p_NW = vocabulary.log_softmaxes_(logits)
    log_p_NV = vocabulary.drafted(log_p_NW)
    is_short_NV = log_q_NV < log_p_NV
    smaller_NV = torch.minimum(log_q_NV, log_p_NV, out=log_p_NV)
    own_N1 = smaller_NV.amax(1, keepdim=True)
    part_NV = smaller_NV.sub_(own_N1).exp_()
    total_N1 = part_NV.sum(1, keepdim=True)
    short_NV = part_NV.mul_(is_short_NV)
    totals_N2 = torch.cat((total_N1, short_NV.sum(1, keepdim=True)), 1)
    largest_N2, totals_N2, _ = vocabulary.joined(own_N1.expand_as(totals_N2), totals_N2)
    total_N1, all_short_N1 = totals_N2.split(1, 1)
    short_NV.mul_((own_N1 - largest_N2[:, :1]).exp_().div_(total_N1))
    gradient_NV = log_q_NV.exp_().mul_(all_short_N1 / total_N1).sub_(short_NV).div_(temperature)
    return (total_N1.log() + largest_N2[:, :1])[:, 0], gradient_NV
