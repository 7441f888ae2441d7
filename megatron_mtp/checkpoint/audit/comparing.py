"""The tensors of two sides: which is which by the plan of conversion, and how those differ that are not equal.

    two folders              by name; what is left by the Megatron tensors that each family's rules give to it
    two checkpoints          by key, with Transformer Engine's other names
    folder and checkpoint    the rules read the checkpoint back under the folder's names

A tensor that one side leaves out since it repeats another one is paired with the repeated one. Each worker has two
tensors in memory at a time. Differences of the same kind are one finding.
"""

import math
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from megatron_mtp.checkpoint.audit import ERROR, NOTE, WARNING, Finding, counted, listed
from megatron_mtp.checkpoint.audit.contents import lacking, unread
from megatron_mtp.checkpoint.audit.quantization import is_quantized
from megatron_mtp.checkpoint.audit.saved import MegatronSide, Side
from megatron_mtp.checkpoint.audit.side import (
    DEPTH,
    EMBEDDING,
    HEAD,
    TRUNK,
    HFSide,
    StoredTensor,
    is_finite,
)
from megatron_mtp.checkpoint.convert.plan import unnumbered
from megatron_mtp.checkpoint.families.rules import Computed, Copies, Piece, Rule
from megatron_mtp.checkpoint.families.trunk import ORIGINAL
from megatron_mtp.checkpoint.mcore import FUSED_NORM, OWN_NORM
from megatron_mtp.checkpoint.mcore.reader import equal_bits
from megatron_mtp.files import default_workers

OF_EMBEDDING, OF_HEAD = ("embed_tokens.weight",), ("shared_head.head.weight", "shared_head.output.weight")
OWN = ("longcat", "step3")
"""Beginnings of the `model_type`s whose depths have an embedding or a head of their own."""
PADDED = WORDS, OUTPUT = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Megatron's tensors that have rows of padding, by the layout of the run."""
NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
CLOSE = 0.1
"""Largest difference of a quantized weight from its original, as a part of the original's norm."""
PIECE = 2**20
"""Numbers that are subtracted at a time."""
EARLIER = "take these tensors from an earlier save"
ADVICE: dict[str, str] = {
    "type": "load both in the same type; convert --dtype writes another one",
    "rounded": "export in the type of side A, if side B is to have the same numbers",
    "other numbers": "check that both are the same model and the same step",
    "not finite": EARLIER,
    "tied copy": "store the head, and set tie_word_embeddings to false",
}
"""What to do; REMAKE for what is not here."""
REMAKE = "convert it again, or correct the names and maps of the program that wrote it"
Kind = tuple[str, str]
"""A difference: out of `GUESSES`, and the end of a sentence that begins with the tensor on side B."""
UNREADABLE = (ValueError, OSError, RuntimeError)


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
    a: StoredTensor
    b: StoredTensor
    copy: str = ""
    other: str = ""


@dataclass
class Pairing:
    """All tensors of both sides: pairs, what one side has alone by name, and what could not be paired."""

    pairs: list[Pair] = field(default_factory=list)
    only_a: dict[str, StoredTensor] = field(default_factory=dict)
    only_b: dict[str, StoredTensor] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def pairing(a: Side, b: Side) -> Pairing:
    """Pair the tensors of both sides."""
    if isinstance(a, HFSide) and isinstance(b, MegatronSide):
        return _across(a, b)
    if isinstance(a, MegatronSide) and isinstance(b, HFSide):
        found = _across(b, a)
        turned = [replace(pair, a=pair.b, b=pair.a) for pair in found.pairs]
        return Pairing(turned, found.only_b, found.only_a, found.findings)
    pairs = [Pair(name, entry, b.tensors[name]) for name, entry in a.tensors.items() if name in b.tensors]
    only_a, only_b = (
        {name: entry for name, entry in one.tensors.items() if name not in other.tensors}
        for one, other in ((a, b), (b, a))
    )
    found = Pairing(pairs, only_a, only_b)
    if isinstance(a, MegatronSide):
        _pair_by_usual_keys(a, b, found)
    elif isinstance(b, HFSide) and only_a and only_b:
        _pair_by_rules(a, b, found)
    for only, own, other in ((only_a, a, b), (only_b, b, a)):
        for name in list(only):  # copies, paired with the tensor that they repeat, of the other side if it has that
            base = base_of(other, name) or base_of(own, name)
            held = next((side.tensors for side in (other, own) if base in side.tensors), None)
            if base is not None and held is not None:
                pair = only.pop(name), held[base]
                found.pairs.append(Pair(name, *(pair if own is a else pair[::-1]), copy=base))
    return found


def base_of(side: Side, name: str) -> str | None:
    """The tensor that a name repeats on this side, embedding or head; None if it is no copy."""
    if not isinstance(side, HFSide):
        return WORDS if name == OUTPUT and side.tied and WORDS in side.tensors else None
    kind = side.parts.of(name).kind
    own = side.config is not None and side.config.model_type.startswith(OWN)
    if kind == HEAD and side.tied:
        wanted = EMBEDDING
    elif kind != DEPTH or own or not name.endswith(OF_EMBEDDING + OF_HEAD):
        return None
    else:
        wanted = EMBEDDING if name.endswith(OF_EMBEDDING) or side.tied else HEAD
    return next((name for name in side.tensors if side.parts.of(name).kind == wanted), None)


def _pair_by_rules(a: HFSide, b: HFSide, found: Pairing) -> None:
    """Pair what the folders name differently, by Megatron's tensors: other prefixes, packed experts."""
    others = _units(b, set(found.only_b))
    for unit, (names, label, one) in _units(a, set(found.only_a)).items():
        if unit in others and others[unit][2].shape == one.shape:
            other_names, other_label, other = others[unit]
            found.pairs.append(Pair(label, one, other, other=other_label))
            for name in names:
                found.only_a.pop(name, None)
            for name in other_names:
                found.only_b.pop(name, None)


def _units(side: HFSide, names: set[str]) -> dict[tuple[str, int | None], tuple[list[str], str, StoredTensor]]:
    """Megatron's tensors that come from these tensors alone: names, a label, numbers; packed experts are taken apart.

    The key is Megatron's, and the index of an expert in it.
    """
    units: dict[tuple[str, int | None], tuple[list[str], str, StoredTensor]] = {}
    for rule in side.plan:
        own = [tensor.name for tensor in rule.hf]
        if len(rule.mcore) != 1 or not set(own) <= names:
            continue
        piece, entries = rule.mcore[0], [side.tensors[name] for name in own]
        shape, read = piece.shape or entries[0].shape, partial(_converted, rule, entries)
        if piece.whole is None and ".experts." in piece.key and shape is not None and len(shape) == 3:
            shared = lru_cache(maxsize=1)(read)
            for index in range(shape[0]):
                one = StoredTensor((1, *shape[1:]), entries[0].dtype, 0, partial(_expert, shared, index))
                label = own[0] if len(own) > 1 or re.search(r"experts\.\d+\.", own[0]) else f"{own[0]}[{index}]"
                units[piece.key, index] = own, label, one
        else:
            index_in = None if piece.offset is None else piece.offset[0]
            units[piece.key, index_in] = own, own[0], StoredTensor(shape, entries[0].dtype, 0, read)
    return units


def _converted(rule: Rule, entries: list[StoredTensor]) -> Tensor:
    return rule.to_mcore([entry.tensor() for entry in entries])[0]


def _expert(packed: Callable[[], Tensor], index: int) -> Tensor:
    return packed()[index : index + 1]


def _pair_by_usual_keys(a: Side, b: Side, found: Pairing) -> None:
    """Pair what two checkpoints call by other keys of the same tensor, with the tensor itself where it is paired."""
    usual_a, usual_b = ({_usual(key): key for key in side.tensors} for side in (a, b))
    for key in list(found.only_a):
        if match := usual_b.get(_usual(key)):
            found.pairs.append(Pair(key, found.only_a.pop(key), b.tensors[match], other=match))
            found.only_b.pop(match, None)
    for key in list(found.only_b):
        if match := usual_a.get(_usual(key)):
            found.pairs.append(Pair(match, a.tensors[match], found.only_b.pop(key), other=key))


def _usual(key: str) -> str:
    """A key under one name, whatever modules saved it."""
    if key.startswith("mtp."):  # a depth's layer, as some versions have written it
        key = re.sub(r"\.(mtp_model_layer|tf_layer)\.(?!layers\.)", ".transformer_layer.", key)
    key = key.replace(FUSED_NORM, OWN_NORM)
    key = re.sub(r"self_attention\.linear_q(kv|_down_proj)\.layer_norm_", "input_layernorm.", key)
    return re.sub(r"self_attention\.linear_(kv|q)_up_proj\.layer_norm_", r"self_attention.\1_layernorm.", key)


def _across(folder: HFSide, saved: MegatronSide) -> Pairing:
    """Pair a folder with a checkpoint, by the rules of the folder's family in the checkpoint's forms."""
    rules = None if saved.reader is None else folder.rules_beside(saved.reader, saved.held_depths)
    if rules is None:
        config = folder.config
        known = "its config is damaged" if config is None else f"no family has its model_type '{config.model_type}'"
        says = f"The folder's names cannot be turned into Megatron's keys: {known}."
        advice = "export the checkpoint with the program that made it, and audit the two folders"
        return Pairing(findings=[Finding("not compared", says, advice)])
    covered = {tensor.name for rule in rules for tensor in rule.hf}
    found = Pairing(
        only_a={name: entry for name, entry in folder.tensors.items() if name not in covered},
        only_b={key: entry for key, entry in saved.tensors.items() if folder.is_counterpart(key)},
    )
    for rule in rules:
        _pair_rule(rule, folder, saved, found)
    return found


def _pair_rule(rule: Rule, folder: HFSide, saved: MegatronSide, found: Pairing) -> None:
    """Pair the tensors of one rule, which makes the folder's of the checkpoint's where these are all there."""
    pieces: list[tuple[str, Piece]] = []
    for piece in rule.mcore:
        every = [key for key in (piece.key, *piece.aliases) if key in saved.tensors]
        pieces += [(key, piece) for key in every[:1]]
        for key in every:
            if found.only_b.pop(key, None) is not None and key != every[0]:
                found.pairs.append(Pair(key, saved.tensors[every[0]], saved.tensors[key], copy=every[0]))
    held = len(pieces) == len(rule.mcore) and all(_fits(saved.tensors[key], piece) for key, piece in pieces)

    @lru_cache(maxsize=1)
    def back() -> list[Tensor]:
        return rule.to_hf([saved.read(key, piece.offset, piece.shape) for key, piece in pieces])

    def nth(index: int, kind: torch.dtype | None) -> Tensor:
        return back()[index] if kind is None else back()[index].to(kind)

    for index, tensor in enumerate(rule.hf):
        mine = folder.tensors.get(tensor.name)
        if held:
            kind = mine.kind if rule.rounds and mine is not None else None  # of a norm whose original training lost
            shape = tensor.shape or (mine.shape if mine is not None else ())
            dtype = saved.tensors[pieces[0][0]].dtype if pieces else "float32"
            theirs = StoredTensor(shape, dtype, 0, partial(nth, index, kind))
            if mine is not None:
                found.pairs.append(Pair(tensor.name, mine, theirs))
            elif base_of(folder, tensor.name) not in folder.tensors and pieces:
                found.only_b[tensor.name] = theirs
        elif mine is not None and (rule.mcore or mine.shape != tensor.shape):
            found.only_a[tensor.name] = mine
    if not held:
        found.only_b |= {key: saved.tensors[key] for key, _ in pieces}
    elif isinstance(rule.map, Computed) and rule.map.original and rule.hf[0].name in folder.tensors:
        # stored as Megatron computes with it beside the original, which an export gives back: both must agree
        mine, (key, piece) = folder.tensors[rule.hf[0].name], next(p for p in pieces if not p[0].startswith(ORIGINAL))
        wanted = StoredTensor(mine.shape, "float32", 0, lambda: rule.to_mcore([mine.tensor()])[1])
        stored = StoredTensor(mine.shape, "float32", 0, lambda: saved.read(key, piece.offset, piece.shape).float())
        found.pairs.append(Pair(key, wanted, stored))


def _fits(entry: StoredTensor, piece: Piece) -> bool:
    wanted, shape = piece.whole or piece.shape, entry.shape or ()
    larger = wanted is not None and piece.padded and shape[0] >= wanted[0] and shape[1:] == wanted[1:]
    return wanted in (None, shape) or larger


# --- numbers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """A compared pair: whether both are finite; the difference and its figure, or why it cannot be read."""

    pair: Pair
    finite: tuple[bool, bool] = (True, True)
    kind: Kind | None = None
    figure: float | None = None
    error: str = ""


def compare(a: Side, b: Side, paired: Pairing, step: Callable[[int], object]) -> tuple[int, list[Finding]]:
    """Compare all tensors of two sides; what was read of them is kept there.

    Args:
        a, b: the sides.
        paired: their tensors.
        step: called after every pair with the bytes that were read.

    Returns:
        The number of tensors that are equal bit by bit, and what differs.
    """
    equal, differing, findings = 0, list[Compared](), list(paired.findings)
    unknown = {pair.name: pair for pair in paired.pairs if pair.a.read is None or pair.b.read is None}
    if unknown:
        says = f"{counted(len(unknown), 'weight')} in forms that are not read were not compared: {listed(unknown)}."
        findings.append(Finding("not compared", says, severity=NOTE, names=tuple(unknown)))
    with ThreadPoolExecutor(default_workers()) as pool:
        compared = partial(_compared, threading.Lock())
        for one in pool.map(compared, [pair for pair in paired.pairs if pair.name not in unknown]):
            pair = one.pair
            if one.error:
                says = f"'{pair.name}' cannot be read: {one.error}"
                findings.append(Finding("damaged file", says, "fetch the file again", names=(pair.name,)))
            elif one.kind is not None:
                differing.append(one)
            for side, name, finite in zip((a, b), (pair.name, pair.other or pair.name), one.finite, strict=True):
                if not one.error and name in side.tensors:
                    side.finite[name] = finite
            equal += one.kind is None and not one.error and not pair.copy
            step(pair.a.bytes + pair.b.bytes)
    findings += _differing(differing)
    parts = (a if isinstance(a, HFSide) else b).parts
    shared = [pair.name for pair in paired.pairs if not pair.copy]
    for only, lacks, letters in ((paired.only_a, b, "AB"), (paired.only_b, a, "BA")):
        if lacks.tensors:
            every = [*shared, *only]
            depths, layers = (parts.numbered(kind, every) for kind in (DEPTH, TRUNK))
            counts = f"Side {letters[0]} holds {{}}, side {letters[1]} {{}}"
            held, says = {*shared, *unread(lacks)}, f"Side {letters[1]} lacks {{}} of the other side"
            findings += lacking(parts, depths, layers, every, held, f" on side {letters[1]}", counts, says)
    return equal, findings


def _compared(explaining: threading.Lock, pair: Pair) -> Compared:
    """Read and compare a pair; differences are explained one at a time, since that takes copies."""
    try:
        left, right = pair.a.tensor(), pair.b.tensor()
    except UNREADABLE as error:
        return Compared(pair, error=str(error))
    if equal_bits(left, right):
        return Compared(pair, (is_finite(left),) * 2)
    seen = Compared(pair, (is_finite(left), is_finite(right)))
    if pair.name in PADDED and left.shape[1:] == right.shape[1:]:
        rows = min(left.size(0), right.size(0))
        if equal_bits(left[:rows], right[:rows]):
            return seen
    with explaining:
        kind = explain(left, right)
        quantized = [("B", pair.b)] * is_quantized(pair.b) or [("A", pair.a)] * is_quantized(pair.a)
        for side, entry in quantized if kind[0] == "other numbers" else ():
            if (left.float() - right.float()).norm() <= CLOSE * left.float().norm():
                kind = "rounded", f"differs by rounding: side {side} is {entry.dtype} with scales"
        if pair.copy and kind[0] not in ("rounded", "type"):
            kind = "tied copy", f"is left out on one side as a copy of '{pair.copy}', whose numbers are others"
        return replace(seen, kind=kind, figure=difference(left, right))


def explain(a: Tensor, b: Tensor) -> Kind:
    """Say how two tensors that are not equal differ: the first explanation that fits every number."""
    if a.shape != b.shape:
        return "shape", f"has the shape {list(b.shape)}, not {list(a.shape)}"
    if a.dtype != b.dtype:
        ours, name = (str(one.dtype).removeprefix("torch.") for one in (a, b))
        if equal_bits(a.double(), b.double()):
            return "type", f"is of type {name}, not {ours}, with the same numbers"
        if equal_bits(a.to(b.dtype), b) or equal_bits(b.to(a.dtype), a):
            return "rounded", f"is of type {name}, not {ours}: one side was rounded"
        b = b.to(a.dtype)
    for one, side in ((a, "A"), (b, "B")):
        if not is_finite(one):
            return "not finite", f"has numbers that are NaN or infinite on side {side}"
    for one, other, side in ((a, b, "B"), (b, a, "A")):
        for narrow in NARROW:
            if narrow.itemsize < one.element_size() and equal_bits(one.to(narrow).to(one.dtype), other):
                name = str(narrow).removeprefix("torch.")
                return "rounded", f"differs by rounding: side {side} went through {name}"
    for dim in range(min(a.dim(), 2))[::-1]:
        if a.size(dim) % 2 == 0 and all(map(torch.equal, a.chunk(2, dim)[::-1], b.chunk(2, dim))):
            return "halves swapped", f"has its two halves of {'columns' if dim else 'rows'} swapped"
    return "other numbers", "has other numbers"


def difference(a: Tensor, b: Tensor) -> float | None:
    """The largest difference of two tensors of one shape, a part at a time so that little is copied; None of others."""
    if a.shape != b.shape or a.numel() == 0:
        return None
    pieces = zip(a.flatten().split(PIECE), b.flatten().split(PIECE), strict=True)
    found = [(one.double() - other.double()).abs().max().item() for one, other in pieces]
    return math.nan if any(map(math.isnan, found)) else max(found)


def _differing(differing: list[Compared]) -> Iterator[Finding]:
    groups: dict[Kind, list[Compared]] = defaultdict(list)
    for one in differing:
        guess, says = one.kind or ("", "")
        groups[guess, "" if guess == "shape" else says].append(one)
    for (guess, _), members in groups.items():
        names = [one.pair.name for one in members]
        figure = max((one.figure for one in members if one.figure is not None), default=None)
        by = f" (largest difference {figure:.3g})" if figure is not None else ""
        kinds, (_, differs) = unnumbered(names), members[0].kind or ("", "")
        named = kinds if len(kinds) < 200 else listed(names)
        says = f"{counted(len(members), 'tensor')}, {named}: side B's {differs}{by}."
        severity = WARNING if guess == "type" else ERROR
        yield Finding(guess, says, ADVICE.get(guess, REMAKE), severity, tuple(names), figure=figure)


# --- numbers of one side ----------------------------------------------------------------------------------------------


def check_numbers(side: Side, step: Callable[[int], object]) -> Iterator[Finding]:
    """Read what no comparison has read, and find numbers that are not finite, and tensors that cannot be read."""
    errors: dict[str, str] = {}
    for name, entry in side.tensors.items():
        if name not in side.finite:
            try:
                side.finite[name] = entry.read is None or is_finite(entry.tensor())
            except UNREADABLE as error:
                errors[name] = str(error)
            step(entry.bytes)
    if errors:
        says = f"{counted(len(errors), 'tensor')} cannot be read: {listed(errors)}. {next(iter(errors.values()))}"
        yield Finding("damaged file", says, "fetch the file again", names=tuple(errors))
    scales = side.scales if isinstance(side, HFSide) else {}
    if wild := tuple(name for name, finite in side.finite.items() if not finite and name not in scales):
        yield Finding("not finite", f"{listed(wild)}: some numbers are NaN or infinite.", EARLIER, names=wild)


def copies_of(side: Side) -> dict[str, str]:
    """The tensors of a side that repeat another one, each with the repeated tensor."""
    named = {name: base for name in side.tensors if (base := base_of(side, name)) is not None}
    for rule in side.plan if isinstance(side, HFSide) else ():
        if isinstance(rule.map, Copies):
            first, *others = (tensor.name for tensor in rule.hf)
            named |= dict.fromkeys(others, first)
    held = side.tensors
    return {name: base for name, base in named.items() if name in held and base in held and name != base}


def check_copies(side: Side) -> Iterator[Finding]:
    """Compare every copy with the tensor that it repeats; loaders take one or the other."""
    same: list[str] = []
    stale: list[str] = []
    for name, base in copies_of(side).items():
        one, other = side.tensors[name], side.tensors[base]
        if one.read is not None and other.read is not None:
            (same if equal_bits(one.tensor(), other.tensor()) else stale).append(name)
    if same:
        says = f"{counted(len(same), 'tensor')} repeat embedding or head, with the same bits: {listed(same)}."
        yield Finding("tied copy", says, severity=NOTE, names=tuple(same))
    if stale:
        says = f"{listed(stale)} should repeat embedding or head, but the numbers differ: engines load either of both."
        yield Finding("stale copy", says, "store the one that was trained in both places", names=tuple(stale))
