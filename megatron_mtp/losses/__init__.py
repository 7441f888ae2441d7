"""Losses of the depths, by the names that `--mtp-loss` takes: LOSSES is the table.

A loss is a class in a file of its own and a row of the table. This file does not import torch, so that `--help` lists
the losses at once.

token_loss.py            TokenLoss: what every loss says of itself, and what it computes
cross_entropy.py         ce, with label smoothing and z-loss
distillation.py          kd and tv, with the trunk as teacher
mix.py                   mix, a weighted sum of other losses
vocabulary.py            softmax, argmax and sums over a vocabulary that is cut over ranks
chunks.py                how many positions are taken at once where logits are made
linear_cross_entropy.py  head and loss together, in chunks of tokens: memory that does not grow with depths
combine.py               masks, weights (lambda / D) and the normaliser: one scalar from all losses
schedule.py              lambda (--mtp-loss-scaling-factor), step by step
reference.py             all losses as their definitions read
"""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from megatron_mtp.config import MTPConfig
from megatron_mtp.registry import Registry

if TYPE_CHECKING:
    from megatron_mtp.losses.token_loss import TokenLoss


@dataclass(frozen=True)
class Loss:
    """A row of the table: what is known of a loss before its file is imported.

    Attributes:
        learns: what the depths learn, for `--help` and docs/attaching.md.
        made_by: makes the `TokenLoss` from a run's settings: a function, or where it is, "module:Class.of".
    """

    learns: str
    made_by: "str | Callable[[MTPConfig], TokenLoss]"

    def token_loss(self, settings: MTPConfig) -> "TokenLoss":
        """Raises ValueError where a setting that the loss reads has a value that is not allowed."""
        make = resolve_name(self.made_by) if isinstance(self.made_by, str) else self.made_by
        made: TokenLoss = make(settings)
        return made


LOSSES = Registry(
    "megatron_mtp.losses",
    {
        "ce": Loss("the labels", "megatron_mtp.losses.cross_entropy:CrossEntropy.of"),
        "kd": Loss(
            "the trunk's own distribution of the same token, by its KL divergence",
            "megatron_mtp.losses.distillation:Divergence.of",
        ),
        "tv": Loss(
            "the trunk's own distribution by total variation, the rate at which sampled drafts are rejected",
            "megatron_mtp.losses.distillation:TotalVariation.of",
        ),
        "mix": Loss("a weighted sum of the others, by --mtp-loss-mix", "megatron_mtp.losses.mix:Mix.of"),
    },
)


def depth_loss(settings: MTPConfig) -> "TokenLoss":
    """The loss that `settings.mtp_loss` names.

    Raises:
        ValueError: there is no such loss, or a setting that it reads has a value that is not allowed.
    """
    if settings.mtp_loss not in LOSSES:
        raise ValueError(f"--mtp-loss is '{settings.mtp_loss}'; choose one of {', '.join(LOSSES)}.")
    return LOSSES[settings.mtp_loss].token_loss(settings)
