"""Losses of the depths: from a chunk of logits, labels and the trunk's own logits to per-token values and gradients.

A loss is a `TokenLoss` with one row in `LOSSES`, which makes it from the settings of a run. Masks, weights and
reduction are in one place, `combine`; the head and the walk over chunks in `linear_cross_entropy`.

    cross_entropy.py         ce, of a chunk of logits
    distillation.py          kd and tv, with the trunk as teacher; mix of several losses
    vocabulary.py            reductions over a vocabulary that is cut over ranks
    linear_cross_entropy.py  head and loss together, in chunks of tokens: memory that does not grow with depths
combine.py               masks, weights (lambda / D) and the normaliser: one scalar from all losses
schedule.py              lambda (--mtp-loss-scaling-factor), step by step
    reference.py             all losses as their definitions read
"""

from collections.abc import Callable

from megatron_mtp.config import MTPConfig
from megatron_mtp.losses.cross_entropy import CrossEntropy
from megatron_mtp.losses.distillation import Divergence, Mix, TotalVariation
from megatron_mtp.losses.linear_cross_entropy import TokenLoss


def _ce(settings: MTPConfig) -> TokenLoss:
    return CrossEntropy(settings.mtp_label_smoothing, settings.mtp_z_loss)


def _kd(settings: MTPConfig) -> TokenLoss:
    return Divergence(settings.mtp_temperature)


def _tv(settings: MTPConfig) -> TokenLoss:
    return TotalVariation(settings.mtp_temperature)


def _mix(settings: MTPConfig) -> TokenLoss:
    parts = zip(settings.mix_weights(), (_ce, _kd, _tv), strict=True)
    return Mix(tuple((weight, make(settings)) for weight, make in parts if weight))


LOSSES: dict[str, Callable[[MTPConfig], TokenLoss]] = {"ce": _ce, "kd": _kd, "tv": _tv, "mix": _mix}


def needs_teacher(settings: MTPConfig) -> bool:
    """Whether the loss compares with the trunk's own distribution."""
    return settings.mtp_loss in ("kd", "tv") or (settings.mtp_loss == "mix" and any(settings.mix_weights()[1:]))


def needs_whole_teacher(settings: MTPConfig) -> bool:
    """Whether it compares with that distribution over all tokens, also where only some are drafted."""
    return settings.mtp_loss == "tv" or (settings.mtp_loss == "mix" and settings.mix_weights()[2] > 0)
