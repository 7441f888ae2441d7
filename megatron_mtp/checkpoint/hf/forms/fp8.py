"""FP8 with a scale for a block, a row or a tensor, and MXFP8 with one for a group of a row."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.checkpoint.hf import Shape, by
from megatron_mtp.checkpoint.hf.forms.form import (
    ALL_ENGINES,
    BLOCK,
    COMPRESSED_ARGS,
    E4M3,
    FLOATS,
    FP8,
    GROUP_32,
    LARGEST_8,
    POWERS,
    Encoding,
    Form,
    MisfitError,
    Numbers,
    StoredPart,
    Tensors,
)
from megatron_mtp.checkpoint.hf.forms.scales import grouped, number, result, scale_of

FP8_SCALES = ("weight_scale_inv", "weight_scale", "scale")
"""Names of FP8 scales: DeepSeek-V3's, others', DeepSeek-V4's."""


def _fp8_scale(parts: Mapping[str, Any]) -> Any:
    given = [name for name in FP8_SCALES if name in parts]
    if len(given) > 1:
        raise MisfitError(f"has two scales, '{given[0]}' and '{given[1]}'; remove the wrong one")
    return parts[given[0]]


def _blocks_of(shape: Shape, block: tuple[int, int]) -> Shape:
    return (*shape[:-2], *(-(-size // step) for size, step in zip(shape[-2:], block, strict=False)))


def _shape_of_fp8(by_what: str, parts: Mapping[str, StoredPart], numbers: Numbers) -> Shape:
    shape, (scale, kind) = parts["weight"][0], _fp8_scale(parts)
    fits = {
        "block": len(shape) > 1 and scale == _blocks_of(shape, numbers.block),
        "row": len(shape) > 1 and scale in ((*shape[:-1], 1), shape[:-1]),
        "tensor": all(size == 1 for size in scale) and not ("weight_scale_inv" in parts and len(scale) > 1),
        "group": len(shape) > 1 and shape[-1] % GROUP_32 == 0 and scale == (*shape[:-1], shape[-1] // GROUP_32),
    }
    if fits[by_what]:
        return shape
    turned = scale in (_blocks_of(shape, numbers.block)[::-1], (1, *shape[:1])) and len(scale) == 2
    groups = f", nor one for {GROUP_32} numbers of a row (MXFP8)" if kind in POWERS else ""
    raise MisfitError(
        f"is FP8 of shape {by(shape)} with scales of shape {by(scale)}, which are neither blocks of "
        f"{by(numbers.block)} nor one or one a row{groups}{'; the scales are transposed' if turned else ''}"
    )


def from_blocks(parts: Tensors, numbers: Numbers) -> Tensor:
    """Multiply FP8 values [..., O, I] by the scales of their blocks [..., O / block, I / block], rounded up."""
    weight, scale = parts["weight"], _fp8_scale(parts)
    (high, wide), columns, factors = numbers.block, weight.size(-1), number(scale)
    out = torch.empty(weight.shape, dtype=result(scale))
    for index in range(scale.size(-2)):  # one row of blocks at a time fits the CPU cache
        rows = slice(index * high, (index + 1) * high)
        each = factors[..., index, None, :].repeat_interleave(wide, dim=-1)[..., :columns]
        out[..., rows, :] = _float32(weight[..., rows, :]).mul_(each)
    return out


def from_rows(parts: Tensors, numbers: Numbers) -> Tensor:
    """Multiply FP8 values [..., O, I] by the scale of each row, [..., O, 1] or [..., O], or of the tensor."""
    weight, scale = parts["weight"], _fp8_scale(parts)
    codes = weight.reshape(-1, (1, *weight.shape)[-1])
    out = torch.empty(codes.shape, dtype=result(scale))
    each = number(scale).reshape(-1, 1).expand(codes.size(0), 1)
    for rows in (slice(first, first + BLOCK) for first in range(0, codes.size(0), BLOCK)):
        out[rows] = _float32(codes[rows]).mul_(each[rows])
    return out.view(weight.shape)


def from_groups(parts: Tensors, numbers: Numbers) -> Tensor:
    """Multiply FP8 values [..., O, I] by the power of two of a group of columns [..., O, G]."""
    weight, scale = parts["weight"], _fp8_scale(parts)
    out = torch.empty(weight.shape, dtype=torch.bfloat16)
    for first in range(0, weight.size(-2), BLOCK):
        rows = (..., slice(first, first + BLOCK), slice(None))
        out[rows] = grouped(_float32(weight[rows]), number(scale[rows]))
    return out


def _float32(codes: Tensor) -> Tensor:
    """Convert FP8 numbers to float32 with a table: torch converts a quarter as many in the same time."""
    found = torch.index_select(_values(codes.dtype), 0, codes.contiguous().view(torch.uint8).flatten().int())
    return found.view(codes.shape)


@functools.cache
def _values(dtype: torch.dtype) -> Tensor:
    """Return the number of every byte [256]."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def to_blocks(weights: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """FP8 with a scale for each block of 128 x 128, its largest number / 448, as DeepSeek-V3's release."""
    out = []
    for weight in (one.float() for one in weights):
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        scale = scale_of(blocks.abs().amax((1, 3)), LARGEST_8)
        coded = (blocks / scale[:, None, :, None]).clamp(-LARGEST_8, LARGEST_8)
        whole = coded.flatten(2).flatten(0, 1)[:rows, :columns]
        out.append({"weight": whole.to(E4M3), "weight_scale_inv": scale})
    return out


def to_rows(weights: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """FP8 with a scale for each row, its largest number / 448."""
    out = []
    for weight in (one.float() for one in weights):
        scale = scale_of(weight.abs().amax(1, keepdim=True), LARGEST_8)
        coded = (weight / scale).clamp(-LARGEST_8, LARGEST_8).to(E4M3)
        out.append({"weight": coded, "weight_scale": scale})
    return out


BLOCKS_SAY = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
}  # fmt: skip
ROWS_SAY = {
    "format": "float-quantized",
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", **COMPRESSED_ARGS},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", **COMPRESSED_ARGS, "dynamic": True},
    "output_activations": None,
}
_SCALES = {"|".join(FP8_SCALES): FLOATS + POWERS}
BLOCKS = Form(
    "FP8, blocks",
    "weight",
    FP8[:2],
    _SCALES,
    functools.partial(_shape_of_fp8, "block"),
    from_blocks,
    methods=("fp8", "modelopt FP8"),
    scheme=("float", 8, ("block",)),
    engines=ALL_ENGINES,
    encoding=Encoding("fp8", to_blocks, BLOCKS_SAY),
)
ROWS = Form(
    "FP8, rows",
    "weight",
    FP8[:2],
    _SCALES,
    functools.partial(_shape_of_fp8, "row"),
    from_rows,
    methods=("fbgemm_fp8", "modelopt FP8"),
    scheme=("float", 8, ("channel",)),
    engines=ALL_ENGINES,
    encoding=Encoding("fp8-channel", to_rows, ROWS_SAY),
)
TENSOR = Form(
    "FP8, tensor",
    "weight",
    FP8[:2],
    _SCALES,
    functools.partial(_shape_of_fp8, "tensor"),
    from_rows,
    methods=("fp8", "modelopt FP8"),
    scheme=("float", 8, ("tensor",)),
    engines=ALL_ENGINES,
)
MXFP8 = Form(
    "MXFP8",
    "weight",
    FP8[:2],
    {"|".join(FP8_SCALES): POWERS},
    functools.partial(_shape_of_fp8, "group"),
    from_groups,
    methods=("mxfp8", "modelopt MXFP8"),
    scheme=("float", 8, ("group",)),
    engines="vLLM, SGLang",
)
