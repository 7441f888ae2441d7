"""What the depths weigh in the loss, step by step: lambda and its schedule, the depths' own weights, slots left out."""

import math
from argparse import Namespace

import torch
from torch import Tensor

from megatron_mtp.config import MTPConfig


def scaling_factor(args: Namespace, settings: MTPConfig, step: int) -> float:
    """lambda of this step: `--mtp-loss-scaling-factor` at first, `--mtp-loss-final-factor` in the end."""
    first = args.mtp_loss_scaling_factor
    if settings.mtp_loss_schedule == "constant":
        return first
    return SCHEDULES[settings.mtp_loss_schedule](
        first, settings.mtp_loss_final_factor, step, settings.mtp_loss_schedule_steps
    )


def _step(first: float, final: float, step: int, steps: int) -> float:
    return first if step < steps else final


def _cosine(first: float, final: float, step: int, steps: int) -> float:
    return final + (first - final) * (1 + math.cos(math.pi * min(step / steps, 1))) / 2


SCHEDULES = {"step": _step, "cosine": _cosine}
"""`step` keeps the first value for so many steps, as DeepSeek-V3 did (arXiv:2412.19437, section 4.2); `cosine` takes so
many to go from one to the other."""


def depth_weights(settings: MTPConfig, depths: int, factor: float) -> list[float]:
    """Of depth 1 .. D: lambda / D, times `--mtp-loss-weights`."""
    return [factor / depths * weight for weight in settings.loss_weights(depths)]


def kept_slots(fraction: float, seed: tuple[int, int], slots: int) -> Tensor | None:
    """Slots of whole sequences that the depths are trained on; None for all.

    They are drawn anew from `seed`, which is (run, step), alone: the same on every rank and after a resume.
    """
    if fraction == 1:
        return None
    generator = torch.Generator(device="cpu").manual_seed(hash(seed) % 2**63)
    return torch.randperm(slots, generator=generator, device="cpu")[: math.ceil(fraction * slots)]
