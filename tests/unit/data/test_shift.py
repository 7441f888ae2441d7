"""data/batch.py, shifts: the worked examples of mtp.md, and random documents against a loop over plain lists."""

import random

import pytest
import torch

from megatron_mtp.data.batch import (
    NO_DOCUMENT,
    documents_from_eod,
    documents_from_offsets,
    inside_document,
    shift_left,
)

PAD = 9


def test_padded_pack_starts_documents_at_the_padded_offsets() -> None:
    document = documents_from_offsets(torch.tensor([[0, 3, 6]]), torch.tensor([[0, 4, 8]]), 8)
    assert document.tolist() == [[0, 0, 0, NO_DOCUMENT, 1, 1, 1, NO_DOCUMENT]]
    tokens = torch.tensor([[1, 2, 3, PAD, 4, 5, 6, PAD]])
    assert shift_left(tokens, 1, document).tolist() == [[[2, 3, 0, 0, 5, 6, 0, 0]]]


def test_two_documents_of_three_positions_at_two_depths() -> None:
    a, b, c, d, e, f = range(1, 7)
    document = documents_from_offsets(torch.tensor([[0, 3, 6]]), None, 6)
    assert document.tolist() == [[0, 0, 0, 1, 1, 1]]
    shifted = shift_left(torch.tensor([[a, b, c, d, e, f]]), 2, document)
    assert shifted.tolist() == [[[b, c, 0, e, f, 0]], [[c, 0, 0, f, 0, 0]]]


def test_inside_is_false_where_the_value_came_from_outside() -> None:
    document = torch.tensor([[0, 0, 0, 1, 1, NO_DOCUMENT]])
    inside = inside_document(document, 2, document)
    assert inside.int().tolist() == [[[1, 1, 0, 1, 0, 0]], [[1, 0, 0, 0, 0, 0]]]


def test_without_documents_a_row_is_one_document() -> None:
    values = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert shift_left(values, 2).tolist() == [[[2, 3, 0], [5, 6, 0]], [[3, 0, 0], [6, 0, 0]]]
    assert inside_document(values, 2).int().tolist() == [[[1, 1, 0], [1, 1, 0]], [[1, 0, 0], [1, 0, 0]]]


def test_the_eod_token_is_the_last_of_its_document() -> None:
    eod = 0
    tokens = torch.tensor([[5, 6, eod, 7, eod, 8], [eod, eod, 5, 6, 7, eod]])
    document = documents_from_eod(tokens, eod)
    assert document.tolist() == [[0, 0, 0, 1, 1, 2], [0, 1, 2, 2, 2, 2]]
    assert shift_left(tokens, 1, document)[0].tolist() == [[6, 0, 0, 0, 0, 0], [0, 0, 6, 7, 0, 0]]
    assert inside_document(tokens, 1, document)[0].int().tolist() == [[1, 1, 0, 1, 0, 0], [0, 0, 1, 1, 1, 0]]


def test_a_document_of_one_token_has_nothing_to_shift() -> None:
    document = documents_from_offsets(torch.tensor([[0, 1, 2, 4]]), None, 4)
    assert shift_left(torch.tensor([[1, 2, 3, 4]]), 2, document).tolist() == [[[0, 0, 4, 0]], [[0, 0, 0, 0]]]


def test_positions_after_the_last_document_are_padding() -> None:
    document = documents_from_offsets(torch.tensor([[0, 2, 3]]), torch.tensor([[0, 2, 4]]), 6)
    assert document.tolist() == [[0, 0, 1, NO_DOCUMENT, NO_DOCUMENT, NO_DOCUMENT]]
    assert shift_left(torch.tensor([[1, 2, 3, PAD, PAD, PAD]]), 1, document).tolist() == [[[2, 0, 0, 0, 0, 0]]]


def test_rows_that_will_be_joined_share_no_document() -> None:
    """Two padded rows, [1 2 _ 3] and [4 _ 5 6], the second with its last offset repeated."""
    cu_seqlens, padded = torch.tensor([[0, 2, 3, 3], [0, 1, 3, 3]]), torch.tensor([[0, 3, 4, 4], [0, 2, 4, 4]])
    document = documents_from_offsets(cu_seqlens, padded, 4)
    assert document.tolist() == [[0, 0, NO_DOCUMENT, 1], [4, NO_DOCUMENT, 5, 5]]
    joined = shift_left(torch.tensor([[1, 2, PAD, 3, 4, PAD, 5, 6]]), 1, document.view(1, 8))
    assert joined.tolist() == [[[2, 0, 0, 0, 0, 0, 6, 0]]]


def test_padding_is_not_shifted_into_padding() -> None:
    document = torch.tensor([[0, NO_DOCUMENT, NO_DOCUMENT, NO_DOCUMENT]])
    assert not shift_left(torch.tensor([[1, PAD, PAD, PAD]]), 3, document).any()
    assert not inside_document(document, 3, document).any()


@pytest.mark.parametrize("document", [None, torch.tensor([[0, 0, 0]])])
def test_more_depths_than_positions(document: torch.Tensor | None) -> None:
    shifted = shift_left(torch.tensor([[1, 2, 3]]), 5, document)
    assert shifted.tolist() == [[[2, 3, 0]], [[3, 0, 0]], [[0, 0, 0]], [[0, 0, 0]], [[0, 0, 0]]]
    assert inside_document(torch.tensor([[1, 2, 3]]), 5, document).sum(dim=2).tolist() == [[2], [1], [0], [0], [0]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bool])
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    shifted = shift_left(torch.tensor([[1, 1, 1]]).to(dtype), 1)
    assert shifted.dtype == dtype
    assert shifted.tolist() == [[[1, 1, 0]]]


def loop_shift(documents: list[list[int]], paddings: list[int], tail: int, depth: int) -> list[int]:
    """For each document, drop the first `depth` tokens and pad with 0."""
    row: list[int] = []
    for tokens, padding in zip(documents, paddings, strict=True):
        later = tokens[depth:]
        row += later + [0] * (len(tokens) - len(later) + padding)
    return row + [0] * tail


@pytest.mark.parametrize("seed", range(30))
def test_random_packs_against_a_loop_over_documents(seed: int) -> None:
    rng = random.Random(seed)
    padded = seed % 3 > 0
    documents = [[rng.randint(1, 99) for _ in range(rng.randint(1, 7))] for _ in range(rng.randint(1, 6))]
    paddings = [rng.randint(0, 3) if padded else 0 for _ in documents]
    tail = rng.randint(0, 2) if padded else 0  # if 0 and without padding, the last document ends at the last slot
    row, ends, padded_ends = [], [0], [0]
    for tokens, padding in zip(documents, paddings, strict=True):
        row += tokens + [PAD] * padding
        ends.append(ends[-1] + len(tokens))
        padded_ends.append(len(row))
    row += [PAD] * tail
    document = documents_from_offsets(torch.tensor([ends]), torch.tensor([padded_ends]) if padded else None, len(row))

    shifted = shift_left(torch.tensor([row]), 5, document)
    inside = inside_document(torch.tensor([row]), 5, document)
    for depth in range(1, 6):
        expected = loop_shift(documents, paddings, tail, depth)
        assert shifted[depth - 1].tolist() == [expected]
        assert inside[depth - 1].tolist() == [[value != 0 for value in expected]]
