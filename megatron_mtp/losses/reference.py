"""The losses as their definitions read, all logits at once and gradients by autograd: what the fast ones must equal.

Letters in names: N slots, H hidden, V vocabulary, all of it, K drafted tokens.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_mtp.config import MTPConfig
from megatron_mtp.losses.linear_cross_entropy import Targets
from megatron_mtp.losses.mix import mix_weights

PlainLoss = Callable[[Tensor, Tensor, Tensor | None, Tensor, MTPConfig], Tensor]
"""(logits_NV, labels_N, teacher logits [N, V] or None, drafted tokens [K], settings) -> loss_N."""


def plain_loss(
    settings: MTPConfig,
    hidden: Sequence[Tensor],
    targets: Sequence[Targets],
    weight_VH: Tensor,
    logit_scale: float,
    drafted_K: Tensor | None = None,
) -> Tensor:
    """sum_d scale_d sum_d, as `linear_loss` has it, of hidden states [N, H] a depth; labels are tokens here."""
    if drafted_K is None:
        drafted_K = torch.arange(len(weight_VH))
    total = torch.zeros((), dtype=weight_VH.dtype)
    for states_NH, target in zip(hidden, targets, strict=True):
        logits_NV = logit_scale * states_NH @ weight_VH.t()
        teacher_NV = None
        if target.teacher_NH is not None:
            teacher_NV = (logit_scale * target.teacher_NH @ weight_VH.t()).detach()
        losses_N = PLAIN_LOSSES[settings.mtp_loss](logits_NV, target.labels_N, teacher_NV, drafted_K, settings)
        total = total + target.scale * (losses_N * target.mask_N).sum()
    return total


def _ce(
    logits_NV: Tensor, labels_N: Tensor, teacher_NV: Tensor | None, drafted_K: Tensor, settings: MTPConfig
) -> Tensor:
    """A label that is not drafted has loss 0."""
    hit_NK = labels_N.unsqueeze(1) == drafted_K
    is_drafted_N, number_N = hit_NK.any(1), hit_NK.int().argmax(1)
    logits_NK, smoothing = logits_NV[:, drafted_K], settings.mtp_label_smoothing
    loss_N = torch.nn.functional.cross_entropy(logits_NK, number_N, reduction="none", label_smoothing=smoothing)
    return is_drafted_N * (loss_N + settings.mtp_z_loss * logits_NK.logsumexp(1).square())


def _kd(
    logits_NV: Tensor, labels_N: Tensor, teacher_NV: Tensor | None, drafted_K: Tensor, settings: MTPConfig
) -> Tensor:
    """The trunk's distribution is restricted to the drafted tokens and renormalised."""
    assert teacher_NV is not None
    log_q_NK = torch.log_softmax(logits_NV[:, drafted_K] / settings.mtp_temperature, 1)
    log_p_NK = torch.log_softmax(teacher_NV[:, drafted_K] / settings.mtp_temperature, 1)
    return settings.mtp_temperature**2 * (log_p_NK.exp() * (log_p_NK - log_q_NK)).sum(1)


def _tv(
    logits_NV: Tensor, labels_N: Tensor, teacher_NV: Tensor | None, drafted_K: Tensor, settings: MTPConfig
) -> Tensor:
    """The trunk's distribution is over all tokens, q is 0 where none are drafted."""
    assert teacher_NV is not None
    q_NK = torch.softmax(logits_NV[:, drafted_K] / settings.mtp_temperature, 1)
    q_NV = torch.zeros_like(logits_NV).index_copy(1, drafted_K, q_NK)
    return 1 - torch.minimum(q_NV, torch.softmax(teacher_NV / settings.mtp_temperature, 1)).sum(1)


def _mix(
    logits_NV: Tensor, labels_N: Tensor, teacher_NV: Tensor | None, drafted_K: Tensor, settings: MTPConfig
) -> Tensor:
    parts = [
        weight * PLAIN_LOSSES[name](logits_NV, labels_N, teacher_NV, drafted_K, settings)
        for name, weight in mix_weights(settings.mtp_loss_mix).items()
    ]
    return torch.stack(parts).sum(0)


PLAIN_LOSSES: dict[str, PlainLoss] = {"ce": _ce, "kd": _kd, "tv": _tv, "mix": _mix}
