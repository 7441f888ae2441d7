"""The control flow of recorded steps, with a stand-in for CUDA graphs that repeats the recorded operations.

As a CUDA graph does, it repeats what was recorded on the memory that was recorded: numbers that Python knew stay what
they were, and a tensor that a step makes anew instead of writing it in place is not seen by the next one.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafting_single import model_of, prompts_of, runner_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_mtp.drafting import loop
from megatron_mtp.drafting.api import generate
from megatron_mtp.drafting.config import SpeculativeConfig
from megatron_mtp.drafting.graphs import GraphedStep, Step, can_record
from megatron_mtp.drafting.method import make_method
from megatron_mtp.drafting.proposers import PROPOSERS
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.sampling import Sampling
from megatron_mtp.drafting.sequences import Sequences
from megatron_mtp.drafting.types import Draft

pytestmark = pytest.mark.usefixtures("megatron")


class Tape(TorchDispatchMode):
    """Notes every operation of a step, and what the tensors it writes held before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, operation: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        named = named or {}
        if operation._schema.is_mutable:
            self.before.append((given[0], given[0].clone()))
        made = operation(*given, **named)
        self.calls.append((operation, given, named, made))
        return made

    def undo(self) -> None:
        for tensor, held in reversed(self.before):
            tensor.copy_(held)

    def replay(self) -> None:
        for operation, given, named, made in self.calls:
            again = operation(*given, **named)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record_on_tape(step: Step) -> tuple[Callable[[], None], Draft]:
    tape = Tape()
    with tape:
        draft = step()
    tape.undo()
    return tape.replay, draft


class Counted(GraphedStep):
    """On tape; `replays` counts over all batches."""

    replays = 0

    def __init__(self, step: Step, sequences: Sequences, growth: int) -> None:
        super().__init__(step, sequences, growth, record_on_tape)

    def __call__(self) -> Draft:
        Counted.replays += self._replay is not None
        return super().__call__()


@pytest.fixture
def on_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "replays", 0)
    monkeypatch.setattr(loop, "GraphedStep", Counted)
    monkeypatch.setattr(loop, "can_record", lambda _, proposer, count, __: count == 0 or proposer.recordable)


RECORDABLE = [name for name, method in PROPOSERS.items() if method.recordable and name != "plain"]


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("method", RECORDABLE)
def test_repeated_steps_emit_what_plain_decoding_does(method: str, count: int, request: pytest.FixtureRequest) -> None:
    target, prompts = runner_of("parallel" if method == "parallel_heads" else "gqa"), prompts_of(4)
    answers = generate(target, prompts, 40).token_ids
    request.getfixturevalue("on_tape")
    settings = {"method": method, "num_speculative_tokens": count}
    assert generate(target, prompts, 40, speculative=settings).token_ids == answers
    assert Counted.replays > 20


@pytest.mark.parametrize("method", ["mtp", "mtp_eagle"])
def test_repeated_steps_sample_the_same_texts(method: str, request: pytest.FixtureRequest) -> None:
    """The random numbers of a step are made within it, from lengths in place; of three tokens many are accepted."""
    target, prompts = Runner(model_of("gqa"), vocab_size=3), [[0, 1, 2, 0]] * 4
    settings = {"method": method, "num_speculative_tokens": 2}
    usual = generate(target, prompts, 40, Sampling(2.0), settings)
    request.getfixturevalue("on_tape")
    again = generate(target, prompts, 40, Sampling(2.0), settings)
    assert again.token_ids == usual.token_ids
    assert again.stats.accepted == usual.stats.accepted > 40
    assert Counted.replays > 10


@pytest.mark.parametrize("in_place", [True, False])
@torch.inference_mode()
def test_the_tape_sees_a_length_that_is_not_written_in_place(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a step leaves its lengths in a new tensor, so that replays start where the recording did."""

    def grow(self: Sequences, gained_B: Tensor) -> None:
        self.length_B = self.length_B + gained_B

    if not in_place:
        monkeypatch.setattr(Sequences, "_grow", grow)
    target, prompts = runner_of(), prompts_of(2)
    sequences = Sequences(target, prompts, [0, 1], 60)
    chosen = make_method(target, SpeculativeConfig("mtp", 2), Sampling())
    loop.prefill(target, sequences, Sampling())
    chosen.proposer.start(sequences)
    taken = GraphedStep(lambda: loop.step(target, sequences, chosen, chosen.count), sequences, 3, record_on_tape)
    lengths = []
    for _ in range(6):
        taken()
        lengths.append(sequences.length_B.tolist())
    assert (lengths[3] < lengths[4] < lengths[5]) == in_place


def test_only_steps_made_for_it_are_recorded() -> None:
    on_cuda: Any = SimpleNamespace(device=torch.device("cuda"), all_short=True)
    on_cpu: Any = SimpleNamespace(device=torch.device("cpu"), all_short=True)
    target = runner_of()
    vanilla, eagle, tree = (
        PROPOSERS[name](target, SpeculativeConfig(name)) for name in ("mtp", "mtp_eagle", "mtp_tree")
    )
    assert can_record(on_cuda, vanilla, 2, "greedy")
    assert can_record(on_cuda, eagle, 2, "rejection")
    assert can_record(on_cuda, tree, 0, "greedy")
    assert not can_record(on_cuda, tree, 2, "greedy")
    assert not can_record(on_cuda, vanilla, 2, "block")
    assert not can_record(on_cpu, vanilla, 2, "greedy")
    on_cuda.all_short = False
    assert not can_record(on_cuda, vanilla, 2, "greedy")
