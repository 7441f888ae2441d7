"""Acceptance while a benchmark ran: the difference of a server's counters, ours or vLLM's, after and before."""

from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
BY_POSITION = ("num_draft_tokens_per_pos", "num_accepted_tokens_per_pos")


@dataclass(frozen=True)
class Counts:
    """What a server has counted.

    Attributes:
        sums: by counter; positions are counters of their own.
    """

    sums: dict[str, float]


def counts(metrics: str | None) -> Counts | None:
    """The counters in a page of metrics; None where there are none."""
    if metrics is None:
        return None
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            _, found, name = sample.name.partition("spec_decode_")
            name = name.removesuffix("_total")
            if found and name in COUNTERS:
                sums[name] = sums.get(name, 0.0) + sample.value
            elif found and name in BY_POSITION:
                key = f"{name} {sample.labels['position']}"
                sums[key] = sums.get(key, 0.0) + sample.value
    return Counts(sums) if sums else None


def acceptance(before: Counts | None, after: Counts | None) -> dict[str, Any] | None:
    """Drafted and accepted tokens, and the share that was accepted at each position; None where nothing was drafted."""
    if before is None or after is None:
        return None
    grown = {name: value - before.sums.get(name, 0.0) for name, value in after.sums.items()}
    if not grown.get("num_draft_tokens"):
        return None
    accepted, drafts = grown["num_accepted_tokens"], grown.get("num_drafts", 0.0)
    return {
        "drafted": int(grown["num_draft_tokens"]),
        "accepted": int(accepted),
        "accepted_per_position": _by_position(grown, drafts),
        "accepted_length": 1 + accepted / drafts if drafts else None,
    }


def _by_position(grown: dict[str, float], drafts: float) -> list[float]:
    """vLLM counts drafts, which are all of one length, and no drafted tokens by position."""
    shares: list[float] = []
    while (key := f"num_accepted_tokens_per_pos {len(shares)}") in grown:
        offered = grown.get(f"num_draft_tokens_per_pos {len(shares)}", drafts)
        shares.append(grown[key] / offered if offered else 0.0)
    return shares
