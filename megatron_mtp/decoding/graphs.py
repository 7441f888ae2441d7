"""Steps as CUDA graphs: propose, verify and keep are captured once and replayed without Python in between.

A captured step reads and writes the same memory each time. So everything that changes from step to step must be in
tensors that are written in place: tokens, lengths, states and caches are. Its shapes depend only on the batch, K and
the window, and it reads nothing back. Plain decoding is the step without drafts.

A graph is bound to the tensors that it reads: those of an engine's memory, and `KeptTensors`, which hold tokens,
lengths and tables for one batch after another of the same kind and size. Another K or window has its own graph:

    a prompt's first step     may run more of the drafter's rows than a step adds; never captured then
    first step of its kind    runs in Python, which allocates caches and workspaces
    second                    is captured, which runs nothing, and replayed
    further ones              are replayed

If a device cannot capture a step, this step and all further ones run in Python, after one warning.
"""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_mtp.decoding.draft import StepOutput
from megatron_mtp.decoding.proposers.proposer import Proposer
from megatron_mtp.decoding.sequences import Sequences

logger = logging.getLogger(__name__)

MAX_GRAPHS = 32
"""Maximum number of graphs for each kind and size of batches; the least recently used one is dropped."""

RunStep = Callable[[int], StepOutput]
"""Everything that a step with K drafts does on the device."""


@dataclass(frozen=True)
class Recorded:
    """A captured step.

    Attributes:
        replay: runs the step.
        output: tensors that every replay fills.
        pool: memory of intermediate results. Steps of the same sequences share it, because none outlives a step.
    """

    replay: Callable[[], None]
    output: StepOutput
    pool: Any = None


Record = Callable[[Callable[[], StepOutput], Any], Recorded]
"""Captures a step without running it, in the memory pool of an earlier one or a new one (None)."""


def record_on_cuda(step: Callable[[], StepOutput], pool: Any) -> Recorded:
    """Capture a step with torch's CUDA graphs; see `Record`."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool):
            output = step()
    finally:
        torch.cuda.set_stream(stream)  # a failed capture leaves its own stream current
    return Recorded(graph.replay, output, graph.pool())


Graphs = dict[Hashable, Recorded | None]
"""Captured steps; None for one that has run once and may be captured."""


class GraphedStep:
    """Captures and replays the steps of a batch.

    Attributes:
        is_steady: whether the last step took as long as later ones of its kind will.
        failed: whether a step could not be captured; later ones then run in Python.
    """

    def __init__(
        self, step: RunStep, sequences: Sequences, proposer: Proposer, graphs: Graphs, record: Record = record_on_cuda
    ) -> None:
        self._step, self._sequences, self._proposer, self._graphs = step, sequences, proposer, graphs
        self._record = record
        self.is_steady, self.failed = True, False

    def __call__(self, count: int) -> StepOutput:
        """Run a step with K = `count`; the output tensors are valid until the next one."""
        sequences, graphs = self._sequences, self._graphs
        if self.failed or self._proposer.missed(sequences, count) > sequences.shapes.growth:
            self.is_steady = True
            return self._step(count)
        run = sequences.tables.run
        key = count, sequences.shapes.growth, sequences.window(0), None if run is None else run.start
        self.is_steady = graphs.get(key) is not None
        if key not in graphs:
            graphs[key] = None
            return self._step(count)
        recorded = graphs.pop(key) or self._recorded(count)
        if recorded is None:
            return self._step(count)
        graphs[key] = recorded  # keeps the dict in order of last use
        for unused in list(graphs)[:-MAX_GRAPHS]:
            del graphs[unused]
        recorded.replay()
        self._proposer.mark_seen(sequences, count)
        return recorded.output

    def _recorded(self, count: int) -> Recorded | None:
        """Record the step in the memory of earlier steps. If that fails, return None and log one warning."""
        pool = next((one.pool for one in self._graphs.values() if one is not None), None)
        try:
            return self._record(lambda: self._step(count), pool)
        except Exception as error:  # CUDA and kernels of libraries raise any type
            logger.warning("steps are not recorded as CUDA graphs, so decoding is slower: %s", f"{error}"[:300])
            self.failed = True
            return None
