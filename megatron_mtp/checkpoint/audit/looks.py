"""What one pass over a tensor's numbers notes, so that an audit reads each tensor once: type, bounds, a digest."""

import math
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from megatron_mtp.checkpoint.families.rules import Shape
from megatron_mtp.checkpoint.mcore.reader import bounds

WORDS = 2**18
"""Words that are multiplied at a time: their factors stay in a processor's cache."""
Bits = tuple[torch.dtype, Shape, int]
"""Equal for tensors that are equal bit by bit, and different for others, but for one chance in 2^48 or fewer."""


@dataclass
class Look:
    """What was seen of a tensor.

    The digest is the sum of all 8-byte words, each times a random odd factor of its place, modulo 2^64. Unlike a
    cryptographic digest it costs no more than reading memory, and the pieces of a tensor may have any size.

    Attributes:
        dtype, shape: of the whole tensor.
        low, high: the smallest and the largest number; NaN if there is one. None of integers and FP8.
        is_whole: whether every number was seen once.
    """

    dtype: torch.dtype
    shape: Shape
    low: float | None = None
    high: float | None = None
    is_whole: bool = True
    _sum: int = field(default=0, repr=False)
    _place: int = field(default=0, repr=False)

    @classmethod
    def of(cls, tensor: Tensor) -> "Look":
        """Look at a whole tensor."""
        look = cls(tensor.dtype, tuple(tensor.shape))
        look.see(tensor)
        return look

    def see(self, piece: Tensor) -> None:
        """Look at the next rows of the tensor."""
        piece = piece.detach()
        self.bound(*bounds(piece))
        if not self.is_whole:
            return
        for words in _words(piece, self.shape).split(WORDS):
            at = self._place % WORDS
            for part in (words[: WORDS - at], words[WORDS - at :]):  # a piece may begin inside of a block
                start = self._place % WORDS
                factors = _factors()[start : start + part.numel()]
                self._sum += int(torch.dot(part, factors)) * (2 * (self._place // WORDS) + 1)
                self._place += part.numel()

    def bound(self, low: float | None, high: float | None) -> None:
        """Extend the bounds; NaN stays."""
        if low is not None and high is not None:
            if self.low is None or not (math.isnan(self.low) or self.low <= low):
                self.low = low
            if self.high is None or not (math.isnan(self.high) or self.high >= high):
                self.high = high

    @property
    def is_finite(self) -> bool:
        """True without NaN and infinities, and of integers and FP8."""
        return self.low is None or self.high is None or (math.isfinite(self.low) and math.isfinite(self.high))

    @property
    def is_constant(self) -> bool:
        """True if all numbers are the same."""
        return self.low is not None and self.low == self.high

    @property
    def bits(self) -> Bits | None:
        """The digest with type and shape; None if only slabs were read."""
        return (self.dtype, self.shape, self._sum % 2**64) if self.is_whole else None


def _words(piece: Tensor, shape: Shape) -> Tensor:
    """A piece as words of 64 bits, or as smaller ones where a row does not have whole ones."""
    size = math.gcd(8, math.prod(shape[1:]) * piece.element_size()) if piece.numel() else 1
    flat = piece.contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % size:
        flat = flat.clone()
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[size]
    return flat.view(kind).long()


@cache
def _factors() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (WORDS,), generator=generator) | 1
