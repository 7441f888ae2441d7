"""Scales as numbers, and what they multiply."""

import torch
from torch import Tensor

from megatron_mtp.checkpoint.hf.forms.form import E8M0


def number(scale: Tensor) -> Tensor:
    """A scale in float32: bytes are powers of two."""
    return scale.view(E8M0).float() if scale.dtype == torch.uint8 else scale.float()


def result(scale: Tensor) -> torch.dtype:
    """The type of a weight: that of scales of 16 bits, bfloat16 of others."""
    return scale.dtype if scale.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16


def grouped(values: Tensor, scale: Tensor) -> Tensor:
    """Numbers [..., I] times the scale of their group [..., G]."""
    return (values.unflatten(-1, (scale.size(-1), -1)) * scale.unsqueeze(-1)).flatten(-2)


def scale_of(largest: Tensor, of: float) -> Tensor:
    """The scale that makes the largest number that of the form; 1 where all numbers are 0."""
    return torch.where(largest > 0, largest / of, 1.0)
