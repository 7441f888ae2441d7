"""Acceptance of draft tokens: the counts that tables, metrics, training and K `auto` use, and the recorded values.

`mtp_acceptance.json` holds the acceptance of the MTP layers by position, as measured by the last evaluation. It is in
the checkpoint folder, and next to `config.json` in an exported folder.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from operator import mul
from typing import Any

import numpy as np

RECORD = "mtp_acceptance.json"

EXPECTED_LENGTH = "expected accepted length"
"""Name of `AcceptanceStats.expected_length` in records, logs and metrics.jsonl."""


@dataclass
class AcceptanceStats:
    """Acceptance counts, summed over decoding steps or over the positions of an evaluation. Add two with `+`.

    Attributes:
        target_forwards: forward passes of the target model, counted per sequence: one pass over a batch of four adds
            four.
        emitted: generated tokens, including the one from the prefill.
        accepted_at: how often the draft token at each position was accepted.
        offered_at: how often there was a draft token at each position.
        reached_at: how often all draft tokens before each position were accepted.
        overlap_at: sum over tokens of sum_v min(p, q) at each position. Measured only in training.
        target_seconds, drafter_seconds: wall-clock time. On a GPU, drafting is launched asynchronously, so unfinished
            draft work counts as the target's time.
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
        """Count one decoding step of one sequence; `offered` is the number of draft tokens on the longest path."""
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
        """Number of draft tokens, counting the longest path of each tree."""
        return sum(self.offered_at)

    @property
    def accepted(self) -> int:
        """Number of accepted draft tokens."""
        return sum(self.accepted_at)

    @property
    def accepted_length(self) -> float:
        """Tokens per forward pass of the target model; plain decoding has 1."""
        return self.emitted / self.target_forwards if self.target_forwards else 0.0

    @property
    def accepted_per_forward(self) -> float:
        """Accepted draft tokens per forward pass of the target model."""
        return self.accepted / self.target_forwards if self.target_forwards else 0.0

    @property
    def accepted_per_position(self) -> list[float]:
        """Fraction of drafts whose token at position k was accepted, for each k, among the drafts that had one."""
        return _rates(self.accepted_at, self.offered_at)

    @property
    def conditional_acceptance(self) -> list[float]:
        """Probability that the token at position k is accepted, given that all tokens before it were."""
        return _rates(self.accepted_at, self.reached_at)

    @property
    def acceptance(self) -> list[float]:
        """Probability that tokens 1 .. k are all accepted: the product of the conditional probabilities."""
        return list(accumulate(self.conditional_acceptance, mul))

    @property
    def expected_length(self) -> float:
        """Expected accepted length, 1 + sum_k acceptance_k, in tokens per forward pass of the trunk."""
        return 1.0 + sum(self.acceptance)

    @property
    def overlap(self) -> list[float]:
        """Probability that a sampled draft token at position k is accepted at temperature 1."""
        return _rates(self.overlap_at, self.offered_at)


def resampled(groups: Sequence[AcceptanceStats], draws: int = 1000, seed: int = 1234) -> np.ndarray:
    """Acceptance by position of bootstrap samples, [draws, D]. A group is a document or a generated sequence.

    Each sample draws as many groups as there are, with replacement, and adds their counts.
    """
    depths = max((len(stats.offered_at) for stats in groups), default=0)
    counts_2GD = np.zeros((2, len(groups), depths))
    for group, stats in enumerate(groups):
        counts_2GD[0, group, : len(stats.accepted_at)] = stats.accepted_at
        counts_2GD[1, group, : len(stats.reached_at)] = stats.reached_at
    drawn_RG = np.random.default_rng(seed).multinomial(len(groups), [1 / len(groups)] * len(groups), draws)
    accepted_RD, reached_RD = drawn_RG @ counts_2GD
    rates: np.ndarray = np.cumprod(accepted_RD / np.maximum(reached_RD, 1), axis=1)
    return rates


LEAST_DOCUMENTS = 8
"""Minimum number of documents for a bootstrap; with fewer, tokens are resampled instead."""
OTHERS = "others"
"""Name of the pooled sources with few documents."""

BySource = dict[str, dict[int, AcceptanceStats]]
"""Counts of every document, by source and document number in the corpus."""


def error_of(documents: Sequence[AcceptanceStats]) -> float:
    """Standard error of the expected accepted length: bootstrap over documents, or over tokens of few documents."""
    if len(documents) >= LEAST_DOCUMENTS:
        return float(resampled(documents).sum(axis=1).std())
    whole = sum(documents, AcceptanceStats())
    drafts = zip(whole.acceptance, whole.offered_at, strict=True)
    return math.sqrt(sum(rate * (1 - rate) / max(offered, 1) for rate, offered in drafts))


def gain_of(before: Sequence[AcceptanceStats], after: Sequence[AcceptanceStats]) -> tuple[float, float]:
    """Increase of the expected accepted length on the same documents, and its standard error."""
    gain = sum(after, AcceptanceStats()).expected_length - sum(before, AcceptanceStats()).expected_length
    if len(before) != len(after) or len(after) < LEAST_DOCUMENTS:
        return gain, error_of(after)
    return gain, float((resampled(after) - resampled(before)).sum(axis=1).std())  # both resample the same documents


def figures_of(documents: Sequence[AcceptanceStats]) -> dict[str, Any]:
    """Summarize documents for records and tables."""
    whole = sum(documents, AcceptanceStats())
    return {
        "documents": len(documents),
        "acceptance": whole.acceptance,
        EXPECTED_LENGTH: whole.expected_length,
        "error": error_of(documents),
    }


def with_others(sources: BySource) -> BySource:
    """Group documents by source, and pool the sources that have few documents."""
    few = [name for name, documents in sources.items() if len(documents) < LEAST_DOCUMENTS]
    if len(few) < 2:
        return sources
    joined = {number: stats for name in few for number, stats in sources[name].items()}
    return {name: documents for name, documents in sources.items() if name not in few} | {OTHERS: joined}


def _sums[Number: (int, float)](one: Sequence[Number], other: Sequence[Number]) -> list[Number]:
    if not (one and other):
        return list(one or other)
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


def _rates(hits: Sequence[float], of: Sequence[int]) -> list[float]:
    return [hit / count if count else 0.0 for hit, count in zip(hits, of, strict=True)]


# --- the record -------------------------------------------------------------------------------------------------------


def record_of(stats: AcceptanceStats, iteration: int, data: str, sources: BySource | None = None) -> dict[str, Any]:
    """Build the record of an evaluation.

    Args:
        sources: counts by document, if known. The record then has standard errors and one entry per source.
    """
    apart = {name: figures_of(list(each.values())) for name, each in with_others(sources or {}).items()}
    documents = [each for of_source in (sources or {}).values() for each in of_source.values()]
    known = {"documents": len(documents), "error": error_of(documents), "sources": apart} if documents else {}
    return {
        "iteration": iteration,
        "data": data,
        "acceptance": stats.acceptance,
        "conditional acceptance": stats.conditional_acceptance,
        "overlap": stats.overlap,
        EXPECTED_LENGTH: stats.expected_length,
        **known,
    }
