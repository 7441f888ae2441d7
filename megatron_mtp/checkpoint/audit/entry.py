"""A tensor of either side, its largest number, and whether two are equal bit by bit."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mtp.checkpoint.families.rules import Shape


@dataclass(frozen=True)
class Entry:
    """A tensor.

    Attributes:
        shape: its shape.
        dtype: name of its type, as stored: "bfloat16".
        bytes: its size in the file.
        read: reads it whole.
    """

    shape: Shape
    dtype: str
    bytes: int
    read: Callable[[], Tensor]

    @property
    def kind(self) -> torch.dtype | None:
        """The type, if torch has it."""
        found = getattr(torch, self.dtype, None)
        return found if isinstance(found, torch.dtype) else None


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types whose numbers are looked at."""
PIECE = 2**20
"""Numbers that are looked at at a time."""


def largest(tensor: Tensor) -> float | None:
    """The largest absolute number of a tensor: NaN if there is one; None for types that are not looked at."""
    if tensor.dtype not in FLOATS or not tensor.numel():
        return None
    found = [piece.abs().max().item() for piece in tensor.flatten().split(PIECE)]
    return math.nan if any(map(math.isnan, found)) else max(found)


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, type and bits: a NaN is equal to itself, -0 is not 0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(bits(one), bits(other))


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bytes [numel * itemsize]."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
