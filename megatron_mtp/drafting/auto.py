"""Automatic K: the number of drafts that gives most tokens a second, 0 included.

With a_k the chance that position k is accepted given the ones before, K drafts yield 1 + sum_{j<=K} prod_{k<=j} a_k
tokens in the time of K drafts and one forward of K + 1 rows. All of it is measured while decoding. A drafter that does
not pay is given up soon: the longer it rests, the more rows it would have to catch up on, which alone would cost more
than plain decoding is allowed to lose.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

import torch

from megatron_mtp.drafting.types import AcceptanceStats

RECENT = 32
"""Steps whose times are remembered, of each kind."""

GIVE_UP = 16
"""Plain steps on end after which there is no more drafting in a batch."""


def _recent() -> deque[float]:
    return deque(maxlen=RECENT)


@dataclass
class AutoK:
    """Picks K per step.

    Attributes:
        most: the largest K to consider.
    """

    most: int
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    _target: dict[int, deque[float]] = field(default_factory=lambda: defaultdict(_recent))
    _draft: deque[float] = field(default_factory=_recent)
    _steps: int = 0
    _plain: int = 0

    def choose(self) -> int:
        """K of the next step; the first rank's where there are several, since their clocks differ."""
        count = torch.tensor([self._own_choice()], device=torch.cuda.current_device())
        if torch.distributed.get_world_size() > 1:
            torch.distributed.broadcast(count, 0)
        return int(count)

    def learn(self, count: int, drafter: float, target: float, stats: AcceptanceStats) -> None:
        """Seconds of one step with K = `count`, and what was accepted so far."""
        self.stats = stats
        self._steps += 1
        self._plain = 0 if count else self._plain + 1
        if self._steps == 1:
            return  # the drafter has run the prompt in it
        self._target[count].append(target)
        if count:
            self._draft.append(drafter / count)

    def rate(self, count: int) -> float:
        """Tokens a second that K = `count` promises."""
        tokens, reached = 1.0, 1.0
        for chance in self._chances()[:count]:
            reached *= chance
            tokens += reached
        return tokens / (self._target_seconds(count) + count * median(self._draft))

    def _own_choice(self) -> int:
        trials = (self.most, self.most, 0, 0)
        if self._steps < len(trials):
            return trials[self._steps]
        if self._plain >= GIVE_UP or not self._draft:
            return 0
        return max(range(self.most + 1), key=self.rate)

    def _target_seconds(self, count: int) -> float:
        """Of a forward of K + 1 rows; between K that were measured, on the line."""
        below = max((known for known in self._target if known <= count), default=min(self._target))
        above = min((known for known in self._target if known >= count), default=max(self._target))
        low, high = median(self._target[below]), median(self._target[above])
        return low if above == below else low + (high - low) * (count - below) / (above - below)

    def _chances(self) -> list[float]:
        """That a position is accepted, given that the ones before were; before any was offered, one in two."""
        hits = [*self.stats.accepted_at, *[0] * self.most]
        offers = [*self.stats.offered_at, *[0] * self.most]
        reached = [offers[0], *hits]
        return [(hits[place] + 0.5) / (min(reached[place], offers[place]) + 1) for place in range(self.most)]
