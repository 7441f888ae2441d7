"""What one pass over a tensor records, so that an audit reads each tensor once: dtype, bounds, digests.

Each row has a digest for up to eight blocks of columns. Together they tell whether two tensors are equal; individually
they tell whether a part of one tensor is zeros or repeats another part, as when a shard is missing or was used twice.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from megatron_mtp.checkpoint.hf import Shape
from megatron_mtp.megatron.checkpoint.bits import bounds

WORDS = 2**18
"""Words that are multiplied at a time, so that their factors stay in the processor's cache."""
SPLITS = (8, 4, 2)
"""Number of parts of a dimension that are compared, like those of tensor-parallel ranks."""
LEAST = 4
"""Rows or columns of the smallest part that is compared."""
Bits = tuple[torch.dtype, Shape, int]
"""Digest: equal for bit-identical tensors; different for others, except with a probability of at most 2^-48."""
Run = tuple[int, int]
"""Rows or columns of a matrix: first, and last plus one."""


@dataclass
class Look:
    """Record of one pass over a tensor.

    A digest is the sum of 8-byte words, each multiplied by a random odd factor of its position, modulo 2^64. Unlike a
    cryptographic digest, it costs no more than reading memory, and the pieces of a tensor may have any number of rows.

    Attributes:
        dtype, shape: of the whole tensor.
        low, high: smallest and largest value; NaN if there is one. None for integers and FP8.
        is_whole: whether every value was read exactly once.
        zero_rows: runs of rows that are all zeros, for a matrix or each matrix of a stack.
        zero_columns: blocks of columns that are all zeros.
        twice: two parts with equal bits, and whether they are rows or columns; None if there are none.
    """

    dtype: torch.dtype
    shape: Shape
    low: float | None = None
    high: float | None = None
    is_whole: bool = True
    zero_rows: tuple[Run, ...] = ()
    zero_columns: tuple[Run, ...] = ()
    twice: tuple[str, Run, Run] | None = None
    _sum: int | None = field(default=None, repr=False)
    _digests: list[Tensor] = field(default_factory=list, repr=False)
    _rows: int = field(default=0, repr=False)

    @classmethod
    def of(cls, tensor: Tensor) -> "Look":
        """Scan a whole tensor."""
        look = cls(tensor.dtype, tuple(tensor.shape))
        look.see(tensor)
        return look

    def see(self, piece: Tensor) -> None:
        """Scan the next rows of the tensor."""
        piece = piece.detach()
        self.bound(*bounds(piece))
        if not self.is_whole:
            return
        digests_RB = _digests(piece, self.shape)
        self._digests.append(digests_RB)
        self._rows += len(digests_RB)
        if self._rows == math.prod(self.shape[:-1] if len(self.shape) > 1 else self.shape):
            self._finish(torch.cat(self._digests))

    def _finish(self, digests_RB: Tensor) -> None:
        """Keep only the needed digests of rows: all of them take 64 bytes a row."""
        self._digests = []
        self._sum = int(_dots(digests_RB.view(1, -1), 1)) % 2**64
        columns = self.shape[-1] if len(self.shape) > 1 else 1
        rows = next((size for size in self.shape[-2::-1] if size > 1), 1) if len(self.shape) > 1 else 1
        if min(rows, columns) < LEAST or not digests_RB.any():
            return
        digests_SRB = digests_RB.view(-1, rows, digests_RB.size(1))
        zero_RB = (digests_SRB == 0).all(dim=0)
        self.zero_rows = tuple(_runs(zero_RB.all(dim=1)))
        width = columns // digests_RB.size(1)
        if width >= LEAST and digests_RB.size(1) > 1:
            self.zero_columns = tuple((first * width, last * width) for first, last in _runs(zero_RB.all(dim=0)))
        of_rows, of_columns = digests_SRB.transpose(0, 1), digests_SRB.permute(2, 0, 1)
        found = (("rows", *pair) for pair in _twice(of_rows, 1))
        self.twice = next(found, None) or next((("columns", *pair) for pair in _twice(of_columns, width)), None)

    def bound(self, low: float | None, high: float | None) -> None:
        """Extend the bounds; NaN stays."""
        if low is not None and high is not None:
            if self.low is None or not (math.isnan(self.low) or self.low <= low):
                self.low = low
            if self.high is None or not (math.isnan(self.high) or self.high >= high):
                self.high = high

    @property
    def is_finite(self) -> bool:
        """Whether it has no NaN or infinity; always true for integers and FP8."""
        return self.low is None or self.high is None or (math.isfinite(self.low) and math.isfinite(self.high))

    @property
    def is_constant(self) -> bool:
        """Whether all values are the same."""
        return self.low is not None and self.low == self.high

    @property
    def bits(self) -> Bits | None:
        """The digest with dtype and shape; None if only slabs were read."""
        return None if self._sum is None else (self.dtype, self.shape, self._sum)


def _digests(piece: Tensor, shape: Shape) -> Tensor:
    """Return digests [R, B] of a piece's rows, in B blocks of columns; a vector has one row per number.

    Words are of 64 bits, or of fewer where a block does not have whole ones.
    """
    if not piece.numel():
        return torch.zeros(math.prod(piece.shape[:-1]) if len(shape) > 1 else 0, 1, dtype=torch.int64)
    columns = shape[-1] if len(shape) > 1 else 1
    blocks = next((count for count in SPLITS if columns % count == 0 and columns // count >= LEAST), 1)
    width = columns // blocks * piece.element_size()
    size = math.gcd(8, width)
    flat = piece.contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % size:
        flat = flat.clone()
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[size]
    words = flat.view(kind).long().view(-1, width // size)
    return _dots(words, 0).view(-1, blocks)


def _dots(words_RW: Tensor, seed: int) -> Tensor:
    """Return a digest [R] of each row of words, modulo 2^64: its product with odd factors that are drawn by a seed."""
    digests_R = torch.zeros(len(words_RW), dtype=torch.int64)
    for index, part in enumerate(words_RW.split(WORDS, dim=1)):
        digests_R += torch.mv(part, _factors(seed)[: part.size(1)]) * (2 * index + 1)
    return digests_R


def _runs(marked: Tensor) -> Iterator[Run]:
    """Return the runs of true values."""
    edges = marked.int().diff(prepend=torch.zeros(1), append=torch.zeros(1))
    yield from zip((edges > 0).nonzero()[:, 0].tolist(), (edges < 0).nonzero()[:, 0].tolist(), strict=True)


def _twice(digests: Tensor, width: int) -> Iterator[tuple[Run, Run]]:
    """Find equal parts of the first dimension that are not zeros, largest first; each entry represents `width` rows."""
    for count in sorted(SPLITS):
        size = len(digests) // count
        if len(digests) % count or size * width < LEAST:
            continue
        first: dict[int, int] = {}
        for place, total in enumerate(_dots(digests.reshape(count, -1), 1).tolist()):
            if total and first.setdefault(total, place) != place:
                one, other = (place * size * width for place in (first[total], place))
                yield (one, one + size * width), (other, other + size * width)


@cache
def _factors(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (WORDS,), generator=generator) | 1
