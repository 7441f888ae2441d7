"""Warning of an engine whose drafts are accepted less often than was recorded."""

import math
from dataclasses import dataclass, field

from megatron_mtp.common.acceptance import AcceptanceStats

LEAST_DRAFTS, DEVIATIONS = 64, 4
"""Number of drafts that an alarm waits for, and standard deviations of the count to tolerate."""

MANY_DRAFTED, WORTH_DRAFTING = 1000, 0.01
"""Without a record, the alarm is raised after this many draft tokens if a smaller fraction was accepted."""


@dataclass
class Alarm:
    """Warns when drafts of the MTP layers are accepted less than half as often as recorded, or never.

    Attributes:
        expected: the acceptance that `read_record` returned.
        said: the warning, once it has been raised.
    """

    expected: list[float] | None = None
    said: str | None = None
    _stats: AcceptanceStats = field(default_factory=AcceptanceStats)

    def reset(self) -> None:
        """Restart the count after the weights have changed."""
        self._stats = AcceptanceStats()

    def learn(self, stats: AcceptanceStats) -> str | None:
        """Count further steps. Return the warning once, when acceptance is too low."""
        if self.said is not None:
            return None
        self._stats = self._stats + stats
        if (found := self._found()) is not None:
            self.said = (
                f"{found}, so drafting costs time and saves little; see that the MTP layers are trained and belong to "
                "this trunk (megatron-mtp audit, megatron-mtp evaluate), or go on without drafts"
            )
        return self.said

    def _found(self) -> str | None:
        drafts, first = (next(iter(sums), 0) for sums in (self._stats.offered_at, self._stats.accepted_at))
        if drafts < LEAST_DRAFTS:
            return None
        drafted, accepted = self._stats.drafted, self._stats.accepted
        if not first:
            return f"none of {drafts} drafts was accepted"
        if self.expected:
            half = self.expected[0] / 2
            if first + DEVIATIONS * math.sqrt(drafts * half * (1 - half)) < drafts * half:
                return (
                    f"{first / drafts:.1%} of {drafts} drafts were accepted, and {self.expected[0]:.1%} were recorded"
                )
        elif drafted >= MANY_DRAFTED and accepted < WORTH_DRAFTING * drafted:
            return f"{accepted} of {drafted} drafted tokens were accepted"
        return None
