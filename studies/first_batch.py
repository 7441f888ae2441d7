"""What automatic K costs on a first batch, about which it knows nothing, against plain decoding.

    python studies/first_batch.py             three sizes, with depths that err and depths that agree
    python studies/first_batch.py --quick     does it run? (the figures mean nothing)

The depths of the models always agree with the trunk, or hardly ever (`agreeing.py`). Both sides must emit the same
tokens, or the benchmark ends with an error.

Run at 6addfb9.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch

from benchmarks.agreeing import agreeing_model
from benchmarks.harness import Goal, compare, count, hardware, interleave, report, Table
from megatron_mtp.drafting import generate
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.model.build import join_world
from megatron_mtp.platform import prepare

ON_CPU = prepare()

GOAL = 0.98
"""With depths that err, automatic K has at least this share of plain decoding's speed."""

SHAPES = {"large": (8, 1024, 8192), "medium": (8, 512, 4096), "small": (4, 192, 1024)}
"""Layers, hidden size and vocabulary."""
QUICK = {"tiny": (1, 64, 64)}
NOISE = {"err": 30.0, "agree": 0.0}
AUTO = {"method": "mtp", "num_speculative_tokens": "auto"}
PROMPT = 64


def main() -> None:
    """Measure, and report."""
    parser = argparse.ArgumentParser(description="Speed of automatic K on a first batch, against plain decoding.")
    parser.add_argument("--repeats", type=count, default=15, help="timed rounds; default: 15")
    parser.add_argument("--new-tokens", type=count, default=128, help="default: 128")
    parser.add_argument("--quick", action="store_true", help="one tiny model, 2 rounds: whether it runs, not how fast")
    wanted = parser.parse_args()
    repeats, new = (2, 12) if wanted.quick else (wanted.repeats, wanted.new_tokens)
    join_world()
    results, goals, rows = {}, [], []
    for name, shape in (QUICK if wanted.quick else SHAPES).items():
        for kind, noise in NOISE.items():
            found = measure(shape, noise, repeats, new)
            results[f"{name}, depths that {kind}"] = found
            rows.append((name, kind, found["speed of automatic K over plain"], found["drafts"]))
            if kind == "err":
                goals.append(Goal(f"automatic K over plain, {name}", rows[-1][2], GOAL, ">="))
    settings = {"prompt": PROMPT, "new tokens": new, "repeats": repeats}
    header = ("model", "depths", "speed over plain", "drafts")
    report("first_batch", hardware(ON_CPU), {**settings, **results}, goals, [Table(header, rows)])


def measure(shape: tuple[int, int, int], noise: float, repeats: int, new: int) -> dict[str, Any]:
    """The speed of automatic K over plain decoding; raises ValueError where their tokens differ."""
    runner = Runner(agreeing_model(*shape, depths=2, noise=noise), None)
    prompt = torch.randint(shape[2], (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()

    def plain() -> Any:
        return generate(runner, [prompt], new)

    def first_batch() -> Any:
        runner.auto_counts.clear()  # what earlier batches have shown
        return generate(runner, [prompt], new, speculative=AUTO)

    if plain().token_ids != (drafted := first_batch()).token_ids:
        raise ValueError("the two sides do not emit the same tokens: there is nothing to compare.")
    spent = interleave({"plain": plain, "auto": first_batch}, repeats, synchronize=torch.cuda.synchronize)
    seconds = {name: [one.wall for one in runs] for name, runs in spent.items()}
    comparison = compare(seconds["plain"], seconds["auto"])
    return {
        "speed of automatic K over plain": comparison.paired_ratio,
        "quartiles": comparison.paired_quartiles,
        "drafts": drafted.stats.drafted,
    }


if __name__ == "__main__":
    main()
