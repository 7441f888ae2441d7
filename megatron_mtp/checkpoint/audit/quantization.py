"""Quantized folders: the tensors of a weight become one, and what the config says of each is compared with its form.

    X.weight + X.weight_scale_inv or X.weight_scale      FP8, read       (DeepSeek, compressed-tensors, modelopt)
    X_blocks + X_scales                                  MXFP4, read     (gpt-oss)
    X.qweight + X.scales, X.qzeros, X.g_idx              AWQ, GPTQ       (also of auto-round)
    X.weight_packed + X.weight_scale, ...                int4, NVFP4     (compressed-tensors)
    X.weight of bytes + X.weight_scale, X.SCB, ...       NVFP4, int8     (modelopt, compressed-tensors, bitsandbytes)

The numbers of the last three are not read: names, layers and depths are judged as of any folder, and one note says so.
"""

import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.checkpoint.audit.finding import NOTE, Finding, counted, listed
from megatron_mtp.checkpoint.audit.side import BESIDE, Entry, HFSide
from megatron_mtp.checkpoint.families.rules import Shape
from megatron_mtp.checkpoint.hf.config import read_json
from megatron_mtp.checkpoint.hf.quantized import (
    FP8,
    Quantized,
    activation_scales,
    block_of,
    quantization,
    quantization_settings,
    quantized_weights,
)

MXFP4 = "mxfp4"
"""The type of a weight of two tensors: numbers of 4 bits and their exponents."""
SCALES = {
    "qweight": ("scales",),
    "weight_packed": ("weight_scale",),
    "weight": ("weight_scale", "SCB", "weight.absmax"),
}
"""Last words of the names of a weight's numbers; of its scales, one of which there must be."""
PARTS = re.compile(
    r"\.(qzeros|scales|g_idx|weight_scale(_2|_inv)?|weight_zero_point|weight_global_scale|weight_g_idx|weight_shape|SCB|"
    r"weight_format|pre_quant_scale|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)|"
    r"(input|output|[qkv])_(scale|zero_point|global_scale))$"
)
"""Endings of the other tensors of quantized weights, activations and caches."""
MODELOPT = "hf_quant_config.json"
LISTS = "ignore modules_to_not_convert exclude_modules ignored_layers llm_int8_skip_modules".split()
"""Keys under which methods list the modules that are not quantized."""
SELECTIVE = "dynamic modules_in_block_to_quantize block_name_to_quantize extra_config quantized_layers".split()
"""Keys by which a method chooses modules in ways that are not read here."""
JUDGED = ("fp8", "fbgemm_fp8", "compressed-tensors", "awq", "gptq", "modelopt", "mxfp4", "bitsandbytes", "auto-round")
"""Methods whose tensors are known by their names."""
RESTORE = "restore the weight with its scale, or remove what does not belong"


def merge_quantized(side: HFSide) -> None:
    """Put one weight in the place of its tensors, read as the conversion does where its form is read."""
    settings = _settings(side)
    for name in [n for n in side.tensors if n.endswith((".qweight", ".weight_packed", ".weight"))]:
        _merge_unread(side, name, settings)
    stored = {name: (entry.shape or (), entry.kind) for name, entry in side.tensors.items()}
    weights = quantized_weights(stored, block_of(side.keys))
    for name, reason in weights.wrong.items():
        side.findings.append(Finding("quantization", f"'{name}' {reason}.", RESTORE, names=(name,)))
    for name, weight in weights.found.items():
        parts = [side.tensors[part] for part in weight.parts]
        dtype = parts[0].dtype if name in weight.parts else MXFP4
        entry = Entry(weight.shape, dtype, sum(part.bytes for part in parts), partial(_decoded, weight, parts))
        for part in weight.parts:
            del side.tensors[part]
        side.tensors[name] = entry
    if weights.found or weights.wrong or settings:
        for name in {*activation_scales(side.tensors), *(n for n in side.tensors if PARTS.search(n))}:
            whole = PARTS.sub(".weight", name)
            beside = whole in side.tensors or whole.endswith("_attn.weight")
            if beside and not any(name in found.names for found in side.findings):
                del side.tensors[name]


def _settings(side: HFSide) -> dict[str, Any]:
    """What config and modelopt's file say of the quantization, as one object."""
    found = dict(quantization_settings(side.keys) or {})
    if (side.path / MODELOPT).is_file():
        try:
            whole = read_json(side.path / MODELOPT)
        except ValueError:
            return found  # the audit of JSON files says so
        inner = whole.get("quantization") if isinstance(whole, dict) else None
        found |= inner if isinstance(inner, dict) else {}
    return found


def _merge_unread(side: HFSide, name: str, settings: dict[str, Any]) -> None:
    """Make one weight of the tensors of AWQ, GPTQ, compressed-tensors, modelopt or bitsandbytes."""
    stem, _, word = name.rpartition(".")
    entry = side.tensors[name]
    if word == "weight" and entry.kind not in (torch.uint8, torch.int8):
        return
    scales = [f"{stem}.{scale}" for scale in SCALES[word]]
    if not any(scale in side.tensors for scale in scales):
        if word != "weight" or settings:
            says = f"'{name}' is {entry.dtype} without its scales ('{scales[0]}')."
            side.findings.append(Finding("quantization", says, RESTORE, names=(name,)))
        if word == "weight":
            return
    parts = [n for n in side.tensors if n.startswith(f"{stem}.") and PARTS.sub("", n) == stem]
    size = sum(side.tensors.pop(part).bytes for part in parts)
    del side.tensors[name]
    method = str(settings.get("quant_method") or settings.get("quant_algo") or word).lower()
    form = f"{method} of {entry.dtype}"
    side.tensors[f"{stem}.weight"] = Entry(_shape(word, entry, parts, method), form, entry.bytes + size, None)


def _shape(word: str, entry: Entry, parts: list[str], method: str) -> Shape | None:
    """The shape of a weight whose numbers have 4 or 8 bits; None where its tensors alone do not tell it."""
    if entry.shape is None or len(entry.shape) != 2 or any(".quant_state." in part for part in parts):
        return None
    rows, columns = entry.shape
    if word == "weight" and entry.kind == torch.int8:
        return entry.shape
    if entry.kind == torch.uint8 and any(part.endswith(("_scale_2", "_global_scale")) for part in parts):
        return rows, 2 * columns  # NVFP4
    if word == "qweight" and "awq" in method:
        return 8 * columns, rows
    return None


def _decoded(weight: Quantized, parts: list[Entry]) -> Tensor:
    return weight.decode(*(part.tensor() for part in parts))


def method_of(side: HFSide) -> str | None:
    """The quant_method of a folder; None without one, or if the file that says it cannot be read."""
    try:
        return quantization(side.path, side.keys)
    except ValueError:
        return None  # the audit of JSON files says so


def is_quantized(entry: Entry) -> bool:
    """Whether a weight is stored in a quantized form."""
    return entry.kind in FP8 or entry.kind is None


def check_quantization(side: HFSide) -> Iterator[Finding]:
    """Compare the forms of weights with what config and lists say of them."""
    settings, method = _settings(side), method_of(side)
    coded = [name for name, entry in side.tensors.items() if is_quantized(entry) and name.endswith(("weight", "_proj"))]
    if method is None and not settings:
        if coded:
            says = f"{counted(len(coded), 'weight')} are quantized, but the config has no 'quantization_config': "
            says += f"engines load them without their scales: {listed(coded)}."
            advice = "copy the key from the release's config.json"
            yield Finding("quantization", says, advice, names=tuple(coded))
        return
    broken = any(found.guess in ("quantization", "damaged file", "file missing") for found in side.findings)
    unread = [name for name in coded if side.tensors[name].read is None]
    judged = str(method).partition(" (")[0] in JUDGED and not any(settings.get(key) for key in SELECTIVE)
    says = f"The folder is quantized: quant_method '{method}', {counted(len(coded), 'weight')}."
    says += f" The numbers of {counted(len(unread), 'weight')} are not read, only their names." if unread else ""
    says += "" if judged else " Whether the right modules are quantized cannot be judged."
    if coded:
        yield Finding("quantization", says, severity=NOTE)
    if coded and judged:
        yield from _check_lists(side, settings, coded)
    wants = settings.get("config_groups") if method == "compressed-tensors" or "config_groups" in settings else True
    if not coded and judged and wants and side.tensors and not broken:
        kinds = ", ".join(sorted({entry.dtype for entry in side.tensors.values()}))
        says = f"The config says quant_method '{method}', but no weight is quantized (they are {kinds}): engines "
        says += "build quantized layers, and do not load these tensors."
        advice = "remove 'quantization_config' from config.json"
        yield Finding("quantization", says, advice, names=("quantization_config",))


def _check_lists(side: HFSide, settings: dict[str, Any], coded: list[str]) -> Iterator[Finding]:
    """Compare the lists of modules that are not quantized with the tensors."""
    entries = [one for key in LISTS for one in settings.get(key) or () if isinstance(one, str)]
    against = [name for name in coded if _is_listed(name, entries)]
    if against:
        says = f"{counted(len(against), 'weight')} are quantized, but the config lists them as not quantized: "
        says += f"{listed(against)}. Engines load them without their scales."
        yield Finding("quantization", says, "remove them from the list", names=tuple(against))
    leaves = {_leaf(name) for name in coded}
    plain = [
        name
        for name, entry in side.tensors.items()
        if not is_quantized(entry)
        and _leaf(name) in leaves
        and side.parts.of(name).kind != BESIDE
        and name.endswith(".weight")
        and not _is_listed(name, entries)
        and _is_targeted(name, settings)
    ]
    if plain and settings.get("quant_method") != "bitsandbytes":  # which quantizes them when it loads them
        says = f"{counted(len(plain), 'weight')} are not quantized, and the config does not list them so: "
        says += f"{listed(plain)}. Engines build quantized layers for them."
        key = next((key for key in LISTS if key in settings), "modules_to_not_convert")
        yield Finding("quantization", says, f"add their modules to '{key}' in the config", names=tuple(plain))


def _leaf(name: str) -> str:
    """The module's own name: `q_proj`."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _is_listed(name: str, entries: Iterable[str]) -> bool:
    """Whether a list names the module of a weight: by a part of its name, a pattern, or a regular expression."""
    module = name.removesuffix(".weight")
    for entry in entries:
        if entry.startswith("re:"):
            if re.match(entry[3:], module):
                return True
        elif "*" in entry:
            if fnmatch(module, entry) or fnmatch(module, f"{entry}.*"):
                return True
        elif f".{entry.strip('.')}." in f".{module}.":
            return True
    return False


def _is_targeted(name: str, settings: dict[str, Any]) -> bool:
    """Whether compressed-tensors chooses the module of a weight: all linear ones, or by name."""
    groups = settings.get("config_groups")
    targets = [t for group in groups.values() for t in group.get("targets") or ()] if isinstance(groups, dict) else []
    words = [target for target in targets if isinstance(target, str)]
    return not words or "Linear" in words or _is_listed(name, words)
