"""Maps on examples that can be checked by hand, and that every inverse is exact."""

import pytest
import torch
from torch import Tensor, tensor

from megatron_mtp.checkpoint.families.rules import (
    Axis,
    ByKind,
    Computed,
    Concat,
    Copies,
    Map,
    MergeQKV,
    Same,
    Split,
    SwapHalves,
    Then,
    Zeros,
)


def rows(*names: int) -> Tensor:
    return tensor(names).unsqueeze(1)


def test_query_key_and_value_go_group_by_group() -> None:
    merge = MergeQKV(heads=4, groups=2, widths=(1, 1, 1))
    (merged,) = merge.forward([rows(1, 2, 3, 4), rows(51, 52), rows(61, 62)])
    assert merged.flatten().tolist() == [1, 2, 51, 61, 3, 4, 52, 62]


def test_gates_follow_the_queries_of_their_group() -> None:
    merge = MergeQKV(heads=4, groups=2, widths=(1, 1, 1), gated=True)
    (merged,) = merge.forward([rows(1, 91, 2, 92, 3, 93, 4, 94), rows(51, 52), rows(61, 62)])
    assert merged.flatten().tolist() == [1, 2, 91, 92, 51, 61, 3, 4, 93, 94, 52, 62]


def test_rows_of_groups_go_kind_by_kind() -> None:
    """Two groups of a query, a key and two values."""
    parts = ByKind(groups=2, rows=(1, 1, 2)).forward([rows(1, 51, 61, 62, 2, 52, 63, 64)])
    assert [part.flatten().tolist() for part in parts] == [[1, 2], [51, 52], [61, 62, 63, 64]]


def test_one_is_subtracted_from_a_norm_and_the_original_kept() -> None:
    weight = tensor([1.5, 0.3, 1.0]).bfloat16()
    kept, difference = Computed(original=True, minus=1).forward([weight])
    assert torch.equal(kept, weight)
    assert difference.dtype == torch.float32
    assert torch.equal(difference + 1, weight.float())
    assert Computed(original=True, minus=1).backward([kept, difference])[0] is kept


def test_one_is_added_to_a_norm_that_was_trained_in_float32() -> None:
    """bfloat16 would round 1 + 2^-9 to 1."""
    (weight,) = Computed(original=False, minus=1).backward([tensor([2.0**-9, -0.5]).bfloat16()])
    assert weight.dtype == torch.float32
    assert weight.tolist() == [1 + 2.0**-9, 0.5]


def test_halves_are_swapped() -> None:
    assert SwapHalves().forward([tensor([[1, 2, 3, 4]])])[0].tolist() == [[3, 4, 1, 2]]


def test_copies_must_be_equal() -> None:
    copies = Copies(("embedding", "its copy"))
    assert copies.forward([rows(1, 2), rows(1, 2)])[0].flatten().tolist() == [1, 2]
    with pytest.raises(ValueError, match="'its copy' is not the copy of 'embedding'"):
        copies.forward([rows(1, 2), rows(1, 3)])


def test_zeros_must_be_zero() -> None:
    assert Zeros(((2,),)).forward([torch.zeros(2)]) == []
    with pytest.raises(ValueError, match="keeps at zero"):
        Zeros(((2,),)).forward([torch.ones(2)])


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in shapes]


INVERTIBLE: list[tuple[Map, list[Tensor]]] = [
    (Same(), drawn((2, 3), (4,))),
    (Concat((2, 3)), drawn((2, 4), (3, 4))),
    (Concat((2, 3), dim=1), drawn((4, 2), (4, 3))),
    (SwapHalves(), drawn((3, 8))),
    (Axis(), drawn((3, 2))),
    (MergeQKV(6, 2, (4, 4, 4)), drawn((24, 5), (8, 5), (8, 5))),
    (MergeQKV(6, 2, (4, 4, 3)), drawn((24, 5), (8, 5), (6, 5))),
    (MergeQKV(6, 2, (4, 4, 4), gated=True), drawn((48, 5), (8, 5), (8, 5))),
    (MergeQKV(4, 4, (4, 4, 4)), drawn((16,), (16,), (16,))),
    (ByKind(2, (3, 3, 5)), drawn((22, 5))),
    (ByKind(4, (1, 1)), drawn((8,))),
    (Then((Split((24, 8, 8)), MergeQKV(6, 2, (4, 4, 4)))), drawn((40, 5))),
    (Then((Concat((3, 3)), Axis())), drawn((3, 4), (3, 4))),
]


@pytest.mark.parametrize(("move", "tensors"), INVERTIBLE, ids=lambda value: type(value).__name__)
def test_backward_undoes_forward(move: Map, tensors: list[Tensor]) -> None:
    back = move.backward(move.forward(tensors))
    assert len(back) == len(tensors)
    assert all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))
