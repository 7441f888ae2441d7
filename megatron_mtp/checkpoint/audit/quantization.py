"""Quantized folders: the tensors of a weight become one, and its form is compared with what the config promises.

The forms are those of `hf/forms.py`. A weight that is read is decoded as the conversion decodes it, and its scales are
looked at on the way. Of every cause there is one finding, with the line of the config to change.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from megatron_mtp.checkpoint.audit.finding import NOTE, Finding, counted, listed
from megatron_mtp.checkpoint.audit.side import BESIDE, DEPTH, TRUNK, Entry, HFSide
from megatron_mtp.checkpoint.hf.forms import FP8
from megatron_mtp.checkpoint.hf.quantized import (
    COMPRESSED,
    MODELOPT,
    Quantized,
    Settings,
    activation_scales,
    inside,
    layer_of,
    module_of,
    quantized_weights,
)

GUESS = "quantization"
RESTORE = "restore the weight with its scale, or remove what does not belong"
SCALES = re.compile(r"\.(qzeros|scales|g_idx|SCB|weight_(scale(_2|_inv)?|zero_point|global_scale|shape|g_idx))$")
"""Names of the parts of a weight beside its numbers."""
STATE = re.compile(r"\.weight(_format|\.quant_state\..+)$|\.pre_quant_scale$")
"""Names of further tensors beside a weight."""
QUANTIZED_LATER = "bitsandbytes"
"""The method that quantizes what it loads."""


def merge_quantized(side: HFSide) -> None:
    """Put one weight in the place of its tensors, decoded as the conversion decodes it."""
    settings = settings_of(side)
    stored = {name: (entry.shape or (), entry.kind) for name, entry in side.tensors.items()}
    weights = quantized_weights(stored, settings.numbers, lambda name: side.tensors[name].tensor())
    side.findings += _wrong(weights.wrong)
    for name, parts in weights.broken.items():
        size = sum(side.tensors.pop(part).bytes for part in parts)
        side.tensors[name] = Entry(None, "damaged", size, None)
    for name, weight in weights.found.items():
        entries = {part: side.tensors.pop(one) for part, one in weight.parts.items()}
        read = None if weight.form.decode is None else partial(_decoded, side, name, weight, entries)
        size = sum(entry.bytes for entry in entries.values())
        side.tensors[name] = Entry(weight.shape, weight.form.name, size, read)
        side.quantized[name] = weight
    if weights.found or weights.wrong or settings.keys:
        _drop_others(side, set(weights.wrong))


def _wrong(wrong: dict[str, str]) -> Iterator[Finding]:
    """One finding for all weights of which the same is wrong."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, reason in wrong.items():
        groups[re.sub(r"'[^']*?([^.']+)'", r"'\1'", reason)].append(name)
    for members in groups.values():
        says, more = f"'{members[0]}' {wrong[members[0]]}", members[1:]
        says += f"; likewise {len(more)} more: {listed(more)}" if more else ""
        yield Finding(GUESS, f"{says}.", RESTORE, names=tuple(members))


def _drop_others(side: HFSide, wrong: set[str]) -> None:
    """Leave out scales of activations, and parts beside a weight; name those without one."""
    for name in activation_scales(side.tensors):
        del side.tensors[name]
    orphans = defaultdict(list)
    for name in [n for n in side.tensors if SCALES.search(n) or STATE.search(n)]:
        weight = re.sub(rf"{SCALES.pattern}|{STATE.pattern}", ".weight", name)
        if name in wrong or f"{name.removesuffix('_scale')}" in wrong:
            continue
        if weight in side.tensors:
            del side.tensors[name]
        elif SCALES.search(name):
            orphans[weight].append(name)
    for weight, parts in orphans.items():
        for part in parts:
            del side.tensors[part]
        side.unread.add(weight)
    if orphans:
        parts = [part for each in orphans.values() for part in each]
        says = f"{listed(parts)}: scales without the numbers of their weight, such as '{next(iter(orphans))}'."
        side.findings.append(Finding(GUESS, says, RESTORE, names=tuple(parts)))


def settings_of(side: HFSide) -> Settings:
    """What config and side files say of the quantization; nothing where they are damaged, which another audit says."""
    try:
        return Settings.of(side.path, side.keys)
    except ValueError:
        return Settings()


def is_quantized(entry: Entry) -> bool:
    """Whether a weight is stored in a quantized form."""
    return entry.kind in FP8 or entry.kind is None


# --- scales -----------------------------------------------------------------------------------------------------------


def _decoded(side: HFSide, name: str, weight: Quantized, entries: dict[str, Entry]) -> Tensor:
    """Decode a weight, and keep what is wrong with its scales."""
    tensors = {part: entry.tensor() for part, entry in entries.items()}
    if fault := scale_fault(weight, tensors):
        side.scales[name] = fault
    return weight.decode(tensors)


def scale_fault(weight: Quantized, tensors: dict[str, Tensor]) -> str:
    """What is wrong with the numbers of a weight's scales; empty if nothing is.

    A scale of 0 is right where all numbers are 0 as well, so these are decoded with a scale of 1 there and 0 elsewhere.
    """
    scales = {part: one for part, one in tensors.items() if "scale" in part or part == "SCB"}
    for part, scale in scales.items():
        values = scale.float()
        if not values.isfinite().all() or (scale.dtype == torch.uint8 and bool((scale == 255).any())):
            return f"'{weight.parts[part]}' has numbers that are NaN or infinite"
        if scale.dtype == torch.uint8 or values.all():
            continue
        ones = {other: torch.ones_like(one.float()).to(one.dtype) for other, one in scales.items()}
        if weight.decode({**tensors, **ones, part: (values == 0).float().to(scale.dtype)}).any():
            return f"'{weight.parts[part]}' has zeros, which make numbers of the weight 0"
    return ""


def check_scales(side: HFSide) -> Iterator[Finding]:
    """Findings about scales whose numbers are wrong, once all weights were read."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, fault in side.scales.items():
        groups[fault.partition("' ")[2]].append(name)
    for members in groups.values():
        says = f"{side.scales[members[0]]}{f'; so have those of {listed(members[1:])}' if members[1:] else ''}."
        yield Finding(GUESS, says, "take the weight with its scales from the release", names=tuple(members))


# --- lists and forms --------------------------------------------------------------------------------------------------


def check_quantization(side: HFSide) -> Iterator[Finding]:
    """Compare the forms of weights with what config and lists say of them."""
    settings = settings_of(side)
    coded = [name for name, entry in side.tensors.items() if is_quantized(entry) and name.endswith(("weight", "_proj"))]
    if not settings.keys:
        if coded:
            says = f"{counted(len(coded), 'weight')} are quantized, but the config has no 'quantization_config': "
            says += f"engines load them without their scales: {listed(coded)}."
            advice = "copy the key from the release's config.json"
            yield Finding(GUESS, says, advice, names=tuple(coded))
        return
    broken = any(found.guess in (GUESS, "damaged file", "file missing") for found in side.findings)
    if coded:
        yield Finding(GUESS, _described(side, settings, coded), severity=NOTE)
        yield from _check_promises(side, settings, coded)
        return
    wants = settings.groups or settings.keys.get("quant_method") != COMPRESSED
    if settings.promised("") is not None and wants and side.tensors and not broken:
        kinds = ", ".join(sorted({entry.dtype for entry in side.tensors.values()}))
        says = (
            f"The config says quant_method '{settings.method}', but no weight is quantized (they are {kinds}): engines "
        )
        says += "build quantized layers, and do not load these tensors."
        advice = "remove 'quantization_config' from config.json"
        yield Finding(GUESS, says, advice, names=("quantization_config",))


def _described(side: HFSide, settings: Settings, coded: list[str]) -> str:
    """A note: the forms of trunk and depths, what is not read, and whether the right modules can be judged."""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for name in coded:
        kinds["MTP layers" if side.parts.of(name).kind == DEPTH else "trunk"][side.tensors[name].dtype] += 1
    each = (f"{part}: {', '.join(f'{n} in {form}' for form, n in found.items())}" for part, found in kinds.items())
    says = f"The folder is quantized: quant_method '{settings.method}', {counted(len(coded), 'weight')}"
    says += f" ({'; '.join(each)})."
    unread = [name for name in coded if side.tensors[name].read is None]
    says += f" The numbers of {counted(len(unread), 'weight')} are not read, only their names." if unread else ""
    judged = settings.promised("") is not None
    return says + ("" if judged else " Whether the right modules are quantized cannot be judged.")


def _check_promises(side: HFSide, settings: Settings, coded: list[str]) -> Iterator[Finding]:
    """Compare every weight of trunk and depths with the forms that the config promises it."""
    leaves = {_leaf(name) for name in coded}
    told = {name for one in side.findings if one.guess == GUESS for name in one.names}
    against, untargeted, plain = list[str](), list[str](), list[str]()
    others: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, entry in side.tensors.items():
        if side.parts.of(name).kind == BESIDE or not name.endswith(("weight", "_proj")) or name in told:
            continue
        promised = settings.promised(module_of(name))
        if promised is None:
            continue
        if not is_quantized(entry):
            plain += [name] if promised and name.endswith(".weight") and _leaf(name) in leaves else []
        elif not promised:
            (against if settings.listing(module_of(name)) else untargeted).append(name)
        elif name in side.quantized and not set(side.quantized[name].forms) & set(promised):
            others[entry.dtype, " or ".join(form.name for form in promised)].append(name)
    if against:
        yield _listed_but_quantized(side, settings, against)
    if untargeted:
        says = (
            f"{counted(len(untargeted), 'weight')}{_whose(side, untargeted)} are quantized, but no group of the config "
        )
        says += f"targets them: {listed(untargeted)}. Engines load them without their scales."
        yield Finding(
            GUESS, says, "add them to the 'targets' of their group in 'config_groups'", names=tuple(untargeted)
        )
    if plain and settings.method != QUANTIZED_LATER:
        yield _quantized_in_the_config_alone(side, settings, plain)
    for (form, promise), members in others.items():
        says = (
            f"{counted(len(members), 'weight')}{_whose(side, members)} are stored as {form}, but the config promises "
        )
        says += f"{promise}: engines take their scales for others, or refuse them: {listed(members)}."
        yield Finding(GUESS, says, _declare(settings, side, members), names=tuple(members))
    if not (against or plain):
        yield from _idle_entries(side, settings)


def _listed_but_quantized(side: HFSide, settings: Settings, members: list[str]) -> Finding:
    entries = dict.fromkeys(entry for name in members if (entry := settings.listing(module_of(name))))
    says = f"{counted(len(members), 'weight')}{_whose(side, members)} are quantized, but the config lists them as not "
    says += f"quantized: {listed(members)}. Engines load them without their scales."
    keys = [key for key, each in settings.lists.items() if entries.keys() & set(each)]
    advice = f"remove {listed(entries)} from '{keys[0]}' in {settings.source}: the list is too long"
    return Finding(GUESS, says, advice, names=tuple(members))


def _quantized_in_the_config_alone(side: HFSide, settings: Settings, members: list[str]) -> Finding:
    says = f"{counted(len(members), 'weight')}{_whose(side, members)} are not quantized, and the config does not list "
    says += f"them so: {listed(members)}. Engines build quantized layers for them."
    if idle := _unmatched(side, settings):
        whole = ", since whole names are compared" if settings.keys.get("quant_method") == COMPRESSED else ""
        says += f" {'The entry' if len(idle) == 1 else 'Entries'} {listed(idle)} of the list match no module{whole}."
    key = next(iter(settings.lists), "ignore" if settings.groups else "modules_to_not_convert")
    advice = f"add {_entries(side, settings, members)} to '{key}' in {settings.source}: the list is too short"
    return Finding(GUESS, says, advice, names=tuple(members))


def _entries(side: HFSide, settings: Settings, members: list[str]) -> str:
    """Entries of a list that name these modules: a pattern for whole layers where the method has some."""
    layers = {layer_of(module_of(name)) for name in members}
    free = all(not any(name.startswith(f"{layer}.") for name in side.quantized) for layer in layers)
    if free and settings.keys.get("quant_method") == COMPRESSED:
        return listed(map(inside, sorted(layers)))
    if free and settings.keys.get("quant_method") == MODELOPT:
        return listed(f"{layer}*" for layer in sorted(layers))
    return listed(map(module_of, members))


def _declare(settings: Settings, side: HFSide, members: list[str]) -> str:
    if settings.groups:
        return f"give {_entries(side, settings, members)} a group in 'config_groups' of {settings.source} that says so"
    return f"quantize them again as the config says, or correct 'quant_method' and its keys in {settings.source}"


def _unmatched(side: HFSide, settings: Settings) -> list[str]:
    """Entries of the lists that name no module of the folder."""
    idle = settings.idle([*side.tensors, *{name.rpartition(".")[0] for name in side.tensors}])
    return [entry for entry in idle if not (side.tied and entry == "lm_head")]


def _idle_entries(side: HFSide, settings: Settings) -> Iterator[Finding]:
    """A note about entries that name nothing: they change nothing."""
    if idle := _unmatched(side, settings):
        says = f"In the lists of unquantized modules, {len(idle)} match no module: "
        yield Finding(GUESS, f"{says}{listed(idle)}.", severity=NOTE, names=tuple(idle))


def _whose(side: HFSide, members: Iterable[str]) -> str:
    kinds = {side.parts.of(name).kind for name in members}
    return {frozenset({DEPTH}): " of the MTP layers", frozenset({TRUNK}): " of the trunk"}.get(frozenset(kinds), "")


def _leaf(name: str) -> str:
    """The module's own name: `q_proj`."""
    return module_of(name).rpartition(".")[2]
