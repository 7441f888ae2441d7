"""Regression check of `megatron-mtp attach`: MTP layers that draft worse after training are not exported.

The same held-out documents are evaluated before and after training. The gain in expected accepted length, over all
documents and for each source with at least eight documents, has a bootstrap standard error over documents.
"""

import json
import os
from typing import Any, NamedTuple

from megatron_mtp.cli.attach_probe import TABLE
from megatron_mtp.cli.attach_settings import AttachSettings
from megatron_mtp.common.acceptance import EXPECTED_LENGTH, RECORD, AcceptanceStats, BySource, gain_of, with_others
from megatron_mtp.common.files import written_beside
from megatron_mtp.training.read_runs import read_documents

DEVIATIONS = 2
"""Standard errors by which the expected accepted length may fall in training."""
ALL = "all text"


class Gain(NamedTuple):
    """Expected accepted lengths before and after training, and the standard error of their difference."""

    before: float
    after: float
    error: float

    @property
    def is_worse(self) -> bool:
        """Whether it fell by more than the error allows."""
        return self.after < self.before - self.error


def gains(before: BySource, after: BySource) -> dict[str, Gain]:
    """Return the gain over all documents, and for each source."""
    begun, trained = with_others(before), with_others(after)
    found = {ALL: _gain(_documents(before), _documents(after))} if before and after else {}
    return found | {name: _gain(begun[name], trained[name]) for name in begun if name in trained and len(begun) > 1}


def _documents(sources: BySource) -> dict[int, AcceptanceStats]:
    return {number: stats for documents in sources.values() for number, stats in documents.items()}


def _gain(before: dict[int, AcceptanceStats], after: dict[int, AcceptanceStats]) -> Gain:
    numbers = sorted(before.keys() & after.keys())
    begun, trained = ([of[number] for number in numbers] for of in (before, after))
    gain, error = gain_of(begun, trained)
    length = sum(begun, AcceptanceStats()).expected_length
    return Gain(length, length + gain, DEVIATIONS * error)


def check_gain(settings: AttachSettings) -> None:
    """Store the gains in the record of the trained checkpoint.

    Raises:
        ValueError: the layers draft worse than before, on all held-out text or for one source.
    """
    record = settings.run / "checkpoint" / RECORD
    found = gains(read_documents(settings.run / "before"), read_documents(settings.run))
    if settings.drafter or not found or not record.is_file():  # a new drafter has no earlier result
        return
    worse = {name: gain for name, gain in found.items() if gain.is_worse}
    if worse and not settings.allow_worse:
        name, gain = min(worse.items(), key=lambda pair: pair[1].after - pair[1].before + pair[1].error)
        origin = "those of --donor" if settings.donor else "at their start"
        raise ValueError(
            f"the MTP layers draft worse than {origin} on {name}: {gain.after:.3f} tokens a forward of held-out text, "
            f"and {gain.before:.3f} before the training (error {gain.error:.3f}), so they are not exported; train them "
            "in another RUN with a lower --learning-rate, another --loss or other text, or give --allow-worse."
        )
    whole = found.pop(ALL)
    start: dict[str, Any] = {
        "donor": None if settings.donor is None else os.path.abspath(settings.donor),
        "text": os.path.basename(settings.corpus),
        EXPECTED_LENGTH: whole.before,
        "error": whole.error,
        "is worse": bool(worse),
        "sources": {name: {EXPECTED_LENGTH: gain.before, "error": gain.error} for name, gain in found.items()},
    }
    probe = settings.run / TABLE
    learned = {"before": start} | ({"probe": json.loads(probe.read_text())} if probe.is_file() else {})
    with written_beside(record) as beside:
        beside.write_text(json.dumps(json.loads(record.read_text()) | learned, indent=2))
