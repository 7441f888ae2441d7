"""Simulates the order and time of Megatron's pipeline schedules.

Without virtual stages, rank r of p runs p - r - 1 forwards, then alternates one forward and one backward, then runs the
remaining backwards (1F1B; Narayanan et al., arXiv:2104.04473, section 2.2.1). With v virtual stages, microbatches pass
through a rank in groups, each group through all of its chunks, and there are 2 (p - r - 1) + (v - 1) g warm-up forwards
for groups of g (section 2.2.2). `order` follows Megatron's `get_schedule_table` and `get_pp_rank_microbatches`; tests
compare it with these and with a pipeline over gloo.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

FORWARD, BACKWARD = "F", "B"

ChunkPass = tuple[str, int, int]
"""`FORWARD` or `BACKWARD`, virtual stage and microbatch."""


@dataclass(frozen=True)
class Pipeline:
    """The shape of a schedule.

    Attributes:
        ranks, virtual: number of pipeline ranks, and virtual stages per rank.
        microbatches: microbatches per step.
        group: microbatches that pass through a virtual stage before the next stage's turn.
        ahead: additional warm-up forwards of an interleaved schedule (--overlap-moe-expert-parallel-comm: 1).
    """

    ranks: int
    virtual: int
    microbatches: int
    group: int
    ahead: int = 0

    def warm_up(self, rank: int) -> int:
        """Return the number of forwards of a rank before its first backward."""
        if self.ranks == 1 and self.virtual == 1:
            return 0
        wanted = self.ranks - rank - 1
        if self.virtual > 1:
            wanted = 2 * wanted + (self.virtual - 1) * self.group + self.ahead
        return min(wanted, self.microbatches * self.virtual)


@cache
def table(pipeline: Pipeline) -> tuple[tuple[int, int], ...]:
    """Return microbatch and virtual stage of every forward of a rank, in order."""
    rows = list[tuple[int, int]]()
    for start in range(0, pipeline.microbatches, pipeline.group):
        group = range(start, min(start + pipeline.group, pipeline.microbatches))
        rows += [(microbatch, chunk) for chunk in range(pipeline.virtual) for microbatch in group]
    return tuple(rows)


def order(pipeline: Pipeline, rank: int) -> list[ChunkPass]:
    """Return the forwards and backwards of a rank, in order."""
    rows, last = table(pipeline), pipeline.virtual - 1
    forwards: list[ChunkPass] = [(FORWARD, chunk, microbatch) for microbatch, chunk in rows]
    backwards: list[ChunkPass] = [(BACKWARD, last - chunk, microbatch) for microbatch, chunk in rows]
    ahead = pipeline.warm_up(rank)
    steps = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        steps += [forward, backward]
    return steps + backwards[len(forwards) - ahead :]


def in_flight(pipeline: Pipeline, rank: int, weights: Sequence[float]) -> float:
    """Return a rank's peak activations: microbatches in flight, each weighted with its virtual stage's size."""
    held = most = 0.0
    for kind, chunk, _ in order(pipeline, rank):
        held += weights[chunk] if kind == FORWARD else -weights[chunk]
        most = max(most, held)
    return most


@dataclass(frozen=True)
class Timeline:
    """Seconds of a step of the pipeline, and the busy seconds of every rank."""

    seconds: float
    busy: tuple[float, ...]


def simulate(pipeline: Pipeline, forward: Sequence[float], backward: Sequence[float], hop: float = 0.0) -> Timeline:
    """Simulate the schedule: a pass starts when its rank is free and its input has arrived.

    Args:
        pipeline: shape of the schedule.
        forward, backward: seconds per microbatch for every chunk, in model order.
        hop: seconds between the end of a chunk and the arrival at the next one.
    """
    ranks, chunks = pipeline.ranks, len(forward)
    orders = [order(pipeline, rank) for rank in range(ranks)]
    unknown = -1.0
    done = {kind: [[unknown] * pipeline.microbatches for _ in range(chunks)] for kind in (FORWARD, BACKWARD)}
    forwards, backwards = done[FORWARD], done[BACKWARD]
    places, free = [0] * ranks, [0.0] * ranks
    waiting = list(range(ranks))
    while waiting:
        rank = waiting.pop()
        steps, place, now = orders[rank], places[rank], free[rank]
        touched = set[int]()
        while place < len(steps):
            kind, virtual, microbatch = steps[place]
            chunk = virtual * ranks + rank
            if kind == FORWARD:
                before = forwards[chunk - 1][microbatch] + hop if chunk else 0.0
                known = not chunk or forwards[chunk - 1][microbatch] != unknown
                seconds, follower = forward[chunk], rank + 1
            elif chunk == chunks - 1:
                before, known = forwards[chunk][microbatch], True
                seconds, follower = backward[chunk], rank - 1
            else:
                before, known = backwards[chunk + 1][microbatch] + hop, backwards[chunk + 1][microbatch] != unknown
                seconds, follower = backward[chunk], rank - 1
            if not known:
                break
            now = max(now, before) + seconds
            done[kind][chunk][microbatch] = now
            touched.add(follower % ranks)
            place += 1
        places[rank], free[rank] = place, now
        waiting += [other for other in touched if other != rank and other not in waiting]
    assert all(place == len(steps) for place, steps in zip(places, orders, strict=True)), "the schedule is deadlocked"
    sums = [forward[chunk] + backward[chunk] for chunk in range(chunks)]
    busy = tuple(pipeline.microbatches * sum(sums[rank::ranks]) for rank in range(ranks))
    return Timeline(max(free), busy)
