"""Steps as CUDA graphs: propose, verify and keep are recorded once and replayed, without Python in between.

A recorded step reads and writes the same memory each time. So everything that changes from step to step must be in
tensors that are written in place: tokens, lengths, states and caches are. Its shapes depend on the batch, K and the
window alone, and it reads nothing back. Plain decoding is the step without drafts.

A graph belongs to the `Sequences` whose memory it reads. The runner keeps these for later prompts (`kept_sequences`),
which replay what earlier ones recorded. A step is recorded anew for another method, sampling, K or window:

    a prompt's first step     runs the prompt's rows through the drafter, as many as there are; never recorded
    first step of its kind    runs in Python, which allocates caches and workspaces
    second                    is recorded, which runs nothing, and replayed
    further ones              are replayed
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_mtp.decoding.kv_cache import rounded
from megatron_mtp.decoding.method import Method
from megatron_mtp.decoding.proposers.base import Proposer
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sequences import Sequences, wants_few_shapes
from megatron_mtp.decoding.types import Draft
from megatron_mtp.decoding.verifiers import VERIFIERS

LEAST_CAPACITY = 1024
"""Slots of a text whose memory is kept, at least, so that a longer request seldom needs other memory."""

MOST_BATCHES = 4
"""Sizes of batches whose memory a runner keeps; the one that was not used for longest goes first, with its graphs."""

MOST_SLOTS = 2**16
"""Slots of all kept texts together, if there is more than one batch; 8.6 GB for Llama 3 8B in bfloat16."""

MOST_GRAPHS = 32
"""Graphs that are kept of a batch; likewise."""

Step = Callable[[int], Draft]
"""A step with K drafts, all that the device does."""


@dataclass(frozen=True)
class Recorded:
    """A recorded step.

    Attributes:
        replay: takes the step.
        draft: its tensors are filled by every replay.
        pool: the memory of what a replay computes; steps of the same sequences share it, since none outlives a step.
    """

    replay: Callable[[], None]
    draft: Draft
    pool: Any = None


Record = Callable[[Callable[[], Draft], Any], Recorded]
"""Records a step without running it, in the pool of an earlier one or a new one (None)."""


def can_record(runner: Runner, proposer: Proposer, count: int, verifier: str) -> bool:
    """Whether the device has graphs, and a step of K = `count` reads nothing back to the host."""
    runners = [runner] if count == 0 or proposer.drafter is None else [runner, proposer.drafter]
    recordable = VERIFIERS[verifier].recordable and (count == 0 or proposer.recordable)
    return recordable and all(one.recordable and one.device.type == "cuda" for one in runners)


def record_on_cuda(step: Callable[[], Draft], pool: Any) -> Recorded:
    """`Record` with torch's CUDA graphs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        draft = step()
    return Recorded(graph.replay, draft, graph.pool())


@contextmanager
def kept_sequences(
    runner: Runner, method: Method, prompts: list[list[int]], seeds: list[int], capacity: int
) -> Iterator[Sequences]:
    """Sequences for these prompts, in memory that earlier ones of the runner had where steps are recorded.

    Args:
        capacity: slots that a text needs.
    """
    if not can_record(runner, method.proposer, method.count, str(method.config.verifier)):
        yield Sequences(runner, prompts, seeds, rounded(capacity, wants_few_shapes(runner.device)))
        return
    batch = len(prompts)
    kept: Sequences | None = runner.kept.pop(batch, None)  # an error in between leaves nothing half written
    if kept is None or kept.capacity < capacity:
        del kept
        capacity = rounded(max(capacity, min(LEAST_CAPACITY, runner.positions)), few=True)
        _make_room(runner.kept, batch * capacity)
        kept = Sequences(runner, prompts, seeds, capacity)
        kept.records = True
    else:
        kept.begin(prompts, seeds)
    yield kept
    _make_room(runner.kept, batch * kept.capacity)
    runner.kept[batch] = kept


def _make_room(kept: dict[int, Sequences], slots: int) -> None:
    """For one more: drop those that were not used for longest."""
    while kept and (
        len(kept) >= MOST_BATCHES or slots + sum(batch * one.capacity for batch, one in kept.items()) > MOST_SLOTS
    ):
        del kept[next(iter(kept))]


class GraphedStep:
    """The steps of a batch, recorded and replayed.

    Args:
        step: a step in Python.
        kind: what decides about the numbers that Python knows in a step, beside K and the sequences.

    Attributes:
        is_steady: whether the last step took as long as further ones of its kind will.
    """

    def __init__(
        self, step: Step, sequences: Sequences, proposer: Proposer, kind: Hashable, record: Record = record_on_cuda
    ) -> None:
        self._step, self._sequences, self._proposer, self._kind = step, sequences, proposer, kind
        self._record = record
        self.is_steady = True

    def __call__(self, count: int) -> Draft:
        """Take a step with K = `count`; the draft's tensors hold until the next one."""
        sequences = self._sequences
        sequences.fixed = self._proposer.missed(sequences, count) <= sequences.growth
        if not sequences.fixed:
            self.is_steady = True
            return self._step(count)
        key = self._kind, count, sequences.growth, sequences.window(0)
        self.is_steady = sequences.recorded.get(key) is not None
        if key not in sequences.recorded:
            sequences.recorded[key] = None
            return self._step(count)
        return self._replayed(key, count)

    def _replayed(self, key: Hashable, count: int) -> Draft:
        steps = self._sequences.recorded
        recorded = steps.pop(key) or self._record(lambda: self._step(count), _pool(steps.values()))
        steps[key] = recorded  # now the last, and the first are those that were not used for longest
        for unused in list(steps)[:-MOST_GRAPHS]:
            del steps[unused]
        recorded.replay()
        self._proposer.mark_seen(self._sequences, count)
        return recorded.draft


def _pool(steps: Iterable[Recorded | None]) -> Any:
    return next((step.pool for step in steps if step is not None), None)
