"""Automatic K: the number of drafts that gives most tokens a second, 0 included.

With a_k the chance that position k is accepted given the ones before, K drafts yield 1 + sum_{j<=K} prod_{k<=j} a_k
tokens for the time of one draft of K and one forward of K + 1 rows. All three are measured while decoding.
"""

from dataclasses import dataclass, field

import torch

from megatron_mtp.drafting.types import AcceptanceStats

TRIALS = 3
"""Steps that each K is tried for before its time is believed; the first of them is warm-up."""

AGAIN_AFTER = 64
"""Plain steps after which drafting is tried again, since acceptance changes along a text."""


@dataclass
class AutoK:
    """Picks K per step.

    Attributes:
        most: the largest K to consider.
    """

    most: int
    _seconds: dict[int, list[float]] = field(default_factory=dict)
    _plain_since: int = 0

    def choose(self) -> int:
        """K of the next step; the first rank's where there are several, since their clocks differ."""
        count = torch.tensor([self._own_choice()], device=torch.cuda.current_device())
        if torch.distributed.get_world_size() > 1:
            torch.distributed.broadcast(count, 0)
        return int(count)

    def _own_choice(self) -> int:
        for count in range(self.most, -1, -1):
            if len(self._seconds.get(count, [])) < TRIALS:
                return count
        best = max(range(self.most + 1), key=self.rate)
        self._plain_since = self._plain_since + 1 if best == 0 else 0
        return 1 if self._plain_since > AGAIN_AFTER else best

    def learn(self, count: int, drafter: float, target: float, stats: AcceptanceStats) -> None:
        """Seconds of one step with K = `count`, and what was accepted so far."""
        self._seconds.setdefault(count, []).append(drafter + target)
        del self._seconds[count][:-32]
        self._accepted = stats

    def rate(self, count: int) -> float:
        """Tokens a second that K = `count` promises."""
        seconds = sorted(self._seconds[count][1:] or self._seconds[count])
        tokens, reached = 1.0, 1.0
        for chance in self._chances()[:count]:
            reached *= chance
            tokens += reached
        return tokens / seconds[len(seconds) // 2]

    def _chances(self) -> list[float]:
        """That a position is accepted, given that the ones before were."""
        hits, offers = self._accepted.accepted_at, self._accepted.offered_at
        given = [offers[0] if offers else 0, *hits]
        return [hit / max(min(of, offer), 1) for hit, of, offer in zip(hits, given, offers, strict=False)]
