"""Sixteen requests of mixed lengths at once: the engine, drafting and plain, and transformers' one by one.

    python benchmarks/serving.py                     the quickstart's checkpoint, or a random model of its shape
    python benchmarks/serving.py --lengths uniform   other lengths
    python benchmarks/serving.py --large             random weights of SmolLM2-135M's shape
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch

from benchmarks.agreeing import SMOLLM2, agreeing_model
from benchmarks.harness import Found, Goal, Table, interleave, main
from benchmarks.llama import greedy, llama_of
from megatron_mtp.decoding import load_runner
from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.engine import Engine
from megatron_mtp.decoding.requests import Request
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.scheduler import EngineSettings
from megatron_mtp.model.build import join_world
from megatron_mtp.runtime import prepare

ON_CPU = prepare()

SMALL: dict[str, Any] = {"layers": 4, "hidden": 192, "vocabulary": 1024, "heads": 6, "ffn": 512}
"""The quickstart's model."""
QUICK: dict[str, Any] = {"layers": 2, "hidden": 64, "vocabulary": 128}
OVER_TRANSFORMERS = 3.0
REPEATS, LARGE_REPEATS = 7, 3


OWN = Path("runs/quickstart/checkpoint")
FLAGS: dict[str, dict[str, Any]] = {
    "--checkpoint": {"type": Path, "default": OWN, "help": f"default: {OWN}; not read with --large"},
    "--lengths": {"choices": ["skewed", "uniform"], "default": "skewed", "help": "of new texts"},
    "--large": {
        "action": "store_true",
        "help": "instead of the checkpoint: random weights of SmolLM2-135M's shape",
    },
}


def serving(wanted: Namespace) -> Found:
    """Tokens a second of every side."""
    join_world()
    runner = large_runner(wanted.quick) if wanted.large else runner_of(wanted.checkpoint, wanted.quick)
    requests = requests_of(runner, 4 if wanted.quick else 16, wanted.lengths)
    sides = Sides(runner, requests)
    repeats = wanted.repeats or (1 if wanted.quick else LARGE_REPEATS if wanted.large else REPEATS)
    timed = interleave(sides.named(), repeats, warm_up=1)
    sides.check()
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
        "wall_seconds": {side: [round(one.wall, 4) for one in rounds] for side, rounds in timed.items()},
    }
    over_one_by_one = timed.compare("transformers", "engine", clock).paired_ratio
    return Found(
        results,
        [Goal("engine over transformers one by one", over_one_by_one, OVER_TRANSFORMERS, ">=")],
        [Table("Sixteen requests at once", ("side", "tokens a second"), [*rates.items()])],
    )


def runner_of(checkpoint: Path, quick: bool) -> Runner:
    """The checkpoint's model, or a random one where there is none."""
    if checkpoint.is_dir() and not quick:
        return load_runner(checkpoint)
    return Runner(agreeing_model(depths=2, noise=0.7, **(QUICK if quick else SMALL)))


def large_runner(quick: bool) -> Runner:
    """A random model of SmolLM2-135M's shape, or a tiny one."""
    return Runner(agreeing_model(depths=2, noise=0.5, **(QUICK if quick else SMOLLM2)))


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
        self.engines: dict[str, Engine] = {}

    def named(self) -> dict[str, Callable[[], None]]:
        """A run of every side, by its name."""
        drafting = SpeculativeConfig("mtp", self.runner.depths)
        return {
            "engine": lambda: self._engine("engine", drafting),
            "engine plain": lambda: self._engine("engine plain", None),
            "transformers": self._transformers,
        }

    def check(self) -> None:
        """End where one of ours emits other tokens than another."""
        ours = [texts for side, texts in self.texts.items() if side != "transformers"]
        if any(texts != ours[0] for texts in ours):
            raise SystemExit("drafting and plain decoding do not emit the same tokens: there is nothing to compare.")

    def _engine(self, side: str, config: SpeculativeConfig | None) -> None:
        if side not in self.engines:  # without reuse, since every round has the same prompts
            settings = EngineSettings(running=len(self.requests), reuse=False)
            self.engines[side] = Engine(self.runner, settings, config)
        engine = self.engines[side]
        texts = {engine.add(request): list[int]() for request in self.requests}
        while engine.busy:
            for update in engine.step():
                texts[update.request] += update.tokens
        self.texts[side] = list(texts.values())

    def _transformers(self) -> None:
        trunk, _ = self.llama
        texts = [greedy(trunk, None, request.prompt, request.max_new_tokens) for request in self.requests]
        self.texts["transformers"] = texts


if __name__ == "__main__":
    main(serving, __doc__, ON_CPU, {"here": REPEATS, "--large": LARGE_REPEATS}, FLAGS)
