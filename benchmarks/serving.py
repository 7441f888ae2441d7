"""Sixteen requests of mixed lengths at once: the engine, drafting and plain, and transformers' one by one.

    python benchmarks/serving.py                     the quickstart's checkpoint, or a random model of its shape
    python benchmarks/serving.py --lengths uniform   other lengths
    python benchmarks/serving.py --model large       random weights of SmolLM2-135M's shape
    python benchmarks/serving.py --quick             does it run? (the figures mean nothing)

Prompts have 20 to 120 tokens. With `skewed`, new tokens are 8 to 128, as often 8 to 16 as 64 to 128, since most of the
texts that servers write are short and a few long; with `uniform`, every number from 8 to 128 is as likely.

All sides emit the same number of tokens for each request, greedily: the engine as its texts come and go, transformers
text by text. Ours must emit the same tokens in float32, or the benchmark ends with an error. The sides take turns, run
by run. Figures are medians: of the processor's time with one thread, which other load disturbs less; else of the clock.

Depths of random models agree with their trunks as often as agreeing.py makes them, so rates with drafting hold for that
agreement alone; plain rates do not depend on weights.
"""

import random
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch

from benchmarks.decoding import CHECKPOINT, ON_CPU, runner_of
from benchmarks.harness import Found, Goal, Table, interleave, main
from benchmarks.llama import greedy, llama_of
from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.engine import Engine
from megatron_mtp.decoding.requests import Request
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.scheduler import EngineSettings
from megatron_mtp.model.build import join_world

OVER_TRANSFORMERS = 3.0
REPEATS = {"small": 7, "large": 3}
FLAGS: dict[str, dict[str, Any]] = {
    "--model": {"choices": REPEATS, "default": "small", "help": "as of decoding.py; default: small"},
    "--checkpoint": CHECKPOINT,
    "--lengths": {"choices": ["skewed", "uniform"], "default": "skewed", "help": "of new texts"},
}


def serving(wanted: Namespace) -> Found:
    """Tokens a second of every side."""
    join_world()
    runner = runner_of(wanted.model, torch.float32, wanted)
    requests = requests_of(runner, 4 if wanted.quick else 16, wanted.lengths)
    texts: dict[str, list[list[int]]] = {}
    timed = interleave(sides_of(runner, requests, texts), wanted.repeats or REPEATS[wanted.model], warm_up=1)
    if texts["engine"] != texts["engine plain"]:
        raise SystemExit("drafting and plain decoding do not emit the same tokens: there is nothing to compare.")
    clock = "cpu" if torch.get_num_threads() == 1 else "wall"
    tokens = sum(request.max_new_tokens for request in requests)
    rates = {side: round(tokens / median, 1) for side, median in timed.medians(clock).items()}
    results = {
        "requests": len(requests),
        "lengths": wanted.lengths,
        "prompt_tokens": [len(request.prompt) for request in requests],
        "new_tokens": [request.max_new_tokens for request in requests],
        "clock": clock,
        "tokens_per_second": rates,
    }
    over_one_by_one = timed.compare("transformers", "engine", clock).paired_ratio
    return Found(
        results,
        [Goal("engine over transformers one by one", over_one_by_one, OVER_TRANSFORMERS, ">=")],
        [Table("Sixteen requests at once", ("side", "tokens a second"), [*rates.items()])],
    )


def requests_of(runner: Runner, count: int, lengths: str) -> list[Request]:
    """Random prompts, the same in every run."""
    chance, made = random.Random(1), []
    for _ in range(count):
        prompt = [chance.randrange(runner.vocab_size) for _ in range(chance.randint(20, 120))]
        new = round(8 * 16 ** chance.random()) if lengths == "skewed" else chance.randint(8, 128)
        made.append(Request(prompt, min(new, runner.positions - len(prompt))))
    return made


def sides_of(
    runner: Runner, requests: list[Request], texts: dict[str, list[list[int]]]
) -> dict[str, Callable[[], None]]:
    """A run of every side, by its name; what it emits is kept in `texts`."""
    trunk, _ = llama_of(runner.model, runner.dtype)
    settings = EngineSettings(running=len(requests), reuse=False)  # since every round has the same prompts
    drafting = SpeculativeConfig("mtp", runner.depths)
    engines = {"engine": Engine(runner, settings, drafting), "engine plain": Engine(runner, settings, None)}

    def by_engine(side: str) -> None:
        engine = engines[side]
        made = {engine.add(request): list[int]() for request in requests}
        while engine.busy:
            for update in engine.step():
                made[update.request] += update.tokens
        texts[side] = [*made.values()]

    def by_transformers() -> None:
        texts["transformers"] = [greedy(trunk, None, one.prompt, one.max_new_tokens) for one in requests]

    return {side: partial(by_engine, side) for side in engines} | {"transformers": by_transformers}


if __name__ == "__main__":
    main(serving, __doc__, ON_CPU, {**REPEATS, "quick": 1}, FLAGS)
