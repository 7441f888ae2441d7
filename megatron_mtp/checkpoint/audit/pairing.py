"""Which tensor of one side is which of the other: by name, by Megatron's keys, or by a family's rules between both.

    two folders              by name; what is left by the Megatron keys that each family gives to it
    two checkpoints          by key, with Transformer Engine's other names; a GPT and a hybrid by their halves
    folder and checkpoint    by the folder's family: what the checkpoint holds is read back under the folder's names

A tensor that one side leaves out since it repeats another one is paired with the repeated one.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from megatron_mtp.checkpoint.audit.copies import base_of
from megatron_mtp.checkpoint.audit.entry import Entry
from megatron_mtp.checkpoint.audit.finding import WARNING, Finding
from megatron_mtp.checkpoint.audit.parts import Parts
from megatron_mtp.checkpoint.audit.side import HFSide, MegatronSide, Side
from megatron_mtp.checkpoint.convert.hybrid import Halves
from megatron_mtp.checkpoint.convert.plan import lost_features, zero_features
from megatron_mtp.checkpoint.families import Layout
from megatron_mtp.checkpoint.families.blocks import FUSED_NORM, OWN_NORM
from megatron_mtp.checkpoint.families.rules import MinusOne, Piece, Rule
from megatron_mtp.checkpoint.families.trunk import ORIGINAL
from megatron_mtp.checkpoint.hf.quantized import FP8
from megatron_mtp.model.draft_vocabulary import DRAFT_VOCABULARY
from megatron_mtp.model.pattern import without_stages

OWN_KEYS = (("mtp_model_layer.", "transformer_layer."), ("tf_layer.", "transformer_layer."))
"""Other names of a depth's layer, which some versions have written."""


@dataclass(frozen=True)
class Pair:
    """A tensor of both sides.

    Attributes:
        name: its name on side A, or on the side that has it.
        a, b: the tensor on both sides.
        copy: the tensor that one side repeats, and the other leaves out; empty for two stored tensors.
        other: its name on side B, if that is another one.
    """

    name: str
    a: Entry
    b: Entry
    copy: str = ""
    other: str = ""


@dataclass
class Pairing:
    """All tensors of both sides.

    Attributes:
        pairs: those that both have.
        only_a, only_b: names of those that one side has alone.
        findings: what could not be paired, and why.
    """

    pairs: list[Pair] = field(default_factory=list)
    only_a: dict[str, Entry] = field(default_factory=dict)
    only_b: dict[str, Entry] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def pairing(a: Side, b: Side) -> Pairing:
    """Pair the tensors of both sides."""
    if isinstance(a, HFSide) and isinstance(b, HFSide):
        return _folders(a, b)
    if isinstance(a, MegatronSide) and isinstance(b, MegatronSide):
        return _checkpoints(a, b)
    return _across(a, b)


def _folders(a: HFSide, b: HFSide) -> Pairing:
    found = _by_name(a.tensors, b.tensors)
    found.only_a, found.only_b = (
        _without_scales(only, own, other) for only, own, other in ((found.only_a, a, b), (found.only_b, b, a))
    )
    _pair_by_rules(a, b, found)
    _pair_copies(a, b, found)
    return found


def _without_scales(only: dict[str, Entry], own: HFSide, other: HFSide) -> dict[str, Entry]:
    """Tensors without the scales of FP8 weights, which the other side stores in another type."""

    def needless(name: str) -> bool:
        weight = own.scaled(name)
        return weight in other.tensors and other.tensors[weight].kind not in FP8

    return {name: only[name] for name in only if not needless(name)}


def _by_name(a: dict[str, Entry], b: dict[str, Entry]) -> Pairing:
    pairs = [Pair(name, a[name], b[name]) for name in a if name in b]
    only_a = {name: entry for name, entry in a.items() if name not in b}
    return Pairing(pairs, only_a, {name: entry for name, entry in b.items() if name not in a})


def _pair_copies(a: Side, b: Side, found: Pairing) -> None:
    """Pair tensors of one side alone with the tensor that they repeat, of the other side if it has that."""
    for name in list(found.only_a):
        base = base_of(b, name) or base_of(a, name)
        if base is not None and (base in b.tensors or base in a.tensors):
            held = b.tensors if base in b.tensors else a.tensors
            found.pairs.append(Pair(name, found.only_a.pop(name), held[base], copy=base))
    for name in list(found.only_b):
        base = base_of(a, name) or base_of(b, name)
        if base is not None and (base in a.tensors or base in b.tensors):
            held = a.tensors if base in a.tensors else b.tensors
            found.pairs.append(Pair(name, held[base], found.only_b.pop(name), copy=base))


Unit = tuple[str, int | None]
"""A Megatron key, and the index of an expert in it."""


def _pair_by_rules(a: HFSide, b: HFSide, found: Pairing) -> None:
    """Pair what the folders name differently, by Megatron's tensors: other prefixes, packed experts."""
    if not (found.only_a and found.only_b):
        return
    units_a, units_b = _units(a, set(found.only_a)), _units(b, set(found.only_b))
    for unit, (names_a, one) in units_a.items():
        match = units_b.get(unit)
        if match is None or one.shape != match[1].shape:
            continue
        names_b, other = match
        found.pairs.append(Pair(_label(names_a, unit), one, other, other=_label(names_b, unit)))
        for names, only in ((names_a, found.only_a), (names_b, found.only_b)):
            for name in names:
                only.pop(name, None)


def _label(names: list[str], unit: Unit) -> str:
    """A name for messages: of packed experts with the index of one."""
    packed = len(names) == 1 and unit[1] is not None and not re.search(r"experts\.\d+\.", names[0])
    return f"{names[0]}[{unit[1]}]" if packed else names[0]


def _units(side: HFSide, names: set[str]) -> dict[Unit, tuple[list[str], Entry]]:
    """The Megatron tensors that come from these tensors alone; packed experts are taken apart."""
    layout = side.layout(max(Parts.of_side(side).depths(side.tensors), default=-1) + 1)
    units: dict[Unit, tuple[list[str], Entry]] = {}
    for rule in (None if layout is None else side.rules(layout)) or ():
        own = [tensor.name for tensor in rule.hf]
        if len(rule.mcore) != 1 or not set(own) <= names:
            continue
        piece = rule.mcore[0]
        whole = _converted(side, rule, 0)
        if piece.whole is None and ".experts." in piece.key and len(piece.shape or ()) == 3:
            shared = lru_cache(maxsize=1)(whole.read)
            for index in range(whole.shape[0]):
                one = replace(whole, shape=(1, *whole.shape[1:]), read=partial(_slice, shared, index))
                units[piece.key, index] = own, one
        else:
            units[piece.key, None if piece.offset is None else piece.offset[0]] = own, whole
    return units


def _slice(whole: Callable[[], Tensor], index: int) -> Tensor:
    return whole()[index : index + 1]


def _converted(side: HFSide, rule: Rule, index: int) -> Entry:
    """A Megatron tensor of a rule, made from the folder's."""
    shape, first = rule.mcore[index].shape, side.tensors[rule.hf[0].name]
    names = [tensor.name for tensor in rule.hf]

    def read() -> Tensor:
        return rule.to_mcore([side.tensors[name].read() for name in names])[index]

    return Entry(shape or first.shape, first.dtype, 0, read)


def _checkpoints(a: MegatronSide, b: MegatronSide) -> Pairing:
    """Pair by key: the other names of Transformer Engine are made one, and a GPT's become its hybrid's."""
    if (a.pattern is None) == (b.pattern is None):
        return _by_other_names(a.tensors, b.tensors, a, b)
    pattern = without_stages(a.pattern or b.pattern or "")
    halves = Halves.of(pattern)
    try:
        one, other = ({_hybrid(halves, side, key): each for key, each in side.tensors.items()} for side in (a, b))
    except (ValueError, IndexError) as error:
        found = _by_other_names(a.tensors, b.tensors, a, b)
        says = f"The GPT has no form with the hybrid's layers '{pattern}'; keys are compared as they are: {error}"
        found.findings.append(Finding("not compared", says, "audit checkpoints of the same model", WARNING))
        return found
    return _by_other_names(one, other, a, b)


def _hybrid(halves: Halves, side: MegatronSide, key: str) -> str:
    return key if side.pattern is not None else halves.hybrid_key(key)


def _by_other_names(one: dict[str, Entry], other: dict[str, Entry], a: MegatronSide, b: MegatronSide) -> Pairing:
    found = _by_name(one, other)
    usual = {_usual(key): key for key in other}
    for key in list(found.only_a):
        match = usual.get(_usual(key))
        if match is not None:
            found.pairs.append(Pair(key, found.only_a.pop(key), other[match], other=match))
            found.only_b.pop(match, None)
    usual = {_usual(key): key for key in one}
    for key in list(found.only_b):
        match = usual.get(_usual(key))
        if match is not None:
            found.pairs.append(Pair(match, one[match], found.only_b.pop(key), other=key))
    _pair_copies(a, b, found)
    return found


def _usual(key: str) -> str:
    """A key under one name, whatever modules saved it."""
    for theirs, ours in OWN_KEYS:
        if key.startswith("mtp.") and f".{theirs}layers." not in key:
            key = key.replace(f".{theirs}", f".{ours}")
    key = key.replace(FUSED_NORM, OWN_NORM)
    for fused, own in (("linear_qkv", "input_layernorm"), ("linear_q_down_proj", "input_layernorm")):
        key = key.replace(f"self_attention.{fused}.layer_norm_", f"{own}.")
    for fused, own in (("linear_kv_up_proj", "kv_layernorm"), ("linear_q_up_proj", "q_layernorm")):
        key = key.replace(f"self_attention.{fused}.layer_norm_", f"self_attention.{own}.")
    return key


def _across(a: Side, b: Side) -> Pairing:
    """Pair a folder and a checkpoint."""
    folder, saved = (a, b) if isinstance(a, HFSide) else (b, a)
    assert isinstance(folder, HFSide)
    assert isinstance(saved, MegatronSide)
    rules = _rules_across(folder, saved)
    if rules is None:
        known = (
            "its config is damaged"
            if folder.config is None
            else f"no family has its model_type '{folder.config.model_type}'"
        )
        says = f"The folder's names cannot be turned into Megatron's keys: {known}."
        advice = "export the checkpoint with the program that made it, and audit the two folders"
        return Pairing(findings=[Finding("not compared", says, advice)])
    found = Pairing()
    left = {key: entry for key, entry in saved.tensors.items() if key != DRAFT_VOCABULARY}
    covered: set[str] = set()
    turned = folder is b
    for rule in rules:
        _pair_rule(rule, folder, saved, left, found, turned)
        covered |= {tensor.name for tensor in rule.hf}
    extra = {
        name: entry for name, entry in folder.tensors.items() if name not in covered and folder.scaled(name) is None
    }
    of_folder, of_saved = (found.only_b, found.only_a) if turned else (found.only_a, found.only_b)
    of_folder |= extra
    of_saved |= left
    return found


def _rules_across(folder: HFSide, saved: MegatronSide) -> list[Rule] | None:
    """The rules of the folder's family for all depths that either side has or counts, in the checkpoint's forms."""
    depths = [max(Parts.of_side(side).depths(side.tensors), default=-1) + 1 for side in (folder, saved)]
    layout = folder.layout(max(*depths, folder.said_depths or 0))
    if layout is None or saved.reader is None:
        return None
    features = (layout.features | set(zero_features(saved.reader))) - lost_features(saved.reader)
    return folder.rules(Layout(layout.depths, frozenset(features), layout.carried))


def _pair_rule(
    rule: Rule, folder: HFSide, saved: MegatronSide, left: dict[str, Entry], found: Pairing, turned: bool
) -> None:
    """Pair the tensors of one rule; `turned` if the folder is side B."""
    keys = [_stored(piece, saved) for piece in rule.mcore]
    for piece, key in zip(rule.mcore, keys, strict=True):
        for alias in (piece.key, *piece.aliases):
            if left.pop(alias, None) is not None and key is not None and alias != key:
                found.pairs.append(Pair(alias, saved.tensors[key], saved.tensors[alias], copy=key))
    pieces = [(key, piece) for key, piece in zip(keys, rule.mcore, strict=True) if key is not None]
    held = len(pieces) == len(rule.mcore) and all(_fits(saved.tensors[key], piece) for key, piece in pieces)
    of_folder, of_saved = (found.only_b, found.only_a) if turned else (found.only_a, found.only_b)
    back = lru_cache(maxsize=1)(partial(_back, rule, pieces, saved)) if held else None
    for index, tensor in enumerate(rule.hf):
        mine = folder.tensors.get(tensor.name)
        name = tensor.name
        if back is not None:
            kind = mine.kind if rule.rounds and mine is not None else None
            shape = tensor.shape or (mine.shape if mine is not None else ())
            theirs = Entry(shape, _dtype(pieces, saved), 0, partial(_nth, back, index, kind))
            if mine is not None:
                found.pairs.append(Pair(name, theirs, mine) if turned else Pair(name, mine, theirs))
            elif not _may_lack(folder, name) and pieces:
                of_saved[name] = theirs
        elif mine is not None and (rule.mcore or mine.shape != tensor.shape):
            of_folder[name] = mine
    for key, _ in pieces if not held else ():
        of_saved[key] = saved.tensors[key]
    if isinstance(rule.map, MinusOne) and rule.map.original and held and rule.hf[0].name in folder.tensors:
        found.pairs.append(_derived(rule, pieces, folder, saved, turned))


def _may_lack(folder: HFSide, name: str) -> bool:
    """Whether a folder may leave out a tensor, since it repeats another one that is there."""
    return base_of(folder, name) in folder.tensors


def _stored(piece: Piece, saved: MegatronSide) -> str | None:
    return next((key for key in (piece.key, *piece.aliases) if key in saved.tensors), None)


def _fits(entry: Entry, piece: Piece) -> bool:
    wanted = piece.whole or piece.shape
    if wanted is None or entry.shape == wanted:
        return True
    return piece.padded and entry.shape[0] >= wanted[0] and entry.shape[1:] == wanted[1:]


def _back(rule: Rule, pieces: list[tuple[str, Piece]], saved: MegatronSide) -> list[Tensor]:
    """The folder's tensors, made from the checkpoint's."""
    return rule.to_hf([saved.read(key, piece.offset, piece.shape) for key, piece in pieces])


def _nth(back: Callable[[], list[Tensor]], index: int, kind: torch.dtype | None) -> Tensor:
    """One of the tensors; `kind` is the type to round it to, of a norm whose original training has not kept."""
    return back()[index] if kind is None else back()[index].to(kind)


def _dtype(pieces: Iterable[tuple[str, Piece]], saved: MegatronSide) -> str:
    return next((saved.tensors[key].dtype for key, _ in pieces), "float32")


def _derived(rule: Rule, pieces: list[tuple[str, Piece]], folder: HFSide, saved: MegatronSide, turned: bool) -> Pair:
    """The weight of a norm that is stored as w - 1 beside the original, which export gives back: both must agree."""
    key, piece = next((key, piece) for key, piece in pieces if not key.startswith(ORIGINAL))
    mine = folder.tensors[rule.hf[0].name]

    def expected() -> Tensor:
        return rule.to_mcore([mine.read()])[1]

    def read() -> Tensor:
        return saved.read(key, piece.offset, piece.shape).float()

    one, other = Entry(mine.shape, "float32", 0, expected), Entry(mine.shape, "float32", 0, read)
    return Pair(key, other, one) if turned else Pair(key, one, other)
