"""Values and bits of tensors of checkpoints."""

import torch
from torch import Tensor


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits: a NaN equals itself, -0 does not equal 0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    pair = [tensor.detach().contiguous().reshape(-1) for tensor in (one, other)]
    places = [number * each.element_size() for each in pair for number in (each.numel(), each.storage_offset())]
    kind = torch.uint8 if any(place % 8 for place in places) else torch.int64  # 8-byte words compare six times as fast
    return torch.equal(*(each.view(kind) for each in pair))


def bounds(tensor: Tensor) -> tuple[float, float] | tuple[None, None]:
    """Return the smallest and largest value, NaN if there is one; None for integers, FP8 and empty tensors."""
    if not tensor.is_floating_point() or tensor.element_size() == 1 or not tensor.numel():
        return None, None
    low, high = torch.aminmax(tensor.detach())
    return low.item(), high.item()
