"""Which tensor of one side is which of the other, by the plan of conversion.

    two folders              by name; what is left by the Megatron tensors that each family's rules give to it
    two checkpoints          by key, with Transformer Engine's other names; a GPT and a hybrid by their halves
    folder and checkpoint    the rules read the checkpoint back under the folder's names

A tensor that one side leaves out since it repeats another one is paired with the repeated one.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from megatron_mtp.checkpoint.audit.finding import WARNING, Finding
from megatron_mtp.checkpoint.audit.side import DEPTH, EMBEDDING, HEAD, Entry, HFSide, MegatronSide, Side
from megatron_mtp.checkpoint.convert.plan import lost_features, zero_features
from megatron_mtp.checkpoint.families.rules import MinusOne, Piece, Rule
from megatron_mtp.checkpoint.families.trunk import ORIGINAL
from megatron_mtp.checkpoint.mcore.keys import FUSED_NORM, OWN_NORM
from megatron_mtp.model.draft_vocabulary import DRAFT_VOCABULARY, DRAFTER
from megatron_mtp.model.pattern import without_stages

OF_EMBEDDING, OF_HEAD = ("embed_tokens.weight",), ("shared_head.head.weight", "shared_head.output.weight")
OWN = ("longcat", "step3")
"""Beginnings of the `model_type`s whose depths have an embedding or a head of their own."""


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
        only_a, only_b: those that one side has alone, by name.
        findings: what could not be paired, and why.
    """

    pairs: list[Pair] = field(default_factory=list)
    only_a: dict[str, Entry] = field(default_factory=dict)
    only_b: dict[str, Entry] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def turned(self) -> "Pairing":
        """The same with the sides exchanged."""
        pairs = [replace(one, a=one.b, b=one.a) for one in self.pairs]
        return Pairing(pairs, self.only_b, self.only_a, self.findings)


def pairing(a: Side, b: Side) -> Pairing:
    """Pair the tensors of both sides."""
    if isinstance(a, HFSide) and isinstance(b, HFSide):
        found = _by_name(a.tensors, b.tensors)
        _pair_by_rules(a, b, found)
        _pair_copies(a, b, found)
        return found
    if isinstance(a, MegatronSide) and isinstance(b, MegatronSide):
        return _checkpoints(a, b)
    if isinstance(a, HFSide) and isinstance(b, MegatronSide):
        return _across(a, b)
    assert isinstance(a, MegatronSide)
    assert isinstance(b, HFSide)
    return _across(b, a).turned()


def base_of(side: Side, name: str) -> str | None:
    """The tensor that a name repeats on this side, embedding or head; None if it is no copy."""
    if not isinstance(side, HFSide):
        same = "embedding.word_embeddings.weight"
        return same if name == "output_layer.weight" and side.tied and same in side.tensors else None
    kind = side.parts.of(name).kind
    own = side.config is not None and side.config.model_type.startswith(OWN)
    if kind == HEAD and side.tied:
        return _first(side, EMBEDDING)
    if kind != DEPTH or own or not name.endswith(OF_EMBEDDING + OF_HEAD):
        return None
    return _first(side, EMBEDDING if name.endswith(OF_EMBEDDING) or side.tied else HEAD)


def _first(side: HFSide, kind: str) -> str | None:
    return next((name for name in side.tensors if side.parts.of(name).kind == kind), None)


def _by_name(a: dict[str, Entry], b: dict[str, Entry]) -> Pairing:
    pairs = [Pair(name, a[name], b[name]) for name in a if name in b]
    only_a = {name: entry for name, entry in a.items() if name not in b}
    return Pairing(pairs, only_a, {name: entry for name, entry in b.items() if name not in a})


def _pair_copies(a: Side, b: Side, found: Pairing) -> None:
    """Pair tensors of one side alone with the tensor that they repeat, of the other side if it has that."""
    for only, own, other in ((found.only_a, a, b), (found.only_b, b, a)):
        for name in list(only):
            base = base_of(other, name) or base_of(own, name)
            held = next((side.tensors for side in (other, own) if base in side.tensors), None)
            if base is not None and held is not None:
                mine, theirs = only.pop(name), held[base]
                found.pairs.append(Pair(name, *((mine, theirs) if own is a else (theirs, mine)), copy=base))


Unit = tuple[str, int | None]
"""A Megatron key, and the index of an expert in it."""


def _pair_by_rules(a: HFSide, b: HFSide, found: Pairing) -> None:
    """Pair what the folders name differently, by Megatron's tensors: other prefixes, packed experts."""
    if not (found.only_a and found.only_b):
        return
    units_a, units_b = _units(a, set(found.only_a)), _units(b, set(found.only_b))
    for unit, (names_a, one) in units_a.items():
        names_b, other = units_b.get(unit, ([], one))
        if not names_b or one.shape != other.shape:
            continue
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
    units: dict[Unit, tuple[list[str], Entry]] = {}
    for rule in side.plan or ():
        own = [tensor.name for tensor in rule.hf]
        if len(rule.mcore) != 1 or not set(own) <= names:
            continue
        piece, entries = rule.mcore[0], [side.tensors[name] for name in own]
        whole = Entry(piece.shape or entries[0].shape, entries[0].dtype, 0, partial(_converted, rule, entries))
        if piece.whole is None and ".experts." in piece.key and piece.shape is not None and len(piece.shape) == 3:
            shared = lru_cache(maxsize=1)(whole.tensor)
            for index in range(piece.shape[0]):
                one = replace(whole, shape=(1, *piece.shape[1:]), read=partial(_slice, shared, index))
                units[piece.key, index] = own, one
        else:
            units[piece.key, None if piece.offset is None else piece.offset[0]] = own, whole
    return units


def _converted(rule: Rule, entries: list[Entry]) -> Tensor:
    return rule.to_mcore([entry.tensor() for entry in entries])[0]


def _slice(whole: Callable[[], Tensor], index: int) -> Tensor:
    return whole()[index : index + 1]


def _checkpoints(a: MegatronSide, b: MegatronSide) -> Pairing:
    """Pair by key: the other names of Transformer Engine are made one, and a GPT's become its hybrid's."""
    keys, findings = (a.tensors, b.tensors), []
    if (a.pattern is None) != (b.pattern is None):
        from megatron_mtp.checkpoint.convert.hybrid import Halves

        pattern = without_stages(a.pattern or b.pattern or "")
        try:
            halves = Halves.of(pattern)
            new = [str if side.pattern is not None else halves.hybrid_key for side in (a, b)]
            renamed = [{name(k): e for k, e in held.items()} for name, held in zip(new, keys, strict=True)]
            keys = renamed[0], renamed[1]
        except (ValueError, IndexError) as error:
            says = f"The GPT has no form with the hybrid's layers '{pattern}'; keys are compared as they are: {error}"
            findings.append(Finding("not compared", says, "audit checkpoints of the same model", WARNING))
    found = _by_name(*keys)
    found.findings += findings
    for only, others, held in ((found.only_a, found.only_b, keys[1]), (found.only_b, found.only_a, keys[0])):
        usual = {_usual(key): key for key in held}
        for key in [key for key in only if _usual(key) in usual]:
            match = usual[_usual(key)]
            mine, theirs = only.pop(key), held[match]
            others.pop(match, None)
            first = held is keys[1]
            pair = (mine, theirs) if first else (theirs, mine)
            found.pairs.append(Pair(key if first else match, *pair, other=match if first else key))
    _pair_copies(a, b, found)
    return found


def _usual(key: str) -> str:
    """A key under one name, whatever modules saved it."""
    for theirs in ("mtp_model_layer.", "tf_layer."):  # a depth's layer, as some versions have written it
        if key.startswith("mtp.") and f".{theirs}layers." not in key:
            key = key.replace(f".{theirs}", ".transformer_layer.")
    key = key.replace(FUSED_NORM, OWN_NORM)
    key = re.sub(r"self_attention\.linear_q(kv|_down_proj)\.layer_norm_", "input_layernorm.", key)
    return re.sub(r"self_attention\.linear_(kv|q)_up_proj\.layer_norm_", r"self_attention.\1_layernorm.", key)


def _across(folder: HFSide, saved: MegatronSide) -> Pairing:
    """Pair a folder with a checkpoint, by the rules of the folder's family in the checkpoint's forms."""
    depths = max(folder.held_depths, max(saved.parts.depths(saved.tensors), default=-1) + 1, folder.said_depths or 0)
    layout, rules = folder.layout(depths), None
    if layout is not None and saved.reader is not None:
        features = (layout.features | set(zero_features(saved.reader))) - lost_features(saved.reader)
        rules = folder.rules(replace(layout, features=frozenset(features)))
    if rules is None:
        config = folder.config
        known = "its config is damaged" if config is None else f"no family has its model_type '{config.model_type}'"
        says = f"The folder's names cannot be turned into Megatron's keys: {known}."
        advice = "export the checkpoint with the program that made it, and audit the two folders"
        return Pairing(findings=[Finding("not compared", says, advice)])
    apart = DRAFT_VOCABULARY, DRAFTER
    found = Pairing(only_b={key: entry for key, entry in saved.tensors.items() if not key.startswith(apart)})
    covered: set[str] = set()
    for rule in rules:
        _pair_rule(rule, folder, saved, found)
        covered |= {tensor.name for tensor in rule.hf}
    found.only_a |= {name: entry for name, entry in folder.tensors.items() if name not in covered}
    return found


def _pair_rule(rule: Rule, folder: HFSide, saved: MegatronSide, found: Pairing) -> None:
    """Pair the tensors of one rule."""
    keys = [next((k for k in (p.key, *p.aliases) if k in saved.tensors), None) for p in rule.mcore]
    for piece, key in zip(rule.mcore, keys, strict=True):
        for alias in (piece.key, *piece.aliases):
            if found.only_b.pop(alias, None) is not None and key is not None and alias != key:
                found.pairs.append(Pair(alias, saved.tensors[key], saved.tensors[alias], copy=key))
    pieces = [(key, piece) for key, piece in zip(keys, rule.mcore, strict=True) if key is not None]
    held = len(pieces) == len(rule.mcore) and all(_fits(saved.tensors[key], piece) for key, piece in pieces)
    back = lru_cache(maxsize=1)(partial(_back, rule, pieces, saved)) if held else None
    for index, tensor in enumerate(rule.hf):
        mine = folder.tensors.get(tensor.name)
        if back is not None:
            kind = mine.kind if rule.rounds and mine is not None else None
            shape = tensor.shape or (mine.shape if mine is not None else ())
            dtype = next((saved.tensors[key].dtype for key, _ in pieces), "float32")
            theirs = Entry(shape, dtype, 0, partial(_nth, back, index, kind))
            if mine is not None:
                found.pairs.append(Pair(tensor.name, mine, theirs))
            elif base_of(folder, tensor.name) not in folder.tensors and pieces:
                found.only_b[tensor.name] = theirs
        elif mine is not None and (rule.mcore or mine.shape != tensor.shape):
            found.only_a[tensor.name] = mine
    for key, _ in pieces if not held else ():
        found.only_b[key] = saved.tensors[key]
    if isinstance(rule.map, MinusOne) and rule.map.original and held and rule.hf[0].name in folder.tensors:
        found.pairs.append(_derived(rule, pieces, folder.tensors[rule.hf[0].name], saved))


def _fits(entry: Entry, piece: Piece) -> bool:
    wanted, shape = piece.whole or piece.shape, entry.shape or ()
    if wanted is None or shape == wanted:
        return True
    return piece.padded and shape[0] >= wanted[0] and shape[1:] == wanted[1:]


def _back(rule: Rule, pieces: list[tuple[str, Piece]], saved: MegatronSide) -> list[Tensor]:
    """The folder's tensors, made from the checkpoint's."""
    return rule.to_hf([saved.read(key, piece.offset, piece.shape) for key, piece in pieces])


def _nth(back: Callable[[], list[Tensor]], index: int, kind: torch.dtype | None) -> Tensor:
    """One of the tensors; `kind` is the type to round it to, of a norm whose original training has not kept."""
    return back()[index] if kind is None else back()[index].to(kind)


def _derived(rule: Rule, pieces: list[tuple[str, Piece]], mine: Entry, saved: MegatronSide) -> Pair:
    """The weight of a norm that is stored as w - 1 beside the original, which export gives back: both must agree."""
    key, piece = next((key, piece) for key, piece in pieces if not key.startswith(ORIGINAL))

    def expected() -> Tensor:
        return rule.to_mcore([mine.tensor()])[1]

    def read() -> Tensor:
        return saved.read(key, piece.offset, piece.shape).float()

    return Pair(key, Entry(mine.shape, "float32", 0, expected), Entry(mine.shape, "float32", 0, read))
