"""Order and time of Megatron's pipeline schedules.

Without virtual stages, rank r of p runs p - r - 1 forwards, then one forward and one backward in turns, then the
backwards that are left (1F1B; Narayanan et al., arXiv:2104.04473, section 2.2.1). With v virtual stages, microbatches
go through a rank in groups, each group through all of its chunks, and the forwards ahead are 2 (p - r - 1) + (v - 1) g
for groups of g (section 2.2.2). `order` is what Megatron's `get_schedule_table` and `get_pp_rank_microbatches` say; a
test compares them, and a pipeline that runs over gloo.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

FORWARD, BACKWARD = "F", "B"

ChunkPass = tuple[str, int, int]
"""`FORWARD` or `BACKWARD`, the virtual stage and the microbatch."""


@dataclass(frozen=True)
class Pipeline:
    """The shape of a schedule.

    Attributes:
        ranks, virtual: pipeline ranks, and virtual stages of each.
        microbatches: of a step.
        group: microbatches that go through a virtual stage before the next one's turn.
        ahead: further forwards of an interleaved schedule (--overlap-moe-expert-parallel-comm: 1).
    """

    ranks: int
    virtual: int
    microbatches: int
    group: int
    ahead: int = 0

    def warm_up(self, rank: int) -> int:
        """Forwards of a rank before its first backward."""
        if self.ranks == 1 and self.virtual == 1:
            return 0
        wanted = self.ranks - rank - 1
        if self.virtual > 1:
            wanted = 2 * wanted + (self.virtual - 1) * self.group + self.ahead
        return min(wanted, self.microbatches * self.virtual)


@cache
def table(pipeline: Pipeline) -> tuple[tuple[int, int], ...]:
    """Microbatch and virtual stage of every forward of a rank, in order."""
    rows = list[tuple[int, int]]()
    for start in range(0, pipeline.microbatches, pipeline.group):
        group = range(start, min(start + pipeline.group, pipeline.microbatches))
        rows += [(microbatch, chunk) for chunk in range(pipeline.virtual) for microbatch in group]
    return tuple(rows)


def order(pipeline: Pipeline, rank: int) -> list[ChunkPass]:
    """Steps of a rank, first to last."""
    rows, last = table(pipeline), pipeline.virtual - 1
    forwards: list[ChunkPass] = [(FORWARD, chunk, microbatch) for microbatch, chunk in rows]
    backwards: list[ChunkPass] = [(BACKWARD, last - chunk, microbatch) for microbatch, chunk in rows]
    ahead = pipeline.warm_up(rank)
    steps = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        steps += [forward, backward]
    return steps + backwards[len(forwards) - ahead :]


def in_flight(pipeline: Pipeline, rank: int, weights: Sequence[float]) -> float:
    """The most that a rank keeps at once: the sum over microbatches, each with the weight of its virtual stage."""
    held = most = 0.0
    for kind, chunk, _ in order(pipeline, rank):
        held += weights[chunk] if kind == FORWARD else -weights[chunk]
        most = max(most, held)
    return most


@dataclass(frozen=True)
class Timeline:
    """Seconds of a step of the pipeline, and of these, what every rank works."""

    seconds: float
    busy: tuple[float, ...]


def simulate(pipeline: Pipeline, forward: Sequence[float], backward: Sequence[float], hop: float = 0.0) -> Timeline:
    """Run the schedule: a step begins when the rank is free and what it waits for has arrived.

    Args:
        pipeline: its shape.
        forward, backward: seconds of a microbatch in every chunk, in the order of the model.
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
    assert all(place == len(steps) for place, steps in zip(places, orders, strict=True)), (
        "the schedule waits in a circle"
    )
    sums = [forward[chunk] + backward[chunk] for chunk in range(chunks)]
    busy = tuple(pipeline.microbatches * sum(sums[rank::ranks]) for rank in range(ranks))
    return Timeline(max(free), busy)
