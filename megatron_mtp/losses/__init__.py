"""Losses of the depths, by the names that `--mtp-loss` takes.

A loss is a class in a file of its own, a `TokenLoss` (`token_loss.py`), and a row of `LOSSES`. `combine.py` has masks,
weights and normaliser; `linear_cross_entropy.py` the head and the chunks. Nothing here imports torch, so that `--help`
lists the losses at once.
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
