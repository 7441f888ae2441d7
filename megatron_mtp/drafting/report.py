"""What a generation cost: the figures of a run, as a table or as JSON."""

from dataclasses import dataclass
from typing import Any

import torch

from megatron_mtp.drafting.stats import AcceptanceStats


@dataclass(frozen=True)
class Cost:
    """The cost of all batches of a run.

    Attributes:
        seconds: wall-clock time, prompts included.
        joules: energy; None where there is no meter, and `why` says why.
    """

    stats: AcceptanceStats
    seconds: float
    joules: float | None = None
    why: str | None = None

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all texts a second."""
        return self.stats.emitted / self.seconds if self.seconds else 0.0


def summary(cost: Cost, dtype: torch.dtype, plain: Cost | None = None, same: bool | None = None) -> dict[str, Any]:
    """The figures under the names of `--json`; `plain` is what plain decoding of the same prompts cost."""
    stats = cost.stats
    joules = None if cost.joules is None else cost.joules / max(stats.emitted, 1)
    figures: dict[str, Any] = {
        "target_forwards": stats.target_forwards,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "accepted_per_position": [round(rate, 4) for rate in stats.accepted_per_position],
        "accepted_length": round(stats.accepted_length, 4),
        "target_seconds": round(stats.target_seconds, 4),
        "drafter_seconds": round(stats.drafter_seconds, 4),
        "tokens_per_second": round(cost.tokens_per_second, 2),
        "energy_joules_per_token": joules,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if joules is None:
        figures["energy_reason"] = cost.why
    if plain is not None:
        figures["plain_tokens_per_second"] = round(plain.tokens_per_second, 2)
        figures["speed_up"] = round(cost.tokens_per_second / plain.tokens_per_second, 3)
        figures["same_tokens"] = same
    return figures


def table(figures: dict[str, Any], sampled: bool) -> str:
    """The same as lines for a terminal."""
    rates = figures["accepted_per_position"]
    rows = [
        *((f"acceptance at position {place}", f"{100 * rate:.1f} %") for place, rate in enumerate(rates, start=1)),
        ("accepted length", f"{figures['accepted_length']:.3f} tokens per target forward"),
        ("target forwards", f"{figures['target_forwards']}"),
        ("tokens per second", f"{figures['tokens_per_second']:.1f}"),
        ("energy", _energy(figures)),
    ]
    if "speed_up" in figures:
        plain = figures["plain_tokens_per_second"]
        rows.append(("speed-up", f"{figures['speed_up']:.2f} over plain decoding at {plain:.1f} tokens per second"))
        if not sampled:
            rows.append(("same tokens", "yes" if figures["same_tokens"] else f"NO{_rounding(figures['dtype'])}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _rounding(dtype: str) -> str:
    """Why greedy texts may differ: rounding, which depends on a forward's rows, decides near-ties of logits."""
    return "" if dtype == "float32" else f": {dtype} rounds a row otherwise among others; compare with --dtype float32"


def _energy(figures: dict[str, Any]) -> str:
    joules = figures["energy_joules_per_token"]
    return f"not measured: {figures['energy_reason']}" if joules is None else f"{joules:.3g} J a token"
