"""Automatic K: choose the number of draft tokens with the highest throughput, including K = 0.

With a_k the probability that position k is accepted given the ones before, K drafts yield 1 + sum_{j<=K} prod_{k<=j}
a_k tokens in the time of K drafts and one forward pass of K + 1 rows. Both are measured while decoding.

While K = 0 is best, drafting is paused. It is retried after 16, 32, 64, ... plain steps, as long as drafting has cost
less than `SHARE` of the time on top of plain decoding. After a pause the drafter must first run the rows of all tokens
emitted meanwhile. This is part of the cost: if it exceeds the share, the next retry waits longer. Measurements are
shared by all batches of the same size. A time is the lower quartile of the latest ones, excluding a K's first steps, so
that compilation and other load on the machine do not decide.
"""

import math
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

import torch

from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.decoding.config import MOST_DRAFTED

RECENT = 32
"""Number of remembered times for each kind of step."""

STALE = 12
"""Steps after which the times of a K are replaced at its next step, because other load on the machine varies."""

FAR_BEHIND = MOST_DRAFTED + 1
"""Maximum number of rows that a drafter catches up if every step drafts."""

WORTH_A_CHANGE = 1.05
"""Factor over the rate of plain steps that drafting must promise before a drafter catches up."""

UNTIMED_STEPS, TRIED_STEPS, TRIAL_STEPS = 2, 4, 8
"""Number of first steps of a K that are not timed, because they are slower; steps of a K that is tried instead of
another one, and after a pause.
"""

PLAIN_AGAIN, PLAIN_STEPS = 200, 8
"""After this many steps with drafts, this many plain ones are timed again. The first of them are slow, because caches
are cold.
"""

MEMORY = 0.97
"""Weight of earlier acceptance after one more step with drafts."""

FIRST_DRAFTS = 2
"""K of the first steps; increased if they show that more may pay off."""

FIRST_STEPS = (1,) * (UNTIMED_STEPS + 1) + (0,) * PLAIN_STEPS
"""Which of the first steps draft."""

MOST_HELD = 31
"""Maximum number of steps without a new choice if the same K was chosen several times in a row, because choosing takes
as long as a small draft.
"""

FIRST_REST_STEPS = 16
"""Plain steps before the first retry; every further pause is twice as long."""

MAX_REST_STEPS = 512
"""Maximum number of plain steps before the cost of another draft is checked again."""

FEW_TIMINGS = 6
"""Number of times that is too small to reject a K, because first steps take longer."""

SHARE = 0.01
"""Maximum fraction of the time so far that drafting may have cost before a draft is retried."""


@dataclass
class AutoK:
    """Chooses K for each step.

    Attributes:
        most: largest K to consider.
        at_once: whether drafting takes the same time for any K.
        rests: whether drafting is paused, so a drafter does not need to keep up; the same on all ranks.
    """

    most: int
    at_once: bool = False
    rests: bool = field(default=False, init=False)
    _hits: list[float] = field(default_factory=list)
    _offers: list[float] = field(default_factory=list)
    _target: dict[int, deque[float]] = field(default_factory=lambda: defaultdict(partial(deque, maxlen=RECENT)))
    _draft: deque[float] = field(default_factory=partial(deque, maxlen=RECENT))
    _timed_at: dict[int, int] = field(default_factory=dict)
    _behind: int = 1
    _left: float = math.inf
    _caught_up: tuple[float, int, int] | None = None
    _elapsed: float = 0.0
    _drafting: float = 0.0
    _worth: float = 0.0
    _steps: int = 0
    _last: int | None = None
    _in_a_row: int = 0
    _count: int = 0
    _held: int = 0
    _span: int = 0
    _pause: int = FIRST_REST_STEPS

    @property
    def holds(self) -> bool:
        """Whether the next step keeps the K of the last one, whatever is measured."""
        return self._held > 0

    def change_batch(self) -> None:
        """Reset: the next step has other sequences, which a drafter may not have kept up with."""
        if not self.rests:
            self._held = 0

    def choose(self, missed: int = 0, left: float = math.inf) -> int:
        """Return K of the next step; with several ranks, the first one's choice, because their clocks differ.

        Args:
            missed: number of rows per sequence that the drafter has not run.
            left: number of tokens that a sequence may still get.
        """
        if self._held:
            self._held -= 1
            return self._count
        self._behind, self._left = (missed if missed > FAR_BEHIND else 1), left
        self._count, self._held = self._plan()
        if torch.distributed.get_world_size() > 1:
            agreed = torch.tensor([self._count, self._held, self.rests], device=torch.cuda.current_device())
            torch.distributed.broadcast(agreed, 0)
            self._count, self._held, rests = agreed.tolist()
            self.rests = bool(rests)
        return self._count

    def learn(self, count: int, step: AcceptanceStats, overhead: float = 0.0) -> None:
        """Record what a step with K = `count` took and gained, and the seconds that the engine spent around it."""
        drafter, target = step.drafter_seconds, step.target_seconds + overhead
        self._elapsed += drafter + target
        self._steps += 1
        self._in_a_row = self._in_a_row + 1 if count == self._last else 1
        self._last = count
        if self._in_a_row > UNTIMED_STEPS:
            if self._steps > self._timed_at.get(count, 0) + STALE:
                self._target[count].clear()
            self._target[count].append(target)
            self._timed_at[count] = self._steps
        if count == 0:
            return
        self._hits = [MEMORY * old + new for old, new in zip_longest(self._hits, step.accepted_at, fillvalue=0)]
        self._offers = [MEMORY * old + new for old, new in zip_longest(self._offers, step.offered_at, fillvalue=0)]
        self._drafting += drafter
        if self._steps > 1:
            self._drafting += target
            self._worth += step.emitted / max(step.target_forwards, 1)
        if self._behind > 1:
            self._caught_up = drafter, count, self._behind
        else:
            self._draft.append(drafter / self._passes(count))
        self._behind = 1

    def rates(self, caught_up: bool = False) -> list[float]:
        """Return the expected tokens per second of K = 0 .. most, over the remaining tokens.

        Args:
            caught_up: whether to ignore the time for rows that the drafter has missed.
        """
        catching_up = 0.0 if caught_up else self._catching_up() / self._left
        draft, seconds_of = _usual(self._draft), self._seconds()
        tokens, reached, rates = 1.0, 1.0, [1 / seconds_of[0]]
        for count, chance in enumerate(self._chances(), start=1):
            reached *= chance
            tokens += reached
            seconds = (seconds_of[count] + self._passes(count) * draft) / tokens
            rates.append(1 / (seconds + catching_up))
        return rates

    def _plan(self) -> tuple[int, int]:
        """Return K of the next step, and for how many steps it holds without another choice."""
        if self.rests:
            missing = self._missing_seconds()
            if missing > 0:
                return 0, max(self._pause - 1, int(min(missing / _usual(self._target[0]), MAX_REST_STEPS)))
            if self._left <= TRIAL_STEPS:
                return 0, 0
            self._pause, self.rests = 2 * self._pause, False
            self._forget_times()
            return self._few, TRIAL_STEPS - 1
        if not self._draft and self._behind > max(self._left, 1):
            return 0, 0  # they end soon, and the benefit of drafts is still unknown
        if self._steps < len(FIRST_STEPS):
            return self._few * FIRST_STEPS[self._steps], 0
        if not self._draft:
            return self._few, 0  # the first drafting step also includes catching up on the prompt
        if self._steps > self._timed_at[0] + PLAIN_AGAIN:
            return 0, PLAIN_STEPS - 1
        if best := self._best(self.rates()):
            self._pause = FIRST_REST_STEPS
            self._span = min(2 * self._span + 1, MOST_HELD) if best == self._count else TRIED_STEPS - 1
            return best, self._span
        if self._behind > 1 and self._best(self.rates(caught_up=True)):
            return 0, TRIED_STEPS - 1  # drafting helps, but not for these sequences
        if self._steps > self._timed_at[0] + PLAIN_STEPS:
            return 0, PLAIN_STEPS - 1  # plain steps may have become slower as well
        self.rests = True
        return 0, self._pause - 1

    @property
    def _few(self) -> int:
        """Return K of the first steps, and of a trial."""
        return min(self.most, FIRST_DRAFTS)

    def _best(self, rates: list[float]) -> int:
        """Return the K with the highest rate."""
        if self._behind > 1:
            rates[0] *= WORTH_A_CHANGE
        return rates.index(max(rates))

    def _forget_times(self) -> None:
        """Drop the times of steps with drafts: times from a slower period may keep a K from being tried again."""
        for count in [count for count in self._target if count]:
            del self._target[count], self._timed_at[count]

    def _missing_seconds(self) -> float:
        """Return how many more seconds of plain decoding it takes until another draft costs at most `SHARE` of all."""
        lost = self._drafting - self._worth * _usual(self._target[0])  # beyond plain decoding of the same tokens
        return (lost + self._price()) / SHARE - self._elapsed

    def _price(self) -> float:
        """Return the expected seconds of a trial's drafts and of the rows that the drafter must catch up on."""
        if not self._draft:
            return float("inf")
        return TRIAL_STEPS * self._passes(self._few) * _usual(self._draft) + self._catching_up()

    def _catching_up(self) -> float:
        """Return the expected seconds for rows that the drafter missed: as last timed, or one pass per row at first."""
        if self._behind == 1:
            return 0.0
        if self._caught_up is None:
            return self._behind * _usual(self._draft)
        seconds, count, rows = self._caught_up
        return self._behind * max(seconds - self._passes(count) * _usual(self._draft), 0.0) / rows

    def _passes(self, count: int) -> int:
        """Return the passes of a draft; all take the same time."""
        return 1 if self.at_once else count

    def _seconds(self) -> list[float]:
        """Return seconds of forwards of 0 ..

        Most drafts: interpolated between frequent ones, or less if few timings support it.
        """
        known = {count: _usual(times) for count, times in self._target.items()}
        often = {count: known[count] for count in known if count == 0 or len(self._target[count]) >= FEW_TIMINGS}
        return [
            often[count] if count in often else min(known.get(count, math.inf), _between(often, count))
            for count in range(self.most + 1)
        ]

    def _chances(self) -> list[float]:
        """Return the conditional acceptance of every position.

        The prior is the previous position's, and 0.5 for the first.
        """
        hits = [*self._hits, *[0] * self.most]
        offers = [*self._offers, *[0] * self.most]
        reached, chances = [offers[0], *hits], [0.5]
        for place in range(self.most):
            chances.append((hits[place] + chances[-1]) / (min(reached[place], offers[place]) + 1))
        return chances[1:]


def _usual(times: Collection[float]) -> float:
    """Return the lower quartile: other load on the machine makes steps longer, never shorter."""
    return sorted(times)[len(times) // 4]


def _between(seconds: dict[int, float], count: int) -> float:
    """Return the seconds of a forward of K + 1 rows, interpolated between measured K."""
    below = max((known for known in seconds if known <= count), default=min(seconds))
    above = min((known for known in seconds if known >= count), default=max(seconds))
    if above == below:
        return seconds[below]
    return seconds[below] + (seconds[above] - seconds[below]) * (count - below) / (above - below)
