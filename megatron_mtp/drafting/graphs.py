"""One step as a CUDA graph: propose, verify and keep are recorded once and replayed, without Python in between.

A recorded step reads and writes the same memory each time. So everything that changes from step to step must be in
tensors that are written in place: tokens, lengths, states and caches are. Its shapes depend on the batch and K alone
(`Sequences.fixed_growth`), and it reads nothing back. Plain decoding is the step without drafts.

    step 1    runs the prompts' rows through the drafter, as many as there are
    step 2    has the shapes of all later steps; it runs once, which allocates caches and workspaces
    step 3    is recorded, which runs nothing, and replayed; so are all later steps
"""

from collections.abc import Callable

import torch

from megatron_mtp.drafting.proposers.base import Proposer
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.sequences import Sequences
from megatron_mtp.drafting.types import Draft
from megatron_mtp.drafting.verifiers import VERIFIERS

Step = Callable[[], Draft]
Record = Callable[[Step], tuple[Callable[[], None], Draft]]
"""Records a step without running it: its replay, and the draft whose tensors every replay fills."""


def can_record(runner: Runner, proposer: Proposer, count: int, verifier: str) -> bool:
    """Whether the device has graphs, and a step of K = `count` reads nothing back (layers of experts do)."""
    recordable = VERIFIERS[verifier].recordable and (count == 0 or proposer.recordable)
    return recordable and runner.all_short and runner.device.type == "cuda"


def record_on_cuda(step: Step) -> tuple[Callable[[], None], Draft]:
    """`Record` with torch's CUDA graphs, whose memory is the graph's own."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draft = step()
    return graph.replay, draft


class GraphedStep:
    """Steps of one batch and one K.

    Args:
        step: one step, from draft to kept rows.
        growth: tokens that a step adds at most, K + 1.
    """

    def __init__(self, step: Step, sequences: Sequences, growth: int, record: Record = record_on_cuda) -> None:
        self._step, self._sequences, self._growth, self._record = step, sequences, growth, record
        self._done = 0
        self._replay: Callable[[], None] | None = None

    def __call__(self) -> Draft:
        """Take a step; of the draft only the number of nodes is to be used."""
        self._done += 1
        if self._done == 1:
            return self._step()
        self._sequences.fixed_growth = self._growth
        if self._done == 2:
            return self._step()
        if self._replay is None:
            self._replay, self._draft = self._record(self._step)
        self._replay()
        return self._draft
