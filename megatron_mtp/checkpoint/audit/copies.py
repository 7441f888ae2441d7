"""Tensors that a side stores several times: tied heads, and the embedding and head that depths repeat.

Loaders take one or the other, so copies that differ are drafts that differ by engine. A copy that is left out is the
tensor that it would repeat: `base_of` names it.
"""

from collections.abc import Iterator

from megatron_mtp.checkpoint.audit.contents import rules_of
from megatron_mtp.checkpoint.audit.entry import Entry, equal_bits
from megatron_mtp.checkpoint.audit.finding import NOTE, Finding, counted, listed
from megatron_mtp.checkpoint.audit.parts import DEPTH, EMBEDDING, HEAD, Parts
from megatron_mtp.checkpoint.audit.side import HFSide, Side
from megatron_mtp.checkpoint.families.rules import Copies

OF_EMBEDDING, OF_HEAD = ("embed_tokens.weight",), ("shared_head.head.weight", "shared_head.output.weight")
OWN = ("longcat", "step3")
"""Beginnings of the `model_type`s whose depths have an embedding or a head of their own."""


def base_of(side: Side, name: str) -> str | None:
    """The tensor that a name repeats on this side; None if it is no copy."""
    if not isinstance(side, HFSide):
        same = "embedding.word_embeddings.weight"
        return same if name == "output_layer.weight" and side.tied and same in side.tensors else None
    parts = Parts.of_side(side)
    own = side.config is not None and side.config.model_type.startswith(OWN)
    if parts.of(name).kind == HEAD and side.tied:
        return _first(side, parts, EMBEDDING)
    if parts.of(name).kind != DEPTH or own:
        return None
    if name.endswith(OF_EMBEDDING):
        return _first(side, parts, EMBEDDING)
    return _head(side, parts) if name.endswith(OF_HEAD) else None


def _first(side: HFSide, parts: Parts, kind: str) -> str | None:
    return next((name for name in side.tensors if parts.of(name).kind == kind), None)


def _head(side: HFSide, parts: Parts) -> str | None:
    """The trunk's head: with a tied one, that is the embedding, even if a head is stored."""
    return _first(side, parts, EMBEDDING if side.tied else HEAD)


def copies_of(side: Side) -> dict[str, str]:
    """The tensors of a side that repeat another one, each with the repeated tensor."""
    named = {name: base for name in side.tensors if (base := base_of(side, name)) is not None}
    rules = rules_of(side) if isinstance(side, HFSide) else None
    for rule in rules or ():
        if isinstance(rule.map, Copies):
            first, *others = (tensor.name for tensor in rule.hf)
            named |= dict.fromkeys(others, first)
    held = side.tensors
    return {name: base for name, base in named.items() if name in held and base in held and name != base}


def check_copies(side: Side) -> Iterator[Finding]:
    """Compare every copy with the tensor that it repeats."""
    same: list[str] = []
    stale: list[str] = []
    for name, base in copies_of(side).items():
        (same if _equal(side.tensors[name], side.tensors[base]) else stale).append(name)
    if same:
        says = f"{counted(len(same), 'tensor')} repeat embedding or head, with the same bits: {listed(same)}."
        yield Finding("tied copy", says, severity=NOTE, names=tuple(same))
    if stale:
        says = f"{listed(stale)} should repeat embedding or head, but the numbers differ: engines load either of both."
        yield Finding("stale copy", says, "store the one that was trained in both places", names=tuple(stale))


def _equal(one: Entry, other: Entry) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and equal_bits(one.read(), other.read())
