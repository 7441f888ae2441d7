"""Numbers that no trained weight has: not finite ones, and matrices of zeros."""

import math
from collections.abc import Iterable, Iterator

from megatron_mtp.checkpoint.audit.contents import rules_of
from megatron_mtp.checkpoint.audit.entry import FLOATS, Entry, largest
from megatron_mtp.checkpoint.audit.finding import WARNING, Finding, counted, listed
from megatron_mtp.checkpoint.audit.side import HFSide, Side
from megatron_mtp.checkpoint.families.rules import Zeros

REPLACE = "take these tensors from an earlier save"


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
        if name in self.known or name in self.unreadable:
            return
        try:
            entry = self._side.tensors[name]
            found = largest(entry.read()) if entry.kind in FLOATS else None
        except (ValueError, OSError, RuntimeError) as error:
            self.unreadable[name] = str(error)
            return
        if found is not None:
            self.known[name] = found

    def keep(self, name: str, found: float | None) -> None:
        """Keep the range of a tensor that was read elsewhere; other names are passed over."""
        if found is not None and name in self._side.tensors and self._side.tensors[name].kind in FLOATS:
            self.known[name] = found

    def findings(self) -> Iterator[Finding]:
        """What is wrong with the ranges that are known."""
        yield from _unreadable(self.unreadable)
        yield from _not_finite(name for name, found in self.known.items() if not math.isfinite(found))
        may = zero_names(self._side)
        zero = [n for n, f in self.known.items() if f == 0 and n not in may and _is_matrix(self._side.tensors[n])]
        if zero:
            says = f"{counted(len(zero), 'matrix').replace('matrixs', 'matrices')} of zeros: {listed(zero)}."
            advice = "unless the model is that new: take the tensors from an earlier save"
            yield Finding("zeros", says, advice, WARNING, tuple(zero))


def _unreadable(errors: dict[str, str]) -> Iterator[Finding]:
    if errors:
        says = f"{counted(len(errors), 'tensor')} cannot be read: {listed(errors)}. {next(iter(errors.values()))}"
        yield Finding("damaged file", says, "fetch the file again", names=tuple(errors))


def _not_finite(names: Iterable[str]) -> Iterator[Finding]:
    every = tuple(names)
    if every:
        says = f"{listed(every)}: some numbers are NaN or infinite."
        yield Finding("not finite", says, REPLACE, names=every)


def _is_matrix(entry: Entry) -> bool:
    return len(entry.shape) > 1


def zero_names(side: Side) -> frozenset[str]:
    """Tensors that a family's form keeps at zero."""
    rules = rules_of(side) if isinstance(side, HFSide) else None
    return frozenset(t.name for rule in rules or () if isinstance(rule.map, Zeros) for t in rule.hf)
