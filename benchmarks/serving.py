"""Several requests at once with trained MTP layers: plain decoding, fixed K, automatic K, and transformers one by one.

    python benchmarks/serving.py                                    the quickstart's checkpoint; 1 to 64 requests
    python benchmarks/serving.py --checkpoint runs/attached/checkpoint --data-path runs/attached/data/corpus --texts 1 4
    python benchmarks/serving.py --quick                            does it run? (the figures mean nothing)

Prompts are 48 tokens from anywhere in documents that training held out (--split 98,2,0). At least eight requests run,
one after another if fewer run concurrently. Outputs have 8 to 128 tokens, as often 8 to 16 as 64 to 128, since most
outputs of servers are short and a few are long.

All sides generate the same number of tokens for each request, greedily: the engine with continuous batching,
transformers one by one. The engine's tokens must be the same with and without drafts, or the benchmark fails. The sides
take turns, run by run. Results are medians: of CPU time with one thread, which other load disturbs less; otherwise of
wall time. Four untimed runs of each side come first: a server measures the cost of each K only once.

Without a checkpoint the model is a random one of the quickstart's shape, and the prompts are random tokens.
"""

import random
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path

import torch

from benchmarks.decoding import CHECKPOINT, ON_CPU, runner_of
from benchmarks.harness import Found, Goal, Table, count, interleave, main
from benchmarks.llama import greedy, llama_of
from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.data.prompts import Beginnings
from megatron_mtp.decoding.block_tables import BLOCK
from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.engine import Engine
from megatron_mtp.decoding.load import load_runner
from megatron_mtp.decoding.requests import Request
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.scheduler import EngineSettings
from megatron_mtp.model.build import join_world

OVER_TRANSFORMERS, OVER_BEST = 3.0, 0.97
FEWEST, PROMPT = 8, 48
"""Minimum number of requests of a run, and tokens of a prompt."""

FIXED = (1, 2, 3)
"""K of the sides with a fixed K."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FLAGS: dict[str, dict[str, Any]] = {
    "--checkpoint": CHECKPOINT | {"help": "with one MTP layer; default: the quickstart's"},
    "--data-path": {"type": Path, "default": Path("runs/quickstart/data/corpus"), "help": "corpus of the training"},
    "--texts": {"type": count, "nargs": "+", "default": [1, 4, 16, 64], "metavar": "N", "help": "at once"},
    "--transformers": {"action": "store_true", "help": "time transformers as well, text by text"},
    "--dtype": {"choices": DTYPES, "default": "float32", "help": "in which the tokens must be equal; default: float32"},
}


def serving(wanted: Namespace) -> Found:
    """Measure tokens per second of every side."""
    join_world()
    runner, prompt = model_of(wanted)
    results: dict[str, Any] = {"checkpoint": str(wanted.checkpoint), "dtype": wanted.dtype}
    goals, rows = list[Goal](), list[list[Any]]()
    for texts in [2] if wanted.quick else wanted.texts:
        print(f"timing: {texts} at once", file=sys.stderr, flush=True)
        requests = requests_of(runner, max(texts, 1 if wanted.quick else FEWEST), prompt)
        found, made = measured(runner, requests, texts, wanted)
        results[f"{texts} at once"] = found
        rates = found["tokens_per_second"]
        fixed = {side: rate for side, rate in rates.items() if side.startswith("K = ")}
        best = max(fixed, key=lambda side: fixed[side])
        rows.append([texts, rates["plain"], rates[best], best, found["accepted_length"][best], rates["auto"], made])
        goals.append(
            Goal(f"auto over the better of plain and fixed K, {texts} at once", found["auto"], OVER_BEST, ">=")
        )
        if "transformers" in rates:
            over = round(rates["auto"] / rates["transformers"], 2)
            goals.append(Goal(f"auto over transformers one by one, {texts} at once", over, OVER_TRANSFORMERS, ">="))
    header = "requests at once", "plain", "best fixed K", "K", "its accepted length", "auto", "auto / better of both"
    return Found(results, goals, [Table("Tokens a second", header, rows)])


def model_of(wanted: Namespace) -> tuple[Runner, Callable[[int], list[int]]]:
    """Return the model, and prompts by number."""
    if wanted.quick or not wanted.checkpoint.is_dir():
        runner, chance = runner_of("small", DTYPES[wanted.dtype], wanted), random.Random(1)
        return runner, lambda _: [chance.randrange(runner.vocab_size) for _ in range(PROMPT)]
    runner = load_runner(wanted.checkpoint, dtype=DTYPES[wanted.dtype])
    if runner.depths != 1 and not runner.model.config.mtp_use_repeated_layer:
        raise SystemExit(f"{wanted.checkpoint} has {runner.depths} MTP layers; give a checkpoint with one.")
    return runner, Beginnings(str(wanted.data_path), PROMPT, 1, "98,2,0", "validation", anywhere=True).prompt


def requests_of(runner: Runner, number: int, prompt: Callable[[int], list[int]]) -> list[Request]:
    """Return prompts and budgets, equal in every run."""
    chance = random.Random(2)
    budgets = [round(8 * 16 ** chance.random()) for _ in range(number)]
    return [Request(prompt(place), min(new, runner.positions - PROMPT)) for place, new in enumerate(budgets)]


def measured(runner: Runner, requests: list[Request], texts: int, wanted: Namespace) -> tuple[dict[str, Any], float]:
    """Return rates of every side with this many concurrent requests, and automatic K's rate over the best other."""
    emitted, stats = dict[str, list[list[int]]](), dict[str, AcceptanceStats]()
    sides = sides_of(runner, requests, texts, emitted, stats)
    if wanted.transformers:
        trunk, _ = llama_of(runner.model, runner.dtype)
        sides["transformers"] = lambda: [greedy(trunk, None, one.prompt, one.max_new_tokens) for one in requests]
    timed = interleave(sides, wanted.repeats, warm_up=4)
    for side, made in emitted.items():
        if made != emitted["plain"]:
            raise SystemExit(f"{side} and plain decoding do not emit the same tokens: there is nothing to compare.")
    clock = "cpu" if torch.get_num_threads() == 1 else "wall"
    total = sum(request.max_new_tokens for request in requests)
    rates = {side: round(total / median, 1) for side, median in timed.medians(clock).items()}
    best = max(rates[side] for side in rates if side not in ("auto", "transformers"))
    over = round(rates["auto"] / best, 3)
    lengths = {side: round(one.accepted_length, 2) for side, one in stats.items()}
    return {"tokens_per_second": rates, "accepted_length": lengths, "auto": over, "clock": clock}, over


def sides_of(
    runner: Runner,
    requests: list[Request],
    texts: int,
    emitted: dict[str, list[list[int]]],
    stats: dict[str, AcceptanceStats],
) -> dict[str, Callable[[], object]]:
    """Return a run of each of our sides by name; outputs and acceptance are stored."""
    blocks = texts * (-(-256 // BLOCK) + 1)
    settings = EngineSettings(running=texts, blocks=blocks, reuse=False)  # every run has the same prompts
    configs = {f"K = {number}": SpeculativeConfig("mtp_eagle", number) for number in FIXED}
    configs["auto"] = SpeculativeConfig("mtp_eagle", "auto")
    engines = {side: Engine(runner, settings, config) for side, config in {"plain": None, **configs}.items()}

    def by_engine(side: str) -> None:
        engine = engines[side]
        engine.stats = AcceptanceStats()
        made = {engine.add(request): list[int]() for request in requests}
        while engine.busy:
            for update in engine.step():
                made[update.request] += update.tokens
        emitted[side], stats[side] = [*made.values()], engine.stats

    return {side: partial(by_engine, side) for side in engines}


if __name__ == "__main__":
    main(serving, __doc__, ON_CPU, {"cpu": 7, "cuda": 7, "quick": 1}, FLAGS)
