"""Training objective of a stage: one scalar loss, and acceptance, from the states of the trunk and the MTP layers.

The trunk's own loss, lambda and the choice of positions are here; the loss of a head is in head_objective.py.

Letters in names: S sequence, B batch, H hidden.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_mtp.data.batch import DepthBatch
from megatron_mtp.losses.head_objective import HeadObjective, HeadOutput, LossSum
from megatron_mtp.losses.linear_cross_entropy import Targets, linear_loss
from megatron_mtp.losses.token_loss import CrossEntropy
from megatron_mtp.model.head import Head
from megatron_mtp.model.stage_output import StageOutput

if TYPE_CHECKING:
    from megatron_mtp.spec.config import MTPConfig


@dataclass(frozen=True)
class ObjectiveOutput:
    """Output of the model on the last pipeline stage.

    Attributes:
        loss: the scalar for Megatron's schedule, before division by the number of tokens.
        main: loss sum of the trunk.
        heads: results of the MTP layers and drafters.
    """

    loss: Tensor
    main: LossSum
    heads: list[HeadOutput]


@dataclass(frozen=True)
class NextTokensObjective:
    """Cross-entropy of the trunk plus the objectives of MTP layers and drafters.

    Attributes:
        heads: objectives, in the order of the model's heads.
        linear_main: whether the trunk's loss is computed in chunks, as for the MTP layers.
        trains_trunk: whether the trunk's loss is part of the total.
        known_main: function that returns the cached trunk loss of a microbatch, or computes it; None to always compute
            it.
    """

    heads: Sequence[HeadObjective] = ()
    linear_main: bool = False
    trains_trunk: bool = True
    known_main: Callable[[DepthBatch, Callable[[], LossSum]], LossSum] | None = None

    def __call__(self, stage: StageOutput) -> ObjectiveOutput:
        """Compute the loss. The model calls this with the microbatch of every head."""
        assert stage.batches is not None
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trains_trunk):
            batch, computed = stage.batches[0], partial(self._main, stage.hidden_SBH, stage.head, stage.batches[0])
            main = computed() if self.known_main is None else self.known_main(batch, computed)
        made = [head(stage.hidden_SBH, drafted) for head, drafted in zip(self.heads, stage.drafted, strict=True)]
        return ObjectiveOutput(sum((each.loss for each in made), main.total), main, made)

    def _main(self, hidden_SBH: Tensor, head: Head, batch: DepthBatch) -> LossSum:
        mask_BS, whole_tokens = batch.loss_mask_BS, batch.whole_tokens[0]
        if not self.linear_main:
            losses_BS = head.cross_entropy(batch.labels_BS, head.project(hidden_SBH))
            return sum_losses(losses_BS, mask_BS, whole_tokens)
        targets = Targets(batch.labels_BS.t()[None], mask_BS.t()[None], torch.ones_like(whole_tokens)[None])
        total, _ = linear_loss(CrossEntropy(), [head.whole(hidden_SBH)], targets, head.weight, head.vocabulary())
        return LossSum(total, mask_BS.float().sum(), whole_tokens)


def sum_losses(losses_BS: Tensor, mask_BS: Tensor, whole_tokens: Tensor) -> LossSum:
    """Sum losses over unmasked positions. Masked positions are ignored even if their loss is not finite."""
    mask_BS = mask_BS.float()
    counted_BS = losses_BS.float().masked_fill(mask_BS == 0, 0) * mask_BS
    return LossSum(counted_BS.sum(), mask_BS.sum(), whole_tokens)


def scaling_factor(args: Namespace, settings: "MTPConfig", step: int) -> float:
    """Return lambda of this step, scheduled from `--mtp-loss-scaling-factor` to `--mtp-loss-final-factor`."""
    first: float = args.mtp_loss_scaling_factor
    if settings.mtp_loss_schedule == "constant":
        return first
    given = settings.mtp_loss_schedule_steps
    progress = min(step / (given if given >= 1 else given * args.train_iters), 1)
    return settings.lambda_at(first, progress)


def kept_positions(fraction: float, seed: tuple[int, int], positions: int) -> Tensor | None:
    """Select the positions of whole sequences to train on; None for all.

    The selection depends only on `seed`, which is (run, step), so every rank draws the same, even after a resume.
    """
    if fraction == 1:
        return None
    generator = torch.Generator(device="cpu").manual_seed(hash(seed) % 2**63)
    return torch.randperm(positions, generator=generator, device="cpu")[: math.ceil(fraction * positions)]
