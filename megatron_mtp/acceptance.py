"""Acceptance of drafts: the one count, which tables, metrics, training and `auto` read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from operator import mul


@dataclass
class AcceptanceStats:
    """Sums over the steps of a generation, or over the positions of an evaluation; add those of several with `+`.

    Attributes:
        target_forwards: forwards, counted for every text: one over a batch of four counts four.
        emitted: tokens that went out, those of the prefill's forward included.
        accepted_at: by position in the draft, how often it was accepted; `offered_at` likewise, and `reached_at` how
            often those before it were accepted.
        overlap_at: by position, the sum of sum_v min(p, q); measured in training alone.
        target_seconds, drafter_seconds: wall-clock time. On a GPU drafting is launched and not waited for, so work that
            the device still has to do for it counts as the target's.
    """

    target_forwards: int = 0
    emitted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    offered_at: list[int] = field(default_factory=list)
    reached_at: list[int] = field(default_factory=list)
    overlap_at: list[float] = field(default_factory=list)
    target_seconds: float = 0.0
    drafter_seconds: float = 0.0

    def count(self, offered: int, accepted: int, emitted: int) -> None:
        """A step of one text: `offered` is the draft's depth."""
        self.target_forwards += 1
        self.emitted += emitted
        for sums, reached in (
            (self.offered_at, offered),
            (self.reached_at, min(accepted + 1, offered)),
            (self.accepted_at, min(accepted, offered)),
        ):
            sums += [0] * (offered - len(sums))
            for position in range(reached):
                sums[position] += 1

    def __add__(self, other: "AcceptanceStats") -> "AcceptanceStats":
        return AcceptanceStats(
            self.target_forwards + other.target_forwards,
            self.emitted + other.emitted,
            _sums(self.accepted_at, other.accepted_at),
            _sums(self.offered_at, other.offered_at),
            _sums(self.reached_at, other.reached_at),
            _sums(self.overlap_at, other.overlap_at),
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
        return _rates(self.accepted_at, self.offered_at)

    @property
    def conditional_acceptance(self) -> list[float]:
        """The probability that position k is accepted, given that those before it were."""
        return _rates(self.accepted_at, self.reached_at)

    @property
    def acceptance(self) -> list[float]:
        """The probability that positions 1 .. k are all accepted: the product of the conditional ones."""
        return list(accumulate(self.conditional_acceptance, mul))

    @property
    def expected_length(self) -> float:
        """Expected accepted length, 1 + sum_k acceptance_k: tokens per forward of the trunk."""
        return 1.0 + sum(self.acceptance)

    @property
    def overlap(self) -> list[float]:
        """The probability that a sampled draft at position k is accepted at temperature 1."""
        return _rates(self.overlap_at, self.offered_at)


def _sums[Number: (int, float)](one: Sequence[Number], other: Sequence[Number]) -> list[Number]:
    if not (one and other):
        return list(one or other)
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


def _rates(hits: Sequence[float], of: Sequence[int]) -> list[float]:
    return [hit / count if count else 0.0 for hit, count in zip(hits, of, strict=True)]
