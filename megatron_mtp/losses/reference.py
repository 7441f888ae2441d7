"""Reference implementation of the losses: all logits at once, gradients by autograd. The fast versions must match it.

Letters in names: N positions, H hidden, V the whole vocabulary, K draft tokens, T states of the trunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from megatron_mtp.losses.linear_cross_entropy import Targets
from megatron_mtp.losses.mix import mix_weights
from megatron_mtp.spec.config import MTPConfig


@dataclass(frozen=True)
class Whole:
    """Inputs of a loss definition: logits over the whole vocabulary, labels as tokens, draft tokens, run settings."""

    logits_NV: Tensor
    labels_N: Tensor
    teacher_NV: Tensor | None
    drafted_K: Tensor
    settings: MTPConfig

    def drafts_NK(self) -> Tensor:
        """Return the logits of the draft tokens."""
        return self.logits_NV[:, self.drafted_K]

    def teacher(self) -> Tensor:
        """Return the trunk's logits, [N, V]."""
        assert self.teacher_NV is not None
        return self.teacher_NV


def plain_loss(
    settings: MTPConfig,
    hidden: Sequence[Tensor],
    targets: Targets,
    weight_VH: Tensor,
    logit_scale: float,
    drafted_K: Tensor | None = None,
    trunk_TH: Tensor | None = None,
) -> Tensor:
    """Compute sum_d scale_d sum_d like `linear_loss`, from hidden states [N, H] of each depth; labels are tokens here.

    In e2e_tv, the loss of a depth is the probability that the drafts up to that depth are not all accepted.
    """
    if drafted_K is None:
        drafted_K = torch.arange(len(weight_VH), device=weight_VH.device)
    losses = []
    for depth, states_NH in enumerate(hidden):
        logits_NV = logit_scale * states_NH @ weight_VH.t()
        teacher_NV = None
        if trunk_TH is not None:
            assert targets.taught_DN is not None
            teacher_NV = (logit_scale * trunk_TH[targets.taught_DN[depth]] @ weight_VH.t()).detach()
        whole = Whole(logits_NV, targets.labels_DN[depth], teacher_NV, drafted_K, settings)
        losses.append(PLAIN_LOSSES[settings.mtp_loss](whole))
    if settings.mtp_loss == "e2e_tv":
        losses = [1 - accepted_N for accepted_N in accumulate((1 - loss_N for loss_N in losses), mul)]
    if settings.mtp_loss == "dpace":
        losses = _paced(losses, targets.mask_DN)
    return (targets.scale_D * (torch.stack(losses) * targets.mask_DN).sum(1)).sum()


def _ce(whole: Whole) -> Tensor:
    """Cross-entropy. A label outside the draft vocabulary has loss 0."""
    hit_NK = whole.labels_N.unsqueeze(1) == whole.drafted_K
    is_drafted_N, number_N = hit_NK.any(1), hit_NK.int().argmax(1)
    logits_NK, smoothing = whole.drafts_NK(), whole.settings.mtp_label_smoothing
    loss_N = torch.nn.functional.cross_entropy(logits_NK, number_N, reduction="none", label_smoothing=smoothing)
    return is_drafted_N * (loss_N + whole.settings.mtp_z_loss * logits_NK.logsumexp(1).square())


def _paced(losses: list[Tensor], mask_DN: Tensor) -> list[Tensor]:
    """Weight each loss with sum_(j >= k) r_1 .. r_j as a constant; no draft after a masked one is reached."""
    reached, reached_N = [], torch.ones_like(losses[0])
    for loss_N, mask_N in zip(losses, mask_DN, strict=True):
        reached_N = reached_N * (1 + torch.exp(-loss_N.detach())) / 2 * (mask_N != 0)
        reached.append(reached_N)
    return [loss_N * torch.stack(reached[depth:]).sum(0) for depth, loss_N in enumerate(losses)]


def _kd(whole: Whole) -> Tensor:
    """Distillation. The trunk's distribution is restricted to the draft vocabulary and renormalized."""
    temperature = whole.settings.mtp_temperature
    log_q_NK = torch.log_softmax(whole.drafts_NK() / temperature, 1)
    log_p_NK = torch.log_softmax(whole.teacher()[:, whole.drafted_K] / temperature, 1)
    return temperature**2 * (log_p_NK.exp() * (log_p_NK - log_q_NK)).sum(1)


def _overlap(whole: Whole) -> Tensor:
    """Overlap with the trunk's distribution over all tokens; q is 0 outside the draft vocabulary."""
    temperature = whole.settings.mtp_temperature
    q_NK = torch.softmax(whole.drafts_NK() / temperature, 1)
    q_NV = torch.zeros_like(whole.logits_NV).index_copy(1, whole.drafted_K, q_NK)
    return torch.minimum(q_NV, torch.softmax(whole.teacher() / temperature, 1)).sum(1)


def _tv(whole: Whole) -> Tensor:
    return 1 - _overlap(whole)


def _nla(whole: Whole) -> Tensor:
    return -_overlap(whole).log()


def _lk(whole: Whole) -> Tensor:
    share_N = torch.exp(-whole.settings.mtp_lk_eta * _overlap(whole).detach())
    return share_N * _kd(whole) + (1 - share_N) * _tv(whole)


def _mix(whole: Whole) -> Tensor:
    weights = mix_weights(whole.settings.mtp_loss_mix)
    return torch.stack([weight * PLAIN_LOSSES[name](whole) for name, weight in weights.items()]).sum(0)


PLAIN_LOSSES: dict[str, Callable[[Whole], Tensor]] = {
    "ce": _ce,
    "kd": _kd,
    "tv": _tv,
    "nla": _nla,
    "lk": _lk,
    "e2e_tv": _tv,
    "dpace": _ce,
    "mix": _mix,
}
"""Loss functions by name; each returns loss_N."""
