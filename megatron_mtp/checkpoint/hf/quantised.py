"""Quantised weights as bfloat16, where transformers gives dense ones on loading as well.

    name                      with                        format
    X.weight  FP8             X.weight_scale_inv          a scale per block (DeepSeek; arXiv:2412.19437, section 3.3)
    X.weight  FP8             X.weight_scale              a scale per tensor, row or block (compressed-tensors)
    X_blocks  4 bits each     X_scales                    MXFP4: a power of two per 32 numbers (gpt-oss)

Scales of activations (`X.input_scale`) say nothing of a weight, and are dropped with the format. `coded_weights` finds
the weights of a folder by its names, shapes and types, and says how each is made of what is stored.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

BLOCK_SCALE, SCALE, ACTIVATION = "_scale_inv", "_scale", "input_scale"
BLOCKS, SCALES = "_blocks", "_scales"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
"""Types of which a tensor is no weight by itself; the last is that of scales that are powers of two."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Numbers of 4 bits, E2M1."""
BIAS = 127
"""What is subtracted from a stored exponent."""


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Coded:
    """A weight that a folder holds as several tensors.

    Attributes:
        parts: names of the tensors.
        shape: of the weight.
        decode: makes the weight, in bfloat16, of the tensors in the order of `parts`.
    """

    parts: tuple[str, ...]
    shape: Shape
    decode: Callable[..., Tensor]


def coded_weights(stored: Mapping[str, tuple[Shape, torch.dtype | None]], block: tuple[int, int]) -> dict[str, Coded]:
    """The weights that are stored as several tensors, by their names.

    Args:
        stored: shape and type of every tensor of a folder; None for a type that torch lacks.
        block: rows and columns that share a scale.

    Raises:
        ValueError: the tensors of a weight are of a shape that no weight has.
    """
    return dict(_coded(stored, block))


def activation_scales(names: Collection[str]) -> list[str]:
    """Those of the names that are scales of activations beside a weight."""
    return [name for name in names if name.endswith(ACTIVATION) and f"{name.removesuffix(ACTIVATION)}weight" in names]


def _coded(
    stored: Mapping[str, tuple[Shape, torch.dtype | None]], block: tuple[int, int]
) -> Iterator[tuple[str, Coded]]:
    for name, (shape, dtype) in stored.items():
        weight = name.removesuffix(BLOCKS)
        if name.endswith(BLOCKS) and f"{weight}{SCALES}" in stored:
            yield weight, Coded((name, f"{weight}{SCALES}"), mxfp4_shape(shape), from_mxfp4)
        elif f"{name}{BLOCK_SCALE}" in stored:
            yield name, Coded((name, f"{name}{BLOCK_SCALE}"), shape, partial(by_block, block=block))
        elif dtype in FP8 and f"{name}{SCALE}" in stored:
            yield name, Coded((name, f"{name}{SCALE}"), shape, partial(by_scale, block=block))


def by_block(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply FP8 values by the scales of their blocks.

    Args:
        weight: values [..., rows, columns].
        scale: one scale per block [..., rows / block[0], columns / block[1]], rounded up.
        block: rows and columns of a block.

    Returns:
        bfloat16 [..., rows, columns].

    Raises:
        ValueError: the scales do not cover the weight.
    """
    rows, columns = (-(-size // step) for size, step in zip(weight.shape[-2:], block, strict=True))
    if weight.dim() < 2 or tuple(scale.shape[-2:]) != (rows, columns):
        raise ValueError(
            f"scales of shape {tuple(scale.shape)} do not cover a weight of shape {tuple(weight.shape)} in blocks of "
            f"{block[0]}x{block[1]}; give the model in bfloat16."
        )
    wide = scale.float().repeat_interleave(block[0], dim=-2).repeat_interleave(block[1], dim=-1)
    return (weight.float() * wide[..., : weight.shape[-2], : weight.shape[-1]]).to(torch.bfloat16)


def by_row(weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply FP8 values [rows, columns] by the scale of the tensor, or of each row [rows, 1]; bfloat16.

    Raises:
        ValueError: the scales are neither.
    """
    if scale.numel() != 1 and tuple(scale.shape) != (weight.size(0), 1):
        raise ValueError(
            f"scales of shape {tuple(scale.shape)} are neither one nor one per row of a weight of shape "
            f"{tuple(weight.shape)}; give the model in bfloat16."
        )
    return (weight.float() * scale.float()).to(torch.bfloat16)


def by_scale(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply FP8 values [rows, columns] by a scale of the tensor, of each row or of each block; bfloat16.

    Raises:
        ValueError: the scales are none of these.
    """
    blocks = tuple(-(-size // step) for size, step in zip(weight.shape[-2:], block, strict=True))
    if scale.dim() == 2 and scale.numel() > 1 and scale.size(1) > 1 and tuple(scale.shape) == blocks:
        return by_block(weight, scale, block)
    return by_row(weight, scale)


def mxfp4_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Shape [E, columns, rows] of a weight whose blocks have the shape [E, rows, groups, bytes].

    Raises:
        ValueError: they have another number of dimensions.
    """
    if len(blocks) != 4:
        raise ValueError(f"MXFP4 blocks of shape {blocks} are not known here; give the model in bfloat16.")
    experts, rows, groups, size = blocks
    return experts, groups * size * 2, rows


def from_mxfp4(blocks_ERGB: Tensor, scales_ERG: Tensor) -> Tensor:
    """Numbers of 4 bits, the lower half of a byte first, times a power of two per group, with rows and columns swapped.

    Args:
        blocks_ERGB: bytes [E, rows, groups, 16].
        scales_ERG: exponents [E, rows, groups].

    Returns:
        bfloat16 [E, columns, rows].

    Raises:
        ValueError: there is not an exponent for each group.
    """
    if scales_ERG.shape != blocks_ERGB.shape[:-1]:
        raise ValueError(
            f"MXFP4 scales of shape {tuple(scales_ERG.shape)} do not fit blocks of shape {tuple(blocks_ERGB.shape)}; "
            "fetch the folder again."
        )
    both = torch.stack([blocks_ERGB & 15, blocks_ERGB >> 4], dim=-1).flatten(-2).int()
    numbers = torch.tensor(FP4, dtype=torch.bfloat16)[both]
    scaled = torch.ldexp(numbers, scales_ERG.int().unsqueeze(-1) - BIAS)
    return scaled.flatten(-2).transpose(1, 2).contiguous()
