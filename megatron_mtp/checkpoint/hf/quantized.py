"""Quantized folders: which tensors form a weight (forms/), the settings in config and side files, and module lists.

Names, shapes and dtypes alone determine the form: a scale of a weight that is not quantized is a fault and is never
applied. Scales of activations (`X.input_scale`, `k_proj.k_scale`) do not concern weights and are dropped.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.checkpoint.hf import Shape
from megatron_mtp.checkpoint.hf.config import CONFIG, read_json
from megatron_mtp.checkpoint.hf.forms.form import E8M0, FP8, Form, MisfitError, Numbers, StoredPart, Tensors, name_of
from megatron_mtp.checkpoint.hf.forms.integers import check_packed
from megatron_mtp.checkpoint.hf.forms.table import FORMS

ACTIVATIONS = re.compile(r"\.(((in|out)put|activation)_(scale|zero_point|global_scale)|[kvq]_(scale|zero_point))$")
"""Suffixes of the scales of activations and of an attention's cache."""
KEYS = ("quantization_config", "compression_config")
"""Keys of a config that describe its quantization, at the top or in `text_config`."""
MODELOPT = "modelopt"
SIDE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": MODELOPT}
"""Files that describe older quantized releases, and their methods."""
LISTS = "ignore modules_to_not_convert exclude_modules ignored_layers llm_int8_skip_modules".split()
"""Keys under which methods list unquantized modules."""
SELECTIVE = "dynamic modules_in_block_to_quantize block_name_to_quantize extra_config quantized_layers".split()
"""Keys that select modules in ways that are not supported here."""
COMPRESSED = "compressed-tensors"
PLAIN = re.compile(r"[\w.-]+")
"""Matches an entry of a list that is a name rather than a pattern."""
StoredParts = Mapping[str, StoredPart]
"""Shape and type of every tensor of a folder, by name."""


@dataclass(frozen=True)
class Quantized:
    """A weight that a folder holds as several tensors.

    Attributes:
        forms: the forms that it fits; it is decoded by the first. With a fault, the nearest form.
        parts: names of the tensors, by part; the numbers come first.
        shape: of the weight; None if the form does not determine it.
        dtype: of the weight that `decode` makes.
        numbers: what decoding needs in addition to tensors.
        fault: why the tensors make no weight, a sentence that begins with a name; empty if they do.
    """

    forms: tuple[Form, ...]
    parts: dict[str, str]
    shape: Shape | None
    dtype: torch.dtype
    numbers: Numbers
    fault: str = ""

    @property
    def form(self) -> Form:
        """The form of the weight: the first that fits."""
        return self.forms[0]

    @property
    def is_read(self) -> bool:
        """True if `decode` makes a weight of its tensors."""
        return not self.fault and self.form.decode is not None

    def decode(self, tensors: Tensors) -> Tensor:
        """The weight of its tensors, by part; raises ValueError where they have a fault, or the form is not read."""
        if self.fault:
            raise MisfitError(self.fault)
        if self.form.decode is None:
            raise ValueError(f"weights in the form '{self.form.name}' are not read")
        return self.form.decode(tensors, self.numbers)


def quantized_weights(
    stored: StoredParts, numbers: Numbers, read: Callable[[str], Tensor] | None = None
) -> dict[str, Quantized]:
    """The weights that are stored as several tensors, by name, those that do not fit each other with their fault.

    Args:
        stored: shape and type of every tensor.
        numbers: the config's settings for quantized numbers.
        read: reads a tensor by name: the shape of packed integers is stored in one.
    """
    weights: dict[str, Quantized] = {}
    for name, (shape, dtype) in stored.items():
        forms = {form: weight for form in FORMS if dtype in form.types and (weight := form.weight_of(name))}
        # an integer vector without a scale of any form is not a weight
        lone = dtype not in FP8 and len(shape) < 2
        if forms and not (lone and all(len(form.find(weight, stored)) == 1 for form, weight in forms.items())):
            weight, found = _fitted(name, forms, stored, numbers, read)
            weights[weight] = found
        elif scale := _left_over(name, dtype, stored):
            says = (
                f"'{name}' is {str(dtype).removeprefix('torch.')}, but '{scale}' with it is the scale of a quantized "
                "weight; remove the scale if the weight was replaced, or restore the quantized weight"
            )
            weights[name] = Quantized((), {"weight": name}, shape, dtype or torch.bfloat16, numbers, says)
    return weights


def _left_over(name: str, dtype: torch.dtype | None, stored: StoredParts) -> str | None:
    """Return a leftover scale of an unquantized weight, which some loaders would multiply."""
    if dtype is None or not dtype.is_floating_point or dtype in FP8:
        return None
    found = [f"{name}{end}" for end in ("_scale_inv", "_scale") if f"{name}{end}" in stored]
    own = name_of(name, "scale")  # other modules have a scale of this name too, but not of this type
    return next((one for one in [*found, own] if one in found or stored.get(own, ((), None))[1] == E8M0), None)


def _fitted(
    name: str, forms: Mapping[Form, str], stored: StoredParts, numbers: Numbers, read: Callable[[str], Tensor] | None
) -> tuple[str, Quantized]:
    """Return a weight in the forms that fit its tensors, or with the fault of the nearest form.

    The nearest form is the one with most parts there, then with most of its types, then without a missing part.
    """
    fitting: dict[Form, Shape | None] = {}
    wrong: list[tuple[tuple[int, int, bool], Form, str]] = []
    for form, weight in forms.items():
        parts = form.find(weight, stored)
        try:
            fitting[form] = _shape_in(form, weight, stored, numbers, read)
        except MisfitError as reason:
            near = len(parts), len(parts) - len(form.odd(parts, stored)), not form.lacks(parts)
            wrong.append((near, form, str(reason)))
    if not fitting:
        _, form, says = max(wrong, key=lambda one: one[0])
        parts = form.find(forms[form], stored)
        shape = stored[name][0] if stored[name][1] in FP8 else None
        return forms[form], Quantized((form,), parts, shape, torch.bfloat16, numbers, f"'{name}' {says}")
    form = next(iter(fitting))
    parts = form.find(forms[form], stored)
    halves = (kind for one in parts.values() if (kind := stored[one][1]) in (torch.float16, torch.bfloat16))
    made = next(halves, None) or torch.bfloat16
    return forms[form], Quantized(tuple(fitting), parts, fitting[form], made, numbers)


def _shape_in(
    form: Form, weight: str, stored: StoredParts, numbers: Numbers, read: Callable[[str], Tensor] | None
) -> Shape | None:
    """Return the shape of a weight in a form. Raise MisfitError if its tensors do not have this form."""
    parts = form.find(weight, stored)
    if lost := form.lacks(parts):
        lacks = " and ".join(_in_words(weight, part) for part in lost)
        raise MisfitError(f"is {form.name.split(',')[0]} without {lacks}")
    form.check_types(parts, stored)
    if weight in stored and weight not in parts.values():
        raise MisfitError(f"is stored next to a whole '{weight}' too; remove the ones that do not belong")
    given = {part: stored[one] for part, one in parts.items()}
    shape = form.shape(given, numbers)
    if "weight_shape" in parts and read is not None:
        shape = tuple(read(parts["weight_shape"]).tolist())
        check_packed(shape, given, numbers)
    return shape


def _in_words(weight: str, part: str) -> str:
    """Return the name of a part, or of one of several, in quotes."""
    return " or ".join(f"'{name_of(weight, one)}'" for one in part.split("|"))


def activation_scales(names: Collection[str]) -> list[str]:
    """Return names of activation scales of a weight, or of an attention's cache, among these names."""
    found = [name for name in names if ACTIVATIONS.search(name)]
    return [n for n in found if not re.search(r"(put|activation)_\w+$", n) or ACTIVATIONS.sub(".weight", n) in names]


# --- the config -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantizationSettings:
    """The quantization that config and side files of a folder state.

    Attributes:
        keys: their keys, as one object; empty without a word.
        source: the file that has them.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    source: str = CONFIG

    @classmethod
    def of(cls, folder: Path, keys: dict[str, Any]) -> "QuantizationSettings":
        """Read the settings in a folder's `config.json`, which has these keys, and in side files.

        Raises:
            ValueError: a side file is damaged.
        """
        found, source = quantization_settings(keys) or {}, CONFIG
        side = next((name for name in SIDE_FILES if (folder / name).is_file()), None)
        if side is not None and (not found or SIDE_FILES[side] == MODELOPT):
            stored = read_json(folder / side)
            inner = stored.get("quantization", stored) if isinstance(stored, dict) else {}
            source = CONFIG if found else side
            found = {"quant_method": SIDE_FILES[side], **found, **(inner if isinstance(inner, dict) else {})}
        return cls(found, source)

    @property
    def method(self) -> str | None:
        """Method of a quantized folder: its `quant_method`, of modelopt with its algorithm; None without one."""
        if not self.keys:
            return None
        if self.keys.get("load_in_8bit") or self.keys.get("load_in_4bit"):
            return "bitsandbytes"  # configs of older versions name no method
        method = str(self.keys.get("quant_method") or "an unnamed method")
        algorithm = self.keys.get("quant_algo") or "an unnamed algorithm"
        return f"{MODELOPT} {algorithm}" if method == MODELOPT else method

    @property
    def numbers(self) -> Numbers:
        """The numbers that decoding needs of them."""
        groups = [weights for _, weights in self.groups]
        widths = [self.keys.get("bits"), self.keys.get("w_bit"), *(one.get("num_bits") for one in groups)]
        blocks = [self.keys.get("weight_block_size"), *(one.get("block_structure") for one in groups)]
        sizes = [tuple(one) for one in blocks if isinstance(one, list) and len(one) == 2 and all(map(_counts, one))]
        group, packing = self.keys.get("group_size"), str(self.keys.get("packing_format", "gptq"))
        return Numbers(
            block=sizes[0] if sizes else Numbers.block,
            bits=tuple(dict.fromkeys(one for one in widths if isinstance(one, int) and 1 <= one <= 8)),
            group=group if _counts(group) else None,
            zero_plus_one=self.keys.get("checkpoint_format") != "gptq_v2" and "gptq" in packing,
        )

    @property
    def groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Targets and weights of each group of compressed-tensors; empty weights for a group without."""
        groups = self.keys.get("config_groups")
        each = [one for one in groups.values() if isinstance(one, dict)] if isinstance(groups, dict) else []
        return [
            ([target for target in one.get("targets") or () if isinstance(target, str)], one.get("weights") or {})
            for one in each
        ]

    @property
    def lists(self) -> dict[str, list[str]]:
        """The lists of unquantized modules, by key."""
        found = {key: self.keys.get(key) for key in LISTS}
        return {key: [one for one in each if isinstance(one, str)] for key, each in found.items() if each}

    @cached_property
    def _entries(self) -> tuple[frozenset[str], list[str]]:
        """Return entries that are names, and entries that are patterns."""
        every = dict.fromkeys(entry for each in self.lists.values() for entry in each)
        plain = frozenset(entry for entry in every if PLAIN.fullmatch(entry))
        return plain, [entry for entry in every if entry not in plain]

    def listing(self, module: str) -> str | None:
        """The entry of a list that names a module; None if none does."""
        plain, patterns = self._entries
        method, words = str(self.keys.get("quant_method")), module.split(".")
        if method == COMPRESSED:
            named = module if module in plain else None
        else:  # search in the set, since releases list thousands of names
            ends = range(1, len(words) + 1)
            parts = (".".join(words[start:end]) for end in ends for start in range(end))
            named = next((part for part in parts if part in plain), None)
            named = named or next((entry for entry in plain if module.endswith(entry)), None)
        return named or next((entry for entry in patterns if names(entry, module, method)), None)

    def idle(self, modules: Collection[str]) -> list[str]:
        """Entries of the lists that name none of the modules."""
        method, text = str(self.keys.get("quant_method")), "\n".join(["", *modules, ""])
        plain, patterns = self._entries
        around = [("\n", "\n")] if method == COMPRESSED else [("", "\n"), (".", "."), ("\n", ".")]
        lost = [one for one in plain if not any(f"{left}{one}{right}" in text for left, right in around)]
        return sorted(lost) + [one for one in patterns if not any(names(one, module, method) for module in modules)]

    def promised(self, module: str) -> list[Form] | None:
        """The forms that a module's weight may have; None if not listed here; empty if it is not quantized."""
        if any(self.keys.get(key) for key in SELECTIVE) or not self.keys:
            return None
        if self.listing(module) is not None:
            return []
        method = str(self.method)
        if self.keys.get("quant_method") == COMPRESSED or self.groups:
            group = self._group_of(module)
            return [form for form in FORMS if form.scheme and _is_scheme(form.scheme, group)] if group else []
        if method.startswith(f"{MODELOPT} FP8"):
            method = f"{MODELOPT} FP8"  # its variants (per tensor, per row, per block) are told apart by the tensors
        found = [form for form in FORMS if method in form.methods]
        if method == "fp8" and isinstance(self.keys.get("weight_block_size"), list):
            found = [form for form in found if form.scheme is None or "tensor" not in form.scheme[2]]
        return found or None

    @property
    def needs_weights(self) -> bool:
        """True if some weight has to be quantized; compressed-tensors may state the form of a cache alone."""
        return self.promised("") is not None and bool(self.groups or self.keys.get("quant_method") != COMPRESSED)

    def _group_of(self, module: str) -> dict[str, Any] | None:
        """Return the group that targets a module, chosen as in compressed-tensors: by name, by pattern, by class."""
        groups = self.groups
        each = [(("re:" in one, one), weights) for targets, weights in groups for one in targets]
        named = sorted((pair for pair in each if names(pair[0][1], module, COMPRESSED)), key=lambda pair: pair[0])
        linear = [weights for targets, weights in groups if "Linear" in targets or not targets]
        return next((weights for weights in [*(weights for _, weights in named), *linear]), None)


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_scheme(scheme: tuple[str, int, tuple[str, ...]], weights: Mapping[str, Any]) -> bool:
    """Return whether compressed-tensors quantizes this way: type, bits (0: any), and a strategy if it names one."""
    kind, bits, strategies = scheme
    same = weights.get("type") == kind and bits in (0, weights.get("num_bits"))
    return same and (weights.get("strategy") is None or weights["strategy"] in strategies)


def names(entry: str, module: str, method: str) -> bool:
    """True if an entry of a list names a module.

    Args:
        entry: a name, `re:` and a regular expression from the start of the name, or a pattern with `*`.
        module: `model.layers.0.mlp.up_proj`.
        method: the `quant_method`; compressed-tensors compares whole names, others parts of a path.
    """
    if entry.startswith("re:"):
        return _matches(entry[3:], module)
    if method == COMPRESSED:
        return entry == module
    if f".{entry.strip('.')}." in f".{module}." or module.endswith(entry):
        return True
    if "*" in entry and (fnmatch(module, entry) or fnmatch(module, f"{entry}.*")):
        return True
    is_regex = method != MODELOPT and not PLAIN.fullmatch(entry) and ("*" not in entry or ".*" in entry)
    return is_regex and _matches(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", module)  # transformers matches it this way


def module_of(weight: str) -> str:
    """Return the module of a weight: its name without `.weight`."""
    return weight.removesuffix(".weight")


def layer_of(module: str) -> str:
    """Return the layer that a module is in, such as `model.layers.3`; the module itself outside of layers."""
    return re.sub(r"(.*?layers\.\d+)\..*", r"\1", module)


def inside(module: str) -> str:
    """The entry of a list of compressed-tensors for all modules inside of one."""
    return f"re:{re.escape(module)}\\..*"


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except re.error:
        return False


def readable_methods() -> list[str]:
    """Prefixes of the methods that are read; tensors decide how."""
    methods = [one for form in FORMS if form.decode is not None for one in form.methods]
    return list(dict.fromkeys([*methods, COMPRESSED, f"{MODELOPT} MIXED_PRECISION"]))


def without_quantization(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a config for tensors in bfloat16."""
    kept = {name: value for name, value in keys.items() if name not in KEYS}
    text = kept.get("text_config")
    return {**kept, "text_config": without_quantization(text)} if isinstance(text, dict) else kept


def quantization_settings(keys: dict[str, Any]) -> dict[str, Any] | None:
    """Return the quantization in a config; None if there is none."""
    text = keys.get("text_config")
    parts = (keys, text if isinstance(text, dict) else {})
    found = (part.get(name) for part in parts for name in KEYS)
    return next((settings for settings in found if settings and isinstance(settings, dict)), None)
