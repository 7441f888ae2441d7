"""What a form of quantized weights is: its parts and their dtypes, the shape of its weight, decoding and encoding."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.checkpoint.hf import Shape

StoredPart = tuple[Shape, torch.dtype | None]
"""Shape and dtype of a stored tensor; the dtype is None if torch lacks it."""
Tensors = Mapping[str, Tensor]
Types = tuple[torch.dtype, ...]

E4M3 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
FP8 = (E4M3, torch.float8_e5m2, E8M0)
"""Dtypes that are not a weight on their own; the last one is for scales that are powers of two."""
FLOATS: Types = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types of scales that are numbers."""
POWERS: Types = (torch.uint8, E8M0)
"""Types of scales that are powers of two: the byte b is 2 ** (b - 127), and 255 is NaN (E8M0 of OCP's MX formats)."""
BLOCK = 128
"""Rows and columns of a block, in the releases of DeepSeek and in exports."""
GROUP_16, GROUP_32 = 16, 32
"""Columns that share a scale: in NVFP4, and in MXFP4 and MXFP8."""
LARGEST_8 = 448.0
"""The largest number of E4M3."""
COMPRESSED_ARGS = {"symmetric": True, "dynamic": False, "group_size": None, "block_structure": None, "actorder": None}
"""Common settings of every compressed-tensors group in an export."""
ALL_ENGINES = "vLLM, SGLang, transformers"


class MisfitError(ValueError):
    """Parts that make no weight; the text follows the weight's name, and is empty for another form's parts."""


@dataclass(frozen=True)
class Numbers:
    """Numbers of a config that decoding needs in addition to tensors.

    Attributes:
        block: rows and columns that share a scale, of FP8 in blocks.
        bits: of packed integers, one for each group of the config; empty if the config has none.
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
        says: its `quantization_config`; for compressed-tensors, a group.
        group: divides the columns of a weight.
    """

    flag: str
    encode: Callable[[Sequence[Tensor]], list[dict[str, Tensor]]]
    says: Mapping[str, Any]
    group: int = 1

    @functools.cache  # noqa: B019 - the forms in `FORMS` live as long as the process
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
        """Return the types of every part, the numbers first."""
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
