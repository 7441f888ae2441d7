"""Compare the tensors of two sides: pair them, read each once, and explain differences.

    two folders              by name; the rest by the Megatron tensors that each family's rules assign
    two checkpoints          by key, including Transformer Engine's other keys
    folder and checkpoint    rule by rule along the conversion plan

A worker holds the tensors of one pair (some rows of large ones) or of one rule. Copies are compared by digests of their
bits. A pair of stored tensors that differs is read again, whole, to explain it. Differences of the same kind become one
finding.
"""

import math
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_mtp.checkpoint.audit import ERROR, NOTE, Finding, counted, listed
from megatron_mtp.checkpoint.audit.contents import lacking
from megatron_mtp.checkpoint.audit.looks import Bits, Look
from megatron_mtp.checkpoint.audit.numbers import EARLIER, differ
from megatron_mtp.checkpoint.audit.quantization import is_quantized
from megatron_mtp.checkpoint.audit.saved import MegatronSide, Side
from megatron_mtp.checkpoint.audit.side import DEPTH, TRUNK, UNREADABLE, HFSide
from megatron_mtp.checkpoint.convert.plan import unnumbered
from megatron_mtp.checkpoint.convert.rule_sides import RuleSides
from megatron_mtp.checkpoint.families.rules import Computed, Piece, Rule
from megatron_mtp.checkpoint.families.trunk import ORIGINAL
from megatron_mtp.checkpoint.hf import Shape
from megatron_mtp.common.files import default_workers
from megatron_mtp.megatron.checkpoint import EMBEDDING, FUSED_NORM, OUTPUT, OWN_NORM
from megatron_mtp.megatron.checkpoint.bits import equal_bits

PADDED = (EMBEDDING, OUTPUT)
"""Megatron's tensors with padding rows, which depend on the layout of the run."""
NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
CLOSE = 0.1
"""Largest difference of a quantized weight from its original, relative to the original's norm."""
PIECE = 2**20
"""Number of values that are subtracted at a time."""
ADVICE: dict[str, str] = {
    "rounded": "export in the type of side A, if side B is to have the same numbers",
    "other numbers": "check that both are the same model and the same step",
    "not finite": EARLIER,
    "tied copy": "store the head, and set tie_word_embeddings to false",
}
"""What to do; REMAKE for kinds that are not listed."""
REMAKE = "convert it again, or correct the names and maps of the program that wrote it"
EXPLAINING = threading.Lock()
"""Lock: differences are explained one at a time, because that needs copies."""
Difference = tuple[str, str]
"""A difference: one of `GUESSES`, and the end of a sentence that begins with the tensor on side B."""


@dataclass(frozen=True)
class Compared:
    """A compared pair of tensors.

    Attributes:
        name: name on side A, or on the side that has it.
        kind: kind of difference; None if equal.
        figure: largest difference of values; None if not computed.
        bits: for a difference, the bits of side A and of side B; None for a tensor with one value.
    """

    name: str
    kind: Difference | None = None
    figure: float | None = None
    bits: tuple[Bits | None, Bits | None] | None = None


@dataclass
class Pairing:
    """The tensors of two sides.

    Attributes:
        groups: functions that read and compare tensors that belong together, with the name of one of them.
        shared: names of what both sides have.
        only_a, only_b: names of what only one side has, in order.
        copies: a side, the name of a tensor that it stores and others leave out, and the name of the tensor it repeats.
        unread: names of what both have, in a form that cannot be read.
        findings: what could not be paired or compared.
    """

    groups: list[tuple[str, Callable[[], Iterable[Compared]]]] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    only_a: dict[str, None] = field(default_factory=dict)
    only_b: dict[str, None] = field(default_factory=dict)
    copies: list[tuple[Side, str, str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def pairing(a: Side, b: Side) -> Pairing:
    """Pair the tensors of both sides."""
    if isinstance(a, HFSide) and isinstance(b, MegatronSide):
        return _across(a, b, "A")
    if isinstance(a, MegatronSide) and isinstance(b, HFSide):
        found = _across(b, a, "B")
        found.only_a, found.only_b = found.only_b, found.only_a
        return found
    found = Pairing()
    usual_a, usual_b = ({_usual(name): name for name in side.tensors} for side in (a, b))
    pairs = {name: name if name in b.tensors else usual_b.get(_usual(name)) for name in a.tensors}
    both = [(name, match) for name, match in pairs.items() if match is not None]
    matched = set(pairs.values())
    rest = [name for name in b.tensors if name not in matched]
    both += [(usual_a[_usual(name)], name) for name in rest if _usual(name) in usual_a]
    for name, match in both:
        found.shared.append(name)
        if None in (a.tensors[name].read, b.tensors[match].read):
            found.unread.append(name)
        else:
            found.groups.append((name, partial(_by_name, a, name, b, match)))
    found.only_a = dict.fromkeys(name for name, match in pairs.items() if match is None)
    found.only_b = dict.fromkeys(name for name in rest if _usual(name) not in usual_a)
    if isinstance(a, HFSide) and isinstance(b, HFSide):
        _pair_by_rules(a, b, found)
    for only, own, other in ((found.only_a, a, b), (found.only_b, b, a)):
        for name in list(only):
            base = other.base_of(name) or own.base_of(name)
            if base is not None and base in own.tensors:
                del only[name]
                found.copies.append((own, name, base))
    return found


def _pair_by_rules(a: HFSide, b: HFSide, found: Pairing) -> None:
    """Pair tensors with different names by Megatron's tensors: other prefixes, packed experts."""
    ours, theirs = _made_of(a, found.only_a), _made_of(b, found.only_b)
    for made in (made for made in ours if made in theirs):
        both = ours[made], theirs[made]
        found.groups.append((made[0], partial(_by_key, a, b, *both)))
        found.shared += [tensor.name for rule in ours[made] for tensor in rule.hf]
        for only, rules in zip((found.only_a, found.only_b), both, strict=True):
            for name in [tensor.name for rule in rules for tensor in rule.hf]:
                del only[name]


def _made_of(side: HFSide, names: Mapping[str, None]) -> dict[tuple[str, Shape | None], list[Rule]]:
    """Return the rules of Megatron's tensors that need only these tensors, by key and shape; one each for experts."""
    made: dict[tuple[str, Shape | None], list[Rule]] = defaultdict(list)
    for rule in side.plan if names else ():
        if len(rule.mcore) == 1 and all(tensor.name in names for tensor in rule.hf):
            piece = rule.mcore[0]
            made[piece.key, piece.whole or piece.shape].append(rule)
    return {
        (key, shape): rules
        for (key, shape), rules in made.items()
        if rules[0].mcore[0].whole is None or (shape and len(rules) == shape[0])
    }


def _by_key(a: HFSide, b: HFSide, ours: list[Rule], theirs: list[Rule]) -> Iterator[Compared]:
    """Compare a tensor of Megatron that both folders produce; expert by expert if one folder has single experts."""
    left, right = (
        [rule.to_mcore([side.read(tensor.name) for tensor in rule.hf])[0] for rule in rules]
        for side, rules in ((a, ours), (b, theirs))
    )
    if len(left) != len(right):
        left, right = (list(torch.cat(tensors).split(1)) for tensors in (left, right))
    for rule, one, other in zip(theirs if len(theirs) > len(ours) else ours, left, right, strict=True):
        yield judged(rule.hf[0].name, one, other)


def _usual(key: str) -> str:
    """Return one common name for a key, whatever modules saved it."""
    if key.startswith("mtp."):  # some versions name the inner layer of an MTP layer differently
        key = re.sub(r"\.(mtp_model_layer|tf_layer)\.(?!layers\.)", ".transformer_layer.", key)
    key = key.replace(FUSED_NORM, OWN_NORM)
    key = re.sub(r"self_attention\.linear_q(kv|_down_proj)\.layer_norm_", "input_layernorm.", key)
    return re.sub(r"self_attention\.linear_(kv|q)_up_proj\.layer_norm_", r"self_attention.\1_layernorm.", key)


# --- a folder and a checkpoint ----------------------------------------------------------------------------------------


def _across(folder: HFSide, saved: MegatronSide, letter: str) -> Pairing:
    """Pair a folder, side `letter`, with a checkpoint; what the folder has alone is in `only_a`.

    The rules are those of the folder's family in the checkpoint's forms.
    """
    rules = [] if saved.reader is None else folder.rules(saved.held_depths, saved.reader)
    if not rules:
        config = folder.config
        known = "its config is damaged" if config is None else f"no family has its model_type '{config.model_type}'"
        says = f"The folder's names cannot be turned into Megatron's keys: {known}."
        advice = "export the checkpoint with the program that made it, and audit the two folders"
        return Pairing(findings=[Finding("not compared", says, advice)])
    covered = {tensor.name for rule in rules for tensor in rule.hf}
    found = Pairing(
        only_a=dict.fromkeys(name for name in folder.tensors if name not in covered),
        only_b=dict.fromkeys(key for key in saved.tensors if folder.is_counterpart(key)),
    )
    for rule in rules:
        _pair_rule(rule, folder, saved, letter, found)
    return found


def _pair_rule(rule: Rule, folder: HFSide, saved: MegatronSide, letter: str, found: Pairing) -> None:
    """Pair the tensors of one rule, if the checkpoint has all tensors that it needs."""
    every = [[key for key in (piece.key, *piece.aliases) if key in saved.tensors] for piece in rule.mcore]
    for key in (key for keys in every for key in keys):
        found.only_b.pop(key, None)
    names = [tensor.name for tensor in rule.hf if tensor.name in folder.tensors]
    stored = [saved.tensors[keys[0]].shape if keys else None for keys in every]
    if not all(every) or not all(map(Piece.fits, rule.mcore, stored)):
        found.only_a |= dict.fromkeys(names)
        found.only_b |= dict.fromkeys(keys[0] for keys in every if keys)
        return
    lost = [tensor.name for tensor in rule.hf if tensor.name not in folder.tensors and rule.mcore]
    found.only_b |= dict.fromkeys(name for name in lost if folder.base_of(name) not in folder.tensors)
    found.copies += [(saved, key, keys[0]) for keys in every for key in keys[1:]]
    found.shared += names
    readable = [name for name in names if folder.tensors[name].read is not None]
    found.unread += [name for name in names if name not in readable]
    if readable:
        found.groups.append((readable[0], partial(_by_rule, rule, readable, every, folder, saved, letter)))


def _by_rule(
    rule: Rule, names: list[str], every: list[list[str]], folder: HFSide, saved: MegatronSide, letter: str
) -> Iterator[Compared]:
    """Compare the folder's tensors with those that the checkpoint produces.

    A weight that Megatron computes with in another form is stored in both, and an export gives back the first alone:
    both are compared.
    """
    ours = []
    for keys, piece in zip(every, rule.mcore, strict=True):
        slab = () if piece.offset is None else (piece.offset, piece.shape)
        tensor = saved.read(keys[0], *slab)
        ours.append(tensor[: piece.shape[0]] if piece.padded and piece.shape else tensor)
    step = RuleSides(rule, {name: folder.read(name) for name in names}, ours)
    pairs = list(step.back())
    if isinstance(rule.map, Computed) and rule.map.original:
        pairs += [(key, made, stored.float()) for key, made, stored in step.there() if not key.startswith(ORIGINAL)]
    for name, theirs, made in pairs:
        quantized = name in folder.tensors and is_quantized(folder.tensors[name])
        left, right = (theirs, made) if letter == "A" else (made, theirs)
        yield judged(name, left, right, f"{letter} is {folder.tensors[name].dtype}" if quantized else "")


# --- parts that only one side has -------------------------------------------------------------------------------------


def check_lacking(a: Side, b: Side, found: Pairing) -> Iterator[Finding]:
    """Find what one side has and the other lacks, and what could not be compared."""
    yield from found.findings
    if found.unread:
        says = f"{counted(len(found.unread), 'weight')} in forms that are not read were not compared: "
        yield Finding("not compared", f"{says}{listed(found.unread)}.", severity=NOTE, names=tuple(found.unread))
    homes = {bits: name for name in found.only_a if (bits := _bits_of(name, a)) is not None}
    known = {name: bits for name in found.only_b if (bits := _bits_of(name, b)) in homes and bits is not None}
    if renamed := {name: homes[bits] for name, bits in known.items()}:
        says = f"{counted(len(renamed), 'tensor')} have other names on side B: {_places(renamed)}."
        yield Finding("tensor missing", says, severity=NOTE, names=tuple(renamed))
    parts = (a if isinstance(a, HFSide) else b).parts
    for only, lacks, letters in ((found.only_a, b, "AB"), (found.only_b, a, "BA")):
        if lacks.tensors:
            every = [*found.shared, *only]
            depths, layers = (parts.numbered(kind, every) for kind in (DEPTH, TRUNK))
            counts = f"Side {letters[0]} holds {{}}, side {letters[1]} {{}}"
            held, says = {*found.shared, *lacks.unread}, f"Side {letters[1]} lacks {{}} of the other side"
            yield from lacking(parts, depths, layers, every, held, f" on side {letters[1]}", counts, says)


# --- values -----------------------------------------------------------------------------------------------------------


def read_all(sides: Sequence[Side], paired: Pairing, bar: tqdm) -> list[Compared]:
    """Compare all pairs, and scan the remaining tensors of one or both sides."""

    def compared(group: tuple[str, Callable[[], Iterable[Compared]]]) -> list[Compared]:
        name, compare = group
        try:
            return list(compare())
        except UNREADABLE as error:
            says = f"'{name}' cannot be compared: {error}"
            paired.findings.append(Finding("damaged file", says, "fetch the file again", names=(name,)))
            return []

    def look(side: Side, name: str) -> list[Compared]:
        with suppress(*UNREADABLE):  # the side has recorded the error
            for _ in side.pieces(name):
                pass
        return []

    with ThreadPoolExecutor(default_workers()) as pool:
        found = list[Compared]()
        for some in pool.map(compared, paired.groups):
            found += some
            bar.update(sum(len(side.seen) for side in sides) - bar.n)
        for side in sides:
            rest = [name for name in side.tensors if name not in side.seen]
            for _ in pool.map(partial(look, side), rest):
                bar.update()
    for side, name, base in paired.copies:
        if differ(side, name, base):
            says = f"is left out on one side as a copy of '{base}', whose numbers are others"
            found.append(Compared(name, ("tied copy", says)))
    return found


def _by_name(a: Side, name: str, b: Side, match: str) -> Iterator[Compared]:
    one, other = a.tensors[name], b.tensors[match]
    alike = one.shape == other.shape and one.dtype == other.dtype
    if alike and all(map(equal_bits, a.pieces(name), b.pieces(match, looks=False))):
        b.looks[match] = a.looks[name]
        yield Compared(name)
        return
    form = f"B is {other.dtype}" if is_quantized(other) else f"A is {one.dtype}" if is_quantized(one) else ""
    yield judged(name, a.read(name), b.read(match), form)


def judged(name: str, left: Tensor, right: Tensor, form: str = "") -> Compared:
    """Compare the values of both sides; `form` names the quantized side and its form."""
    if equal_bits(left, right):
        return Compared(name)
    if name in PADDED and left.shape[1:] == right.shape[1:]:
        rows = min(left.size(0), right.size(0))
        if equal_bits(left[:rows], right[:rows]):
            return Compared(name)
    with EXPLAINING:
        kind = explain(left, right)
        if form and kind[0] == "other numbers" and (left.float() - right.float()).norm() <= CLOSE * left.float().norm():
            kind = "rounded", f"differs by rounding: side {form} with scales"
        ours, theirs = (None if (look := Look.of(one)).is_constant else look.bits for one in (left, right))
        return Compared(name, kind, difference(left, right), (ours, theirs))


def explain(a: Tensor, b: Tensor) -> Difference:
    """Explain how two unequal tensors differ: the first explanation that fits all values."""
    if a.shape != b.shape:
        return "shape", f"has the shape {list(b.shape)}, not {list(a.shape)}"
    if a.dtype != b.dtype:
        ours, name = (str(one.dtype).removeprefix("torch.") for one in (a, b))
        if equal_bits(a.double(), b.double()):
            return "type", f"are equal numbers in another type: {name}, not {ours}"
        if equal_bits(a.to(b.dtype), b) or equal_bits(b.to(a.dtype), a):
            return "rounded", f"is of type {name}, not {ours}: one side was rounded"
        b = b.to(a.dtype)
    for one, side in ((a, "A"), (b, "B")):
        if not Look.of(one).is_finite:
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
    """Return the largest difference of two tensors with the same shape, computed in parts; None if shapes differ."""
    if a.shape != b.shape or a.numel() == 0:
        return None
    pieces = zip(a.flatten().split(PIECE), b.flatten().split(PIECE), strict=True)
    found = [(one.double() - other.double()).abs().max().item() for one, other in pieces]
    return math.nan if any(map(math.isnan, found)) else max(found)


def check_differences(compared: Sequence[Compared], a: Side, b: Side) -> Iterator[Finding]:
    """Return a finding for all differences of one kind, and one for tensors that have another place on side A.

    Args:
        compared: all tensors of both sides.
        a, b: the sides; one of them has recorded the bits of equal tensors under the name of the pair.
    """
    held = {one.name: one.bits[0] if one.bits else _bits_of(one.name, a, b) for one in compared}
    homes = {bits: name for name, bits in reversed(held.items()) if bits is not None}
    theirs = {one.name: one.bits[1] for one in compared if one.bits is not None}
    moved = {name: homes[bits] for name, bits in theirs.items() if bits is not None and bits in homes}
    if moved:
        says = f"{counted(len(moved), 'tensor')} of side B stand under another name on side A: {_places(moved)}."
        advice = "give the tensors the names that side A has, or correct the names in the program that wrote side B"
        yield Finding("other numbers", says, advice, names=tuple(moved))
    groups: dict[Difference, list[Compared]] = defaultdict(list)
    for one in compared:
        if one.kind is not None and one.name not in moved:
            guess, says = one.kind
            groups[guess, "" if guess == "shape" else says].append(one)
    for (guess, _), members in groups.items():
        names = [one.name for one in members]
        figure = max((one.figure for one in members if one.figure is not None), default=None)
        by = f" (largest difference {figure:.3g})" if figure else ""
        kinds, (_, differs) = unnumbered(names), members[0].kind or ("", "")
        named = kinds if len(kinds) < 200 else listed(names)
        says = f"{counted(len(members), 'tensor')}, {named}: side B's {differs}{by}."
        severity, advice = (NOTE, "") if guess == "type" else (ERROR, ADVICE.get(guess, REMAKE))
        yield Finding(guess, says, advice, severity, tuple(names), figure=figure)


def _bits_of(name: str, *sides: Side) -> Bits | None:
    """Return the bits of a tensor, enough to tell it from others."""
    look = next((side.looks[name] for side in sides if name in side.looks), None)
    return None if look is None or look.is_constant else look.bits


def _places(moved: Mapping[str, str]) -> str:
    """Return `side B's model.layers.1 holds side A's model.layers.2 (9 tensors)`, without the names' common end."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, home in moved.items():
        ours, theirs = name.split("."), home.split(".")
        while len(ours) > 1 < len(theirs) and ours[-1] == theirs[-1]:
            del ours[-1], theirs[-1]
        counts[".".join(ours), ".".join(theirs)] += 1
    each = [f"side B's {ours} holds side A's {theirs} ({counted(n, 'tensor')})" for (ours, theirs), n in counts.items()]
    return "; ".join(each[:4]) + (f"; and {len(each) - 4} more" if len(each) > 4 else "")
