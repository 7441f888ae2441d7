"""The depth-shifted batch: tokens, labels and masks of every depth, made once on whole sequences.

`add_depths` runs before a batch is cut for context parallelism and puts the shifted tensors beside the others as
[B, S, D], sequence second like everything in Megatron's batch, so that one slicing serves all; `depth_batch` collects
them afterwards. Letters in names: D depths, B batch, S sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.data.shift import inside_document, shift_left

IGNORED_LABEL = -100
"""The label that Hugging Face data sets use for 'not trained on'."""


@dataclass(frozen=True)
class DepthBatch:
    """What block and losses need to know of a microbatch.

    Attributes:
        labels_BS, loss_mask_BS: of the trunk.
        tokens_DBS: t_{i+d}, the token whose embedding depth d sees at slot i; None on a stage without tokens.
        labels_DBS: t_{i+d+1}, what depth d predicts there.
        loss_mask_DBS: float; the trunk's mask, shifted.
        inside_DBS: False where the slot was shifted in from outside the document.
    """

    labels_BS: Tensor
    loss_mask_BS: Tensor
    tokens_DBS: Tensor | None
    labels_DBS: Tensor
    loss_mask_DBS: Tensor
    inside_DBS: Tensor


def mask_ignored_labels(batch: dict[str, Any]) -> None:
    """Turn labels of -100 into label 0 with mask 0, in place."""
    labels_BS = batch["labels"]
    ignored_BS = labels_BS == IGNORED_LABEL
    batch["labels"] = labels_BS.masked_fill(ignored_BS, 0)
    batch["loss_mask"] = batch["loss_mask"].masked_fill(ignored_BS, 0)


def add_depths(batch: dict[str, Any], depths: int, document_BS: Tensor | None) -> None:
    """Put the tensors of every depth into the batch, as [B, S, D].

    Args:
        batch: Megatron's, of whole sequences; `tokens` may be None.
        depths: D, at least 1.
        document_BS: see `shift.shift_left`.
    """
    for name in ("tokens", "labels", "loss_mask"):
        whole_BS = batch[name]
        batch[f"depth_{name}"] = None if whole_BS is None else _depth_last(shift_left(whole_BS, depths, document_BS))
    batch["depth_inside"] = _depth_last(inside_document(batch["labels"], depths, document_BS))


def depth_batch(batch: dict[str, Any]) -> DepthBatch:
    """The depths of a batch after it was cut for context parallelism; without `add_depths`, a batch of no depths."""
    labels_BS, loss_mask_BS = batch["labels"], batch["loss_mask"]
    none_DBS = labels_BS.new_empty((0, *labels_BS.shape))
    if "depth_labels" not in batch:
        return DepthBatch(labels_BS, loss_mask_BS, none_DBS, none_DBS, none_DBS.float(), none_DBS.bool())
    tokens_BSD = batch["depth_tokens"]
    return DepthBatch(
        labels_BS,
        loss_mask_BS,
        None if tokens_BSD is None else _depth_first(tokens_BSD),
        _depth_first(batch["depth_labels"]),
        _depth_first(batch["depth_loss_mask"]),
        _depth_first(batch["depth_inside"]),
    )


def _depth_last(values_DBS: Tensor) -> Tensor:
    return torch.movedim(values_DBS, 0, 2)


def _depth_first(values_BSD: Tensor) -> Tensor:
    return torch.movedim(values_BSD, 2, 0).contiguous()
