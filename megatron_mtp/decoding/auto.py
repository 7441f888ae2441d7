"""Automatic K: the number of drafts that gives most tokens a second, 0 included.

With a_k the chance that position k is accepted given the ones before, K drafts yield 1 + sum_{j<=K} prod_{k<=j} a_k
tokens in the time of K drafts and one forward of K + 1 rows. Both are measured while decoding.

While K = 0 is best, drafting rests. A draft is tried again after 16, 32, 64, ... plain steps, as long as drafting has
cost less than `SHARE` of the time beyond plain decoding. After a rest the drafter has to run the rows of all tokens
emitted meanwhile. That is part of the price: where it exceeds the share, the next draft waits for more time to pass.
The measurements hold for all batches of one size that a model generates.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from statistics import median

import torch

from megatron_mtp.acceptance import AcceptanceStats

RECENT = 32
"""Steps of each kind whose times are remembered."""

MEMORY = 0.97
"""The weight of earlier acceptances after one more step with drafts."""

FIRST_DRAFTS = 2
"""K of the first steps; more where they show that more may pay."""

FIRST_REST = 16
"""Plain steps before the first trial; every further rest is twice as long."""

LONGEST_REST = 512
"""Plain steps after which the price of another draft is looked at again, however far away it was."""

FEW_TIMES, CLOSE = 3, 0.9
"""A K that promises this share of the highest rate is tried until it was timed so often; first steps take longer."""

SHARE = 0.01
"""The share of the time so far that drafting may have cost when a draft is tried again."""


@dataclass
class AutoK:
    """Picks K per step.

    Attributes:
        most: the largest K to consider.
        at_once: whether a draft takes as long for any K.
    """

    most: int
    at_once: bool = False
    _hits: list[float] = field(default_factory=list)
    _offers: list[float] = field(default_factory=list)
    _target: dict[int, deque[float]] = field(default_factory=lambda: defaultdict(partial(deque, maxlen=RECENT)))
    _draft: deque[float] = field(default_factory=partial(deque, maxlen=RECENT))
    _behind: int = 1
    _caught_up: tuple[float, int, int] = (0.0, 0, 1)
    _elapsed: float = 0.0
    _drafting: float = 0.0
    _worth: float = 0.0
    _steps: int = 0
    _rest: int = 0
    _pause: int = FIRST_REST
    _rests: bool = False

    def fall_behind(self, rows: int) -> None:
        """The drafter has so many rows of a sequence to run, before the first draft of it."""
        self._behind = max(self._behind, rows)

    @property
    def rests(self) -> bool:
        """True if the next step is plain whatever it would take; the same on all ranks."""
        return self._rest > 0

    def choose(self) -> int:
        """K of the next step; with several ranks the first one's choice, since their clocks differ."""
        if self._rest:
            self._rest -= 1
            return 0
        count, self._rest = self._plan()
        if torch.distributed.get_world_size() > 1:
            agreed = torch.tensor([count, self._rest], device=torch.cuda.current_device())
            torch.distributed.broadcast(agreed, 0)
            count, self._rest = agreed.tolist()
        return count

    def learn(self, count: int, step: AcceptanceStats) -> None:
        """Take in what one step with K = `count` took and gave."""
        drafter, seconds = step.drafter_seconds, step.drafter_seconds + step.target_seconds
        self._elapsed += seconds
        self._steps += 1
        if self._steps > 1:  # the first step of all takes longer
            self._target[count].append(step.target_seconds)
        if count == 0:
            self._behind += 1
            return
        self._hits = [MEMORY * old + new for old, new in zip_longest(self._hits, step.accepted_at, fillvalue=0)]
        self._offers = [MEMORY * old + new for old, new in zip_longest(self._offers, step.offered_at, fillvalue=0)]
        self._drafting += seconds
        self._worth += step.emitted / max(step.target_forwards, 1)
        if self._behind > 1:
            self._caught_up = drafter, count, self._behind
        else:
            self._draft.append(drafter / self._passes(count))
        self._behind = 1

    def rates(self) -> list[float]:
        """Tokens a second that K = 0 .. most promise."""
        draft = median(self._draft)
        tokens, reached, rates = 1.0, 1.0, [1 / self._target_seconds(0)]
        for count, chance in enumerate(self._chances(), start=1):
            reached *= chance
            tokens += reached
            rates.append(tokens / (self._target_seconds(count) + self._passes(count) * draft))
        return rates

    def _plan(self) -> tuple[int, int]:
        """K of the next step, and how many plain steps follow it without another choice."""
        if self._rests:
            missing = self._missing_seconds()
            if missing > 0:
                return 0, max(self._pause - 1, int(min(missing / self._target_seconds(0), LONGEST_REST)))
            self._pause, self._rests = 2 * self._pause, False
            return 1, 0
        few = min(self.most, FIRST_DRAFTS)
        if self._steps < 4:
            return (few, few, 0, 0)[self._steps], 0
        if not self._draft:
            return few, 0  # the first draft's time is that of its catching up
        if best := self._best():
            self._pause = FIRST_REST
            return best, 0
        self._rests = True
        return 0, self._pause - 1

    def _best(self) -> int:
        """K of the highest rate; if that is not 0, a larger one that is close to it and was timed a few times only."""
        rates = self.rates()
        best = rates.index(max(rates))
        close = [count for count in range(best + 1, self.most + 1) if rates[count] >= CLOSE * rates[best]]
        unsure = [count for count in close if 0 < len(self._target.get(count, ())) < FEW_TIMES]
        return unsure[0] if best and unsure else best

    def _missing_seconds(self) -> float:
        """Seconds of plain decoding that are missing until another draft costs no more than `SHARE` of all."""
        lost = self._drafting - self._worth * self._target_seconds(0)  # beyond plain decoding to the same tokens
        return (lost + self._price()) / SHARE - self._elapsed

    def _price(self) -> float:
        """Seconds of one more draft and of the rows that the drafter has to catch up on, as the last ones took."""
        if not self._draft:
            return float("inf")
        draft = median(self._draft)
        seconds, count, rows = self._caught_up
        return draft + self._behind * max(seconds - self._passes(count) * draft, 0.0) / rows

    def _passes(self, count: int) -> int:
        """Passes of a draft, each of which takes the same time."""
        return 1 if self.at_once else count

    def _target_seconds(self, count: int) -> float:
        """Seconds of a forward of K + 1 rows; interpolated between measured K."""
        below = max((known for known in self._target if known <= count), default=min(self._target))
        above = min((known for known in self._target if known >= count), default=max(self._target))
        low = median(self._target[below])
        if above == below:
            return low
        return low + (median(self._target[above]) - low) * (count - below) / (above - below)

    def _chances(self) -> list[float]:
        """Conditional acceptance of every position; one in two before any was offered."""
        hits = [*self._hits, *[0] * self.most]
        offers = [*self._offers, *[0] * self.most]
        reached = [offers[0], *hits]
        return [(hits[place] + 0.5) / (min(reached[place], offers[place]) + 1) for place in range(self.most)]
