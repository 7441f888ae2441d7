"""Integers times a scale: packed in words or as bytes by compressed-tensors, AWQ and GPTQ."""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from megatron_mtp.checkpoint.hf import Shape, by
from megatron_mtp.checkpoint.hf.forms.form import (
    ALL_ENGINES,
    FLOATS,
    Form,
    MisfitError,
    Numbers,
    StoredPart,
    Tensors,
    Types,
)
from megatron_mtp.checkpoint.hf.forms.scales import result

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ keeps the numbers 0 .. 7 of a word, in steps of 4 bits."""


def unpacked(words: Tensor, bits: int, count: int, order: Sequence[int] = ()) -> Tensor:
    """Unpack unsigned numbers of this many bits from 32-bit words, along the last axis.

    Args:
        words: int32 [..., words].
        bits: of a number; where 32 is not a multiple of it, numbers go over the end of a word.
        count: of numbers.
        order: place in the word of its numbers; empty if they follow each other, the lowest first.

    Returns:
        int16 [..., count].
    """
    if 32 % bits == 0:
        shifts = bits * torch.tensor(order or range(32 // bits), dtype=torch.int32)
        return ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).to(torch.int16).flatten(-2)[..., :count]
    single = ((words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1).to(torch.int16).flatten(-2)
    value = 2 ** torch.arange(bits, dtype=torch.int16)
    return (single[..., : count * bits].unflatten(-1, (count, bits)) * value).sum(-1).to(torch.int16)


def _words(count: int, bits: int) -> int:
    """Return how many 32-bit words hold this many numbers."""
    return -(-count * bits // 32)


def _shape_of_packed(parts: Mapping[str, StoredPart], numbers: Numbers) -> Shape | None:
    """Return None: the shape is the content of `weight_shape`."""
    (packed, _), (scale, _) = parts["weight_packed"], parts["weight_scale"]
    if len(packed) != 2 or len(scale) > 2 or (prod(scale) != 1 and scale[0] != packed[0]):
        raise MisfitError(
            f"has packed numbers of shape {by(packed)} with scales of shape {by(scale)}; there must be as many rows"
        )
    return None


def check_packed(shape: Shape, parts: Mapping[str, StoredPart], numbers: Numbers) -> int:
    """The bits of packed integers, given what `weight_shape` holds.

    Raises:
        MisfitError: their words or scales are not those of such a weight.
    """
    (packed, _), (scale, _) = parts["weight_packed"], parts["weight_scale"]
    for bits in (*numbers.bits, 4, 8, 2):
        if len(shape) == 2 and packed == (shape[0], _words(shape[1], bits)) and not shape[1] % (*scale, 1, 1)[1]:
            return bits
    says = f"has packed numbers of shape {by(packed)} with scales of shape {by(scale)}, which are none of a weight of "
    raise MisfitError(says + by(shape))


def from_packed(parts: Tensors, numbers: Numbers) -> Tensor:
    """Integers in words, less half of their range, less a zero point, times a scale by tensor, row or group."""
    packed, scale = parts["weight_packed"], parts["weight_scale"]
    rows, columns = shape = tuple(parts["weight_shape"].tolist())
    bits = check_packed(shape, {name: (tuple(one.shape), one.dtype) for name, one in parts.items()}, numbers)
    zero = parts.get("weight_zero_point")
    half = 2 ** (bits - 1)
    if zero is not None and zero.dtype == torch.int32:
        zero = unpacked(zero.T.contiguous(), bits, rows).T - half
    return _integers(unpacked(packed, bits, columns) - half, scale, zero, parts.get("weight_g_idx"))


def _shape_of_int8(parts: Mapping[str, StoredPart], numbers: Numbers) -> Shape:
    (shape, _), (scale, _) = parts["weight"], parts["weight_scale"]
    fits = len(shape) == 2 and len(scale) <= 2 and (prod(scale) == 1 or scale[0] == shape[0])
    if not fits or shape[1] % (*scale, 1, 1)[1]:
        raise MisfitError(f"is int8 of shape {by(shape)} with scales of shape {by(scale)}; there must be one a row")
    zero = parts.get("weight_zero_point", (scale, None))[0]
    if prod(zero) != 1 and zero != scale:
        raise MisfitError(f"is int8 with scales of shape {by(scale)} and zero points of {by(zero)}, not one for each")
    return shape


def from_int8(parts: Tensors, numbers: Numbers) -> Tensor:
    """Integers less a zero point, times a scale by tensor, row or group."""
    return _integers(parts["weight"], parts["weight_scale"], parts.get("weight_zero_point"), None)


def _integers(codes_OI: Tensor, scale: Tensor, zero: Tensor | None, index_I: Tensor | None) -> Tensor:
    """Subtract each group's zero point and multiply by its scale; scale and zero point are [O, G] or single."""
    scale = scale.unsqueeze(1) if scale.dim() == 1 else scale
    zero = zero.unsqueeze(1) if zero is not None and zero.dim() == 1 else zero
    groups = scale.size(-1) if scale.dim() == 2 else 1
    if groups > 1:
        even = torch.arange(codes_OI.size(1)) // (codes_OI.size(1) // groups)
        index = even if index_I is None else index_I.long()
        scale, zero = scale[:, index], None if zero is None else zero[:, index]
    values = codes_OI.to(scale.dtype)
    values = values if zero is None else values - zero.to(scale.dtype)
    return (values * scale).to(result(scale))


def _shape_of_awq(parts: Mapping[str, StoredPart], numbers: Numbers) -> Shape:
    (words, _), (scale, _), (zeros, _) = parts["qweight"], parts["scales"], parts["qzeros"]
    fits = len(words) == 2 and len(scale) == 2 and scale[1] == 8 * words[1] and zeros == (scale[0], words[1])
    if not fits or words[0] % scale[0]:
        raise _packed_misfit(words, scale, zeros)
    return scale[1], words[0]


def _packed_misfit(words: Shape, scale: Shape, zeros: Shape) -> MisfitError:
    return MisfitError(
        f"has 'qweight' of shape {by(words)}, 'scales' of {by(scale)} and 'qzeros' of {by(zeros)}, which is neither "
        "AWQ (GEMM, 4 bits) nor GPTQ"
    )


def from_awq(parts: Tensors, numbers: Numbers) -> Tensor:
    """Words [I, O / 8] in AWQ's order, less the zero point of a group [G, O / 8], times its scale [G, O]: [O, I]."""
    scale = parts["scales"]
    codes = unpacked(parts["qweight"], 4, scale.size(1), AWQ_ORDER)
    zeros = unpacked(parts["qzeros"], 4, scale.size(1), AWQ_ORDER)
    size = codes.size(0) // scale.size(0)
    values = (codes - zeros.repeat_interleave(size, 0)) * scale.repeat_interleave(size, 0)
    return values.to(result(scale)).T.contiguous()


def _gptq_bits(parts: Mapping[str, StoredPart], numbers: Numbers) -> tuple[int, int]:
    """Return bits and columns I of GPTQ's words [I * bits / 32, O]."""
    (words, _), (scale, _), (zeros, _) = parts["qweight"], parts["scales"], parts["qzeros"]
    if len(words) == 2 and len(scale) == 2 and len(zeros) == 2 and words[1] == scale[1] and zeros[0] == scale[0]:
        for bits in (*numbers.bits, 4, 8, 2, 3):
            columns = parts["g_idx"][0][0] if "g_idx" in parts else words[0] * 32 // bits
            if zeros[1] == _words(scale[1], bits) and words[0] == _words(columns, bits):
                return bits, columns
    raise _packed_misfit(words, scale, zeros)


def _shape_of_gptq(parts: Mapping[str, StoredPart], numbers: Numbers) -> Shape:
    return parts["scales"][0][1], _gptq_bits(parts, numbers)[1]


def from_gptq(parts: Tensors, numbers: Numbers) -> Tensor:
    """Words [I * bits / 32, O], less the zero point of their group [G, O * bits / 32], times its scale [G, O]: [O, I].

    `g_idx` [I] names the group of a column. Format `gptq` stores zero points less 1, subtracted from whole words.
    """
    bits, columns = _gptq_bits({name: (tuple(one.shape), one.dtype) for name, one in parts.items()}, numbers)
    scale, zeros = parts["scales"], parts["qzeros"]
    rows = scale.size(1)
    if numbers.zero_plus_one and 32 % bits == 0:
        zeros = zeros + sum(1 << shift for shift in range(0, 32, bits))
    zeros = unpacked(zeros, bits, rows)
    if numbers.zero_plus_one and 32 % bits:
        zeros = (zeros + 1) & (2**bits - 1)
    group = numbers.group if numbers.group and numbers.group > 0 else -(-columns // scale.size(0))
    index = parts["g_idx"].long() if "g_idx" in parts else torch.arange(columns) // group
    codes = unpacked(parts["qweight"].T.contiguous(), bits, columns).T
    values = scale[index] * (codes - zeros[index])
    return values.to(result(scale)).T.contiguous()


_INT: Types = (torch.int32,)
_INDEX: Types = (torch.int32, torch.int64)
_PARTS = {"qzeros": _INT, "scales": FLOATS}
PACKED = Form(
    "integers, packed",
    "weight_packed",
    _INT,
    {"weight_scale": FLOATS, "weight_shape": _INDEX},
    _shape_of_packed,
    from_packed,
    more={"weight_zero_point": (torch.int32, torch.int8), "weight_g_idx": _INDEX},
    scheme=("int", 0, ("tensor", "channel", "group")),
    engines=ALL_ENGINES,
)
INT8 = Form(
    "int8, compressed-tensors",
    "weight",
    (torch.int8,),
    {"weight_scale": FLOATS},
    _shape_of_int8,
    from_int8,
    more={"weight_zero_point": (torch.int8, torch.int32)},
    scheme=("int", 8, ("tensor", "channel", "group")),
    engines=ALL_ENGINES,
)
AWQ = Form(
    "AWQ",
    "qweight",
    _INT,
    _PARTS,
    _shape_of_awq,
    from_awq,
    methods=("awq", "auto-round"),
    engines=ALL_ENGINES,
)
GPTQ = Form(
    "GPTQ",
    "qweight",
    _INT,
    _PARTS,
    _shape_of_gptq,
    from_gptq,
    more={"g_idx": _INDEX},
    methods=("gptq", "auto-round"),
    engines=ALL_ENGINES,
)
