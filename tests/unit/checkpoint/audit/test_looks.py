"""audit/looks.py: what one pass over a tensor records, independent of the pieces it is read in."""

import pytest
import torch
from torch import Tensor

from megatron_mtp.checkpoint.audit.looks import Look, Run

TYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random nonzero numbers."""
    drawn = torch.randint(1, 100, shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(dtype)


def in_pieces(tensor: Tensor, rows: int) -> Look:
    look = Look(tensor.dtype, tuple(tensor.shape))
    for piece in tensor.split(rows):
        look.see(piece)
    return look


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(24, 40), (24, 7), (6, 10, 9), (31,), (5, 1, 4)])
def test_digests_do_not_depend_on_the_piece_size(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = numbers(*shape, dtype=dtype)
    assert len({in_pieces(tensor, rows).bits for rows in (1, 2, 5, len(tensor))}) == 1
    for place in range(0, tensor.numel(), 7):
        other = tensor.clone().flatten()
        other[place] = 101
        assert Look.of(other.view(shape)).bits != Look.of(tensor).bits


@pytest.mark.parametrize("shape", [(8, 8), (16, 16)])
def test_a_transposed_or_permuted_matrix_has_another_digest(shape: tuple[int, int]) -> None:
    """In float64 a word is one number."""
    tensor = numbers(*shape, dtype=torch.float64)
    others = [tensor.T.contiguous(), tensor.flip(0), tensor.flip(1), tensor.roll(shape[1] // 2, 1)]
    assert len({Look.of(one).bits for one in (tensor, *others)}) == 5


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [
        ((16, 32), (8, 16), (0, 0)),
        ((16, 32), (0, 0), (16, 32)),
        ((3, 16, 32), (4, 8), (8, 12)),
        ((64, 1, 4), (0, 8), (0, 0)),
    ],
)
def test_zero_rows_and_column_blocks_are_found(
    shape: tuple[int, ...], rows: Run, columns: Run, dtype: torch.dtype
) -> None:
    """For a stack, the zeros of every matrix."""
    tensor = numbers(*shape, dtype=torch.float32)
    of_rows = tensor if shape[-2] == 1 else tensor.movedim(-2, 0)
    of_rows[slice(*rows)] = 0
    tensor.movedim(-1, 0)[slice(*columns)] = 0
    for look in (Look.of(tensor.to(dtype)), in_pieces(tensor.to(dtype), 1)):
        assert look.zero_rows == ((rows,) if rows[1] else ())
        assert look.zero_columns == ((columns,) if columns[1] else ())
        assert look.twice is None


@pytest.mark.parametrize(
    ("parts", "dim", "found"),
    [
        ([0, 0], 0, ("rows", (0, 8), (8, 16))),
        ([0, 0], 1, ("columns", (0, 16), (16, 32))),
        ([0, 1, 1, 2], 0, ("rows", (4, 8), (8, 12))),
        ([0, 1, 2, 0], 1, ("columns", (0, 8), (24, 32))),
        ([0, 1, 2, 3, 4, 5, 6, 2], 1, ("columns", (8, 12), (28, 32))),
        ([0, 1, 2, 3], 0, None),
        ([0, 1, 2, 3, 4, 5, 6, 6], 0, None),
    ],
)
def test_parts_of_equal_bits_are_found_in_halves_quarters_and_eighths(
    parts: list[int], dim: int, found: tuple[str, Run, Run] | None
) -> None:
    """Eighths of sixteen rows are too small to detect."""
    blocks = numbers(16, 32).chunk(len(parts), dim)
    tensor = torch.cat([blocks[part] for part in parts], dim)
    assert Look.of(tensor).twice == in_pieces(tensor, 3).twice == found


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), ()])
def test_empty_and_single_element_tensors_have_a_digest(shape: tuple[int, ...]) -> None:
    assert Look.of(torch.ones(shape)).bits is not None
    assert Look.of(torch.zeros(8, 8)).zero_rows == ()
