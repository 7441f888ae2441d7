"""data/context_parallel.py: every slot is on one rank, split as Megatron splits a batch."""

import pytest
import torch

from megatron_mtp.data.batch import positions_of_ranks


def test_the_example_of_the_module() -> None:
    positions_RS = positions_of_ranks(torch.tensor([0, 4, 8]), 2)
    assert positions_RS.tolist() == [[0, 3, 4, 7], [1, 2, 5, 6]]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_rank_holds_two_mirrored_chunks_of_every_document(ranks: int) -> None:
    lengths = [2 * ranks * chunk for chunk in (1, 3, 2)]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    for rank, positions_S in enumerate(positions_of_ranks(offsets, ranks)):
        expected = []
        for start, length in zip(offsets.tolist(), lengths, strict=False):
            chunks = torch.arange(start, start + length).chunk(2 * ranks)
            expected += [*chunks[rank].tolist(), *chunks[2 * ranks - 1 - rank].tolist()]
        assert positions_S.tolist() == expected


def test_a_document_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match=r"documents of \[4, 6\] positions, .* multiple of 4"):
        positions_of_ranks(torch.tensor([0, 4, 10]), 2)
