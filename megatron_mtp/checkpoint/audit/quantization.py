"""Quantized folders: compare the form of every weight with the config, and check the values of its scales.

Each cause gets one finding, with the config line to change.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megatron_mtp.checkpoint.audit import NOTE, Finding, counted, listed
from megatron_mtp.checkpoint.audit.side import BESIDE, DEPTH, TRUNK, HFSide, Opened, StoredTensor
from megatron_mtp.checkpoint.hf.forms.form import E8M0, FP8, POWERS
from megatron_mtp.checkpoint.hf.forms.scales import number
from megatron_mtp.checkpoint.hf.forms.table import FORMS
from megatron_mtp.checkpoint.hf.quantized import (
    COMPRESSED,
    MODELOPT,
    QuantizationSettings,
    Quantized,
    activation_scales,
    inside,
    layer_of,
    module_of,
    names,
)

GUESS = "quantization"
RESTORE = "restore the weight with its scale, or remove what does not belong"
SCALES = re.compile(r"\.(qzeros|scales|g_idx|SCB|weight_(scale(_2|_inv)?|zero_point|global_scale|shape|g_idx))$")
"""Names of a weight's parts other than its values."""
STATE = re.compile(r"\.weight(_format|\.quant_state\..+)$|\.pre_quant_scale$")
"""Names of further tensors of a weight."""
PROJECTIONS = frozenset(
    "q_proj k_proj v_proj o_proj qkv_proj q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj gate_proj up_proj down_proj "
    "gate_up_proj".split()
)
"""Modules that engines quantize unless the config excludes them, even if no layer has them quantized."""
WHOLE, NOTHING = "not quantized", "no quantization"
_FORMS = frozenset(form.name for form in FORMS)
_POWERS = str(E8M0).removeprefix("torch.")
QUANTIZED_LATER, EXPERTS_ALONE = "bitsandbytes", "mxfp4"
"""The method that quantizes during loading, and that of gpt-oss, which quantizes only experts."""


def is_quantized(entry: StoredTensor) -> bool:
    """Return whether a weight is stored in a quantized form."""
    kind = getattr(torch, entry.dtype, None)
    return kind in FP8 or not isinstance(kind, torch.dtype)


def _is_coded(entry: StoredTensor) -> bool:
    """Return whether a weight is quantized in a known form, or in FP8 of an unknown form."""
    return entry.dtype in _FORMS or getattr(torch, entry.dtype, None) in FP8[:2]


def check_parts(side: HFSide) -> None:
    """Skip activation scales and further parts of a weight; report scales without a weight.

    A tensor of dtype E8M0 is a scale, whatever its name.
    """
    if not (side.quantized or side.quantization.keys):
        return
    for name in activation_scales(side.tensors):
        del side.tensors[name]
    orphans: dict[str, str] = {}
    powers = {name for name, entry in side.tensors.items() if entry.dtype == _POWERS and not name.endswith(".weight")}
    for name in [n for n in side.tensors if n in powers or SCALES.search(n) or STATE.search(n)]:
        weight = re.sub(rf"{SCALES.pattern}|{STATE.pattern}|\.scale$", ".weight", name)
        if weight != name and (weight in side.tensors or weight in side.unread):
            del side.tensors[name]
        elif name in powers or SCALES.search(name):
            orphans[name] = weight
    for part, weight in orphans.items():
        del side.tensors[part]
        side.unread.add(weight)
    if orphans:
        says = f"{listed(orphans)}: scales without the numbers of their weight, such as "
        side.add(GUESS, f"{says}'{next(iter(orphans.values()))}'.", RESTORE, names=orphans)


# --- scales -----------------------------------------------------------------------------------------------------------


def scale_fault(weight: Quantized, tensors: dict[str, Tensor]) -> str:
    """Return what is wrong with the values of a weight's scales; empty if nothing is.

    A scale of 0 is correct if all its values are 0 as well, so these are decoded with a scale of 1 there and 0
    elsewhere.
    """
    scales = {part: one for part, one in tensors.items() if "scale" in part or part == "SCB"}
    for part, scale in scales.items():
        values = number(scale)
        if not values.isfinite().all():
            return f"'{weight.parts[part]}' has numbers that are NaN or infinite"
        if scale.dtype in POWERS or values.all():
            continue
        ones = {other: torch.ones_like(one.float()).to(one.dtype) for other, one in scales.items()}
        if weight.decode({**tensors, **ones, part: (values == 0).float().to(scale.dtype)}).any():
            return f"'{weight.parts[part]}' has zeros, which make numbers of the weight 0"
    return ""


def check_scales(side: Opened) -> Iterator[Finding]:
    """Return findings about scales with wrong values, after all weights were read."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, fault in side.scales.items():
        groups[fault.partition("' ")[2]].append(name)
    for first, *more in groups.values():
        says = f"{side.scales[first]}{f'; so have those of {listed(more)}' if more else ''}."
        yield Finding(GUESS, says, "take the weight with its scales from the release", names=(first, *more))


# --- lists and forms --------------------------------------------------------------------------------------------------


def check_quantization(side: HFSide) -> Iterator[Finding]:
    """Compare the forms of weights with what config and module lists specify."""
    settings = side.quantization
    yield from _check_types(side)
    coded = [name for name, entry in side.tensors.items() if _is_coded(entry) and name.endswith(("weight", "_proj"))]
    if coded and settings.keys:
        yield _described(side, settings, coded)
        yield from _check_promises(side, settings, coded)
        yield from _check_names_in_vllm(side, settings, {_leaf(name) for name in coded})
    elif coded := [name for name in coded if name not in side.quantized or not side.quantized[name].fault]:
        says = f"{counted(len(coded), 'weight')} are quantized, but the config has no 'quantization_config': "
        says += f"engines load them without their scales: {listed(coded)}."
        yield Finding(GUESS, says, "copy the key from the release's config.json", names=tuple(coded))
    elif settings.needs_weights:
        kinds = ", ".join(sorted({entry.dtype for entry in side.tensors.values()}))
        says = f"The config says quant_method '{settings.method}', but no weight is quantized (they are {kinds}): "
        says += "engines build quantized layers, and do not load these tensors."
        yield Finding(GUESS, says, "remove 'quantization_config' from config.json", names=("quantization_config",))


def _check_types(side: HFSide) -> Iterator[Finding]:
    """Find weights in the type of scales."""
    if strange := [name for name, entry in side.tensors.items() if entry.dtype == _POWERS]:
        says = f"{listed(strange)}: of type '{_POWERS}', which is the type of scales, but weights are floating-point "
        yield Finding("type", f"{says}numbers.", "export them again in the type of the model", names=tuple(strange))


def _described(side: HFSide, settings: QuantizationSettings, coded: list[str]) -> Finding:
    """Return a note on the quantization of trunk and MTP layers, what is not read, and which checks are possible."""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for name in coded:
        kinds["MTP layers" if side.parts.of(name).kind == DEPTH else "trunk"][side.tensors[name].dtype] += 1
    each = (f"{part}: {', '.join(f'{n} in {form}' for form, n in found.items())}" for part, found in kinds.items())
    says = f"The folder is quantized: quant_method '{settings.method}', {counted(len(coded), 'weight')}"
    says += f" ({'; '.join(each)})."
    unread = [name for name in coded if side.tensors[name].read is None]
    says += f" The numbers of {counted(len(unread), 'weight')} are not read, only their names." if unread else ""
    if settings.promised("") is None:
        says += " Whether the right modules are quantized cannot be judged."
    return Finding(GUESS, says, severity=NOTE)


def _check_promises(side: HFSide, settings: QuantizationSettings, coded: list[str]) -> Iterator[Finding]:
    """Compare every weight of trunk and MTP layers with the form that the config gives for it."""
    leaves = {_leaf(name) for name in coded} | (frozenset() if settings.method == EXPERTS_ALONE else PROJECTIONS)
    against: dict[tuple[str, str], list[str]] = defaultdict(list)
    depths = None if side.family is None else side.family.depths
    for name, entry in side.tensors.items():
        if side.parts.of(name).kind == BESIDE or not name.endswith(("weight", "_proj")):
            continue
        promised = settings.promised(module_of(name))
        whole = not is_quantized(entry)
        stored = side.quantized.get(name)
        if (stored is None and not whole) or (stored is not None and stored.fault):  # reported by another finding
            continue
        if promised is None or (whole and not (name.endswith(".weight") and _leaf(name) in leaves)):
            continue
        if whole and depths is not None and depths.is_never_quantized(module_of(name)):
            continue
        forms = set() if stored is None else set(stored.forms)
        if not (whole and not promised) and not forms & set(promised):
            promise = " or ".join(form.name for form in promised) or NOTHING
            against[WHOLE if whole else f"stored as {entry.dtype}", promise].append(name)
    modules = {name.rpartition(".")[0] for name in side.tensors}
    idle = settings.idle([*side.tensors, *modules, *(in_vllm(side, module) for module in modules)])
    for (kind, promise), members in against.items():
        if kind == WHOLE and settings.method == QUANTIZED_LATER:
            continue
        says = f"{_weights(side, members)} are {kind}, but the config promises {promise}: engines build other layers "
        says += f"for them, or take their scales for others: {listed(members)}."
        remedy = _remedy(side, settings, kind, promise, members)
        if kind == WHOLE and (meant := [one for one in idle if any(_is_meant(one, name) for name in members)]):
            says += f" The list names {listed(meant)}, under a prefix that no tensor has."
            remedy = f"in {settings.source}, give these entries the prefix of the tensors"
        yield Finding(GUESS, says, remedy, names=tuple(members))
    if idle := [one for one in idle if not (side.tied and one == "lm_head")]:
        says = f"In the lists of unquantized modules, {len(idle)} match no module: {listed(idle)}."
        yield Finding(GUESS, says, severity=NOTE, names=tuple(idle))


def _is_meant(entry: str, weight: str) -> bool:
    """Return whether an entry of a list would match a weight's module if both had the same prefix before `layers.`."""
    prefix, found, tail = entry.partition("layers.")
    own, _, module = module_of(weight).partition("layers.")
    return bool(found) and prefix not in ("", own) and names(tail, module, MODELOPT)


def _remedy(side: HFSide, settings: QuantizationSettings, stored: str, promise: str, members: list[str]) -> str:
    """Return the config line to change if weights are not in the form that it gives."""
    entries = dict.fromkeys(one for name in members if (one := settings.listing(module_of(name))))
    if entries:
        key = next(key for key, each in settings.lists.items() if entries.keys() & set(each))
        return f"remove {listed(entries)} from '{key}' in {settings.source}: the list is too long"
    if promise == NOTHING:
        return "add them to the 'targets' of their group in 'config_groups'"
    modules = _entries(side, settings, members)
    if stored == WHOLE:
        key = next(iter(settings.lists), "ignore" if settings.groups else "modules_to_not_convert")
        return f"add {modules} to '{key}' in {settings.source}: the list is too short"
    if settings.groups:
        return f"give {modules} a group in 'config_groups' of {settings.source} for that"
    return f"quantize them again to match the config, or correct 'quant_method' and its keys in {settings.source}"


def _check_names_in_vllm(side: HFSide, settings: QuantizationSettings, leaves: set[str]) -> Iterator[Finding]:
    """Find unquantized MTP weights whose modules are on the lists, but not under vLLM's names."""
    whole = (name for name in side.tensors if name not in side.quantized and _leaf(name) in leaves)
    own = {name: in_vllm(side, module_of(name)) for name in whole if name.endswith(".weight")}
    listed_here = (name for name in own if settings.promised(module_of(name)) == [])
    if lost := [name for name in listed_here if settings.promised(own[name])]:
        says = f"{_weights(side, lost)} are not quantized, and listed so, but vLLM calls their modules by other names, "
        says += f"which the list lacks: {listed(own[name] for name in lost)}. "
        says += "It builds quantized layers for them, and rejects what they draft."
        advice = f"add these names to '{next(iter(settings.lists))}' in {settings.source} too"
        yield Finding(GUESS, says, advice, names=tuple(lost))


def in_vllm(side: HFSide, module: str) -> str:
    """Return vLLM's name of a module."""
    stored = None if side.family is None else side.family.depths
    if stored is None or side.config is None:
        return module
    return stored.in_vllm(side.config, side.held_depths, module)


def _entries(side: HFSide, settings: QuantizationSettings, members: list[str]) -> str:
    """Return list entries for these modules: one pattern per whole layer if the method supports patterns."""
    layers = {layer_of(module_of(name)) for name in members}
    free = not any(name.startswith(tuple(f"{layer}." for layer in layers)) for name in side.quantized)
    if free and settings.keys.get("quant_method") == COMPRESSED:
        return listed(map(inside, sorted(layers)))
    if free and settings.keys.get("quant_method") == MODELOPT:
        return listed(f"{layer}*" for layer in sorted(layers))
    return listed(map(module_of, members))


def _weights(side: HFSide, members: Iterable[str]) -> str:
    """Return `25 weights of the MTP layers`."""
    kinds, named = {side.parts.of(name).kind for name in members}, list(members)
    whose = {frozenset({DEPTH}): " of the MTP layers", frozenset({TRUNK}): " of the trunk"}.get(frozenset(kinds), "")
    return counted(len(named), "weight") + whose


def _leaf(name: str) -> str:
    """Return the module's last name: `q_proj`."""
    return module_of(name).rpartition(".")[2]
