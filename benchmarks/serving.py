"""Sixteen requests of mixed lengths at once: the continuous engine, `generate`'s batches, transformers' one by one.

    python benchmarks/serving.py                     the quickstart's checkpoint, or a random model of its shape
    python benchmarks/serving.py --lengths uniform   other lengths
    python benchmarks/serving.py --large             random weights of SmolLM2-135M's shape
    python benchmarks/serving.py --vllm PYTHON       against vLLM for CPU in PYTHON's environment (scripts/test_vllm.sh)
    python benchmarks/serving.py --quick             does it run? (the figures mean nothing)

Prompts have 20 to 120 tokens. With `skewed`, new tokens are 8 to 128, as often 8 to 16 as 64 to 128, since most of the
texts that servers write are short and a few long; with `uniform`, every number from 8 to 128 is as likely.

All sides emit the same number of tokens for each request, greedily: the engine as its texts come and go, `generate` in
one batch in which ended texts keep their places, transformers text by text. Ours must emit the same tokens in float32,
or the benchmark ends with an error. The sides take turns, run by run; figures are medians, with one thread of the
processor's time, which other load disturbs less, else of the clock's.

The time to the first token is measured by first_token.py, the gap between the forwards of a step by gaps.py. Depths of
random models agree with their trunks as often as agreeing.py makes them, so rates with drafting hold for that agreement
alone; plain rates do not depend on weights. With `--vllm` the model is that of `--large`, each text has 64 new tokens,
and the sides are the engine and vLLM; vLLM has no depths to draft with.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from operator import eq
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch

from benchmarks.agreeing import SMOLLM2, agreeing_model
from benchmarks.first_token import Waits, waits
from benchmarks.gaps import gaps
from benchmarks.harness import Goal, Spent, add_common_flags, hardware, interleave, limit_threads, report, table
from benchmarks.llama import greedy, llama_of
from benchmarks.vllm_process import VLLM
from megatron_mtp.drafting import generate, load_runner
from megatron_mtp.drafting.config import SpeculativeConfig
from megatron_mtp.drafting.engine import ContinuousEngine, EngineSettings
from megatron_mtp.drafting.loop import Limits
from megatron_mtp.drafting.requests import Request
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.model.build import join_world
from megatron_mtp.platform import prepare

ON_CPU = prepare()

SMALL: dict[str, Any] = {"layers": 4, "hidden": 192, "vocabulary": 1024, "heads": 6, "ffn": 512}
"""The quickstart's model."""
QUICK: dict[str, Any] = {"layers": 2, "hidden": 64, "vocabulary": 128}
OVER_BATCHES, OVER_TRANSFORMERS, OVER_VLLM, NO_WIDER, STEPS_LATE = 1.5, 3.0, 1.0, 1.0, 2.0
NEW_OF_VLLM = 64
"""New tokens of each text where vLLM is the other side."""


@dataclass(frozen=True)
class Runs:
    """How much is measured: rounds of so many requests, then long prompts one after the other, of so many tokens."""

    requests: int
    rounds: int
    long_prompts: int
    long_tokens: int


SMALL_RUNS, LARGE_RUNS, QUICK_RUNS = Runs(16, 7, 40, 192), Runs(16, 3, 20, 384), Runs(4, 1, 3, 192)


def main() -> None:
    """Measure, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, own = parser.add_argument, Path("runs/quickstart/checkpoint")
    add("--checkpoint", type=Path, default=own, help=f"default: {own}; not read with --large or --vllm")
    add("--lengths", choices=["skewed", "uniform"], default="skewed", help="of new texts; --vllm has one length")
    add("--large", action="store_true", help="instead of the checkpoint: random weights of SmolLM2-135M's shape")
    add("--vllm", type=Path, metavar="PYTHON", help="of the environment that vLLM for CPU is installed in")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="with --vllm alone; default: float32")
    add_common_flags(parser, {"here": SMALL_RUNS.rounds, "--vllm, --large": LARGE_RUNS.rounds})
    args = parser.parse_args()
    limit_threads(args)
    join_world()
    if args.vllm is not None:
        return against_vllm(args)
    runs = QUICK_RUNS if args.quick else LARGE_RUNS if args.large else SMALL_RUNS
    runner = large_runner(args.quick) if args.large else runner_of(args.checkpoint, args.quick)
    requests = requests_of(runner, runs.requests, args.lengths)
    sides = Sides(runner, requests)
    named = sides.named()
    spent = interleave(named, args.repeats or runs.rounds, warm_up=1)
    sides.check()
    ways = {"drafting": SpeculativeConfig("mtp", runner.depths), "plain": None}
    between = {name: gaps(runner, requests, config) for name, config in ways.items()}
    first = {name: waits(runner, config, runs.long_prompts, runs.long_tokens) for name, config in ways.items()}
    results = {
        "requests": len(requests),
        "lengths": args.lengths,
        "prompt_tokens": [len(request.prompt) for request in requests],
        "new_tokens": [request.max_new_tokens for request in requests],
        **rates_of(spent, requests),
        "gap_milliseconds": between,
        "first_token": {name: {**asdict(one), "own_p95_steps": one.own_p95_steps} for name, one in first.items()},
    }
    goals = [*goals_of(spent), *gap_goals(between), *first_goals(first)]
    report("serving", hardware(ON_CPU), results, goals, [rates_table(results)])


def against_vllm(args: argparse.Namespace) -> None:
    """Measure the engine and vLLM on the same weights, and report."""
    runs, new = (QUICK_RUNS, 8) if args.quick else (LARGE_RUNS, NEW_OF_VLLM)
    runner = large_runner(args.quick, args.dtype)
    requests = [replace(one, max_new_tokens=new) for one in requests_of(runner, runs.requests, "uniform")]
    sides, theirs = Sides(runner, requests), VLLM(args.vllm, runner, runs.requests)
    named = {name: run for name, run in sides.named().items() if name.startswith("engine")}
    spent = interleave({**named, "vllm": lambda: theirs.run(requests)}, args.repeats or runs.rounds, 1)
    theirs.end()
    results = {
        "vllm": theirs.version,
        "dtype": args.dtype,
        "same_texts": sum(map(eq, sides.texts["engine plain"], theirs.texts)),
        **rates_of(spent, requests),
    }
    goals = [
        Goal(f"{side} over vLLM, {args.dtype}", faster(spent, side, "vllm"), OVER_VLLM, ">=")
        for side in ("engine plain", "engine")
    ]
    report("serving", hardware(ON_CPU), results, goals, [rates_table(results)])


def rates_of(spent: dict[str, list[Spent]], requests: list[Request]) -> dict[str, Any]:
    """Tokens a second of every side, and what they are made of."""
    tokens = sum(request.max_new_tokens for request in requests)
    return {
        "clock": clock(),
        "tokens_per_second": {
            side: round(tokens / statistics.median(map(seconds, rounds)), 1) for side, rounds in spent.items()
        },
        "wall_seconds": {side: [round(one.wall, 4) for one in rounds] for side, rounds in spent.items()},
    }


def rates_table(results: dict[str, Any]) -> str:
    """A side a line."""
    return table(["side", "tokens a second"], [[side, rate] for side, rate in results["tokens_per_second"].items()])


def runner_of(checkpoint: Path, quick: bool) -> Runner:
    """The checkpoint's model, or a random one where there is none."""
    if checkpoint.is_dir() and not quick:
        return load_runner(checkpoint)
    return Runner(agreeing_model(depths=2, noise=0.7, **(QUICK if quick else SMALL)))


def large_runner(quick: bool, dtype: str = "float32") -> Runner:
    """A random model of SmolLM2-135M's shape, or a tiny one."""
    model = agreeing_model(depths=2, noise=0.5, **(QUICK if quick else SMOLLM2))
    return Runner(model.to(getattr(torch, dtype)))


def requests_of(runner: Runner, count: int, lengths: str) -> list[Request]:
    """Random prompts, the same in every run."""
    chance, made = random.Random(1), []
    for _ in range(count):
        prompt = [chance.randrange(runner.vocab_size) for _ in range(chance.randint(20, 120))]
        new = round(8 * 16 ** chance.random()) if lengths == "skewed" else chance.randint(8, 128)
        made.append(Request(prompt, min(new, runner.positions - len(prompt))))
    return made


class Sides:
    """What is compared, and the texts that each side made last."""

    def __init__(self, runner: Runner, requests: list[Request]) -> None:
        self.runner, self.requests = runner, requests
        self.llama = llama_of(runner.model, runner.dtype)
        self.texts: dict[str, list[list[int]]] = {}
        self.engines: dict[str, ContinuousEngine] = {}

    def named(self) -> dict[str, Callable[[], None]]:
        """A run of every side, by its name."""
        drafting = SpeculativeConfig("mtp", self.runner.depths)
        return {
            "engine": lambda: self._engine("engine", drafting),
            "batch": lambda: self._batch("batch", drafting),
            "engine plain": lambda: self._engine("engine plain", None),
            "batch plain": lambda: self._batch("batch plain", None),
            "transformers": self._transformers,
        }

    def check(self) -> None:
        """End where one of ours emits other tokens than another."""
        ours = [texts for side, texts in self.texts.items() if side != "transformers"]
        if any(texts != ours[0] for texts in ours):
            raise SystemExit("the engine and the batch do not emit the same tokens: there is nothing to compare.")

    def _engine(self, side: str, config: SpeculativeConfig | None) -> None:
        if side not in self.engines:  # without reuse, since every round has the same prompts
            settings = EngineSettings(running=len(self.requests), reuse=False)
            self.engines[side] = ContinuousEngine(self.runner, settings, config)
        engine = self.engines[side]
        texts = {engine.add(request): list[int]() for request in self.requests}
        while engine.busy:
            for update in engine.step():
                texts[update.request] += update.tokens
        self.texts[side] = list(texts.values())

    def _batch(self, side: str, config: SpeculativeConfig | None) -> None:
        limits = [Limits(request.max_new_tokens) for request in self.requests]
        prompts = [request.prompt for request in self.requests]
        longest = max(request.max_new_tokens for request in self.requests)
        self.texts[side] = generate(self.runner, prompts, longest, speculative=config, limits=limits).token_ids

    def _transformers(self) -> None:
        trunk, _ = self.llama
        texts = [greedy(trunk, None, request.prompt, request.max_new_tokens) for request in self.requests]
        self.texts["transformers"] = texts


def clock() -> str:
    """Whose time counts: `Spent.cpu` or `Spent.wall`."""
    return "cpu" if torch.get_num_threads() == 1 else "wall"


def seconds(one: Spent) -> float:
    """What a run took."""
    return float(getattr(one, clock()))


def goals_of(spent: dict[str, list[Spent]]) -> list[Goal]:
    """What was aimed at in tokens a second."""
    over_one_by_one = faster(spent, "engine", "transformers")
    return [
        Goal("engine over batches, drafting", faster(spent, "engine", "batch"), OVER_BATCHES, ">="),
        Goal("engine over batches, plain", faster(spent, "engine plain", "batch plain"), OVER_BATCHES, ">="),
        Goal("engine over transformers one by one", over_one_by_one, OVER_TRANSFORMERS, ">="),
    ]


def gap_goals(between: dict[str, dict[str, float]]) -> list[Goal]:
    """That a step which starts before the last one is read takes no longer between its forwards."""
    what = "gap between the forwards of a step, with overlap over without"
    return [Goal(f"{what}, {name}", one["overlap"] / one["none"], NO_WIDER) for name, one in between.items()]


def first_goals(first: dict[str, Waits]) -> list[Goal]:
    """What was aimed at in waiting."""
    what = "first token of long prompts, decode steps beside the own prefill, p95"
    return [Goal(f"{what}, {name}", one.p95_steps, STEPS_LATE) for name, one in first.items()]


def faster(spent: dict[str, list[Spent]], side: str, than: str) -> float:
    """Median of the ratios within each round."""
    pairs = zip(spent[than], spent[side], strict=True)
    return statistics.median(seconds(slow) / seconds(fast) for slow, fast in pairs)


if __name__ == "__main__":
    main()
