"""The depths' loss in a training loop that is not Megatron's: fine-tuning, and RL trainers whose policy has MTP.

    hidden_SBH = trunk_states(model, tokens_BS)
    loss = policy_loss(hidden_SBH, ...) + 0.1 * mtp_loss(hidden_SBH, model, tokens_BS, labels_BS, mask_BS).loss

Rows of several documents, as trainers pack rollouts, have `document_BS` in both calls: trunk and depths then attend
within documents, and a row computes what its documents compute one by one.

One pipeline stage; tensor and sequence parallelism as the model has them. Letters in names: S sequence, B batch, H
hidden, D depths.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import pad

from megatron_mtp.config import MTPConfig
from megatron_mtp.data.batch import DepthBatch, depth_batch, mask_ignored_labels
from megatron_mtp.data.shift import NO_DOCUMENT, inside_document, shift_left
from megatron_mtp.losses import depth_loss
from megatron_mtp.losses.combine import depth_weights
from megatron_mtp.model.causal import square_mask
from megatron_mtp.model.mtp import AttentionInputs
from megatron_mtp.model.trunk import MTPTrunk
from megatron_mtp.training.objective import NextTokensObjective


@dataclass(frozen=True)
class MTPLoss:
    """The depths' loss of a batch.

    Attributes:
        loss: (1 / D) sum_d w_d mean_d, to be weighted with lambda and trained on; of e2e_tv the mean over positions.
        depth_means: [D], the mean loss of every depth over its own unmasked tokens.
    """

    loss: Tensor
    depth_means: Tensor


def trunk_states(model: MTPTrunk, tokens_BS: Tensor, document_BS: Tensor | None = None) -> Tensor:
    """The trunk's hidden states after its final norm, [S, B, H], with their graph.

    Args:
        tokens_BS: whole sequences.
        document_BS: as in `mtp_loss`.

    Raises:
        ValueError: sequence parallelism cuts several rows with documents.
    """
    packed = None if document_BS is None else _packed(model, document_BS)
    joined_BS = tokens_BS if packed is None else tokens_BS.reshape(1, -1)
    states: Tensor = model(
        joined_BS,
        _positions(joined_BS),
        None if packed is not None else square_mask(joined_BS.size(1), tokens_BS.device),
        packed_seq_params=packed,
        output_processor=lambda stage: stage.hidden_SBH,  # there is no batch of depths, so they are not run
    )
    return states if packed is None else states.view(len(tokens_BS), -1, states.size(-1)).transpose(0, 1)


def mtp_loss(
    hidden_SBH: Tensor,
    model: MTPTrunk,
    tokens_BS: Tensor,
    labels_BS: Tensor | None,
    loss_mask_BS: Tensor,
    settings: MTPConfig | None = None,
    document_BS: Tensor | None = None,
) -> MTPLoss:
    """The loss of the model's depths on the trunk's hidden states.

    Args:
        hidden_SBH: from `trunk_states` or a forward of your own. Detached, it keeps the depths' loss out of the whole
            trunk, its embedding and head too; so does `mtp_train_only` in the settings.
        tokens_BS: what the trunk saw.
        labels_BS: t_{i+1} at position i, as the trunk has them; -100 counts as masked. The depths' are shifted here.
            None for the next tokens of `tokens_BS`.
        loss_mask_BS: 1 where the label counts, such as the answer of a prompt or the tokens of a rollout.
        settings: loss, temperature and weights of the depths; cross-entropy by default. A draft vocabulary is the
            model's own, whatever they say.
        document_BS: a number for every position, equal within a document, where a row has several; -1 on padding.

    Raises:
        ValueError: the model has no depths, the shapes differ, there is no such loss, hidden states are to be mixed, or
            sequence parallelism cuts several rows with documents.
    """
    settings = settings or MTPConfig()
    if not model.mtp_process:
        raise ValueError("the model has no MTP layers; attach some with megatron-mtp convert attach-mtp.")
    if settings.mtp_hidden_state_mixing:
        raise ValueError(
            "mtp_hidden_state_mixing is set, which only megatron-mtp train can do, since it draws by the number of the "
            "step; leave it out."
        )
    if labels_BS is None:
        labels_BS = shift_left(tokens_BS, 1, document_BS)[0]
        loss_mask_BS = loss_mask_BS * inside_document(tokens_BS, 1, document_BS)[0]
    if not tokens_BS.shape == labels_BS.shape == loss_mask_BS.shape:
        raise ValueError(
            f"tokens, labels and loss mask have the shapes {tuple(tokens_BS.shape)}, {tuple(labels_BS.shape)} and "
            f"{tuple(loss_mask_BS.shape)}; give all three as [B, S]."
        )
    packed = None if document_BS is None else _packed(model, document_BS)
    if document_BS is not None:
        hidden_SBH = hidden_SBH.transpose(0, 1).reshape(1, -1, hidden_SBH.size(-1)).transpose(0, 1)
        tokens_BS, labels_BS, loss_mask_BS = (each.reshape(1, -1) for each in (tokens_BS, labels_BS, loss_mask_BS))
        document_BS = _apart(document_BS).view(1, -1)
    batch: dict[str, Any] = {"tokens": tokens_BS, "labels": labels_BS, "loss_mask": loss_mask_BS.float()}
    mask_ignored_labels(batch)
    depths = depth_batch(batch, model.mtp.depths, document_BS)
    is_apart = model.config.mtp_detach_heads or settings.mtp_train_only or not hidden_SBH.requires_grad
    states = _depth_states(model, hidden_SBH, depths, packed, is_apart)
    loss = depth_loss(settings)
    weights = depth_weights(settings, model.mtp.depths, 1.0, loss.couples_depths)
    objective = NextTokensObjective(weights, model.pg_collection.cp, loss)
    later = objective.later_positions(depths.positions_S, len(states))
    total, sums = objective.of_depths(hidden_SBH.detach(), states, model.head(detached=is_apart), depths, later)
    means = torch.stack([each.total / each.tokens.clamp(min=1) for each in sums])
    return MTPLoss(total / depths.whole_tokens[0].clamp(min=1), means.detach())


def _depth_states(
    model: MTPTrunk, hidden_SBH: Tensor, depths: DepthBatch, packed: PackedSeqParams | None, is_apart: bool
) -> list[Tensor]:
    """Hidden states of the depths; if they are apart, they pass no gradient to the trunk's states and embedding."""
    positions = depths.positions_S.numel()
    mask = None if packed is not None else square_mask(positions, hidden_SBH.device)
    length = positions if packed is None else packed.max_seqlen_q
    angles = model.rotary_angles(length, packed_seq=packed is not None)[0] if model.turns_heads else None
    attention = AttentionInputs(mask, angles, packed_seq_params=packed)
    before, model.config.mtp_detach_heads = model.config.mtp_detach_heads, is_apart
    try:
        return model.depth_states(hidden_SBH, depths, _positions(depths.labels_BS), attention)
    finally:
        model.config.mtp_detach_heads = before


def _packed(model: MTPTrunk, document_BS: Tensor) -> PackedSeqParams:
    """Megatron's description of the documents, all rows joined to one."""
    if model.config.sequence_parallel and len(document_BS) > 1:
        raise ValueError(
            f"document_BS has {len(document_BS)} rows, which sequence parallelism cuts; join them to one row."
        )
    changes_BS = document_BS.diff(dim=1, prepend=document_BS[:, :1] - 1) != 0  # a row begins a document too
    starts = changes_BS.flatten().nonzero()[:, 0]
    offsets = pad(starts, (0, 1), value=document_BS.numel()).to(torch.int32)
    longest = int(offsets.diff().max())
    return PackedSeqParams("thd", offsets, offsets, None, None, longest, longest, total_tokens=document_BS.numel())


def _apart(document_BS: Tensor) -> Tensor:
    """Numbers of documents that differ between rows too."""
    first_B1 = (document_BS.max() + 1) * torch.arange(len(document_BS), device=document_BS.device).unsqueeze(1)
    return torch.where(document_BS == NO_DOCUMENT, document_BS, document_BS + first_B1)


def _positions(tokens_BS: Tensor) -> Tensor:
    return torch.arange(tokens_BS.size(1), device=tokens_BS.device).expand_as(tokens_BS)
