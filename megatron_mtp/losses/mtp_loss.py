"""MTP loss for custom training loops: fine-tuning, and RL trainers whose policy has MTP layers.

    logits_BSV, hidden_SBH = model(tokens_BS, position_ids_BS, mask, output_processor=logits_and_states)
    loss = policy_loss(logits_BSV, ...) + 0.1 * mtp_loss(hidden_SBH.detach(), model, tokens_BS, None, mask_BS).loss

The first line is the loop's own forward pass, under any parallel layout and in Megatron's schedules. Without a policy
loss, `trunk_states` does the forward pass. For rows with several packed documents, pass `packed_seq_params` to both
calls, or `document_BS`: trunk and MTP layers then attend within documents, and a row computes the same as its documents
one by one.

Letters in names: S sequence, B batch, H hidden, D depths, V this rank's slice of the vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import _fork_rng
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from megatron_mtp.data.batch import (
    NO_DOCUMENT,
    depth_batch,
    documents_from_offsets,
    inside_document,
    mask_ignored_labels,
    positions_of_ranks,
    shift_left,
    to_device,
)
from megatron_mtp.losses.objective import HeadObjective, base_share, depth_weights, with_draws
from megatron_mtp.losses.table import depth_loss
from megatron_mtp.model.attachment import Attachment, DraftHead, attached_of
from megatron_mtp.model.packed_rows import bounds_of
from megatron_mtp.model.stage_output import Drafted, StageOutput
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


def logits_and_states(stage: StageOutput) -> tuple[Tensor, Tensor]:
    """Return logits [B, S, V] and the states [S, B, H] for `mtp_loss`.

    Pass this as `output_processor` to a model's forward.

    The logits are bit by bit those of a forward without labels. Stages before the last one return what they always do.
    """
    return stage.head.project(stage.hidden_SBH).transpose(0, 1).contiguous(), stage.hidden_SBH


def trunk_states(model: torch.nn.Module, tokens_BS: Tensor, document_BS: Tensor | None = None) -> Tensor:
    """Compute the trunk's hidden states after its final norm, [S, B, H], with gradients.

    Args:
        model: model with one pipeline stage; wrapped or not.
        tokens_BS: whole sequences; a context-parallel rank computes its part of them.
        document_BS: as in `mtp_loss`.

    Raises:
        ValueError: sequence parallelism is used with several rows of documents, or the model has several pipeline
            stages.
    """
    trunk = unwrap_model(model)
    if not (trunk.pre_process and trunk.post_process):
        raise ValueError(
            "trunk_states runs a whole model, and this is one of several pipeline stages; call the model in Megatron's "
            "schedule, with output_processor=logits_and_states."
        )
    packed = None if document_BS is None else packed_rows(document_BS, trunk.config.sequence_parallel)
    joined_BS = tokens_BS if packed is None else tokens_BS.reshape(1, -1)
    positions_S = to_device(own_positions(trunk.pg_collection.cp, joined_BS.size(1), packed), tokens_BS.device)
    states: Tensor = model(
        joined_BS[:, positions_S],
        positions_S.expand(len(joined_BS), -1),
        None,  # no mask means causal attention
        packed_seq_params=packed,
        output_processor=lambda stage: stage.hidden_SBH,  # no batch is passed, so the MTP layers do not run
    )
    return states if packed is None else states.view(len(tokens_BS), -1, states.size(-1)).transpose(0, 1)


def mtp_loss(
    hidden_SBH: Tensor,
    model: torch.nn.Module,
    tokens_BS: Tensor,
    labels_BS: Tensor | None,
    loss_mask_BS: Tensor,
    settings: MTPConfig | None = None,
    document_BS: Tensor | None = None,
    *,
    packed_seq_params: PackedSeqParams | None = None,
    normalizer: Tensor | float | None = None,
) -> MTPLoss:
    """Compute the loss of the model's MTP layers from the trunk's hidden states.

    Args:
        hidden_SBH: this rank's output of `logits_and_states` or `trunk_states`. If detached, the MTP loss does not
            reach the trunk, including its embedding and output layer; `mtp_train_only` in the settings does the same.
            The trunk's gradients are then bit-identical to those of a step without this call.
        model: the last pipeline stage, wrapped or not.
        tokens_BS: input tokens of the trunk, whole sequences even under context parallelism. Targets that depend on a
            token below 0, such as an image placeholder, are not learned.
        labels_BS: t_{i+1} at position i, as for the trunk. A label below 0, such as -100, is masked. Labels of the MTP
            layers are shifted here. None for the next tokens of `tokens_BS`.
        loss_mask_BS: 1 where the label counts, for example in the response to a prompt.
        settings: loss, temperature and weights of the MTP layers; cross-entropy by default. The soft labels of kd and
            tv come from the trunk, without gradient. The draft vocabulary is always the model's.
        document_BS: document number of each position, for rows with several documents; -1 on padding.
        packed_seq_params: the argument of the model's forward, with one row; an alternative to `document_BS`.
        normalizer: divisor of each depth's sum, so that microbatches and ranks add up: the tokens of a global batch, or
            a tensor that broadcasts to [B, S], such as each sequence's length times the number of sequences. None for
            each depth's number of unmasked tokens in this call.

    Raises:
        ValueError: the stage has no MTP layers, shapes differ, a label on the CPU is a padding row of the vocabulary,
            there is no such loss, the settings ask for hidden-state mixing, or sequence parallelism is used with
            several rows of documents.
    """
    trunk = unwrap_model(model)
    settings = settings or MTPConfig()
    _check_stage(trunk, settings)
    document_BS = None if packed_seq_params is not None else document_BS
    batch = Batch(tokens_BS, labels_BS, loss_mask_BS, document_BS, packed_seq_params, normalizer)
    if document_BS is not None:
        batch = _joined(batch, trunk.config.sequence_parallel)
        hidden_SBH = hidden_SBH.transpose(0, 1).reshape(1, -1, hidden_SBH.size(-1)).transpose(0, 1)
    stage = attached_of(trunk)
    return loss_of_stage(stage, stage.heads[0], hidden_SBH, batch, settings)


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


def _check_stage(trunk: Any, settings: MTPConfig) -> None:
    if not trunk.config.mtp_num_layers:
        raise ValueError("the model has no MTP layers; attach some with megatron-mtp convert attach-mtp.")
    if not (trunk.mtp_process and trunk.post_process):
        raise ValueError(
            "this pipeline stage does not have both the MTP layers and the output layer; call mtp_loss on the last "
            "stage, and build the model without a separate stage for the MTP layers."
        )
    if settings.mtp_hidden_state_mixing:
        raise ValueError(
            "mtp_hidden_state_mixing is set, which draws by the number of the step, and mtp_loss does not know it; "
            "leave it out, or attach the layers."
        )


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


# --- documents, and the positions of context-parallel ranks ----------------------------------------------------------


def _joined(batch: Batch, cuts_rows: bool) -> Batch:
    """Join all rows into one packed row."""
    assert batch.document_BS is not None
    packed, normalizer = packed_rows(batch.document_BS, cuts_rows), batch.normalizer
    if isinstance(normalizer, Tensor):
        normalizer = normalizer.expand_as(batch.tokens_BS).reshape(1, -1)
    rows = batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS, _apart(batch.document_BS)
    tokens, labels, mask, documents = (None if each is None else each.reshape(1, -1) for each in rows)
    assert tokens is not None
    assert mask is not None
    return Batch(tokens, labels, mask, documents, packed, normalizer)


def packed_rows(document_BS: Tensor, cuts_rows: bool) -> PackedSeqParams:
    """Return Megatron's `packed_seq_params` for the documents, with all rows joined.

    `cuts_rows` is sequence parallelism.
    """
    if cuts_rows and len(document_BS) > 1:
        raise ValueError(
            f"document_BS has {len(document_BS)} rows, which sequence parallelism cuts; join them to one row."
        )
    changes_BS = document_BS.diff(dim=1, prepend=document_BS[:, :1] - 1) != 0  # every row starts a document
    starts = changes_BS.flatten().nonzero()[:, 0]
    offsets = pad(starts, (0, 1), value=document_BS.numel()).to(torch.int32)
    longest = int(offsets.diff().max())
    return PackedSeqParams("thd", offsets, offsets, None, None, longest, longest, total_tokens=document_BS.numel())


def _apart(document_BS: Tensor) -> Tensor:
    """Return document numbers that also differ between rows."""
    first_B1 = (document_BS.max() + 1) * torch.arange(len(document_BS), device=document_BS.device).unsqueeze(1)
    return torch.where(document_BS == NO_DOCUMENT, document_BS, document_BS + first_B1)


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
