"""The depth-shifted batch: tokens, labels and masks of every depth, made once on whole sequences.

`add_depths` adds the shifted tensors as [B, S, D], with the sequence second as in all of Megatron's batch;
`keep_positions` cuts all entries for context parallelism, and `depth_batch` collects what is left.
Letters in names: D depths, B batch, S sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_mtp.data.shift import inside_document, shift_left

IGNORED_LABEL = -100
"""The label that Hugging Face data sets use for 'not trained on'."""

WITHOUT_SEQUENCE = {"cu_seqlens", "cu_seqlens_padded", "max_seqlen", "whole_tokens"}
"""Entries of a batch without a sequence dimension."""


@dataclass(frozen=True)
class DepthBatch:
    """A microbatch, as the MTP block and the losses need it.

    Attributes:
        labels_BS, loss_mask_BS: of the trunk.
        tokens_DBS: t_{i+d}, the token whose embedding depth d sees at position i; None on a stage without tokens.
        labels_DBS: t_{i+d+1}, what depth d predicts there.
        loss_mask_DBS: float; the trunk's mask, shifted.
        inside_DBS: False where the token at depth d is outside the document.
        positions_S: the numbers of these positions in the whole sequence.
        whole_tokens: [1 + D], float: unmasked tokens of the trunk and of every depth in the whole microbatch; the other
            fields may be one context-parallel rank's part of it.
        ages_DS: how many depths before the last one each depth takes its state from (`model/mixing.py`); None to take
            the last one everywhere.
    """

    labels_BS: Tensor
    loss_mask_BS: Tensor
    tokens_DBS: Tensor | None
    labels_DBS: Tensor
    loss_mask_DBS: Tensor
    inside_DBS: Tensor
    positions_S: Tensor
    whole_tokens: Tensor
    ages_DS: Tensor | None = None


def mask_ignored_labels(batch: dict[str, Any]) -> None:
    """Turn labels of -100 into label 0 with mask 0, in place."""
    labels_BS = batch["labels"]
    ignored_BS = labels_BS == IGNORED_LABEL
    batch["labels"] = labels_BS.masked_fill(ignored_BS, 0)
    batch["loss_mask"] = batch["loss_mask"].masked_fill(ignored_BS, 0)


def join_rows(batch: dict[str, Any]) -> None:
    """Join the rows of a packed batch to one row, in place, with offsets [documents + 1]."""
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        if batch[name] is not None:
            lengths = batch[name].diff(dim=1).flatten()
            batch[name] = pad(lengths[lengths > 0].cumsum(0, dtype=torch.int32), (1, 0))
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        if batch[name] is not None:
            batch[name] = batch[name].view(1, -1)


def add_depths(batch: dict[str, Any], depths: int, document_BS: Tensor | None) -> None:
    """Add the tensors of every depth, as [B, S, D], and the other fields of `DepthBatch`, in place.

    Args:
        batch: Megatron's batch of whole sequences; `tokens` may be None.
        depths: D, 0 or more.
        document_BS: see `shift.shift_left`.
    """
    for name in ("tokens", "labels", "loss_mask"):
        whole_BS = batch[name]
        batch[f"depth_{name}"] = None if whole_BS is None else _depth_last(shift_left(whole_BS, depths, document_BS))
    labels_BS = batch["labels"]
    batch["depth_inside"] = _depth_last(inside_document(labels_BS, depths, document_BS))
    batch["positions"] = torch.arange(labels_BS.size(1), device=labels_BS.device).unsqueeze(0)
    counts = [batch["loss_mask"].float().sum().view(1), batch["depth_loss_mask"].float().sum((0, 1))]
    batch["whole_tokens"] = torch.cat(counts)


def keep_positions(batch: dict[str, Any], positions_S: Tensor) -> None:
    """Keep only these positions of every sequence, in place; an attention mask keeps all its columns."""
    for name, value in batch.items():
        if value is not None and name not in WITHOUT_SEQUENCE:
            batch[name] = value.index_select(2 if name == "attention_mask" else 1, positions_S)


def depth_batch(batch: dict[str, Any]) -> DepthBatch:
    """What `add_depths` has added, after the batch was cut for context parallelism."""
    tokens_BSD = batch["depth_tokens"]
    return DepthBatch(
        labels_BS=batch["labels"],
        loss_mask_BS=batch["loss_mask"],
        tokens_DBS=None if tokens_BSD is None else _depth_first(tokens_BSD),
        labels_DBS=_depth_first(batch["depth_labels"]),
        loss_mask_DBS=_depth_first(batch["depth_loss_mask"]),
        inside_DBS=_depth_first(batch["depth_inside"]),
        positions_S=batch["positions"].squeeze(0),
        whole_tokens=batch["whole_tokens"],
    )


def _depth_last(values_DBS: Tensor) -> Tensor:
    return torch.movedim(values_DBS, 0, 2)


def _depth_first(values_BSD: Tensor) -> Tensor:
    return torch.movedim(values_BSD, 2, 0).contiguous()
