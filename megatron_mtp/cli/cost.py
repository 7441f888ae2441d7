"""Cost of a generation: time the prompts of a run, alone or alternating with plain decoding, and report the result."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.engine import Generated, generate
from megatron_mtp.decoding.requests import Update
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.megatron import cpu

WARM_UP = 8
"""Tokens generated before timing starts, so that no side pays for one-time costs."""
TURNS, LEAST_SECONDS, MOST_SECONDS = 3, 1.0, 20.0
"""Minimum number of rounds and seconds for comparing drafting with plain decoding, because a new process is a third
slower for a second. After the maximum, no further round starts.
"""
NO_METER = "zeus (the extra `energy`) is not installed, or finds no counter that it may read"


@dataclass(frozen=True)
class Cost:
    """Cost of all batches of a run: wall-clock seconds including prompts, and energy if there is a meter."""

    stats: AcceptanceStats
    seconds: float
    joules: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, over all outputs."""
        return self.stats.emitted / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Workload:
    """Prompts of a run in batches of `batch`, generated under one clock; other arguments as in `generate`."""

    runner: Runner
    prompts: list[list[int]]
    new_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]
    drafter: Runner | None
    cut: Callable[[list[int]], int | None] | None
    batch: int
    seed: int

    def timed(
        self, config: SpeculativeConfig | None, emit: Callable[[Update], None] | None = None
    ) -> tuple[list[list[int]], Cost]:
        """Continue all prompts. `emit` gets every step of an output, by the prompt's index in the run."""

        self._generated(config, 0, 1, min(WARM_UP, self.new_tokens))
        self.runner.auto_counts.clear()  # the first steps are slower than later ones
        joules, began = start_meter(), time.perf_counter()
        parts = self._all(config, emit)
        seconds = time.perf_counter() - began
        cost = Cost(sum((part.stats for part in parts), AcceptanceStats()), seconds, joules())
        return [ids for part in parts for ids in part.token_ids], cost

    def perplexity(self, config: SpeculativeConfig | None) -> float:
        """Return the perplexity of all new tokens under the trunk's distribution at temperature 1."""
        found = [one.logprob for part in self._all(config, logprobs=0) for text in part.logprobs for one in text]
        return math.exp(-math.fsum(found) / len(found))

    def _all(
        self,
        config: SpeculativeConfig | None,
        emit: Callable[[Update], None] | None = None,
        logprobs: int | None = None,
    ) -> list[Generated]:
        """Return every batch of the run."""
        batches = range(0, len(self.prompts), self.batch)
        return [self._generated(config, first, self.batch, self.new_tokens, emit, logprobs) for first in batches]

    def _generated(
        self,
        config: SpeculativeConfig | None,
        first: int,
        batch: int,
        new: int,
        emit: Callable[[Update], None] | None = None,
        logprobs: int | None = None,
    ) -> Generated:
        """Return the batch that begins with prompt `first`."""
        prompts = self.prompts[first : first + batch]
        seeds = [self.seed + first + number for number in range(len(prompts))]
        each = None if emit is None else lambda update: emit(replace(update, request=first + update.request))
        given = (self.sampling, config, seeds, self.stop_ids, self.drafter, self.cut, each, logprobs)
        return generate(self.runner, prompts, new, *given)

    def compared(self, config: SpeculativeConfig, texts: list[list[int]]) -> tuple[Cost, Cost, bool | None]:
        """Return the costs of drafting and of plain decoding, and whether plain decoding also emits `texts`.

        The run that generated `texts` is not timed: it also printed them, and included one-time compilation and
        loading. Costs are medians over alternating rounds. Several ranks run one round, because their clocks might not
        agree on further ones. Sampled outputs differ although their distribution does not; the third result is then
        None.
        """
        drafting, plain, same = list[Cost](), list[Cost](), True
        turns, least = (TURNS, LEAST_SECONDS) if torch.distributed.get_world_size() == 1 else (1, 0.0)
        spent = 0.0
        while (len(plain) < turns or spent < least) and spent < MOST_SECONDS:
            plain_texts, plain_cost = self.timed(None)
            plain.append(plain_cost)
            drafting.append(self.timed(config)[1])
            spent += plain_cost.seconds + drafting[-1].seconds
            same = same and plain_texts == texts
        return _median(drafting), _median(plain), same if self.sampling.greedy else None


def _median(costs: list[Cost]) -> Cost:
    return sorted(costs, key=lambda cost: cost.seconds)[len(costs) // 2]


def start_meter() -> Callable[[], float | None]:
    """Return a function that returns the joules used since now, by this process's GPU or the CPUs.

    None without a meter.
    """
    on_cpu = cpu.installed()
    try:
        from zeus.monitor import ZeusMonitor

        monitor = ZeusMonitor([] if on_cpu else [torch.cuda.current_device()], None if on_cpu else [])
        if not (monitor.gpu_indices or monitor.cpu_indices):
            return lambda: None
        monitor.begin_window("generated")
    except Exception:  # the library, drivers and permissions are optional, and each raises its own types
        return lambda: None

    def joules() -> float:
        spent = monitor.end_window("generated")
        return sum(spent.gpu_energy.values()) + sum((spent.cpu_energy or {}).values())

    return joules


def summary(
    cost: Cost,
    dtype: torch.dtype,
    plain: Cost | None = None,
    same: bool | None = None,
    perplexities: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Return the results under the names of `--json`.

    Args:
        plain: cost of plain decoding of the same prompts.
        same: whether it emitted the same tokens.
        perplexities: perplexities of the outputs of drafting and of plain decoding.
    """
    stats = cost.stats
    figures: dict[str, Any] = {
        "target_forwards": stats.target_forwards,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "accepted_per_position": [round(rate, 4) for rate in stats.accepted_per_position],
        "accepted_length": round(stats.accepted_length, 4),
        "target_seconds": round(stats.target_seconds, 4),
        "drafter_seconds": round(stats.drafter_seconds, 4),
        "tokens_per_second": round(cost.tokens_per_second, 2),
        "energy_joules_per_token": None if cost.joules is None else cost.joules / max(stats.emitted, 1),
        "dtype": str(dtype).removeprefix("torch."),
    }
    if cost.joules is None:
        figures["energy_reason"] = NO_METER
    if plain is not None:
        figures["plain_tokens_per_second"] = round(plain.tokens_per_second, 2)
        figures["speed_up"] = round(cost.tokens_per_second / plain.tokens_per_second, 3)
        figures["same_tokens"] = same
        figures["break_even_length"] = round(
            stats.accepted_length * plain.tokens_per_second / cost.tokens_per_second, 4
        )
    if perplexities is not None:
        figures["perplexity"], figures["plain_perplexity"] = (round(one, 4) for one in perplexities)
    return figures


def table(figures: dict[str, Any], sampled: bool) -> str:
    """Format the comparison for a terminal."""
    rates, joules = figures["accepted_per_position"], figures["energy_joules_per_token"]
    rows = [
        *((f"acceptance at position {place}", f"{100 * rate:.1f} %") for place, rate in enumerate(rates, start=1)),
        ("accepted length", f"{figures['accepted_length']:.3f} tokens per target forward"),
        ("target forwards", f"{figures['target_forwards']}"),
        ("tokens per second", f"{figures['tokens_per_second']:.1f}"),
    ]
    if joules is not None:
        rows.append(("energy", f"{joules:.3g} J a token"))
    if "speed_up" in figures:
        plain = figures["plain_tokens_per_second"]
        rows.append(
            ("break-even", f"at an accepted length of {figures['break_even_length']:.2f}: drafting pays above it")
        )
        rows.append(("speed-up", f"{figures['speed_up']:.2f} over plain decoding at {plain:.1f} tokens per second"))
        if not sampled:
            rows.append(("same tokens", "yes" if figures["same_tokens"] else f"NO{_rounding(figures['dtype'])}"))
    if "perplexity" in figures:
        drafted, alone = figures["perplexity"], figures["plain_perplexity"]
        rows.append(("perplexity", f"{drafted:.3f}; of plain decoding {alone:.3f}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _rounding(dtype: str) -> str:
    """Explain why greedy texts may differ: rounding, which depends on a forward's rows, decides near-ties of logits."""
    return "" if dtype == "float32" else f": {dtype} rounds a row otherwise among others; compare with --dtype float32"
