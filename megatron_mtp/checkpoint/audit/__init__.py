"""Findings about any checkpoint, and about whether two are the same model.

    error     numbers are lost, wrong or unreadable
    warning   a loader may compute something other than what was trained
    note      worth knowing, but not a fault

side.py          a folder or a checkpoint, as far as it can be read; parts of a model, by name
folder.py        open a Hugging Face folder: config, tensors, JSON files, a drafter's lists
saved.py         open a Megatron checkpoint from Megatron-LM, Megatron-Bridge, ms-swift or this package
quantization.py  quantized weights, and whether the config lists them as they are stored
contents.py      whether a side has what its config specifies, by the plan of its conversion
looks.py         what one pass over a tensor records: bounds and a digest
numbers.py       what the values of one side show: damage, and weights that no training produces
comparing.py     pair the tensors of two sides by the same plan, read each once, and explain differences
auditing.py      the whole audit, with settings and logits of both sides, as plain data
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

ERROR, WARNING, NOTE = SEVERITIES = ("error", "warning", "note")
GUESSES = (
    "damaged file", "unindexed file", "damaged config", "tensor misnamed", "MTP dropped", "depth missing",
    "depth incomplete", "depth count", "index share", "drafter dropped", "drafter incomplete", "layers missing",
    "quantization", "draft vocabulary", "token id", "rounded", "halves swapped", "tied copy", "stale copy",
    "not finite", "implausible numbers", "type", "tensor missing", "shape", "tensor left over", "other numbers",
    "config", "logits", "not compared", "duplicate tensors", "skipped buffers", "drafter inside",
)  # fmt: skip
"""Explanations of a finding, most informative first, in the order of an audit's output."""
SHOWN = 3
"""Maximum number of names in a sentence."""


@dataclass(frozen=True)
class Finding:
    """A finding of an audit.

    Attributes:
        guess: the explanation, one of `GUESSES`.
        says: one sentence.
        advice: what to do about it; empty for notes.
        severity: one of `SEVERITIES`; everything but notes makes the audit fail.
        names: the tensors or config keys that it concerns.
        side: "A" or "B"; empty for a difference between both.
        figure: largest difference of values; None if not computed.
    """

    guess: str
    says: str
    advice: str = ""
    severity: str = ERROR
    names: tuple[str, ...] = ()
    side: str = ""
    figure: float | None = None


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by severity, then by guess, and remove duplicates."""
    once = dict.fromkeys(findings)
    return sorted(once, key=lambda found: (SEVERITIES.index(found.severity), GUESSES.index(found.guess)))


def listed(names: Iterable[Any]) -> str:
    """Format the first names in quotes, and how many more there are."""
    every = [f"'{name}'" for name in names]
    return ", ".join(every[:SHOWN]) + (f" and {len(every) - SHOWN} more" if len(every) > SHOWN else "")


def counted(number: int, what: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{number} {what}{'' if number == 1 else 's'}"
