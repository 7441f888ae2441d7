"""Weights of the depths in the loss at every step: lambda and its schedule, weights by depth, positions left out."""

import math
from argparse import Namespace

import torch
from torch import Tensor

from megatron_mtp.config import SCHEDULES, MTPConfig


def scaling_factor(args: Namespace, settings: MTPConfig, step: int) -> float:
    """lambda of this step: `--mtp-loss-scaling-factor` at first, `--mtp-loss-final-factor` in the end."""
    first: float = args.mtp_loss_scaling_factor
    if settings.mtp_loss_schedule == "constant":
        return first
    progress = min(step / settings.mtp_loss_schedule_steps, 1)
    return SCHEDULES[settings.mtp_loss_schedule](first, settings.mtp_loss_final_factor, progress)


def depth_weights(settings: MTPConfig, depths: int, factor: float, are_coupled: bool = False) -> list[float]:
    """The weight of depth 1 .. D: lambda / D, times `--mtp-loss-weights`; `factor` is lambda.

    Of a loss that couples depths these are the terms of one mean, so that all of them add to lambda.
    """
    weights = settings.loss_weights(depths)
    return [factor / (sum(weights) if are_coupled else depths) * weight for weight in weights]


def kept_positions(fraction: float, seed: tuple[int, int], positions: int) -> Tensor | None:
    """Positions of whole sequences that the depths are trained on; None for all.

    They depend on `seed`, which is (run, step), alone: every rank draws the same, also after a resume.
    """
    if fraction == 1:
        return None
    generator = torch.Generator(device="cpu").manual_seed(hash(seed) % 2**63)
    return torch.randperm(positions, generator=generator, device="cpu")[: math.ceil(fraction * positions)]
