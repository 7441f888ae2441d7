"""One scalar from the trunk's and the depths' sums of losses: masks, lambda, weights and normalizer in one place.

By default Megatron's schedule divides this scalar by the microbatch's count of tokens. With
`--calculate-per-token-loss` it divides every gradient by the count of the global batch. So the scalar is

    default     sum_main + sum_d w_d T sum_d / T_d     then divided by T
    per token   sum_main + sum_d w_d sum_d             then divided by the global T

with w_d = lambda / D (times the depth's own weight), T the main tokens and T_d those of depth d. The second is the
paper's normalizer (arXiv:2412.19437, eq. 24 divides every depth by T), and does not depend on how a global batch is
cut. Under context parallelism every rank has a part of the sums, and T and T_d are counts of the whole microbatch, so
the ranks' scalars add up to that of the microbatch. An empty mask gives loss 0 and gradient 0.
"""

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mtp.config import SCHEDULES, MTPConfig


@dataclass(frozen=True)
class LossSum:
    """Scalars on the device.

    Attributes:
        total: the masked sum of losses.
        tokens: its unmasked tokens.
        whole_tokens: those of the whole microbatch, of which this may be one context-parallel rank's part.
    """

    total: Tensor
    tokens: Tensor
    whole_tokens: Tensor

    def report(self) -> Tensor:
        """[2], float: total and tokens, which Megatron's logs add over microbatches and ranks, and then divide.

        A tiny number replaces a count of 0, so that a depth without tokens logs 0 and not NaN; the metrics
        name such a depth.
        """
        return torch.stack([self.total.detach().float(), self.tokens.float().clamp(min=1e-20)])


def sum_losses(losses_BS: Tensor, mask_BS: Tensor, whole_tokens: Tensor) -> LossSum:
    """The sum over unmasked positions; a masked position does not count, whatever its loss."""
    mask_BS = mask_BS.float()
    counted_BS = losses_BS.float().masked_fill(mask_BS == 0, 0) * mask_BS
    return LossSum(counted_BS.sum(), mask_BS.sum(), whole_tokens)


def depth_scales(whole_tokens: Tensor, weights: Sequence[float], per_token: bool) -> Tensor:
    """The factors [D] of the depths' masked sums in the scalar that goes to Megatron's schedule.

    Args:
        whole_tokens: [1 + D], unmasked tokens of the trunk and of every depth in the whole microbatch.
        weights: w_1 .. w_D.
        per_token: whether `--calculate-per-token-loss` is on.
    """
    weight_D = whole_tokens.new_tensor(weights)
    return weight_D if per_token else weight_D * whole_tokens[0].int() / whole_tokens[1:].clamp(min=1)


# --- lambda and weights, step by step --------------------------------------------------------------------------------


def scaling_factor(args: Namespace, settings: MTPConfig, step: int) -> float:
    """lambda of this step: `--mtp-loss-scaling-factor` at first, `--mtp-loss-final-factor` in the end."""
    first: float = args.mtp_loss_scaling_factor
    if settings.mtp_loss_schedule == "constant":
        return first
    progress = min(step / settings.mtp_loss_schedule_steps, 1)
    return SCHEDULES[settings.mtp_loss_schedule](first, settings.mtp_loss_final_factor, progress)


def depth_weights(settings: MTPConfig, depths: int, factor: float, are_coupled: bool = False) -> list[float]:
    """The weight of depth 1 .. D: lambda / D, times `--mtp-loss-weights`; `factor` is lambda.

    A drafter's loss is the sum over its steps, without the division by D. Of a loss that couples depths these are the
    terms of one mean, so that all of them add to lambda.
    """
    weights = settings.loss_weights(depths)
    terms = sum(weights) if are_coupled else depths if settings.drafter is None else 1
    return [factor / terms * weight for weight in weights]


def kept_positions(fraction: float, seed: tuple[int, int], positions: int) -> Tensor | None:
    """Positions of whole sequences that the depths are trained on; None for all.

    They depend on `seed`, which is (run, step), alone: every rank draws the same, also after a resume.
    """
    if fraction == 1:
        return None
    generator = torch.Generator(device="cpu").manual_seed(hash(seed) % 2**63)
    return torch.randperm(positions, generator=generator, device="cpu")[: math.ceil(fraction * positions)]
