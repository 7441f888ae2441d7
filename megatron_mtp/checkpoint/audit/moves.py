"""Tensors whose numbers stand under another name on the other side: layers off by one, depths or experts exchanged.

Only tensors that no guess explains are looked at. Each is known by a checksum of its bits, so that only one is in
memory.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_mtp.checkpoint.audit.copies import OF_EMBEDDING, OF_HEAD
from megatron_mtp.checkpoint.audit.entry import Entry, bits
from megatron_mtp.checkpoint.audit.guesses import Guess
from megatron_mtp.checkpoint.audit.parts import DEPTH, EMBEDDING, HEAD, Part, Parts

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
LEAST = 2
"""Tensors of fewer numbers are not looked for: a single number is found everywhere."""


@dataclass(frozen=True)
class Move:
    """A tensor of side B that holds the numbers of another tensor of side A.

    Attributes:
        name: the tensor of side B.
        origin: the tensor of side A.
        guess: what that means.
    """

    name: str
    origin: str
    guess: Guess


def moves(wanted: Mapping[str, Entry], given: Mapping[str, Entry], first: Iterable[str], names: Parts) -> list[Move]:
    """Where the numbers of some tensors come from.

    Args:
        wanted: tensors of side B that nothing explains.
        given: all tensors of side A.
        first: names of side A that are preferred: those that nothing explains either.
        names: how names are read.
    """
    kinds = {(entry.shape, entry.dtype) for entry in wanted.values() if _is_found(entry)}
    places: dict[bytes, list[str]] = defaultdict(list)
    for name, entry in given.items():
        if (entry.shape, entry.dtype) in kinds:
            places[checksum(entry)].append(name)
    preferred, found = set(first), []
    for name, entry in wanted.items():
        if not _is_found(entry):
            continue
        origins = [origin for origin in places.get(checksum(entry), ()) if origin != name]
        if origins:
            origin = min(origins, key=lambda one: (one not in preferred, _distance(one, name)))
            found.append(Move(name, origin, meaning(origin, name, names)))
    return found


def _is_found(entry: Entry) -> bool:
    size = 1
    for length in entry.shape:
        size *= length
    return size >= LEAST


def checksum(entry: Entry) -> bytes:
    """A checksum of a tensor's bits."""
    return hashlib.blake2b(bits(entry.read()).numpy(), digest_size=16).digest()


def _distance(one: str, other: str) -> tuple[bool, int]:
    """How little two names differ: not in their words, and in few numbers."""
    numbers = list(zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=False))
    return _NUMBER.sub("*", one) != _NUMBER.sub("*", other), sum(a != b for a, b in numbers)


def meaning(origin: str, name: str, names: Parts) -> Guess:
    """What it means that `name` of side B holds the numbers of `origin` of side A."""
    one, other = names.of(origin), names.of(name)
    says = f"holds the numbers of side A's '{origin}'"
    if {_role(origin, one), _role(name, other)} == {EMBEDDING, HEAD}:
        return Guess("tied copy", f"{says}: head and embedding are one there")
    if _NUMBER.sub("*", origin) == _NUMBER.sub("*", name):
        return _renumbered(one, other, says)
    if one == other and _one_expert(origin) == _one_expert(name):
        return _renumbered(one, other, says)
    if _rest(origin) == _rest(name) and one.kind == other.kind:
        return _renumbered(one, other, says) if one.index != other.index else Guess("renamed", says)
    return Guess("tensors exchanged", says)


def _role(name: str, part: Part) -> str:
    """The part of a tensor; a depth's copies of embedding and head are these."""
    return EMBEDDING if name.endswith(OF_EMBEDDING) else HEAD if name.endswith(OF_HEAD) else part.kind


def _renumbered(one: Part, other: Part, says: str) -> Guess:
    if one == other:
        return Guess("experts permuted", f"{says}: experts are in another order")
    if one.kind == other.kind == DEPTH:
        return Guess("depths swapped", f"{says}: depths are in another order")
    shift = "" if one.index is None or other.index is None else f" by {other.index - one.index:+d}"
    return Guess("layers shifted", f"{says}: layers are shifted{shift if one.kind == other.kind else ''}")


def _one_expert(name: str) -> str:
    """A name that all experts of a layer have, packed or single."""
    return re.sub(r"\[\d+\]$|\.weight$", "", re.sub(r"experts\.\d+\.", "experts.", name))


def _rest(name: str) -> str:
    """The last words of a name, which prefixes and numbers do not change."""
    return ".".join(_NUMBER.sub("*", name).split("*")[-1].split(".")[-3:])
