"""The depths' loss in a training loop that is not Megatron's: fine-tuning, and RL trainers whose policy has MTP.

    hidden_SBH = trunk_states(model, tokens_BS)
    loss = policy_loss(hidden_SBH, ...) + 0.1 * mtp_loss(hidden_SBH, model, tokens_BS, labels_BS, mask_BS).loss

One pipeline stage; tensor and sequence parallelism as the model has them. Letters in names: S sequence, B batch, H
hidden, D depths.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.config import MTPConfig
from megatron_mtp.data.batch import add_depths, depth_batch, mask_ignored_labels
from megatron_mtp.losses import depth_loss
from megatron_mtp.losses.schedule import depth_weights
from megatron_mtp.model.causal import square_mask
from megatron_mtp.model.mtp import AttentionInputs
from megatron_mtp.model.trunk import MTPGPTModel
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


def trunk_states(model: MTPGPTModel, tokens_BS: Tensor) -> Tensor:
    """The trunk's hidden states after its final norm, [S, B, H], with their graph."""
    states: Tensor = model(
        tokens_BS,
        _positions(tokens_BS),
        square_mask(tokens_BS.size(1), tokens_BS.device),
        output_processor=lambda stage: stage.hidden_SBH,  # there is no batch of depths, so they are not run
    )
    return states


def mtp_loss(
    hidden_SBH: Tensor,
    model: MTPGPTModel,
    tokens_BS: Tensor,
    labels_BS: Tensor,
    loss_mask_BS: Tensor,
    settings: MTPConfig | None = None,
    document_BS: Tensor | None = None,
) -> MTPLoss:
    """The loss of the model's depths on the trunk's hidden states.

    Args:
        hidden_SBH: from `trunk_states` or a forward of your own; detach it to keep the depths' loss out of the trunk.
        tokens_BS: what the trunk saw.
        labels_BS: t_{i+1} at position i, as the trunk has them; -100 counts as masked. The depths' are shifted here.
        loss_mask_BS: 1 where the label counts, such as the answer of a prompt or the tokens of a rollout.
        settings: loss, temperature and weights of the depths; cross-entropy by default. A draft vocabulary is the
            model's own, whatever they say.
        document_BS: which document every position belongs to, where a row has several.

    Raises:
        ValueError: the model has no depths, the shapes differ, there is no such loss, or hidden states are to be mixed.
    """
    settings = settings or MTPConfig()
    if not model.mtp_process:
        raise ValueError("the model has no MTP depths; attach some with megatron-mtp convert attach-mtp.")
    if settings.mtp_hidden_state_mixing:
        raise ValueError(
            "mtp_hidden_state_mixing is set, which only megatron-mtp train can do, since it draws by the number of the "
            "step; leave it out."
        )
    if not tokens_BS.shape == labels_BS.shape == loss_mask_BS.shape:
        raise ValueError(
            f"tokens, labels and loss mask have the shapes {tuple(tokens_BS.shape)}, {tuple(labels_BS.shape)} and "
            f"{tuple(loss_mask_BS.shape)}; give all three as [B, S]."
        )
    batch: dict[str, Any] = {"tokens": tokens_BS, "labels": labels_BS, "loss_mask": loss_mask_BS.float()}
    mask_ignored_labels(batch)
    add_depths(batch, model.mtp.depths, document_BS)
    depths = depth_batch(batch)
    attention = AttentionInputs(
        square_mask(tokens_BS.size(1), tokens_BS.device), *model._preprocess(None, None, hidden_SBH)[1:4]
    )
    states = model.depth_states(hidden_SBH, depths, _positions(tokens_BS), attention)
    loss = depth_loss(settings)
    weights = depth_weights(settings, model.mtp.depths, 1.0, loss.couples_depths)
    objective = NextTokensObjective(weights, model.pg_collection.cp, loss)
    head = model.head(detached=model.config.mtp_detach_heads or settings.mtp_train_only)
    later = objective.later_positions(depths.positions_S, len(states))
    total, sums = objective.of_depths(hidden_SBH.detach(), states, head, depths, later)
    means = torch.stack([each.total / each.tokens.clamp(min=1) for each in sums])
    return MTPLoss(total / depths.whole_tokens[0].clamp(min=1), means.detach())


def _positions(tokens_BS: Tensor) -> Tensor:
    return torch.arange(tokens_BS.size(1), device=tokens_BS.device).expand_as(tokens_BS)
