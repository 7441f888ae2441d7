"""data/batch.py: what depth d sees and predicts at slot i, in literal numbers."""

from typing import Any

import torch

from megatron_mtp.data.batch import depth_batch, join_rows, keep_positions, mask_ignored_labels

SIX = {
    "tokens": torch.tensor([[10, 11, 12, 13, 14, 15]]),
    "labels": torch.tensor([[11, 12, 13, 14, 15, 16]]),
    "loss_mask": torch.tensor([[1.0, 1, 0, 1, 1, 1]]),
}


def test_depth_d_sees_the_token_d_later_and_predicts_the_one_after_it() -> None:
    batch: dict[str, Any] = dict(SIX)
    depths = depth_batch(batch, 2)
    assert depths.tokens_DBS is not None
    assert depths.tokens_DBS.tolist() == [[[11, 12, 13, 14, 15, 0]], [[12, 13, 14, 15, 0, 0]]]
    assert depths.labels_DBS.tolist() == [[[12, 13, 14, 15, 16, 0]], [[13, 14, 15, 16, 0, 0]]]
    assert depths.loss_mask_DBS.tolist() == [[[1, 0, 1, 1, 1, 0]], [[0, 1, 1, 1, 0, 0]]]
    assert depths.inside_DBS.int().tolist() == [[[1, 1, 1, 1, 1, 0]], [[1, 1, 1, 1, 0, 0]]]
    assert depths.labels_BS is batch["labels"]
    assert depths.loss_mask_BS is batch["loss_mask"]


def test_no_depth_crosses_a_document() -> None:
    batch: dict[str, Any] = dict(SIX)
    depths = depth_batch(batch, 2, torch.tensor([[0, 0, 0, 1, 1, 1]]))
    assert depths.tokens_DBS is not None
    assert depths.tokens_DBS.tolist() == [[[11, 12, 0, 14, 15, 0]], [[12, 0, 0, 15, 0, 0]]]
    assert depths.labels_DBS.tolist() == [[[12, 13, 0, 15, 16, 0]], [[13, 0, 0, 16, 0, 0]]]
    assert depths.loss_mask_DBS.tolist() == [[[1, 0, 0, 1, 1, 0]], [[0, 0, 0, 1, 0, 0]]]
    assert depths.inside_DBS.int().tolist() == [[[1, 1, 0, 1, 1, 0]], [[1, 0, 0, 1, 0, 0]]]


def test_a_cut_for_context_parallelism_leaves_the_same_positions_of_everything() -> None:
    batch: dict[str, Any] = {name: value.repeat(3, 1) for name, value in SIX.items()}
    batch |= {"attention_mask": torch.ones(3, 1, 6, 6).tril() == 0, "cu_seqlens": None, "max_seqlen": torch.tensor([6])}
    depths = depth_batch(batch, 2).at(torch.tensor([0, 3], device="cpu"))
    keep_positions(batch, torch.tensor([0, 3]))
    assert depths.tokens_DBS is not None
    assert depths.labels_BS.tolist() == [[11, 14]] * 3
    assert depths.tokens_DBS[:, 0].tolist() == [[11, 14], [12, 15]]
    assert depths.labels_DBS[:, 0].tolist() == [[12, 15], [13, 16]]
    assert depths.labels_DBS.is_contiguous()
    assert depths.positions_S.tolist() == [0, 3]
    assert batch["attention_mask"].shape == (3, 1, 2, 6)
    assert batch["max_seqlen"].tolist() == [6]


def test_tokens_are_counted_on_whole_sequences() -> None:
    batch: dict[str, Any] = dict(SIX)
    assert depth_batch(batch, 2).at(torch.tensor([0, 3], device="cpu")).whole_tokens.tolist() == [5, 4, 3]


def test_packed_rows_become_one_row_with_the_offsets_of_that_row() -> None:
    """Two rows of four slots: documents of 2 and 1, padded to 3 and 1; of 1 and 2, padded to 2 and 2."""
    rows = torch.tensor([[1, 2, 0, 3], [4, 0, 5, 6]])
    batch: dict[str, Any] = {
        "tokens": rows,
        "labels": None,
        "loss_mask": None,
        "position_ids": None,
        "cu_seqlens": torch.tensor([[0, 2, 3, 3, 3], [0, 1, 3, 3, 3]], dtype=torch.int32),
        "cu_seqlens_padded": torch.tensor([[0, 3, 4, 4, 4], [0, 2, 4, 4, 4]], dtype=torch.int32),
    }
    join_rows(batch)
    assert batch["tokens"].tolist() == [[1, 2, 0, 3, 4, 0, 5, 6]]
    assert batch["cu_seqlens"].tolist() == [0, 2, 3, 4, 6]
    assert batch["cu_seqlens_padded"].tolist() == [0, 3, 4, 6, 8]
    assert batch["cu_seqlens"].dtype == batch["cu_seqlens_padded"].dtype == torch.int32


def test_positions_that_depend_on_a_placeholder_are_masked() -> None:
    """Token 3 is an image placeholder: depth 2 reads it at position 1, and at position 2 continues from depth 1's
    state.
    """
    batch: dict[str, Any] = dict(SIX, tokens=torch.tensor([[10, 11, 12, -200, 14, 15]]))
    depths = depth_batch(batch, 2)
    assert depths.tokens_DBS is not None
    assert depths.tokens_DBS.tolist() == [[[11, 12, 0, 14, 15, 0]], [[12, 0, 14, 15, 0, 0]]]
    assert depths.loss_mask_DBS.tolist() == [[[1, 0, 0, 1, 1, 0]], [[0, 0, 0, 1, 0, 0]]]
    assert depths.inside_DBS.int().tolist() == [[[1, 1, 0, 1, 1, 0]], [[1, 0, 0, 1, 0, 0]]]
    assert depths.whole_tokens.tolist() == [5, 3, 1]


def test_labels_below_0_are_masked_at_every_depth() -> None:
    batch: dict[str, Any] = dict(SIX, labels=torch.tensor([[11, 12, 13, -100, 15, -1]]))
    mask_ignored_labels(batch)
    assert batch["labels"].tolist() == [[11, 12, 13, 0, 15, 0]]
    assert batch["loss_mask"].tolist() == [[1, 1, 0, 0, 1, 0]]
    assert SIX["loss_mask"].tolist() == [[1, 1, 0, 1, 1, 1]], "the tensor that was given is left alone"
    depths = depth_batch(batch, 1)
    assert depths.labels_DBS.tolist() == [[[12, 13, 0, 15, 0, 0]]]
    assert depths.loss_mask_DBS.tolist() == [[[1, 0, 0, 1, 0, 0]]]


def test_a_stage_without_tokens_still_gets_labels() -> None:
    batch: dict[str, Any] = dict(SIX, tokens=None)
    depths = depth_batch(batch, 1)
    assert depths.tokens_DBS is None
    assert depths.labels_DBS.tolist() == [[[12, 13, 14, 15, 16, 0]]]


def test_a_batch_of_no_depths() -> None:
    batch: dict[str, Any] = dict(SIX)
    depths = depth_batch(batch, 0)
    for tensor in (depths.tokens_DBS, depths.labels_DBS, depths.loss_mask_DBS, depths.inside_DBS):
        assert tensor is not None
        assert tensor.shape == (0, 1, 6)
    assert depths.labels_BS is SIX["labels"]
    assert depths.whole_tokens.tolist() == [5]
