"""What drafting has gained: the one count of accepted tokens, which tables, metrics and `auto` read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass
class AcceptanceStats:
    """Sums over the steps of a generation; add those of several with `+`.

    Attributes:
        target_forwards: forwards, counted for every text: one over a batch of four counts four.
        emitted: tokens that went out, those of the prefill's forward included.
        accepted_at: by position in the draft, how often it was accepted; `offered_at` likewise.
        target_seconds, drafter_seconds: wall-clock time. On a GPU drafting is launched and not waited for, so work that
            the device still has to do for it counts as the target's.
    """

    target_forwards: int = 0
    emitted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    offered_at: list[int] = field(default_factory=list)
    target_seconds: float = 0.0
    drafter_seconds: float = 0.0

    def count(self, offered: int, accepted: int, emitted: int) -> None:
        """A step of one text: `offered` is the draft's depth."""
        self.target_forwards += 1
        self.emitted += emitted
        self.offered_at = _sums(self.offered_at, [1] * offered)
        self.accepted_at = _sums(self.accepted_at, [int(position < accepted) for position in range(offered)])

    def __add__(self, other: "AcceptanceStats") -> "AcceptanceStats":
        return AcceptanceStats(
            self.target_forwards + other.target_forwards,
            self.emitted + other.emitted,
            _sums(self.accepted_at, other.accepted_at),
            _sums(self.offered_at, other.offered_at),
            self.target_seconds + other.target_seconds,
            self.drafter_seconds + other.drafter_seconds,
        )

    @property
    def drafted(self) -> int:
        """Tokens on the longest path of every draft."""
        return sum(self.offered_at)

    @property
    def accepted(self) -> int:
        """Drafted tokens on the paths that were kept."""
        return sum(self.accepted_at)

    @property
    def accepted_length(self) -> float:
        """Tokens per forward of the target; 1 is plain decoding."""
        return self.emitted / self.target_forwards if self.target_forwards else 0.0

    @property
    def accepted_per_forward(self) -> float:
        """Drafted tokens that a forward of the target accepts."""
        return self.accepted / self.target_forwards if self.target_forwards else 0.0

    @property
    def accepted_per_position(self) -> list[float]:
        """Acceptance: how often position k of a draft was accepted, among the drafts that had one."""
        return [hit / of if of else 0.0 for hit, of in zip(self.accepted_at, self.offered_at, strict=True)]


def _sums(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
