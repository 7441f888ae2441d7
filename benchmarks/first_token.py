"""Time to the first token while texts are decoded and long prompts keep coming.

A prompt waits for the step that runs when it comes, and runs in the next one. So its first token is due after its own
prefill and one decode step. Prompts come often enough to meet decode steps in any phase, and so far apart that each is
over before the next one comes.

Prefills vary as well, without any wait, and a small model's decode step is short. So each prompt also runs in an engine
without other texts, in turns: `own_p95_steps` is how many steps the 95th percentile of these lies above their median.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_mtp.drafting.config import SpeculativeConfig
from megatron_mtp.drafting.engine import ContinuousEngine, EngineSettings
from megatron_mtp.drafting.requests import Request
from megatron_mtp.drafting.runner import Runner

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
