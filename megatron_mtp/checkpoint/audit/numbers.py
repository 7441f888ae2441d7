"""Numbers of a side, each read once: copies that must be equal, numbers that are not finite, matrices of zeros."""

import math
from collections.abc import Iterator

from megatron_mtp.checkpoint.audit.finding import NOTE, WARNING, Finding, counted, listed
from megatron_mtp.checkpoint.audit.pairing import base_of
from megatron_mtp.checkpoint.audit.side import HFSide, Side, equal_bits, largest
from megatron_mtp.checkpoint.families.rules import Copies, Zeros


class Ranges:
    """The ranges of a side's tensors, each read once.

    Args:
        side: the side.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self.known: dict[str, float] = {}
        self.unreadable: dict[str, str] = {}

    def read(self, name: str) -> None:
        """Read a tensor and keep its range; what cannot be read is kept by name, with the reason."""
        entry = self._side.tensors[name]
        if name in self.known or name in self.unreadable or entry.read is None:
            return
        try:
            self.keep(name, largest(entry.tensor()))
        except (ValueError, OSError, RuntimeError) as error:
            self.unreadable[name] = str(error)

    def keep(self, name: str, found: float | None) -> None:
        """Keep the range of a tensor that was read elsewhere; other names are passed over."""
        if found is not None and name in self._side.tensors:
            self.known[name] = found

    def findings(self) -> Iterator[Finding]:
        """What is wrong with the ranges that are known."""
        if errors := self.unreadable:
            says = f"{counted(len(errors), 'tensor')} cannot be read: {listed(errors)}. {next(iter(errors.values()))}"
            yield Finding("damaged file", says, "fetch the file again", names=tuple(errors))
        scales = self._side.scales if isinstance(self._side, HFSide) else {}
        known = {name: found for name, found in self.known.items() if name not in scales}
        wild = tuple(name for name, found in known.items() if not math.isfinite(found))
        if wild:
            says, advice = (
                f"{listed(wild)}: some numbers are NaN or infinite.",
                "take these tensors from an earlier save",
            )
            yield Finding("not finite", says, advice, names=wild)
        plan = self._side.plan if isinstance(self._side, HFSide) else None
        may = {tensor.name for rule in plan or () if isinstance(rule.map, Zeros) for tensor in rule.hf}
        held = self._side.tensors
        zero = [n for n, found in known.items() if found == 0 and n not in may and len(held[n].shape or ()) > 1]
        if zero:
            says = f"{len(zero)} {'matrix' if len(zero) == 1 else 'matrices'} of zeros: {listed(zero)}."
            advice = "unless the model is that new: take the tensors from an earlier save"
            yield Finding("zeros", says, advice, WARNING, tuple(zero))


def copies_of(side: Side) -> dict[str, str]:
    """The tensors of a side that repeat another one, each with the repeated tensor."""
    named = {name: base for name in side.tensors if (base := base_of(side, name)) is not None}
    plan = side.plan if isinstance(side, HFSide) else None
    for rule in plan or ():
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
            equal = one.shape == other.shape and equal_bits(one.tensor(), other.tensor())
            (same if equal else stale).append(name)
    if same:
        says = f"{counted(len(same), 'tensor')} repeat embedding or head, with the same bits: {listed(same)}."
        yield Finding("tied copy", says, severity=NOTE, names=tuple(same))
    if stale:
        says = f"{listed(stale)} should repeat embedding or head, but the numbers differ: engines load either of both."
        yield Finding("stale copy", says, "store the one that was trained in both places", names=tuple(stale))
