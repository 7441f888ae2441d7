"""Quantised weights as bfloat16, where transformers gives dense ones on loading as well.

    name                      with                        format
    X.weight  FP8             X.weight_scale_inv          a scale per block (DeepSeek; arXiv:2412.19437, section 3.3)
    X.weight  FP8             X.weight_scale              a scale per tensor or row (compressed-tensors)
    X_blocks  4 bits each     X_scales                    MXFP4: a power of two per 32 numbers (gpt-oss)

Scales of activations (`X.input_scale`) say nothing of a weight, and are dropped with the format.
"""

import torch
from torch import Tensor

BLOCK_SCALE, SCALE, ACTIVATION = "_scale_inv", "_scale", "input_scale"
BLOCKS, SCALES = "_blocks", "_scales"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Numbers of 4 bits, E2M1."""
BIAS = 127
"""What is subtracted from a stored exponent."""


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
