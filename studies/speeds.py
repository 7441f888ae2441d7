"""How long the same texts take: plain and drafting, ours and transformers', one text and eight at once.

Run at 1c8f248.
"""

import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.agreeing import agreeing_model
from benchmarks.decoding import Generations, check_tokens
from benchmarks.harness import Goal, Spent, interleave
from benchmarks.llama import llama_of
from megatron_mtp.drafting import load_runner
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.types import AcceptanceStats

EIGHT = 8
"""Texts of the batch that transformers' MTP, which runs one, is compared with."""


@dataclass(frozen=True)
class Scale:
    """How much is run."""

    prompts: int
    new_tokens: int
    rounds: int
    layers: int
    hidden: int

    @property
    def speed_tokens(self) -> int:
        return min(self.new_tokens, 128)


FULL, QUICK = Scale(32, 160, 4, 8, 1024), Scale(2, 12, 1, 2, 128)


def speed(
    name: str, runner: Runner, llama: Any, prompts: list[list[int]], scale: Scale
) -> tuple[dict[str, Any], list[Goal]]:
    """Seconds of the same texts: plain and drafting, ours and transformers', and ours at batch 8."""
    new, prompt, eight, count = scale.speed_tokens, prompts[0], (prompts * EIGHT)[:EIGHT], runner.depths
    made = Generations(runner, llama, new)
    sides = {
        "plain": made.ours("plain", [prompt], 0),
        "draft": made.ours("draft", [prompt], count),
        "auto": made.ours("auto", [prompt], "auto"),
        f"draft of {EIGHT}": made.ours(f"draft of {EIGHT}", eight, count),
        "transformers": made.theirs("transformers", prompt, False),
        "transformers mtp": made.theirs("transformers mtp", prompt, True),
    }
    spent = interleave(sides, scale.rounds, warm_up=1)
    check_tokens(name, made.texts, runner.dtype)
    results, goals = _against_theirs(name, spent, new)
    loop, goal = _against_bound(name, made.stats, count)
    return results | loop, [goal, *goals]


def _against_bound(name: str, stats: dict[str, list[AcceptanceStats]], count: int) -> tuple[dict[str, Any], Goal]:
    """Speed-up over plain decoding, prompts apart, against accepted length / (1 + cK): least seconds of the rounds."""
    plain = min(one.target_seconds / (one.target_forwards - 1) for one in stats["plain"])
    draft = min(stats["draft"], key=lambda one: one.target_seconds + one.drafter_seconds)
    steps, tokens = draft.target_forwards - 1, draft.emitted - 1
    cost = min(one.drafter_seconds for one in stats["draft"]) / steps / count / plain
    speed_up = plain * tokens / (draft.target_seconds + draft.drafter_seconds)
    bound = tokens / steps / (1 + cost * count)
    results = {
        "accepted_length": round(tokens / steps, 3),
        "drafter_cost": round(cost, 4),
        "plain_forward_ms": round(1000 * plain, 3),
        "speed_up": round(speed_up, 3),
        "bound": round(bound, 3),
    }
    return results, Goal(f"{name}: drafting over plain, against its bound", speed_up / bound, 0.9, ">=")


def _against_theirs(name: str, spent: dict[str, list[Spent]], new: int) -> tuple[dict[str, Any], list[Goal]]:
    """Ratios are of the processor's time with one thread, which other load disturbs less, else of the clock's."""
    clock = "cpu" if torch.get_num_threads() == 1 else "wall"
    seconds = {side: statistics.median(getattr(one, clock) for one in rounds) for side, rounds in spent.items()}
    results = {
        "clock": clock,
        "tokens_per_second": {
            side: round((EIGHT if side.endswith(str(EIGHT)) else 1) * new / time, 1) for side, time in seconds.items()
        },
        "wall_seconds": {side: [round(one.wall, 3) for one in rounds] for side, rounds in spent.items()},
    }
    large = name.startswith("large")

    def faster(side: str, than: str) -> float:
        """Seconds of one over those of the other, the median of the rounds."""
        pairs = zip(spent[than], spent[side], strict=True)
        return statistics.median(getattr(slow, clock) / getattr(fast, clock) for slow, fast in pairs)

    goals = [
        Goal(f"{name}: auto over plain", faster("auto", "plain"), 0.98, ">="),
        Goal(
            f"{name}: drafting over transformers' MTP", faster("draft", "transformers mtp"), 1.3 if large else 2.0, ">="
        ),
        Goal(
            f"{name}: {EIGHT} texts at once over theirs",
            EIGHT * faster(f"draft of {EIGHT}", "transformers mtp"),
            2.5,
            ">=",
        ),
    ]
    if large:
        goals.append(Goal(f"{name}: plain over transformers' generate", faster("plain", "transformers"), 1.3, ">="))
    return results, goals


def speeds(checkpoint: Path | None, prompts: list[list[int]], scale: Scale) -> tuple[dict[str, Any], list[Goal]]:
    """The trained model, and the large one with drafts that agree often and never, in both precisions."""
    results: dict[str, Any] = {}
    goals: list[Goal] = []
    cases: list[tuple[str, float, torch.dtype]] = [
        ("large float32", 0.5, torch.float32),
        ("large bfloat16", 0.5, torch.bfloat16),
        ("large float32, drafts that err", 50.0, torch.float32),
    ]
    for name, noise, dtype in cases:
        print(f"timing: {name}", file=sys.stderr, flush=True)
        model = agreeing_model(scale.layers, scale.hidden, 8192, 2, noise)
        llama = llama_of(model, dtype)
        found, wanted = speed(name, Runner(model.to(dtype)), llama, [list(range(5, 37))], scale)
        results[name], goals = found, goals + wanted
        del model, llama
    if checkpoint is not None:
        print("timing: quickstart", file=sys.stderr, flush=True)
        runner = load_runner(checkpoint)
        short = replace(scale, rounds=4 * scale.rounds)  # a round takes a second
        results["quickstart"], wanted = speed(
            "quickstart", runner, llama_of(runner.model, torch.float32), prompts, short
        )
        goals += wanted
    return results, goals
