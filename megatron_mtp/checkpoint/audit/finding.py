"""What an audit says: findings, each with its severity, the guess that explains it, a sentence, and what to do.

    error     numbers are lost, wrong or unreadable
    warning   a loader may compute something else than was trained
    note      worth knowing, and no fault

A clean audit has notes alone. GUESSES orders findings: what explains most comes first.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

ERROR, WARNING, NOTE = SEVERITIES = ("error", "warning", "note")

GUESSES = (
    "damaged file", "damaged index", "file missing", "unindexed file", "tensor in another file", "duplicate tensor",
    "tensor not in the index", "damaged config", "MTP dropped", "depth missing", "depth incomplete", "depth count",
    "layers missing", "quantization", "tokenizer", "rounded", "halves swapped", "norm plus 1", "transposed", "zeros",
    "tied copy", "stale copy", "padding", "not finite", "type", "tensor missing", "shape", "tensor left over",
    "other numbers", "config", "logits", "copy left out", "not compared",
)  # fmt: skip
"""The guesses by which differences are explained, in the order in which an audit lists them."""
SHOWN = 3
"""Names that a sentence lists."""


@dataclass(frozen=True)
class Finding:
    """One thing that an audit found.

    Attributes:
        guess: the explanation, out of `GUESSES`.
        says: one sentence.
        advice: what to do about it; empty for notes.
        severity: out of `SEVERITIES`.
        names: the tensors or config keys that it is about.
        side: "A" or "B"; empty for a difference between both.
        figure: the largest difference of numbers; None if none was computed.
    """

    guess: str
    says: str
    advice: str = ""
    severity: str = ERROR
    names: tuple[str, ...] = ()
    side: str = ""
    figure: float | None = None

    def of(self, side: str) -> "Finding":
        """The same finding, as one about this side."""
        return replace(self, side=side)

    @property
    def counts(self) -> bool:
        """Whether it makes the audit fail."""
        return self.severity != NOTE


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Findings in the order of a page: by severity, then by guess; equal ones once."""
    once = dict.fromkeys(findings)
    return sorted(once, key=lambda found: (SEVERITIES.index(found.severity), GUESSES.index(found.guess)))


def listed(names: Iterable[Any]) -> str:
    """The first names in quotes, and how many more there are."""
    every = [str(name) for name in names]
    shown = ", ".join(f"'{name}'" for name in every[:SHOWN])
    return shown if len(every) <= SHOWN else f"{shown} and {len(every) - SHOWN} more"


def counted(number: int, what: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{number} {what}{'' if number == 1 else 's'}"
