"""Loss of a draft head on the last pipeline stage, from the trunk's states and the batch of a forward.

`attach` computes it after or in a loop's forward; `mtp_loss.py` computes it for models of this package.

Letters in names: S sequence, B batch, H hidden, D depths, R context-parallel ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import _fork_rng
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mtp.data.batch import (
    depth_batch,
    documents_from_offsets,
    inside_document,
    mask_ignored_labels,
    positions_of_ranks,
    shift_left,
)
from megatron_mtp.losses.head_objective import HeadObjective, base_share, depth_weights, with_draws
from megatron_mtp.losses.table import depth_loss
from megatron_mtp.model.attachment import Attachment, DraftHead
from megatron_mtp.model.packed_rows import bounds_of
from megatron_mtp.model.stage_output import Drafted
from megatron_mtp.model.stages import NO_BACKWARD
from megatron_mtp.model.trunk_output import is_detached
from megatron_mtp.spec.config import MTPConfig

HALFWAY = 0.5
"""Fraction of the run that is over, for loops that do not set it."""


TAKEN = "mtp_taken"
"""Attribute that marks a loss scale that was set after a forward and used in its backward pass."""


@dataclass(frozen=True)
class MTPLoss:
    """MTP loss of a batch.

    Attributes:
        loss: (1 / D) sum_d w_d mean_d. Multiply by lambda and add it to the training loss. For e2e_tv, the mean over
            positions. With a normalizer, sums divided by the normalizer replace the means. Under context parallelism,
            this rank's part; the parts add up to the loss.
        depth_means: [D], mean loss of each depth over its unmasked tokens on all context-parallel ranks.
        heads: losses by name of the heads that `attach` has added to the model. `loss` is then their weighted sum, and
            `depth_means` are those of the first one.
    """

    loss: Tensor
    depth_means: Tensor
    heads: "Mapping[str, MTPLoss]" = field(default_factory=dict)

    def without_graph(self) -> "MTPLoss":
        """Return the same numbers detached, for logging."""
        return MTPLoss(
            self.loss.detach(), self.depth_means, {name: made.without_graph() for name, made in self.heads.items()}
        )


@dataclass(frozen=True)
class Batch:
    """Whole sequences, even under context parallelism. The fields are arguments of `mtp_loss`.

    Attributes:
        mask_at_tokens: for a batch without labels, whether the mask refers to the tokens that count rather than to
            positions whose label counts.

    Raises:
        ValueError: shapes differ.
    """

    tokens_BS: Tensor
    labels_BS: Tensor | None
    loss_mask_BS: Tensor
    document_BS: Tensor | None = None
    packed: PackedSeqParams | None = None
    normalizer: Tensor | float | None = None
    mask_at_tokens: bool = False

    def __post_init__(self) -> None:
        given = [self.tokens_BS, self.loss_mask_BS, *([] if self.labels_BS is None else [self.labels_BS])]
        if len({each.shape for each in given}) > 1:
            raise ValueError(
                f"tokens, loss mask and labels have the shapes {', '.join(str(tuple(each.shape)) for each in given)}; "
                "give all as [B, S]."
            )


def loss_of_stage(
    stage: Attachment,
    head: DraftHead,
    hidden_SBH: Tensor,
    batch: Batch,
    settings: MTPConfig,
    step: int = 0,
    progress: float = HALFWAY,
) -> MTPLoss:
    """Compute `mtp_loss` of one head. Documents only end the shifts, unless the batch is packed.

    Args:
        step: number that is the same on all ranks; seeds the draws of drafter blocks and of mixed hidden states.
        progress: fraction of the run that is over (`base_share`).
    """
    tokens_BS, labels_BS, loss_mask_BS = batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS
    document_BS, packed, normalizer = batch.document_BS, batch.packed, batch.normalizer
    if not stage.config.fp32_residual_connection:  # Float16Module has converted the outputs to float32
        hidden_SBH = hidden_SBH.to(stage.head(detached=True).weight.dtype)
    if packed is not None and document_BS is None:
        document_BS = _documents(packed, tokens_BS)
    if labels_BS is None:
        labels_BS = shift_left(tokens_BS, 1, document_BS)[0]
        if batch.mask_at_tokens:
            loss_mask_BS = shift_left(loss_mask_BS, 1, document_BS)[0]
        loss_mask_BS = loss_mask_BS * inside_document(tokens_BS, 1, document_BS)[0]
    loss_mask_BS = loss_mask_BS.float()
    if normalizer is not None:
        loss_mask_BS = (loss_mask_BS / normalizer).masked_fill(loss_mask_BS == 0, 0)
    shifted: dict[str, Any] = {"tokens": tokens_BS, "labels": labels_BS, "loss_mask": loss_mask_BS}
    mask_ignored_labels(shifted)
    _check_labels(shifted["labels"], shifted["loss_mask"], stage.head(detached=True).vocab_size)
    own_S = own_positions(stage.pg_collection.cp, tokens_BS.size(1), packed)
    _check_states(stage, hidden_SBH, tokens_BS, len(own_S))
    depths = depth_batch(shifted, head.depths, document_BS).at(own_S)
    depths = with_draws(depths, settings, (0, step), tokens_BS.size(1))
    is_apart = is_detached(stage.config) or settings.mtp_train_only or not hidden_SBH.requires_grad
    with _fork_rng():  # keep MTP dropout from changing the trunk's random state
        drafted = stage.drafted(head, hidden_SBH, depths, packed, tokens_BS.size(1), is_apart)
    return _loss(stage, settings, hidden_SBH, drafted, normalizer is not None, progress)


def _loss(
    stage: Attachment, settings: MTPConfig, hidden_SBH: Tensor, drafted: Drafted, is_normalized: bool, progress: float
) -> MTPLoss:
    """Return the loss of the MTP layers; the mask is already divided by the normalizer, if there is one."""
    loss, group = depth_loss(settings), stage.pg_collection.cp
    weights = depth_weights(settings, len(drafted.batch.labels_DBS), 1.0, loss)
    share = base_share(settings, progress)
    objective = HeadObjective(weights, group, loss, per_token=is_normalized, base_share=share)
    made = objective(hidden_SBH, drafted)
    total, sums = made.loss, made.depths
    shown_2D = torch.stack([torch.stack([each.total, each.tokens]) for each in sums], dim=1).detach()
    torch.distributed.all_reduce(shown_2D, group=group)
    means_D = torch.where(shown_2D[1] > 0, shown_2D[0] / shown_2D[1], 0)
    return MTPLoss(total if is_normalized else total / drafted.batch.whole_tokens[0].clamp(min=1), means_D)


def _check_states(stage: Attachment, hidden_SBH: Tensor, tokens_BS: Tensor, positions: int) -> None:
    """Refuse tokens of another forward pass; `positions` of them are this context-parallel rank's."""
    ranks = stage.pg_collection.tp.size() if stage.config.sequence_parallel else 1
    if hidden_SBH.shape[:2] != (positions // ranks, len(tokens_BS)):
        raise ValueError(
            f"tokens [B, S] are {tuple(tokens_BS.shape)}, and the forward had states [S, B] of "
            f"{tuple(hidden_SBH.shape[:2])} on this rank; give the whole sequences of that forward."
        )


def _check_labels(labels_BS: Tensor, loss_mask_BS: Tensor, vocab_size: int | None) -> None:
    if vocab_size is None or labels_BS.device.type != "cpu":  # reading labels on a GPU would synchronize
        return
    strange = labels_BS[(labels_BS >= vocab_size) & (loss_mask_BS != 0)]
    if strange.numel():
        raise ValueError(
            f"the label {int(strange[0])} counts, and the model has tokens 0 to {vocab_size - 1}; the rows behind them "
            "only pad the vocabulary, so correct the labels or mask them."
        )


def _documents(packed: PackedSeqParams, tokens_BS: Tensor) -> Tensor:
    """Return the document of every position of the one row, [1, S]."""
    if len(tokens_BS) != 1:
        raise ValueError(f"packed_seq_params was given with {len(tokens_BS)} rows of tokens; join them to one row.")
    padded = packed.cu_seqlens_q_padded
    rows = packed.cu_seqlens_q[None], None if padded is None else padded[None]
    return documents_from_offsets(*rows, tokens_BS.size(1))


def own_positions(group: ProcessGroup, length: int, packed: PackedSeqParams | None) -> Tensor:
    """Return the positions that this context-parallel rank holds, [S], on the host, in Megatron's order."""
    return positions_of_group(group, length, packed)[group.rank()]


def positions_of_group(group: ProcessGroup, length: int, packed: PackedSeqParams | None) -> Tensor:
    """Return the positions of every rank of the group, [R, S]."""
    if group.size() == 1:
        return torch.arange(length).unsqueeze(0)
    offsets = torch.tensor([0, length]) if packed is None else bounds_of(packed)
    return positions_of_ranks(offsets, group.size())


class RidingLoss(torch.autograd.Function):
    """Variant of Megatron's `MTPLossAutoScaler` that does not reuse a scale set by an earlier schedule.

    A schedule sets the scale after every forward. Such a scale applies only to that forward: the next forward, in a
    plain loop, starts with 1. A scale that a loop sets before its forwards stays.
    """

    @staticmethod
    def forward(ctx: Any, states_SBH: Tensor, loss: Tensor) -> Tensor:
        """Return the states unchanged and keep the loss for the backward pass."""
        scale = MTPLossAutoScaler.main_loss_backward_scale
        if getattr(scale, TAKEN, False) and torch._C._current_graph_task_id() == NO_BACKWARD:
            scale = torch.ones_like(scale)
            MTPLossAutoScaler.set_loss_scale(scale)
        ctx.scale, ctx.like = scale, (loss.dtype, loss.device)
        return states_SBH

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        """Return the gradient of the states, and the scale as the gradient of the loss."""
        scale = MTPLossAutoScaler.main_loss_backward_scale
        if scale is not ctx.scale:
            setattr(scale, TAKEN, True)
        dtype, device = ctx.like
        return gradients[0], (torch.ones((), dtype=dtype, device=device) * scale).reshape(())
