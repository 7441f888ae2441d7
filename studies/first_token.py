"""Time to the first token while texts are decoded and long prompts keep coming.

A prompt waits for the step that runs when it comes, and runs in the next one. So its first token is due after its own
prefill and one decode step. Prompts come often enough to meet decode steps in any phase, and so far apart that each is
over before the next one comes.

Prefills vary as well, without any wait, and a small model's decode step is short. So each prompt also runs in an engine
without other texts, in turns: `own_p95_steps` is how many steps the 95th percentile of these lies above their median.

    python studies/first_token.py             the quickstart's checkpoint, 40 prompts of 192 tokens
    python studies/first_token.py --large     random weights of SmolLM2-135M's shape, 20 of 384

Run at 5f33b9e.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Goal, hardware, report
from benchmarks.serving import ON_CPU, large_runner, runner_of
from megatron_mtp.drafting.config import SpeculativeConfig
from megatron_mtp.drafting.engine import ContinuousEngine, EngineSettings
from megatron_mtp.drafting.requests import Request
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.model.build import join_world

DECODED, APART = 8, 3
"""Texts that are decoded, and own prefills between two long prompts."""


@dataclass(frozen=True)
class Waits:
    """What was measured, in seconds.

    Attributes:
        own: prefill of each long prompt in an engine without other texts, the first token included.
        step: decode step of the texts that are decoded; median.
        first: from the arrival of each long prompt to its first token.
    """

    own: list[float]
    step: float
    first: list[float]

    @property
    def p95_steps(self) -> float:
        """Decode steps that 95 % of the prompts waited beside the median of their own prefills, at most."""
        return self._p95_over_own(self.first)

    @property
    def own_p95_steps(self) -> float:
        """The same of the own prefills, which wait for nothing."""
        return self._p95_over_own(self.own)

    def _p95_over_own(self, seconds: list[float]) -> float:
        own = statistics.median(self.own)
        late = sorted((one - own) / self.step for one in seconds)
        return late[min(round(0.95 * len(late)), len(late) - 1)]


def waits(runner: Runner, config: SpeculativeConfig | None, prompts: int, tokens: int) -> Waits:
    """Measure with so many long prompts of so many tokens; three quarters of the model's positions are the most."""
    chance = random.Random(2)

    def request(length: int, new: int) -> Request:
        return Request([chance.randrange(runner.vocab_size) for _ in range(length)], new)

    settings = EngineSettings(running=2 * DECODED, reuse=False)
    engine, idle = (ContinuousEngine(runner, settings, config) for _ in range(2))
    long = min(tokens, runner.positions * 3 // 4)
    apart = APART * statistics.median(_until_first(one, request(long, 1)) for _ in range(5) for one in (engine, idle))
    clock = _Clock(engine, lambda: request(8, runner.positions - 8))
    for _ in range(40):
        clock.step()
    step, own = statistics.median(clock.decode_steps), list[float]()
    for _ in range(prompts):
        prompt = request(long, 1)
        own.append(_until_first(idle, prompt))
        clock.ask(prompt, time.perf_counter() + apart + chance.random() * 2 * step)
    return Waits(own, statistics.median(clock.decode_steps), clock.first)


class _Clock:
    """An engine in which so many texts are always decoded."""

    def __init__(self, engine: ContinuousEngine, make_text: Callable[[], Request]) -> None:
        self._engine, self._make_text, self._decoded = engine, make_text, set[int]()
        self.first: list[float] = []
        self.decode_steps: list[float] = []

    def step(self) -> set[int]:
        """One step; returns the requests that have ended."""
        fresh = DECODED - len(self._decoded)
        self._decoded |= {self._engine.add(self._make_text()) for _ in range(fresh)}
        began = time.perf_counter()
        ended = {update.request for update in self._engine.step() if update.finish is not None}
        if not fresh and ended <= self._decoded:
            self.decode_steps.append(time.perf_counter() - began)
        self._decoded -= ended
        return ended

    def ask(self, request: Request, due: float) -> None:
        """Let a prompt for one token come when it is due, and step until it has that."""
        while time.perf_counter() < due:
            self.step()
        number = self._engine.add(request)
        while number not in self.step():
            pass
        self.first.append(time.perf_counter() - due)


def _until_first(engine: ContinuousEngine, request: Request) -> float:
    """Seconds that an idle engine takes for a request of one token."""
    engine.add(request)
    began = time.perf_counter()
    while engine.busy:
        engine.step()
    return time.perf_counter() - began


def main() -> None:
    """The quickstart's checkpoint, or a random model of its shape; with drafting and without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/quickstart/checkpoint"))
    parser.add_argument("--large", action="store_true", help="random weights of SmolLM2-135M's shape instead")
    args = parser.parse_args()
    join_world()
    runner = large_runner(False) if args.large else runner_of(args.checkpoint, False)
    ways = {"drafting": SpeculativeConfig("mtp", runner.depths), "plain": None}
    prompts, tokens = (20, 384) if args.large else (40, 192)
    found = {name: waits(runner, config, prompts, tokens) for name, config in ways.items()}
    what = "first token of long prompts, decode steps beside the own prefill, p95"
    goals = [Goal(f"{what}, {name}", one.p95_steps, 2.0) for name, one in found.items()]
    results = {name: {**asdict(one), "own_p95_steps": one.own_p95_steps} for name, one in found.items()}
    report("first_token", hardware(ON_CPU), results, goals)


if __name__ == "__main__":
    main()
