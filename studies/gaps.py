"""The gap between two forwards of a step: what the engine does by itself while the model waits.

In: a runner, requests, and how they draft. Out: milliseconds of every step that are not spent in the runner's forwards.

    python studies/gaps.py             the quickstart's checkpoint, sixteen requests
    python studies/gaps.py --large     random weights of SmolLM2-135M's shape

Run at 5f33b9e.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Goal, hardware, report
from benchmarks.serving import ON_CPU, large_runner, requests_of, runner_of
from megatron_mtp.drafting.config import SpeculativeConfig
from megatron_mtp.drafting.engine import ContinuousEngine, EngineSettings
from megatron_mtp.drafting.requests import Request
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.model.build import join_world

FORWARDS = ("trunk", "depth", "logits", "draft_logits", "most_probable", "draft_greedily")
"""Methods of a runner in which the model computes."""
ROUNDS = 5


def gaps(runner: Runner, requests: Sequence[Request], config: SpeculativeConfig | None) -> dict[str, float]:
    """The median step's gap in milliseconds, with and without overlap; rounds take turns.

    Steps that run prompts do not count.
    """
    found: dict[str, list[float]] = {"overlap": [], "none": []}
    for turn in range(2 * ROUNDS + 2):
        name = ("overlap", "none")[turn % 2]
        of_steps = _of_steps(runner, requests, config, name == "overlap")
        if turn > 1:  # the first round of each warms up
            found[name].append(1000 * statistics.median(of_steps))
    return {name: statistics.median(rounds) for name, rounds in found.items()}


def _of_steps(
    runner: Runner, requests: Sequence[Request], config: SpeculativeConfig | None, overlap: bool
) -> list[float]:
    engine = ContinuousEngine(runner, EngineSettings(running=len(requests), reuse=False, overlap=overlap), config)
    for request in requests:
        engine.add(request)
    seconds, begun = list[float](), set[int]()
    with _computing(runner) as spent:
        while engine.busy:
            counts, before, began = len(begun) == len(requests), spent[0], time.perf_counter()
            begun |= {update.request for update in engine.step()}
            if counts:
                seconds.append(time.perf_counter() - began - (spent[0] - before))
    return seconds


@contextmanager
def _computing(runner: Runner) -> Iterator[list[float]]:
    """One number: seconds inside the outermost forwards so far."""
    spent, inside = [0.0], [0]

    def timed(forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            inside[0] += 1
            began = time.perf_counter()
            try:
                return forward(*args, **kwargs)
            finally:
                inside[0] -= 1
                spent[0] += 0 if inside[0] else time.perf_counter() - began

        return run

    with patch.dict(vars(runner), {name: timed(getattr(runner, name)) for name in FORWARDS}):
        yield spent


def main() -> None:
    """The quickstart's checkpoint, or a random model of its shape; with drafting and without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/quickstart/checkpoint"))
    parser.add_argument("--large", action="store_true", help="random weights of SmolLM2-135M's shape instead")
    args = parser.parse_args()
    join_world()
    runner = large_runner(False) if args.large else runner_of(args.checkpoint, False)
    ways = {"drafting": SpeculativeConfig("mtp", runner.depths), "plain": None}
    requests = requests_of(runner, 16, "skewed")
    found = {name: gaps(runner, requests, config) for name, config in ways.items()}
    what = "gap between the forwards of a step, with overlap over without"
    goals = [Goal(f"{what}, {name}", one["overlap"] / one["none"], 1.0) for name, one in found.items()]
    report("gaps", hardware(ON_CPU), {"gap_milliseconds": found}, goals)


if __name__ == "__main__":
    main()
