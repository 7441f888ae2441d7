"""Weighted sum of other losses of the table.

Letters in names: N positions, V this rank's slice of the vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Self, override

import torch
from torch import Tensor

from megatron_mtp.losses.table import LOSSES
from megatron_mtp.losses.token_loss import Chunk, TokenLoss
from megatron_mtp.spec.config import MTPConfig, are_weights, number_of

UNNAMED = ("ce", "kd", "tv")
"""Losses that a list of weights without names refers to."""


@dataclass(frozen=True)
class Mix(TokenLoss):
    """Weighted sum of the losses `parts`. It needs a teacher if any of them does."""

    line = "weighted sum of other losses (--mtp-loss-mix)"
    parts: tuple[tuple[float, TokenLoss], ...]

    @property
    @override
    def needs_teacher(self) -> bool:
        return any(part.needs_teacher for _, part in self.parts)

    @property
    @override
    def needs_whole_teacher(self) -> bool:
        return any(part.needs_whole_teacher for _, part in self.parts)

    @property
    @override
    def knows_overlap(self) -> bool:
        return any(part.knows_overlap for _, part in self.parts)

    @classmethod
    @override
    def of(cls, settings: MTPConfig) -> Self:
        weights = mix_weights(settings.mtp_loss_mix)
        return cls(tuple((weight, LOSSES[name].of(settings)) for name, weight in weights.items() if weight))

    @override
    def __call__(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        loss_N, gradient_NV = torch.zeros_like(chunk.logits_NV[:, 0]), torch.zeros_like(chunk.logits_NV)
        for weight, part in self.parts:
            teacher_NV = None if chunk.teacher_NV is None else chunk.teacher_NV.clone()
            part_N, part_NV = part(replace(chunk, logits_NV=chunk.logits_NV.clone(), teacher_NV=teacher_NV))
            loss_N += weight * part_N
            gradient_NV += weight * part_NV
        return loss_N, gradient_NV


def mix_weights(given: str | None) -> dict[str, float]:
    """Parse weights by loss name: 'ce=0.5,tv=0.5', or three numbers for ce, kd and tv, '0.2,0.4,0.4'.

    Raises:
        ValueError: there is no such loss, or the weights are negative or all 0.
    """
    words = (given or "").split(",")
    if len(words) == len(UNNAMED) and not any("=" in word for word in words):
        words = [f"{name}={word}" for name, word in zip(UNNAMED, words, strict=True)]
    weights = {name: number_of(number) for name, _, number in (word.partition("=") for word in words)}
    parts = [name for name, loss in LOSSES.items() if name != "mix" and not (loss.couples_depths or loss.weighs_depths)]
    are_known = len(weights) == len(words) and weights.keys() <= set(parts)
    if are_known and are_weights(list(weights.values())):
        return weights
    raise ValueError(
        f"--mtp-loss-mix is '{given}'; give 3 numbers of 0 or more (of ce, kd and tv), with commas, not all 0, or such "
        f"numbers with names, as in ce=0.5,tv=0.5 (the names are {', '.join(parts)})."
    )
