"""A tensor of either side, and whether two are equal bit by bit: compared in pieces, so neither is in memory.

Pieces are small enough for the processor's cache: a pair is compared almost as fast as it is read.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_mtp.checkpoint.families.rules import Shape

PIECE = 2**20
"""Bytes that are read at a time; a multiple of every type's size."""


@dataclass(frozen=True)
class Place:
    """Bytes of a file."""

    file: Path
    start: int
    length: int

    def first(self, count: int) -> bytes:
        """The first bytes."""
        with open(self.file, "rb", buffering=0) as stream:
            stream.seek(self.start)
            return stream.read(min(count, self.length))

    def pieces(self) -> Iterator[bytearray]:
        """The bytes, some at a time, in a buffer that the next piece overwrites; fewer if the file ends before."""
        buffer = bytearray(min(self.length, PIECE))
        with open(self.file, "rb", buffering=0) as stream:
            stream.seek(self.start)
            left = self.length
            while left >= len(buffer) > 0:
                count = stream.readinto(buffer) or 0
                yield buffer if count == len(buffer) else buffer[:count]
                left = left - count if count == len(buffer) else 0
            if left:
                yield bytearray(stream.read(left))


@dataclass(frozen=True)
class Entry:
    """A tensor.

    Attributes:
        shape: its shape.
        dtype: name of its type, as stored: "bfloat16".
        bytes: its size in the file.
        read: reads it whole.
        place: where its bytes are, if they are there as they are in memory.
    """

    shape: Shape
    dtype: str
    bytes: int
    read: Callable[[], Tensor]
    place: Place | None = None

    @property
    def kind(self) -> torch.dtype | None:
        """The type, if torch has it."""
        found = getattr(torch, self.dtype, None)
        return found if isinstance(found, torch.dtype) else None


INFINITE = {
    torch.float64: (np.int64, np.uint64, 0x7FF0_0000_0000_0000),
    torch.float32: (np.int32, np.uint32, 0x7F80_0000),
    torch.float16: (np.int16, np.uint16, 0x7C00),
    torch.bfloat16: (np.int16, np.uint16, 0x7F80),
}
"""Types whose numbers are looked at: integers of their size, and the bits of infinity."""


@dataclass
class Range:
    """The largest bits of a tensor's positive and negative numbers: those of NaN and infinity are the largest of all.

    Read as integers with a sign, positive numbers are the largest; read without one, negative numbers are.

    Attributes:
        kind: the tensor's type.
        positive, negative: the largest bits so, without the sign.
    """

    kind: torch.dtype
    positive: int = 0
    negative: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> "Range":
        """The range of a tensor; of one whose type is not looked at, that of 0."""
        found = cls(tensor.dtype)
        if tensor.dtype in INFINITE:
            for part in bits(tensor).split(PIECE):
                found.add(part.numpy())
        return found

    def add(self, piece: bytearray | np.ndarray[Any, Any]) -> None:
        """Widen the range by the numbers of these bytes."""
        if self.kind in INFINITE and len(piece) >= self.kind.itemsize and len(piece) % self.kind.itemsize == 0:
            signed, unsigned, _ = INFINITE[self.kind]
            sign = 1 << (8 * self.kind.itemsize - 1)
            self.positive = max(self.positive, int(np.frombuffer(piece, signed).max()))
            self.negative = max(self.negative, int(np.frombuffer(piece, unsigned).max()) - sign)

    @property
    def finite(self) -> bool:
        """Whether all numbers were finite."""
        return self.kind not in INFINITE or max(self.positive, self.negative) < INFINITE[self.kind][2]

    @property
    def zero(self) -> bool:
        """Whether all numbers were 0."""
        return self.kind in INFINITE and self.positive == self.negative == 0


def range_of(entry: Entry) -> Range | None:
    """The range of a tensor's numbers; None for types that are not looked at."""
    if entry.kind not in INFINITE:
        return None
    if entry.place is None:
        return Range.of(entry.read())
    found = Range(entry.kind)
    for piece in entry.place.pieces():
        found.add(piece)
    return found


def same_bits(one: Entry, other: Entry, found: Range | None = None) -> bool:
    """Whether two tensors of one shape and type are equal bit by bit.

    Args:
        one, other: the tensors.
        found: widened by the numbers of `one`; complete if the tensors are equal.
    """
    if one.place is None or other.place is None or one.place.length != other.place.length:
        return equal_bits(one.read(), other.read())
    for mine, theirs in zip(one.place.pieces(), other.place.pieces(), strict=False):
        if mine != theirs:
            return False
        if found is not None:
            found.add(mine)
    return True


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, type and bits: a NaN is equal to itself, -0 is not 0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(bits(one), bits(other))


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bytes [numel * itemsize]."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
