"""The control flow of captured steps, with a stand-in for CUDA graphs that replays the recorded operations.

Like a CUDA graph, it replays on the recorded memory: Python numbers keep their recorded values, and the next step does
not see a tensor that is newly created instead of written in place. It also keeps nothing alive that the step has read:
memory freed since then has other contents on a GPU, and fails here.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, cast

import pytest
import torch
from drafting_single import (
    kind_for,
    model_of,
    place_static_experts_everywhere,
    prefilled,
    prompts_of,
    runner_of,
    sequences_of,
    want_few_shapes,
)
from tiers import tiered
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_mtp.decoding import batch, graphs, sequences
from megatron_mtp.decoding.auto_count import AutoK
from megatron_mtp.decoding.batch import can_record
from megatron_mtp.decoding.config import PROPOSERS
from megatron_mtp.decoding.draft import Draft, StepOutput, Verdict
from megatron_mtp.decoding.engine import Engine, generate
from megatron_mtp.decoding.graphs import GraphedStep, Graphs, Recorded, RunStep
from megatron_mtp.decoding.method import config_from
from megatron_mtp.decoding.proposers.proposer import Proposer
from megatron_mtp.decoding.requests import Request, Update
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.decoding.scheduler import EngineSettings
from megatron_mtp.decoding.sequences import BatchShapes, Sequences

pytestmark = pytest.mark.usefixtures("megatron")


FROM_THE_HOST = ("lift_fresh", "lift_fresh_copy")
"""Operations behind `torch.tensor` of numbers."""


class Read:
    """A tensor in external memory, identified by its address."""

    def __init__(self, tensor: Tensor) -> None:
        self.memory, self.dtype = StorageWeakRef(tensor.untyped_storage()), tensor.dtype
        self.place = tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self) -> Tensor:
        memory = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        assert memory is not None, f"a replay reads {[*self.place[1]]} {self.dtype}, which have been freed"
        return torch.empty(0, dtype=self.dtype).set_(memory, *self.place)


class Tape(TorchDispatchMode):
    """Record every operation of a step, and the previous contents of the tensors it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.before: list[tuple[Tensor, Tensor]] = []
        self.own: set[int] = set()

    def noted(self, value: Any) -> Any:
        """Return the value with `Read` instead of every tensor that the step has not created."""
        if isinstance(value, list | tuple):
            return type(value)([self.noted(one) for one in value])
        is_read = isinstance(value, Tensor) and value.untyped_storage()._cdata not in self.own
        return Read(value) if is_read else value

    def __torch_dispatch__(self, operation: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        named = named or {}
        name = operation.overloadpacket.__name__
        assert name not in FROM_THE_HOST, f"{name} copies from the host, once: a replay has the old numbers"
        for argument, tensor in zip(operation._schema.arguments, given, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before.append((tensor, tensor.clone()))
        made = operation(*given, **named)
        known = {one.untyped_storage()._cdata for one in tensors_of([*given, *named.values()])}
        fresh = {one.untyped_storage()._cdata for one in tensors_of([made])} - known
        self.own |= fresh
        noted, names = self.noted([*given]), dict(zip(named, self.noted([*named.values()]), strict=True))
        reads = any(type(one) is Read for one in tensors_of([*noted, *names.values()]))
        self.calls.append(Call(operation, noted, names, reads, tensors_of(self.noted([made])) if fresh else []))
        return made

    def undo(self) -> None:
        for tensor, held in reversed(self.before):
            tensor.copy_(held)
        self.before.clear()

    def replay(self) -> None:
        for operation, given, named, reads, made in self.calls:
            if reads:
                given, named = [*map(present, given)], {name: present(one) for name, one in named.items()}
            again = operation(*given, **named)
            for old, new in zip(made, tensors_of([again]) if made else (), strict=True):
                if type(old) is not Read and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Call(NamedTuple):
    """An operation with its arguments, and the tensors that it returned, unless all are views of the arguments.

    Tensors in external memory are `Read`.
    """

    operation: Any
    given: list[Any]
    named: dict[str, Any]
    reads: bool
    made: list[Any]


def present(value: Any) -> Any:
    """Return the value with tensors instead of every `Read`."""
    kind = type(value)
    if kind is Read:
        return value.tensor()
    return [present(one) for one in value] if kind is list or kind is tuple else value


def tensors_of(values: Sequence[Any]) -> list[Any]:
    """Return all tensors, and their records, including those in lists."""
    found: list[Any] = []
    for one in values:
        if isinstance(one, list | tuple):
            found += tensors_of(one)
        elif isinstance(one, Tensor | Read):
            found.append(one)
    return found


def record_on_tape(step: Callable[[], StepOutput], _: None) -> Recorded:
    tape = Tape()
    with tape:
        output = step()
    tape.undo()
    return Recorded(tape.replay, output)


class Counted(GraphedStep):
    """Record on tape; count the replays of all batches, and note what was recorded: K and the window."""

    replays = 0
    recorded: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, step: RunStep, sequences: Sequences, proposer: Proposer, kept: Graphs) -> None:
        def record(one_step: Callable[[], StepOutput], pool: Any) -> Recorded:
            made = record_on_tape(one_step, pool)
            Counted.recorded.append((made.output.draft.nodes, sequences.window(0)))

            def replay() -> None:
                Counted.replays += 1
                made.replay()

            return replace(made, replay=replay)

        super().__init__(step, sequences, proposer, kept, record)


@pytest.fixture
def on_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "replays", 0)
    monkeypatch.setattr(Counted, "recorded", [])
    monkeypatch.setattr(graphs, "GraphedStep", Counted)
    want_few_shapes(monkeypatch)
    allowed = lambda _, proposer, count: count == 0 or proposer.recordable  # noqa: E731
    monkeypatch.setattr(batch, "can_record", allowed)


@pytest.fixture
def narrow_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_mtp.decoding.rows.FEW_WINDOWS_STEP", 16)


RECORDABLE = [name for name, method in PROPOSERS.items() if method.recordable and name != "plain"]
FEW = ("mtp", "mtp_eagle", "mtp_tree", "mtp_beam", "draft_model", "ngram", "eagle3_tree", "dspark", "exhaustive")
"""Methods of the first tier; the others' steps consist of the same parts."""


MATRIX = pytest.mark.matrix


@pytest.mark.parametrize(
    ("method", "count"),
    tiered([(method, count) for method in RECORDABLE for count in (0, 1, 3)], [(method, 3) for method in FEW]),
)
def test_repeated_steps_emit_what_plain_decoding_does(method: str, count: int, request: pytest.FixtureRequest) -> None:
    target, prompts = runner_of(kind_for(method)), prompts_of(4)
    answers = generate(target, prompts, 25).token_ids
    request.getfixturevalue("on_tape")
    settings = settings_of(method, count)
    assert generate(target, prompts, 25, speculative=settings, drafter=drafter_of(method)).token_ids == answers
    assert Counted.replays > 9


@pytest.mark.parametrize("kind", tiered(["bias-ungated-qknorm", "moe", "mla", "mla-moe"], ("moe", "mla")))
def test_repeated_steps_with_megatrons_own_layers_match(
    kind: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Megatron's own layers, with few rows through experts and with cached latents; a second request too."""
    place_static_experts_everywhere(monkeypatch)
    target, requests = runner_of(kind), [prompts_of(3), prompts_of(3, longest=30, seed=2)]
    answers = [generate(target, prompts, 20).token_ids for prompts in requests]
    request.getfixturevalue("on_tape")
    assert target.recordable
    for prompts, answer in zip(requests, answers, strict=True):
        assert generate(target, prompts, 20, speculative=settings_of("mtp")).token_ids == answer
    assert set(Counted.recorded) == {(3, 128)}
    assert len(Counted.recorded) <= 3  # for 4, 2 and 1 sequences
    assert Counted.replays > 20


SAMPLED = [
    ("mtp", None),
    ("mtp_eagle", None),
    ("mtp_tree", "specinfer"),
    pytest.param("mtp_tree", "spectr", marks=MATRIX),
    pytest.param("draft_model", "bild", marks=MATRIX),
    *(pytest.param(method, None, marks=MATRIX) for method in ("mtp_tree", "mtp_beam", "draft_model", "ngram")),
    pytest.param("mtp", "block", marks=MATRIX),
    pytest.param("mtp_beam", "joint", marks=MATRIX),
]


@pytest.mark.usefixtures("narrow_windows")
@pytest.mark.parametrize(("method", "verifier"), SAMPLED)
def test_repeated_steps_sample_the_same_texts(
    method: str, verifier: str | None, request: pytest.FixtureRequest
) -> None:
    """A step's random numbers are computed inside it, from lengths in place; with three tokens many are accepted."""
    target, prompts = Runner(model_of("gqa"), vocab_size=3), [[0, 1, 2, 0]] * 4
    settings = settings_of(method, 2) | ({"verifier": verifier} if verifier else {})
    drafter = drafter_of(method, vocab_size=3)
    usual = generate(target, prompts, 40, Sampling(2.0), settings, drafter=drafter)
    request.getfixturevalue("on_tape")
    again = generate(target, prompts, 40, Sampling(2.0), settings, drafter=drafter)
    assert again.token_ids == usual.token_ids
    assert again.stats.accepted == usual.stats.accepted > 25
    assert Counted.replays > 5


def test_repeated_steps_see_where_the_thinking_phase_begins_and_ends(request: pytest.FixtureRequest) -> None:
    """`relaxed` reads the growing sequences on the device."""
    target, prompts = Runner(model_of("gqa"), vocab_size=8), [[1, 2], [1], [5, 3]]
    settings = settings_of("mtp", 2) | {"verifier": "relaxed", "delta": 1.0, "think_start": 3, "think_end": 6}
    strict = generate(target, prompts, 60, speculative=settings_of("mtp", 2))
    usual = generate(target, prompts, 60, speculative=settings)
    request.getfixturevalue("on_tape")
    again = generate(target, prompts, 60, speculative=settings)
    assert again.token_ids == usual.token_ids != strict.token_ids
    assert again.stats.accepted == usual.stats.accepted
    assert Counted.replays > 10


def test_a_different_draft_model_is_captured_again(request: pytest.FixtureRequest) -> None:
    target, settings = Runner(model_of("gqa"), vocab_size=3), settings_of("draft_model", 2)
    drafters = [Runner(model_of(kind), vocab_size=3) for kind in ("mha-tied-layernorm", "gqa", "mha-tied-layernorm")]
    asked = [([[0, 1, 2]] * 2, 20, Sampling(2.0), settings, None, (), drafter) for drafter in drafters]
    wanted = [generate(target, *one) for one in asked]
    request.getfixturevalue("on_tape")
    made = [generate(target, *one) for one in asked]
    assert [one.token_ids for one in made] == [one.token_ids for one in wanted]
    assert [one.stats.accepted for one in made] == [one.stats.accepted for one in wanted]
    assert len(Counted.recorded) >= 3


@pytest.mark.usefixtures("narrow_windows")
@pytest.mark.parametrize("method", ["mtp", "mtp_tree", "mtp_beam", "draft_model", "ngram"])
def test_all_forwards_of_a_step_have_one_window(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window identifies a step's graph; a tree attends to more slots than its path is long."""
    windows: dict[tuple[int, ...], set[int]] = {}
    window = Sequences.window

    def watched(self: Sequences, beyond: int) -> int:
        found = window(self, beyond)
        if self.shapes.reach:  # not the prompts' own
            windows.setdefault(tuple(map(len, self.token_ids)), set()).add(found)
        return found

    monkeypatch.setattr(Sequences, "window", watched)
    want_few_shapes(monkeypatch)
    target, drafter = runner_of(depths=1 if method == "mtp" else 3), drafter_of(method)
    generate(target, [[1, 2, 3]], 40, speculative=settings_of(method, 1 if method == "mtp" else 2), drafter=drafter)
    assert len(windows) > 20
    assert {len(found) for found in windows.values()} == {1}
    assert len(set.union(*windows.values())) > 2


def settings_of(method: str, count: int | str = 3) -> dict[str, Any]:
    own = {"tree": [3, 2, 1]} if method.endswith("_tree") else {}
    model = {"model": "-"} if method.startswith("draft_model") else {}
    count = 1 if method == "exhaustive" else count
    return {"method": method, "num_speculative_tokens": count, **own, **model}


def drafter_of(method: str, vocab_size: int | None = None) -> Runner | None:
    """Return the small model of `draft_model`."""
    return Runner(model_of("mha-tied-layernorm"), vocab_size) if method.startswith("draft_model") else None


@pytest.mark.parametrize("sampling", tiered([Sampling(), Sampling(2.0)], (Sampling(2.0),)))
@pytest.mark.parametrize(
    ("method", "count"), tiered([("mtp", 3), ("mtp_eagle", 3), ("mtp_eagle", 0)], (("mtp", 3), ("mtp_eagle", 0)))
)
def test_a_second_request_records_nothing(
    method: str, count: int, sampling: Sampling, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Longer and shorter prompts and outputs, other seeds; batch sizes 4, 2 and 1 have their own graphs."""
    requests = [(prompts_of(2), 15, [0, 1]), (prompts_of(2, longest=60, seed=7), 25, [5, 6]), ([[1], [2]], 9, [7, 8])]
    another = prompts_of(3), 12, [1, 2, 3]
    target, settings = (
        Runner(model_of("gqa"), vocab_size=3 if sampling.temperature else None),
        settings_of(method, count),
    )
    asked = [
        ([[token % 3 for token in prompt] for prompt in prompts], *rest) for prompts, *rest in [*requests, another]
    ]

    def answer(prompts: list[list[int]], new_tokens: int, seeds: list[int]) -> list[list[int]]:
        return generate(target, prompts, new_tokens, sampling, settings, seeds).token_ids

    wanted = [answer(*one) for one in asked]
    request.getfixturevalue("on_tape")
    in_python: list[int] = []
    take = batch.step
    monkeypatch.setattr(batch, "step", lambda *given: in_python.append(given[-1]) or take(*given))
    assert answer(*asked[3]) == wanted[3]
    for one, answers in zip(asked[:3], wanted[:3], strict=True):
        before = Counted.replays
        assert answer(*one) == answers
        assert Counted.replays > before
    assert set(Counted.recorded) == {(count, 128)}
    assert len(Counted.recorded) <= 7  # the block of the last remaining sequence may matter too
    for _ in range(3):
        in_python.clear()
        assert answer(*asked[0]) == wanted[0]
    assert in_python == []


def test_another_method_and_other_sampling_have_graphs_of_their_own(request: pytest.FixtureRequest) -> None:
    target, prompts = runner_of(), prompts_of(2)
    samplings = Sampling(), Sampling(2.0), Sampling(2.0, top_k=3)
    asked = [(settings_of("mtp"), sampling) for sampling in samplings]
    asked += [(settings_of(method, count), Sampling()) for method, count in (("mtp", 2), ("mtp_eagle", 3))]
    wanted = [generate(target, prompts, 9, sampling, settings).token_ids for settings, sampling in asked]
    request.getfixturevalue("on_tape")
    recorded = list[int]()
    for _ in range(4):
        assert [generate(target, prompts, 9, sampling, settings).token_ids for settings, sampling in asked] == wanted
        recorded.append(len(Counted.recorded))
    assert len(asked) <= recorded[2] == recorded[3] <= 2 * len(asked)  # of 2 sequences, and of the 1 that remained


@pytest.mark.usefixtures("narrow_windows")
@pytest.mark.parametrize("method", tiered(["mtp", "mtp_eagle", "mtp_tree", "draft_model", "ngram", "plain"], ("mtp",)))
def test_a_sequence_that_outgrows_its_window_gets_another_graph(method: str, request: pytest.FixtureRequest) -> None:
    target, prompts = runner_of(), prompts_of(2)
    count, drafter = 0 if method == "plain" else 2, drafter_of(method)
    answers, recorded = generate(target, prompts, 90).token_ids, list[int]()
    request.getfixturevalue("on_tape")
    for _ in range(4):
        settings = settings_of(method, count)
        assert generate(target, prompts, 90, speculative=settings, drafter=drafter).token_ids == answers
        recorded.append(len(Counted.recorded))
    assert {window for _, window in Counted.recorded} >= {32, 48, 64, 80, 96}
    assert recorded[2] == recorded[3]


@pytest.mark.usefixtures("narrow_windows")
def test_kept_graphs_and_batches_are_limited(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The least recently used graphs and batches are dropped, and recreated when needed."""
    target, settings = runner_of(), settings_of("mtp", 2)
    answers = {batch: generate(target, prompts_of(batch), 60).token_ids for batch in (1, 2, 3)}
    request.getfixturevalue("on_tape")
    monkeypatch.setattr(sequences, "MAX_KEPT_BATCHES", 2)
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    for texts in (1, 2, 3, 2, 1):
        assert generate(target, prompts_of(texts), 60, speculative=settings).token_ids == answers[texts]
        kept = target.kept.scheduler._kept._kept
        assert len(kept) <= 2
        assert all(len([one for one in recorded.values() if one]) <= 2 for _, _, recorded in kept.values())
    assert target.kept.settings.running == 3


def test_a_longer_request_gets_larger_memory(request: pytest.FixtureRequest) -> None:
    target, prompts = runner_of(), prompts_of(2)
    target.positions = 40
    short = generate(target, prompts, 20).token_ids
    target.positions = 400
    answers = generate(target, prompts, 140).token_ids
    request.getfixturevalue("on_tape")
    target.positions = 40
    assert generate(target, prompts, 20, speculative=settings_of("mtp")).token_ids == short
    assert target.kept.settings.slots == 128
    assert target.kept.scheduler.memory.states_N1SH.shape[:3] == (2, 1, 129)  # two sequences, without a spare block
    target.positions = 400
    assert generate(target, prompts, 140, speculative=settings_of("mtp")).token_ids == answers
    assert target.kept.settings.slots == 512


@torch.inference_mode()
def test_an_earlier_text_leaves_nothing_in_the_memory(request: pytest.FixtureRequest) -> None:
    """Not even NaN, which no mask would keep out of a sum."""
    target, prompts = runner_of(), prompts_of(2)
    answers = generate(target, prompts, 20).token_ids
    request.getfixturevalue("on_tape")
    generate(target, prompts, 20, speculative=settings_of("mtp"))
    memory = target.kept.scheduler.memory
    for cache in (memory.cache, *memory.depths):
        for held in (*cache.keys, *cache.values):
            held[1:].fill_(torch.nan)
    memory.states_N1SH[1:].fill_(torch.nan)
    assert generate(target, prompts, 20, speculative=settings_of("mtp")).token_ids == answers


def test_a_step_that_fails_leaves_no_memory_behind(request: pytest.FixtureRequest) -> None:
    target, prompts = runner_of(), prompts_of(2)
    request.getfixturevalue("on_tape")

    def fail(_: Any) -> None:
        raise RuntimeError("planted")

    generate(target, prompts, 20, speculative=settings_of("mtp"))
    assert target.kept is not None
    with pytest.raises(RuntimeError, match="planted"):
        generate(target, prompts, 20, speculative=settings_of("mtp"), emit=fail)
    assert target.kept is None


def test_a_nested_request_has_its_own_memory(request: pytest.FixtureRequest) -> None:
    target, prompts = runner_of(), prompts_of(2)
    answers, others = generate(target, prompts, 20).token_ids, generate(target, prompts_of(2, seed=8), 20).token_ids
    request.getfixturevalue("on_tape")
    generate(target, prompts, 20, speculative=settings_of("mtp"))
    found: list[list[list[int]]] = []

    def ask(_: Any) -> None:
        if len(found) < 3:
            found.append([])
            found[-1] = generate(target, prompts_of(2, seed=8), 20, speculative=settings_of("mtp")).token_ids

    assert generate(target, prompts, 20, speculative=settings_of("mtp"), emit=ask).token_ids == answers
    assert found == [others] * 3


@pytest.mark.parametrize("method", tiered(["mtp", "mtp_eagle", "plain"], ("mtp", "plain")))
def test_texts_that_join_and_leave_replay_steps(method: str, request: pytest.FixtureRequest) -> None:
    """In an engine with too few blocks, which preempts; finished rows leave no trace in blocks of others."""
    target, settings = runner_of(), config_from(settings_of(method, 0 if method == "plain" else 2))
    asked = [Request(prompt, 15 + 9 * (seed % 3), seed=seed) for seed, prompt in enumerate(prompts_of(9, longest=40))]
    wanted = [generate(target, [one.prompt], one.max_new_tokens).token_ids[0] for one in asked]
    request.getfixturevalue("on_tape")
    sizes = EngineSettings(running=5, blocks=5, reuse=False, contains_errors=False)
    engine = Engine(target, sizes, settings)
    made: dict[int, list[int]] = {}
    for one in asked:
        made[engine.add(one)] = []
        for _ in range(4):
            for update in engine.step():
                made[update.request] += update.tokens
    while engine.busy:
        for update in engine.step():
            made[update.request] += update.tokens
    assert [*made.values()] == wanted
    assert Counted.replays > 20
    assert engine.load.preempted > 0


def drafted(target: Runner, settings: dict[str, Any]) -> tuple[list[list[int]], dict[tuple[int, int], list[int]]]:
    """Return new tokens of three prompts, and the drafts of every sequence by its number of tokens."""
    drafts, lengths = {}, [0, 0, 0]

    def note(update: Update) -> None:
        if update.draft is not None:
            drafts[update.request, lengths[update.request]] = update.draft.tokens_BN[update.row].tolist()
        lengths[update.request] += len(update.tokens)

    return generate(target, prompts_of(3), 90, speculative=settings, emit=note).token_ids, drafts


@pytest.mark.parametrize("method", tiered(["mtp", "mtp_eagle"], ("mtp",)))
def test_automatic_k_has_a_graph_for_every_k(
    method: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """K changes from step to step, with pauses after which the drafter has many rows to run.

    Drafts do not depend on K of earlier steps, so they are those of K = 3, truncated.
    """
    target = runner_of()
    answers, wanted = drafted(target, settings_of(method, 3))
    request.getfixturevalue("on_tape")
    for _ in range(2):
        order = itertools.cycle([3, 1, 0, 2, 0, 0, 0, 0, 0, 0, 2, 1, 3])
        monkeypatch.setattr(AutoK, "choose", lambda *_, order=order: next(order))
        texts, drafts = drafted(target, settings_of(method, "auto"))
        assert texts == answers
        shared = drafts.keys() & wanted.keys()
        assert len(shared) > 200
        assert all(drafts[place] == wanted[place][: len(drafts[place])] for place in shared)
        assert set(Counted.recorded) == {(0, 128), (1, 128), (2, 128), (3, 128)}
    assert Counted.replays > 100


def test_automatic_k_learns_only_from_replayed_steps(request: pytest.FixtureRequest) -> None:
    """Capturing takes much longer than the captured step."""
    target, prompts = runner_of(), prompts_of(3)
    request.getfixturevalue("on_tape")
    patch = request.getfixturevalue("monkeypatch")
    learned: list[int] = []
    patch.setattr(AutoK, "choose", lambda *_: 2)
    patch.setattr(AutoK, "learn", lambda *_: learned.append(Counted.replays))
    generate(target, prompts, 30, speculative=settings_of("mtp", "auto"))
    assert learned[0] == 2  # without the eager step and the captured one


@pytest.mark.parametrize("in_place", [True, False])
@torch.inference_mode()
def test_the_tape_sees_a_length_that_is_not_written_in_place(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a step leaves its lengths in a new tensor, so that a replay would read the recorded ones."""

    def grow(self: Sequences, gained_B: Tensor) -> None:
        self.length_B = self.length_B + gained_B

    if not in_place:
        monkeypatch.setattr(Sequences, "_grow", grow)
    target, prompts = runner_of(), prompts_of(2)
    begun = prefilled(target, prompts, settings_of("mtp", 2))
    sequences, chosen = begun.sequences.only([0, 1], BatchShapes(growth=3, fixed=True)), begun.method
    step = lambda count: batch.step(sequences, chosen, count)  # noqa: E731
    taken = GraphedStep(step, sequences, chosen.proposer, {}, record_on_tape)
    lengths = []
    with nullcontext() if in_place else pytest.raises(AssertionError, match="have been freed"):
        for _ in range(6):
            taken(2)
            lengths.append(sequences.length_B.tolist())
        assert lengths[3] < lengths[4] < lengths[5]


def test_the_graphs_of_a_batch_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the calls to torch with stand-ins for its classes; the first graph creates the pool."""
    pools: list[Any] = []

    class Graph:
        def replay(self) -> None:
            pass

        def pool(self) -> tuple[int, int]:
            return 0, 7

    @contextmanager
    def recording(_: Graph, pool: Any) -> Iterator[None]:
        pools.append(pool)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    sequences = sequences_of(runner_of(), [[1, 2]], 60, shapes=BatchShapes(growth=4))
    proposer = SimpleNamespace(missed=lambda *_: 0, mark_seen=lambda *_: None)
    kept_BR = torch.ones(1, 1, dtype=torch.bool)
    output = sequences.accept(Draft(sequences.tokens_BT[:, :0]), Verdict(kept_BR, sequences.seed_B))
    taken = GraphedStep(lambda _: output, sequences, cast("Proposer", proposer), {})
    for count in (0, 1, 2):
        for _ in range(3):
            assert taken(count) is output
    assert pools == [None, (0, 7), (0, 7)]


def test_decoding_works_on_a_device_that_cannot_capture_graphs(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the first of several batches tries; half of the step had run when it failed."""
    target, prompts, budgets = runner_of("gqa"), prompts_of(4), [9, 9, 40, 40]
    answers = generate(target, prompts, budgets).token_ids
    request.getfixturevalue("on_tape")
    asked = []

    class Refused(GraphedStep):
        def __init__(self, step: RunStep, sequences: Sequences, proposer: Proposer, kept: Graphs) -> None:
            def record(one_step: Callable[[], StepOutput], _: Any) -> Recorded:
                asked.append(record_on_tape(one_step, None))
                raise RuntimeError("operation not permitted when stream is capturing")

            super().__init__(step, sequences, proposer, kept, record)

    monkeypatch.setattr(graphs, "GraphedStep", Refused)
    assert generate(target, prompts, budgets, speculative=settings_of("mtp")).token_ids == answers
    assert len(asked) == 1
    assert [record.getMessage() for record in caplog.records if record.name == graphs.__name__] == [
        "steps are not recorded as CUDA graphs, so decoding is slower: operation not permitted when stream is capturing"
    ]


def test_only_steps_made_for_it_are_recorded() -> None:
    on_cuda: Any = SimpleNamespace(device=torch.device("cuda"), recordable=True)
    on_cpu: Any = SimpleNamespace(device=torch.device("cpu"), recordable=True)
    target = runner_of()
    vanilla, eagle, tree = (
        PROPOSERS[name](target, config_from({"method": name})) for name in ("mtp", "mtp_eagle", "mtp_tree")
    )
    assert can_record(on_cuda, vanilla, 2)
    assert can_record(on_cuda, eagle, 2)
    assert can_record(on_cuda, tree, 0)
    assert can_record(on_cuda, tree, 2)
    window = PROPOSERS["lookahead"](target, config_from({"method": "lookahead"}))
    assert can_record(on_cuda, window, 0)
    assert not can_record(on_cuda, window, 2)
    small = PROPOSERS["draft_model"](target, config_from(settings_of("draft_model")), target)
    assert not can_record(on_cuda, small, 2)
    small.drafter = on_cuda
    assert can_record(on_cuda, small, 2)
    assert not can_record(on_cpu, vanilla, 2)
    on_cuda.recordable = False
    assert not can_record(on_cuda, vanilla, 2)
