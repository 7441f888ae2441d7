"""The prompts of a run, generated in batches under one clock, alone or in turns with plain decoding."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_mtp.drafting.api import Generated, generate
from megatron_mtp.drafting.config import SpeculativeConfig
from megatron_mtp.drafting.energy import Meter
from megatron_mtp.drafting.loop import Emit, Limits
from megatron_mtp.drafting.record import Record
from megatron_mtp.drafting.report import Cost
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.sampling import Sampling
from megatron_mtp.drafting.stats import AcceptanceStats
from megatron_mtp.drafting.text import Stream
from megatron_mtp.drafting.types import Emitted

WARM_UP = 8
"""Tokens that are generated before the clock starts, so that no side pays for what is made only once."""
TURNS = 5
"""At most so many turns of drafting and plain decoding, where they are compared."""
COMPARED_SECONDS = 2.0
"""After so long no further turn is taken."""


@dataclass(frozen=True)
class Listeners:
    """Callbacks that receive every step's tokens: one streams the text, one records the drafts."""

    stream: Stream | None = None
    record: Record | None = None

    def from_text(self, first: int) -> Emit | None:
        """For a batch whose texts begin with this one."""
        if self.stream is None and self.record is None:
            return None

        def emit(emitted: Emitted) -> None:
            if self.stream is not None:
                self.stream(emitted.tokens, emitted.accepted)
            if self.record is not None:
                self.record.add(first + emitted.text, emitted)

        return emit


@dataclass(frozen=True)
class Work:
    """The prompts of a run in batches of `batch`, generated under one clock."""

    runner: Runner
    prompts: list[list[int]]
    sampling: Sampling
    limits: Limits
    drafter: Runner | None
    batch: int
    seed: int

    def timed(
        self, config: SpeculativeConfig | None, listeners: Listeners | None = None
    ) -> tuple[list[list[int]], Cost]:
        """All texts, and what they cost."""
        self._generate(self.prompts[:1], [self.seed], config, Limits(min(WARM_UP, self.limits.new_tokens)), None)
        self.runner.auto_counts.clear()  # first steps are slower than those that follow
        meter, before = Meter(), time.perf_counter()
        parts = list(self._batches(config, listeners or Listeners()))
        seconds = time.perf_counter() - before
        texts = [ids for part in parts for ids in part.token_ids]
        return texts, Cost(sum((part.stats for part in parts), AcceptanceStats()), seconds, meter.joules(), meter.why)

    def compared(self, config: SpeculativeConfig, texts: list[list[int]], cost: Cost) -> tuple[Cost, Cost, bool | None]:
        """Costs of drafting and of plain decoding, and whether plain decoding emits `texts` too.

        Short runs take several turns, and the costs are their medians. Several ranks take one turn, since their clocks
        might not agree on another. Sampled texts differ, though their distribution does not: for them it is None.
        """
        drafting, plain, same = [cost], [], True
        turns = TURNS if torch.distributed.get_world_size() == 1 else 1
        while True:
            plain_texts, plain_cost = self.timed(None)
            plain.append(plain_cost)
            same = same and plain_texts == texts
            if len(plain) == turns or sum(one.seconds for one in (*drafting, *plain)) > COMPARED_SECONDS:
                return _median(drafting), _median(plain), same if self.sampling.greedy else None
            drafting.append(self.timed(config)[1])

    def _batches(self, config: SpeculativeConfig | None, listeners: Listeners) -> Iterator[Generated]:
        for first in range(0, len(self.prompts), self.batch):
            prompts = self.prompts[first : first + self.batch]
            seeds = [self.seed + first + number for number in range(len(prompts))]
            yield self._generate(prompts, seeds, config, self.limits, listeners.from_text(first))

    def _generate(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        config: SpeculativeConfig | None,
        limits: Limits,
        emit: Emit | None,
    ) -> Generated:
        return generate(
            self.runner,
            prompts,
            limits.new_tokens,
            self.sampling,
            config,
            seeds,
            drafter=self.drafter,
            limits=limits,
            emit=emit,
        )


def _median(costs: list[Cost]) -> Cost:
    return sorted(costs, key=lambda cost: cost.seconds)[len(costs) // 2]
