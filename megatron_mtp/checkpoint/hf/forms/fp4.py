"""Numbers of 4 bits with an exponent: NVFP4, with scales in E4M3, and MXFP4, with powers of two."""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_mtp.checkpoint.hf import Shape, by
from megatron_mtp.checkpoint.hf.forms.form import (
    ALL_ENGINES,
    COMPRESSED_ARGS,
    E4M3,
    FLOATS,
    GROUP_16,
    GROUP_32,
    LARGEST_8,
    POWERS,
    Encoding,
    Form,
    MisfitError,
    Numbers,
    StoredPart,
    Tensors,
    Types,
)
from megatron_mtp.checkpoint.hf.forms.scales import grouped, number, result, scale_of

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Numbers of 4 bits, E2M1."""
LARGEST_4 = 6.0
"""The largest of them."""
BIAS = 127
"""Subtracted from the exponent in a byte of E8M0."""


def _shape_of_nibbles(group: int, parts: Mapping[str, StoredPart], numbers: Numbers) -> Shape:
    """Return the shape of bytes [O, I / 2] with scales [O, I / group]."""
    (shape, _), (scale, _) = list(parts.values())[:2]
    whole = (*shape[:-1], 2 * shape[-1]) if shape else ()
    if len(shape) < 2 or (*scale[:-1], scale[-1:] and scale[-1] * group) != whole:
        turned = (
            "; the scales are transposed" if len(shape) == 2 and scale[::-1] == (shape[0], whole[1] // group) else ""
        )
        says = f"has bytes of shape {by(shape)} with scales of shape {by(scale)}; there must be one for {group} numbers"
        raise MisfitError(says + turned)
    return whole


def _fp4(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers [..., I] of bytes [..., I / 2], the lower half of a byte first."""
    found = torch.index_select(_pairs(dtype), 0, packed.flatten().view(torch.uint8).int())
    return found.view(*packed.shape[:-1], 2 * packed.shape[-1])


@functools.cache
def _pairs(dtype: torch.dtype) -> Tensor:
    """Return the two numbers that each byte holds, [256, 2]."""
    return torch.tensor([(FP4[byte & 15], FP4[byte >> 4]) for byte in range(256)], dtype=dtype)


def from_nvfp4(parts: Tensors, numbers: Numbers) -> Tensor:
    """E2M1 times a scale in E4M3 for 16 numbers, divided by one for all (compressed-tensors) or times it (modelopt)."""
    packed, scale, whole = parts.values()
    each = scale.float() / whole.float() if "weight_global_scale" in parts else scale.float() * whole.float()
    return grouped(_fp4(packed, torch.float32), each).to(result(whole))


def from_packed_mxfp4(parts: Tensors, numbers: Numbers) -> Tensor:
    """E2M1 times a power of two for 32 numbers."""
    packed, scale = parts.values()
    return grouped(_fp4(packed, torch.bfloat16), number(scale).bfloat16())


def _shape_of_mxfp4(parts: Mapping[str, StoredPart], numbers: Numbers) -> Shape:
    (shape, _), (scale, _) = parts["_blocks"], parts["_scales"]
    if len(shape) != 4 or scale != shape[:-1]:
        raise MisfitError(
            f"of shape {by(shape)} with scales of shape {by(scale)} is not a weight in MXFP4, whose bytes have the "
            "shape experts x rows x groups x 16"
        )
    experts, rows, groups, size = shape
    return experts, groups * size * 2, rows


def from_mxfp4(parts: Tensors, numbers: Numbers) -> Tensor:
    """Bytes [E, O, G, 16] times a power of two per group [E, O, G], with rows and columns swapped: [E, I, O]."""
    blocks_EOGB, scales_EOG = parts["_blocks"], parts["_scales"]
    exponents = scales_EOG.view(torch.uint8).int().unsqueeze(-1) - BIAS
    scaled = torch.ldexp(_fp4(blocks_EOGB, torch.bfloat16), exponents)
    return scaled.flatten(-2).transpose(1, 2).contiguous()


def to_nvfp4(weights: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """E2M1 with a scale in E4M3 for 16 numbers, and one in float32 for all weights, since engines take one for all."""
    largest = torch.stack([one.float().abs().max() for one in weights]).max()
    whole = (1 / scale_of(largest, LARGEST_8 * LARGEST_4)).reshape(1)
    return [_in_nibbles(weight.float(), whole) for weight in weights]


def _in_nibbles(weight: Tensor, whole: Tensor) -> dict[str, Tensor]:
    """Round numbers to the nearest code, and ties to the even code."""
    groups = weight.unflatten(1, (-1, GROUP_16))
    least = torch.finfo(E4M3).smallest_normal / 8  # smallest E4M3 number: a scale of 0 has no inverse
    scale = (groups.abs().amax(2) / LARGEST_4 * whole).clamp(least, LARGEST_8).to(E4M3)
    scaled = (groups / (scale.float() / whole).unsqueeze(2)).flatten(1)
    size = scaled.abs()
    steps = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
    codes = sum((size >= at if even else size > at).to(torch.uint8) for at, even in steps)
    codes = codes + 8 * (scaled < 0).to(torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": whole}


NVFP4_SAYS = {
    "format": "nvfp4-pack-quantized",
    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", **COMPRESSED_ARGS, "group_size": GROUP_16},
    "input_activations": None,  # 16 bits: 4-bit activations would need calibrated scales
    "output_activations": None,
}
_BYTE: Types = (torch.uint8,)
NVFP4 = Form(
    "NVFP4, compressed-tensors",
    "weight_packed",
    _BYTE,
    {"weight_scale": (E4M3,), "weight_global_scale": FLOATS},
    functools.partial(_shape_of_nibbles, GROUP_16),
    from_nvfp4,
    scheme=("float", 4, ("tensor_group",)),
    engines=ALL_ENGINES,
    encoding=Encoding("nvfp4", to_nvfp4, NVFP4_SAYS, GROUP_16),
)
NVFP4_OF_MODELOPT = Form(
    "NVFP4, modelopt",
    "weight",
    _BYTE,
    {"weight_scale": (E4M3,), "weight_scale_2": FLOATS},
    functools.partial(_shape_of_nibbles, GROUP_16),
    from_nvfp4,
    methods=("modelopt NVFP4",),
    engines="vLLM, SGLang",
)
MXFP4 = Form(
    "MXFP4, compressed-tensors",
    "weight_packed",
    _BYTE,
    {"weight_scale": POWERS},
    functools.partial(_shape_of_nibbles, GROUP_32),
    from_packed_mxfp4,
    scheme=("float", 4, ("group",)),
    engines="vLLM, transformers",
)
MXFP4_OF_GPT_OSS = Form(
    "MXFP4, gpt-oss",
    "_blocks",
    _BYTE,
    {"_scales": POWERS},
    _shape_of_mxfp4,
    from_mxfp4,
    methods=("mxfp4",),
    engines=ALL_ENGINES,
)
MXFP4_OF_DEEPSEEK_V4 = Form(
    "MXFP4, DeepSeek-V4",
    "weight",
    (torch.int8, torch.uint8),
    {"scale": POWERS},
    functools.partial(_shape_of_nibbles, GROUP_32),
    from_packed_mxfp4,
    methods=("fp8",),
    engines=ALL_ENGINES,
)
MXFP4_OF_QUARK = Form(
    "MXFP4, Quark",
    "weight",
    _BYTE,
    {"weight_scale": POWERS},
    functools.partial(_shape_of_nibbles, GROUP_32),
    None,
    engines="vLLM, SGLang",
)
