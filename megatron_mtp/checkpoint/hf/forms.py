"""Forms of quantized weights: one row each in `FORMS`, which the reader, the audit, the export and the docs share.

A weight X.weight is stored as several tensors, its parts. A part is called by the end of its name:

    weight, weight_scale, ...    X.weight, X.weight_scale; of stacked experts E.gate_up_proj, E.gate_up_proj_scale
    qweight, scales, SCB, ...    X.qweight, X.scales, X.SCB
    _blocks, _scales             E.gate_up_proj_blocks, E.gate_up_proj_scales

Decoding computes what the form's own library computes, bit by bit: in the type of scales of 16 bits, in float32 for
others, which gives bfloat16. Letters: O rows (outputs), I columns (inputs), G groups of columns, E experts.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.checkpoint.hf import Shape

StoredPart = tuple[Shape, torch.dtype | None]
"""Shape and type of a stored tensor; None for a type that torch lacks."""
Tensors = Mapping[str, Tensor]

E4M3 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
FP8 = (E4M3, torch.float8_e5m2, E8M0)
"""Types of which a tensor is no weight by itself; the last is that of scales that are powers of two."""
Types = tuple[torch.dtype, ...]
FLOATS: Types = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types of scales that are numbers."""
POWERS: Types = (torch.uint8, E8M0)
"""Types of scales that are powers of two: the byte b is 2 ** (b - 127), and 255 is NaN (E8M0 of OCP's MX formats)."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Numbers of 4 bits, E2M1."""
LARGEST_8, LARGEST_4 = 448.0, 6.0
"""The largest numbers of E4M3 and E2M1."""
BIAS = 127
"""What is subtracted from the exponent in a byte of E8M0."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ keeps the numbers 0 .. 7 of a word, in steps of 4 bits."""
BLOCK = 128
"""Rows and columns of a block, in the releases of DeepSeek and in exports."""
GROUP_16, GROUP_32 = 16, 32
"""Columns that share a scale: in NVFP4, in MXFP4 and MXFP8."""


class MisfitError(ValueError):
    """Parts that make no weight; the text goes on after the weight's name, and is empty for another form's parts."""


@dataclass(frozen=True)
class Numbers:
    """Numbers of a config that decoding needs beside tensors.

    Attributes:
        block: rows and columns that share a scale, of FP8 in blocks.
        bits: of packed integers, one for each group of the config; empty if it does not say.
        group: columns that share a scale, of GPTQ without `g_idx`.
        zero_plus_one: whether GPTQ's zero points are stored less 1 (format `gptq`, not `gptq_v2`).
    """

    block: tuple[int, int] = (BLOCK, BLOCK)
    bits: tuple[int, ...] = ()
    group: int | None = None
    zero_plus_one: bool = True


@dataclass(frozen=True, eq=False)
class Encoding:
    """A form as an export writes it.

    Attributes:
        flag: names the form in `--quantize`.
        encode: the parts of weights [O, I] that engines multiply at once (query, key and value; gate and up).
        says: what `quantization_config` says of it; of compressed-tensors, a group.
        group: divides the columns of a weight.
    """

    flag: str
    encode: Callable[[Sequence[Tensor]], list[dict[str, Tensor]]]
    says: Mapping[str, Any]
    group: int = 1

    @functools.cache  # noqa: B019 - the encodings of `FORMS` live as long as the program
    def parts(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shapes and types of the parts of a weight; empty for one that the form does not have."""
        if len(shape) != 2 or shape[1] % self.group:
            return {}
        (parts,) = self.encode([torch.empty(shape, device="meta")])
        return {name: (tuple(one.shape), one.dtype) for name, one in parts.items()}


@dataclass(frozen=True, eq=False)
class Form:
    """A form of quantized weights.

    Attributes:
        name: as the audit and the docs call it.
        numbers: the part that holds the numbers; it comes first in `parts`.
        types: of that part.
        scales: further parts that there must be, each with its types; of several between bars, one.
        more: parts that there may be, with their types.
        methods: values of `quant_method` (`modelopt NVFP4`: with the algorithm) that promise the form.
        scheme: type, bits and strategies of a group of compressed-tensors that promise it; None of other libraries.
        shape: the weight's shape, from the parts; it raises `MisfitError`.
        decode: makes the weight of its parts; None of a form that is only described.
        engines: who loads it, for the docs.
        encoding: how an export writes it; None if it does not.
    """

    name: str
    numbers: str
    types: Types
    scales: Mapping[str, Types]
    shape: Callable[[Mapping[str, StoredPart], Numbers], Shape | None]
    decode: Callable[[Tensors, Numbers], Tensor] | None
    more: Mapping[str, Types] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    scheme: tuple[str, int, tuple[str, ...]] | None = None
    engines: str = ""
    encoding: Encoding | None = None

    def weight_of(self, name: str) -> str | None:
        """The weight whose numbers a tensor of this name would be; None if it can be none."""
        if self.numbers == "weight":
            may_be = self.types == FP8[:2] and not name.endswith(("scale", "scale_inv", "scales"))
            return name if may_be or name.endswith(".weight") else None
        if self.numbers.startswith(("weight", "_")):
            ending = self.numbers.removeprefix("weight")
            return name.removesuffix(ending) if name.endswith(ending) else None
        return f"{name.removesuffix(self.numbers)}weight" if name.endswith(f".{self.numbers}") else None

    def find(self, weight: str, stored: Mapping[str, StoredPart]) -> dict[str, str]:
        """The names of the parts of a weight that are stored, by part."""
        return {part: name for part in self._types_of if (name := name_of(weight, part)) in stored}

    def lacks(self, parts: Mapping[str, str]) -> list[str]:
        """The parts that are missing, of those that there must be."""
        return [part for part in self.scales if not any(one in parts for one in part.split("|"))]

    def odd(self, parts: Mapping[str, str], stored: Mapping[str, StoredPart]) -> list[str]:
        """The parts whose type is not one of the form's."""
        return [part for part, name in parts.items() if stored[name][1] not in self._types_of[part]]

    def check_types(self, parts: Mapping[str, str], stored: Mapping[str, StoredPart]) -> None:
        """Raises MisfitError for a part of another type than the form has, since its numbers would be read wrongly."""
        for part in self.odd(parts, stored):
            *most, last = (in_words(one) for one in self._types_of[part])
            allowed = f"{', '.join(most)} or {last}" if most else last
            raise MisfitError(
                f"has '{parts[part]}' of type {in_words(stored[parts[part]][1])}; in the form '{self.name}' it must be "
                f"of type {allowed}"
            )

    @cached_property
    def _types_of(self) -> dict[str, Types]:
        """The types of every part, the numbers first."""
        either = {one: types for part, types in self.scales.items() for one in part.split("|")}
        return {self.numbers: self.types, **either, **self.more}


def name_of(weight: str, part: str) -> str:
    """The name of a weight's part: of `m.weight` and `scales`, `m.scales`."""
    if part.startswith(("weight", "_")):
        return weight + part.removeprefix("weight")
    return f"{weight.removesuffix('.weight')}.{part}"


def in_words(dtype: torch.dtype | None) -> str:
    """A type in a sentence."""
    if dtype is None:
        return "that is not known here"
    return str(dtype).removeprefix("torch.") + (" (E8M0)" if dtype in POWERS else "")


def by(shape: Shape) -> str:
    """A shape in a sentence: 4x6."""
    return "x".join(map(str, shape)) or "1"


# --- FP8 --------------------------------------------------------------------------------------------------------------


FP8_SCALES = ("weight_scale_inv", "weight_scale", "scale")
"""What the scale of FP8 is called: by DeepSeek-V3, by others, by DeepSeek-V4."""


def _fp8_scale(parts: Mapping[str, Any]) -> Any:
    given = [name for name in FP8_SCALES if name in parts]
    if len(given) > 1:
        raise MisfitError(f"has two scales, '{given[0]}' and '{given[1]}'; remove the wrong one")
    return parts[given[0]]


def number(scale: Tensor) -> Tensor:
    """A scale in float32: bytes are powers of two."""
    return scale.view(E8M0).float() if scale.dtype == torch.uint8 else scale.float()


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
    out = torch.empty(weight.shape, dtype=_result(scale))
    for index in range(scale.size(-2)):  # a row of blocks stays in a processor's cache
        rows = slice(index * high, (index + 1) * high)
        each = factors[..., index, None, :].repeat_interleave(wide, dim=-1)[..., :columns]
        out[..., rows, :] = _float32(weight[..., rows, :]).mul_(each)
    return out


def from_rows(parts: Tensors, numbers: Numbers) -> Tensor:
    """Multiply FP8 values [..., O, I] by the scale of each row, [..., O, 1] or [..., O], or of the tensor."""
    weight, scale = parts["weight"], _fp8_scale(parts)
    codes = weight.reshape(-1, (1, *weight.shape)[-1])
    out = torch.empty(codes.shape, dtype=_result(scale))
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
        out[rows] = _grouped(_float32(weight[rows]), number(scale[rows]))
    return out


def _float32(codes: Tensor) -> Tensor:
    """FP8 numbers in float32, by a table: torch converts a quarter as many in the same time."""
    found = torch.index_select(_values(codes.dtype), 0, codes.contiguous().view(torch.uint8).flatten().int())
    return found.view(codes.shape)


@functools.cache
def _values(dtype: torch.dtype) -> Tensor:
    """The number of every byte [256]."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def _result(scale: Tensor) -> torch.dtype:
    """The type of a weight: that of scales of 16 bits, bfloat16 of others."""
    return scale.dtype if scale.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16


# --- numbers of 4 bits with an exponent -------------------------------------------------------------------------------


def _shape_of_nibbles(group: int, parts: Mapping[str, StoredPart], numbers: Numbers) -> Shape:
    """The shape of bytes [O, I / 2] with scales [O, I / group]."""
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
    """The numbers of bytes [..., I / 2], the lower half of a byte first: [..., I]."""
    found = torch.index_select(_pairs(dtype), 0, packed.flatten().view(torch.uint8).int())
    return found.view(*packed.shape[:-1], 2 * packed.shape[-1])


@functools.cache
def _pairs(dtype: torch.dtype) -> Tensor:
    """The two numbers that each byte holds, [256, 2]."""
    return torch.tensor([(FP4[byte & 15], FP4[byte >> 4]) for byte in range(256)], dtype=dtype)


def _grouped(values: Tensor, scale: Tensor) -> Tensor:
    """Numbers [..., I] times the scale of their group [..., G]."""
    return (values.unflatten(-1, (scale.size(-1), -1)) * scale.unsqueeze(-1)).flatten(-2)


def from_nvfp4(parts: Tensors, numbers: Numbers) -> Tensor:
    """E2M1 times a scale in E4M3 for 16 numbers, divided by one for all (compressed-tensors) or times it (modelopt)."""
    packed, scale, whole = parts.values()
    each = scale.float() / whole.float() if "weight_global_scale" in parts else scale.float() * whole.float()
    return _grouped(_fp4(packed, torch.float32), each).to(_result(whole))


def from_packed_mxfp4(parts: Tensors, numbers: Numbers) -> Tensor:
    """E2M1 times a power of two for 32 numbers."""
    packed, scale = parts.values()
    return _grouped(_fp4(packed, torch.bfloat16), number(scale).bfloat16())


def _shape_of_mxfp4(parts: Mapping[str, StoredPart], numbers: Numbers) -> Shape:
    (shape, _), (scale, _) = parts["_blocks"], parts["_scales"]
    if len(shape) != 4 or scale != shape[:-1]:
        raise MisfitError(
            f"of shape {by(shape)} with scales of shape {by(scale)} is no weight in MXFP4, whose bytes have the shape "
            "experts x rows x groups x 16"
        )
    experts, rows, groups, size = shape
    return experts, groups * size * 2, rows


def from_mxfp4(parts: Tensors, numbers: Numbers) -> Tensor:
    """Bytes [E, O, G, 16] times a power of two per group [E, O, G], with rows and columns swapped: [E, I, O]."""
    blocks_EOGB, scales_EOG = parts["_blocks"], parts["_scales"]
    exponents = scales_EOG.view(torch.uint8).int().unsqueeze(-1) - BIAS
    scaled = torch.ldexp(_fp4(blocks_EOGB, torch.bfloat16), exponents)
    return scaled.flatten(-2).transpose(1, 2).contiguous()


# --- integers ---------------------------------------------------------------------------------------------------------


def unpacked(words: Tensor, bits: int, count: int, order: Sequence[int] = ()) -> Tensor:
    """Unsigned numbers of so many bits out of words of 32, along the last axis.

    Args:
        words: int32 [..., words].
        bits: of a number; where 32 is no multiple of it, numbers go over the end of a word.
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
    """Words of 32 bits that hold so many numbers."""
    return -(-count * bits // 32)


def _shape_of_packed(parts: Mapping[str, StoredPart], numbers: Numbers) -> Shape | None:
    """None: the shape is the content of `weight_shape`."""
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
    """Integers less the zero point of their group, times its scale; scale and zero point are [O, G] or single."""
    scale = scale.unsqueeze(1) if scale.dim() == 1 else scale
    zero = zero.unsqueeze(1) if zero is not None and zero.dim() == 1 else zero
    groups = scale.size(-1) if scale.dim() == 2 else 1
    if groups > 1:
        even = torch.arange(codes_OI.size(1)) // (codes_OI.size(1) // groups)
        index = even if index_I is None else index_I.long()
        scale, zero = scale[:, index], None if zero is None else zero[:, index]
    values = codes_OI.to(scale.dtype)
    values = values if zero is None else values - zero.to(scale.dtype)
    return (values * scale).to(_result(scale))


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
    return values.to(_result(scale)).T.contiguous()


def _gptq_bits(parts: Mapping[str, StoredPart], numbers: Numbers) -> tuple[int, int]:
    """Bits and columns I of GPTQ's words [I * bits / 32, O]."""
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
    return values.to(_result(scale)).T.contiguous()


def _unknown_shape(parts: Mapping[str, StoredPart], numbers: Numbers) -> Shape | None:
    shape, dtype = parts["weight"]
    return shape if dtype == torch.int8 else None


# --- written by an export ---------------------------------------------------------------------------------------------


def to_blocks(weights: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """FP8 with a scale for each block of 128 x 128, its largest number / 448, as DeepSeek-V3's release."""
    out = []
    for weight in (one.float() for one in weights):
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        scale = _scale(blocks.abs().amax((1, 3)), LARGEST_8)
        coded = (blocks / scale[:, None, :, None]).clamp(-LARGEST_8, LARGEST_8)
        whole = coded.flatten(2).flatten(0, 1)[:rows, :columns]
        out.append({"weight": whole.to(E4M3), "weight_scale_inv": scale})
    return out


def _scale(largest: Tensor, of: float) -> Tensor:
    """The scale that makes the largest number that of the form; 1 where all numbers are 0."""
    return torch.where(largest > 0, largest / of, 1.0)


def to_rows(weights: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """FP8 with a scale for each row, its largest number / 448."""
    out = []
    for weight in (one.float() for one in weights):
        scale = _scale(weight.abs().amax(1, keepdim=True), LARGEST_8)
        coded = (weight / scale).clamp(-LARGEST_8, LARGEST_8).to(E4M3)
        out.append({"weight": coded, "weight_scale": scale})
    return out


def to_nvfp4(weights: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """E2M1 with a scale in E4M3 for 16 numbers, and one in float32 for all weights, since engines take one for all."""
    largest = torch.stack([one.float().abs().max() for one in weights]).max()
    whole = (1 / _scale(largest, LARGEST_8 * LARGEST_4)).reshape(1)
    return [_in_nibbles(weight.float(), whole) for weight in weights]


def _in_nibbles(weight: Tensor, whole: Tensor) -> dict[str, Tensor]:
    """Numbers round to the nearest, and halfway ones to the even code."""
    groups = weight.unflatten(1, (-1, GROUP_16))
    least = torch.finfo(E4M3).smallest_normal / 8  # the smallest number of E4M3: a scale of 0 has no inverse
    scale = (groups.abs().amax(2) / LARGEST_4 * whole).clamp(least, LARGEST_8).to(E4M3)
    scaled = (groups / (scale.float() / whole).unsqueeze(2)).flatten(1)
    size = scaled.abs()
    steps = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
    codes = sum((size >= at if even else size > at).to(torch.uint8) for at, even in steps)
    codes = codes + 8 * (scaled < 0).to(torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": whole}


_ARGS = {"symmetric": True, "dynamic": False, "group_size": None, "block_structure": None, "actorder": None}
BLOCKS_SAY = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
}  # fmt: skip
ROWS_SAY = {
    "format": "float-quantized",
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", **_ARGS},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", **_ARGS, "dynamic": True},
    "output_activations": None,
}
NVFP4_SAYS = {
    "format": "nvfp4-pack-quantized",
    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", **_ARGS, "group_size": GROUP_16},
    "input_activations": None,  # in 16 bits: scales of 4-bit activations need calibration
    "output_activations": None,
}

# --- the table --------------------------------------------------------------------------------------------------------

ALL = "vLLM, SGLang, transformers"
_INT: Types = (torch.int32,)
_INDEX: Types = (torch.int32, torch.int64)
_BYTE: Types = (torch.uint8,)
_OF_FP8 = {"|".join(FP8_SCALES): FLOATS + POWERS}
_AWQ = {"qzeros": _INT, "scales": FLOATS}
FORMS = (
    Form(
        "FP8, blocks", "weight", FP8[:2], _OF_FP8, functools.partial(_shape_of_fp8, "block"), from_blocks,
        methods=("fp8", "modelopt FP8"), scheme=("float", 8, ("block",)), engines=ALL,
        encoding=Encoding("fp8", to_blocks, BLOCKS_SAY),
    ),
    Form(
        "FP8, rows", "weight", FP8[:2], _OF_FP8, functools.partial(_shape_of_fp8, "row"), from_rows,
        methods=("fbgemm_fp8", "modelopt FP8"), scheme=("float", 8, ("channel",)), engines=ALL,
        encoding=Encoding("fp8-channel", to_rows, ROWS_SAY),
    ),
    Form(
        "FP8, tensor", "weight", FP8[:2], _OF_FP8, functools.partial(_shape_of_fp8, "tensor"), from_rows,
        methods=("fp8", "modelopt FP8"), scheme=("float", 8, ("tensor",)), engines=ALL,
    ),
    Form(
        "MXFP8", "weight", FP8[:2], {"|".join(FP8_SCALES): POWERS}, functools.partial(_shape_of_fp8, "group"),
        from_groups, methods=("mxfp8", "modelopt MXFP8"), scheme=("float", 8, ("group",)), engines="vLLM, SGLang",
    ),
    Form(
        "NVFP4, compressed-tensors", "weight_packed", _BYTE, {"weight_scale": (E4M3,), "weight_global_scale": FLOATS},
        functools.partial(_shape_of_nibbles, GROUP_16), from_nvfp4,
        scheme=("float", 4, ("tensor_group",)), engines=ALL,
        encoding=Encoding("nvfp4", to_nvfp4, NVFP4_SAYS, GROUP_16),
    ),
    Form(
        "NVFP4, modelopt", "weight", _BYTE, {"weight_scale": (E4M3,), "weight_scale_2": FLOATS},
        functools.partial(_shape_of_nibbles, GROUP_16), from_nvfp4, methods=("modelopt NVFP4",), engines="vLLM, SGLang",
    ),
    Form(
        "MXFP4, compressed-tensors", "weight_packed", _BYTE, {"weight_scale": POWERS},
        functools.partial(_shape_of_nibbles, GROUP_32), from_packed_mxfp4,
        scheme=("float", 4, ("group",)), engines="vLLM, transformers",
    ),
    Form(
        "MXFP4, gpt-oss", "_blocks", _BYTE, {"_scales": POWERS}, _shape_of_mxfp4, from_mxfp4, methods=("mxfp4",),
        engines=ALL,
    ),
    Form(
        "integers, packed", "weight_packed", _INT, {"weight_scale": FLOATS, "weight_shape": _INDEX}, _shape_of_packed,
        from_packed, more={"weight_zero_point": (torch.int32, torch.int8), "weight_g_idx": _INDEX},
        scheme=("int", 0, ("tensor", "channel", "group")), engines=ALL,
    ),
    Form(
        "int8, compressed-tensors", "weight", (torch.int8,), {"weight_scale": FLOATS}, _shape_of_int8, from_int8,
        more={"weight_zero_point": (torch.int8, torch.int32)}, scheme=("int", 8, ("tensor", "channel", "group")),
        engines=ALL,
    ),
    Form(
        "MXFP4, DeepSeek-V4", "weight", (torch.int8, torch.uint8), {"scale": POWERS},
        functools.partial(_shape_of_nibbles, GROUP_32), from_packed_mxfp4, methods=("fp8",), engines=ALL,
    ),
    Form(
        "MXFP4, Quark", "weight", _BYTE, {"weight_scale": POWERS}, functools.partial(_shape_of_nibbles, GROUP_32), None,
        engines="vLLM, SGLang",
    ),
    Form("AWQ", "qweight", _INT, _AWQ, _shape_of_awq, from_awq, methods=("awq", "auto-round"), engines=ALL),
    Form(
        "GPTQ", "qweight", _INT, _AWQ, _shape_of_gptq, from_gptq, more={"g_idx": _INDEX},
        methods=("gptq", "auto-round"), engines=ALL,
    ),
    Form(
        "bitsandbytes, int8", "weight", (torch.int8,), {"SCB": FLOATS}, _unknown_shape, None,
        more={"weight_format": _BYTE}, methods=("bitsandbytes",), engines="vLLM, transformers",
    ),
    Form(
        "bitsandbytes, 4 bits", "weight", _BYTE, {"weight.absmax": FLOATS + _BYTE}, _unknown_shape, None,
        more=dict.fromkeys(("weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"), FLOATS),
        methods=("bitsandbytes",), engines="vLLM, transformers",
    ),
)  # fmt: skip
"""Forms of quantized weights; of several that fit, the first counts."""
WRITTEN = {form.encoding.flag: form for form in FORMS if form.encoding is not None}
"""The forms that an export writes, by their names in `--quantize`."""
