"""Continuous batching against `generate` in float32: the same tokens, whenever requests arrive."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from drafting_single import KINDS, draft_one_by_one, method_of, model_of, prompts_of, trained_forward
from engine_days import (
    KEPT,
    METHODS,
    PIECES,
    QUIET,
    SAMPLINGS,
    alone,
    check_day,
    days,
    drained,
    request_of,
    runner_of,
    texts_of,
)
from hybrid_single import drafting_hybrid
from hypothesis import given, settings
from megatron_single import VOCABULARY
from tiers import tiered

from megatron_mtp.decoding import scheduler
from megatron_mtp.decoding.batch import DecodeBatch, PenalizedVerifier, PrefillBatch, Sequence
from megatron_mtp.decoding.draft import Draft, Round, Verdict
from megatron_mtp.decoding.engine import Engine, block_bytes, blocks_for, blocks_in, default_cache_gib, generate
from megatron_mtp.decoding.method import config_from
from megatron_mtp.decoding.requests import UNLIMITED, Finish, QueueFull, Request
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Noise, Penalties, Sampling, penalized
from megatron_mtp.decoding.scheduler import EngineSettings

pytestmark = pytest.mark.usefixtures("megatron")

LENGTHS = (510, 512, 600, 1030)
HYBRID = "M*EG/GM*/GM*/GM*"


def engine_of(runner: Runner | None = None, **sizes: Any) -> Engine:
    drafter = runner_of("mha-tied-layernorm")
    return Engine(runner or runner_of(), EngineSettings(**sizes), drafter=drafter)


def same_as_alone(engine: Engine, requests: list[Request], runner: Runner | None = None) -> None:
    numbers = [engine.add(request) for request in requests]
    made = texts_of(drained(engine))
    assert [made[number] for number in numbers] == [alone(request, runner) for request in requests]
    assert engine.load.blocks_used == 0


# ---- random arrivals


@settings(max_examples=15, **QUIET)
@given(days())
def test_tokens_match_generate_for_any_arrival_order(day: Any) -> None:
    check_day(day)


@pytest.mark.matrix
@settings(max_examples=80, **QUIET)
@given(days())
def test_tokens_match_generate_in_many_more_cases(day: Any) -> None:
    check_day(day)


@pytest.mark.parametrize("method", tiered(METHODS, ("plain", "mtp", "mtp_tree")))
def test_texts_of_a_method_join_and_leave(method: str) -> None:
    """More requests than slots; greedy and sampled."""
    every = zip(prompts_of(7, 50), [3, 30, 9, 1, 17, 24, 12], SAMPLINGS * 2, strict=False)
    wanted = [request_of(p, n, method, sampling=s, seed=n) for p, n, s in every]
    same_as_alone(engine_of(running=3, chunk=16), wanted)


@pytest.mark.parametrize("kind", tiered([*KINDS, "mla"], ("gqa", "moe", "eagle3", "dspark")))
def test_every_kind_of_model_is_served(kind: str) -> None:
    runner = runner_of(kind)
    speculative = config_from({"method": method_of(kind), "num_speculative_tokens": 2})
    if kind == "repeated":
        speculative = config_from({"method": "mtp_eagle", "num_speculative_tokens": 2})
    wanted = [replace(request_of(prompt, 15), speculative=speculative) for prompt in prompts_of(5, 70)]
    same_as_alone(engine_of(runner, running=3, blocks=14), wanted, runner)


LONG = {length: [(place * place * 7 + length) % (VOCABULARY - 1) + 1 for place in range(length)] for length in LENGTHS}


def long_runner(kind: str, compiled: str, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Return a model with positions for more than two chunks, shared by all tests."""
    monkeypatch.setenv("MEGATRON_MTP_COMPILED", compiled)
    if (name := f"long {kind} {compiled}") not in KEPT:
        model = drafting_hybrid(HYBRID, torch.float32) if kind == "hybrid" else model_of(kind, 3, torch.float32)
        model.max_sequence_length = 1100
        KEPT[name] = Runner(model)
    return KEPT[name]


@pytest.mark.parametrize("compiled", ["0", pytest.param("1", marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    ("kind", "method"),
    tiered(
        [
            *((kind, method) for kind in ("gqa", "moe", "mla", "hybrid") for method in ("mtp", "mtp_eagle")),
            *(("gqa", method) for method in ("draft_model", "mtp_tree")),
        ],
        (("gqa", "mtp_eagle"), ("gqa", "draft_model"), ("hybrid", "mtp_eagle")),
    ),
)
def test_prompts_around_a_chunk_and_two(kind: str, method: str, compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No window of a catching-up drafter consists only of padding; prompts arrive one by one, and together."""
    runner, drafter = (long_runner(one, compiled, monkeypatch) for one in (kind, "mha-tied-layernorm"))
    wanted = [request_of(LONG[length], 4, method) for length in LENGTHS]
    right = [alone(request, runner, drafter) for request in wanted]
    for running in (1, 3):
        engine = Engine(runner, EngineSettings(running=running, blocks=256), drafter=drafter)
        numbers = [engine.add(request) for request in wanted]
        made = texts_of(drained(engine))
        assert [made[number] for number in numbers] == right


def test_a_new_engine_is_idle() -> None:
    engine = engine_of()
    assert not engine.busy
    assert engine.load.running == engine.load.waiting == engine.load.blocks_used == 0


# ---- one step


def test_a_long_prompt_does_not_stall_others() -> None:
    """A sequence that is decoding gains a token between any two chunks of another's prompt."""
    engine = engine_of(chunk=16)
    short = engine.add(request_of([5], 40, "plain"))
    engine.step()
    long = engine.add(request_of(prompts_of(1, 1)[0] * 100, 4, "plain"))
    steps = [engine.step() for _ in range(14)]
    assert [[len(one.tokens) for one in updates if one.request == short] for updates in steps] == [[1], []] * 7
    chunks = [[len(one.tokens) for one in updates if one.request == long] for updates in steps]
    assert chunks == [[], [0]] * 6 + [[], [1]]
    drained(engine)


def test_a_step_is_planned_before_any_of_it_runs() -> None:
    """Prompts of 3, 2, 4 and 5 tokens in a chunk of 12 rows; the second and third run alone."""
    engine = engine_of(chunk=12)
    for length in (3, 2, 4, 5):
        engine.add(request_of([7] * length, 4, "plain"))
    for number in (1, 2):
        engine.scheduler.seqs[number].alone = True
    plan = engine.scheduler.schedule()
    assert [[*zip([seq.number for seq in one.seqs], one.counts, strict=True)] for one in plan] == [
        [(0, 3), (3, 5)],
        [(1, 2)],
        [(2, 2)],
    ]


def test_a_first_token_does_not_wait_for_other_sequences() -> None:
    engine = engine_of()
    others = [engine.add(request_of([number], 40, "plain")) for number in range(3)]
    engine.step()
    assert {one.request for one in engine.step()} == {*others}
    late = engine.add(request_of([7, 8], 4, "plain"))
    assert [(one.request, len(one.tokens)) for one in engine.step()] == [(late, 1)]
    assert {one.request for one in engine.step()} == {*others, late}
    drained(engine)


def test_a_freed_slot_is_taken_in_the_next_step() -> None:
    engine = engine_of(running=1)
    first, second = (engine.add(request_of([3, 4], 2, "plain")) for _ in range(2))
    engine.step()
    assert (engine.load.running, engine.load.waiting) == (1, 1)
    steps = [[(one.request, len(one.tokens), one.finish) for one in engine.step()] for _ in range(2)]
    assert steps == [[(first, 1, Finish.LENGTH)], [(second, 1, None)]]


@pytest.mark.parametrize("method", ["plain", "mtp"])
def test_prompts_run_in_one_forward_pass_without_padding(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """100, 12 and 50 rows: through the trunk together, and through each of the three MTP layers."""
    runner, rows = runner_of(), list[int]()
    embed = runner.backend._embed

    def counted(tokens_BR: torch.Tensor) -> torch.Tensor:
        rows.append(tokens_BR.numel())
        return embed(tokens_BR)

    monkeypatch.setattr(runner.backend, "_embed", counted)
    monkeypatch.setattr(scheduler, "wants_few_shapes", lambda _: False)  # a GPU pads, so that few shapes occur
    engine = engine_of()
    wanted = [request_of((PIECES[0] + PIECES[1] + PIECES[2])[:length], 5, method) for length in (100, 12, 50)]
    numbers = [engine.add(request) for request in wanted]
    updates = engine.step()
    assert rows[0] == 100 + 12 + 50
    assert len(rows) == (1 if method == "plain" else 4)
    assert all(100 + 12 + 50 <= one < 3 * 100 for one in rows)
    monkeypatch.undo()
    made = texts_of([*updates, *drained(engine)])
    assert [made[number] for number in numbers] == [alone(request) for request in wanted]


def test_a_short_prompt_neither_waits_for_a_long_one_nor_delays_others() -> None:
    """Rows per step: 8 of the long prompt; then 5 of the short one and 3; 8; 4 of the next short one and 4."""
    engine, long, short = engine_of(chunk=8), request_of(PIECES[0], 4), request_of([1, 2, 3, 4, 5], 1)
    first = engine.add(long)
    engine.step()
    second, third = engine.add(short), engine.add(replace(short, prompt=[1, 2, 3, 4, 5, 6, 7, 8]))
    got: list[list[int]] = [[one.request for one in engine.step() if one.tokens] for _ in range(8)]
    assert [numbers.index(second) if second in numbers else None for numbers in got[:2]] == [None, 0]
    assert next(step for step, numbers in enumerate(got) if third in numbers) <= 4
    assert next(step for step, numbers in enumerate(got) if first in numbers) <= 7
    drained(engine)


@pytest.mark.parametrize("when", [0, 1, 2, 4])
def test_a_canceled_request_frees_its_slot_and_blocks(when: int) -> None:
    """While it waits, while its prompt runs, and while it is decoding."""
    engine = engine_of(running=1, chunk=16)
    request = request_of(prompts_of(1, 1)[0] * 40, 30)
    number = engine.add(request)
    for _ in range(when):
        engine.step()
    engine.cancel(number)
    assert not engine.busy
    assert engine.load.blocks_used == engine.load.running == engine.load.waiting == 0
    engine.cancel(number)
    same_as_alone(engine, [request])


def test_preempted_sequences_lose_no_tokens() -> None:
    """Three sequences grow to 3 blocks each, and there are 6."""
    engine = engine_of(blocks=6, reuse=False)
    wanted = [request_of(prompt, 60, sampling=Sampling(1.0), seed=7) for prompt in prompts_of(3, 20)]
    same_as_alone(engine, wanted)
    assert engine.load.preempted > 0


def test_the_oldest_sequence_is_never_preempted() -> None:
    engine = engine_of(blocks=6, reuse=False)
    oldest = engine.add(request_of([4, 5, 6], 60, "plain"))
    for prompt in prompts_of(3, 20):
        engine.add(request_of(prompt, 60, "plain"))
    gains = [sum(len(one.tokens) for one in engine.step() if one.request == oldest) for _ in range(60)]
    assert gains == [1] * 60


@pytest.mark.parametrize("method", tiered(METHODS, ("mtp", "mtp_tree", "ngram")))
def test_a_text_may_fill_all_positions(method: str) -> None:
    """160 positions; the last steps draft beyond."""
    prompt = (PIECES[0] + PIECES[1] + PIECES[2])[:101]
    same_as_alone(engine_of(), [request_of(prompt, 100, method), request_of(prompt[:3], 9, method)])


@pytest.mark.parametrize("method", tiered(METHODS, ("mtp", "mtp_tree", "ngram")))
def test_ends_and_preemptions_change_no_token(method: str) -> None:
    """Ends at stops and budgets; preempted sequences; reused slots."""
    every = zip(prompts_of(7, 50), [3, 30, 9, 1, 17, 24, 12], SAMPLINGS * 2, strict=False)
    wanted = [request_of(p, n, method, sampling=s, seed=n, stop_ids=frozenset({7, 8})) for p, n, s in every]
    same_as_alone(engine_of(running=3, chunk=16), wanted)
    same_as_alone(engine_of(running=4, blocks=6), wanted)


READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
"""Tensor methods that synchronize with the device."""


@pytest.mark.parametrize(
    ("method", "reads"), [("plain", 2), ("mtp", 2), ("mtp_eagle", 2), ("ngram", 4), ("draft_model", 2)]
)
def test_a_step_reads_back_only_its_results(method: str, reads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and counts, plus the nodes of a draft that may end early: after the trunk, and nothing before it."""
    engine, noted = engine_of(), list[str]()
    numbers = [engine.add(request_of(prompt, 30, method)) for prompt in prompts_of(3, 9)]

    def noting(name: str) -> Any:
        own = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *given: Any, **named: Any) -> Any:
            noted.append("read")
            return own(self, *given, **named)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, noting(name))
    trunk = Runner.trunk

    def started(self: Runner, *given: Any) -> torch.Tensor:
        noted.extend(["start"] if self is engine.runner else [])
        return trunk(self, *given)

    monkeypatch.setattr(Runner, "trunk", started)
    draft_one_by_one(monkeypatch)
    for _ in range(3):
        engine.step()
    noted.clear()
    updates = [engine.step() for _ in range(3)]
    monkeypatch.undo()
    assert all({one.request for one in each} == set(numbers) for each in updates)
    assert noted == ["start", *["read"] * reads] * 3
    made = texts_of(drained(engine))
    assert all(len(text) < 30 for text in made.values())


# ---- prefix caching


@pytest.mark.parametrize("method", tiered(METHODS, ("mtp", "mtp_tree", "draft_model", "lookahead")))
def test_a_cached_prefix_gives_the_same_tokens_and_does_not_run(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """80 tokens of a prompt of 90 are cached, which are two blocks of 32."""
    rows: list[int] = []
    trunk, runner = Runner.trunk, runner_of()

    def counted(self: Runner, tokens_BR: torch.Tensor, *given: Any) -> torch.Tensor:
        rows.extend([tokens_BR.size(1)] if self is runner else [])
        return trunk(self, tokens_BR, *given)

    engine, beginning = engine_of(), PIECES[0] + PIECES[1]
    one, other = (
        request_of(beginning + rest, 20, method, sampling=Sampling(1.0), seed=5) for rest in ([3] * 10, [4] * 10)
    )
    same_as_alone(engine, [one])
    engine.add(other)
    monkeypatch.setattr(Runner, "trunk", counted)
    updates = engine.step()
    assert [update.cached_tokens for update in updates] == [64]
    assert rows == [26]
    monkeypatch.undo()
    made = texts_of([*updates, *drained(engine)])
    assert [*made.values()] == [alone(other)]
    assert engine.load.cached_tokens == 64


def test_a_drafter_reuses_a_cached_prefix_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it drafts the same: acceptance matches `generate`."""
    engine, beginning = engine_of(), PIECES[0] + PIECES[1]
    one, other = (request_of(beginning + rest, 20, sampling=Sampling(1.0), seed=5) for rest in ([3] * 10, [4] * 10))
    same_as_alone(engine, [one])
    rows: list[int] = []
    depth = Runner.depth

    def counted(self: Runner, number: int, hidden_SBH: torch.Tensor, *given: Any) -> torch.Tensor:
        rows.append(hidden_SBH.size(0))
        return depth(self, number, hidden_SBH, *given)

    monkeypatch.setattr(Runner, "depth", counted)
    before = engine.load.stats.accepted
    engine.add(other)
    drained(engine)
    monkeypatch.undo()
    alone_stats = generate(runner_of(), [other.prompt], 20, other.sampling, other.speculative, [5]).stats
    assert max(rows) <= 90 - 64 + 3
    assert engine.load.stats.accepted - before == alone_stats.accepted > 0


def test_a_block_is_shared_only_if_the_next_tokens_agree() -> None:
    """The last depth's rows depend on three tokens after the block."""
    engine, beginning = engine_of(), PIECES[0][:32]
    same_as_alone(engine, [request_of([*beginning, 1, 2, 3, 4], 3)])
    for rest, cached in (([1, 2, 3, 9], 32), ([1, 2, 9, 9], 0)):
        number = engine.add(request_of(beginning + rest, 3))
        assert next(one.cached_tokens for one in drained(engine) if one.request == number) == cached


@pytest.mark.parametrize("method", ["plain", "mtp"])
def test_a_cached_block_is_identified_by_its_whole_prefix(method: str) -> None:
    """Its own tokens, at a prompt's start or after another block, do not identify it: its rows would differ."""
    engine, block, rest = engine_of(), PIECES[1][:32], [1, 2, 3, 4, 5]
    for before in (PIECES[0][:32], [], PIECES[2][:32], PIECES[2][:32], PIECES[0][:32]):
        prompt = [*before, *block, *rest]
        same_as_alone(engine, [request_of(prompt, 9, method, sampling=Sampling(1.0), seed=5)])
    assert engine.load.cached_tokens == 64 + 64, "of the second prompts with the same beginning"


def test_the_end_of_a_cached_sequence_is_evicted_first() -> None:
    """Three of four blocks are cached; a sequence of two takes the free one and one of these."""
    engine, text = engine_of(blocks=4), request_of((PIECES[0] + PIECES[1] + PIECES[2])[:100], 3)
    same_as_alone(engine, [text, request_of(PIECES[2], 3), text])
    assert engine.load.cached_tokens == 64


def test_reused_blocks_contain_nothing_of_earlier_sequences() -> None:
    """Kernels that read a whole window would spread a NaN, which no mask keeps out of a sum."""
    engine = engine_of(blocks=3, reuse=False)
    same_as_alone(engine, [request_of(PIECES[0], 30)])
    memory = engine.scheduler.memory
    held = [one for cache in memory.caches for one in (*cache.keys, *cache.values) if one is not None]
    with torch.inference_mode():
        for tensor in (memory.states_N1SH, *held):
            tensor[1:] = torch.nan
    number = engine.add(request_of(PIECES[1], 30))
    engine.step()
    blocks = engine.scheduler.seqs[number].block_table.blocks
    assert len(blocks) == 2
    assert not any(tensor[blocks].isnan().any() for tensor in (memory.states_N1SH, *held))


def test_a_conversation_continues_from_the_emitted_tokens() -> None:
    engine = engine_of()
    first = request_of(PIECES[0], 40)
    same_as_alone(engine, [first])
    same_as_alone(engine, [request_of([*first.prompt, *alone(first), 7, 8], 9)])
    assert engine.load.cached_tokens == 64


def test_without_reuse_no_prefix_is_cached() -> None:
    engine = engine_of(reuse=False)
    same_as_alone(engine, [request_of(PIECES[0], 3)])
    same_as_alone(engine, [request_of(PIECES[0], 3)])
    assert engine.load.cached_tokens == 0


# ---- no block leaks


def soak(requests_count: int) -> Engine:
    """Run random requests, many of which are aborted while they wait, run or are preempted."""
    chance, engine = random.Random(5), engine_of(running=6, blocks=9, chunk=48, waiting=1000)
    live: list[int] = []
    left = 100 * requests_count  # steps; runs out if a block leaks
    for number in range(requests_count):
        prompt = chance.choice([[], *PIECES]) + [chance.randrange(1, VOCABULARY) for _ in range(chance.randint(1, 30))]
        method = chance.choice(["plain", "mtp", "mtp_eagle", "ngram"])
        live.append(engine.add(request_of(prompt, chance.randint(1, 6), method)))
        while engine.load.waiting > 4 or (number == requests_count - 1 and engine.busy):
            engine.step()
            left -= 1
            assert left, "the engine does not come to an end"
            if chance.random() < 0.3:
                engine.cancel(chance.choice(live[-12:]))
    return engine


def check_soak(engine: Engine) -> None:
    pool, load = engine.scheduler.block_manager, engine.load
    assert load.blocks_used == 0
    assert load.preempted > 0
    assert load.cached_tokens > 0
    assert sorted([*pool._unused, *pool._kept]) == list(range(1, pool.count + 1))
    assert len(pool._known) == len(pool._known_block) == len(pool._kept)
    assert not engine.scheduler.seqs


def test_no_block_is_lost() -> None:
    check_soak(soak(150))


@pytest.mark.matrix
def test_no_block_is_lost_by_a_thousand_requests() -> None:
    check_soak(soak(1000))


# ---- other request options


def test_a_text_ends_at_its_stops_and_cuts() -> None:
    request = request_of([5, 6, 7], 20)
    text = alone(request)
    stopped = replace(request, stop_ids=frozenset(text[5:6]))
    cut = replace(request, cut=lambda tokens: 4 if len(tokens) >= 6 else None)
    engine = engine_of()
    for one, length, finish in ((request, 20, Finish.LENGTH), (stopped, text.index(text[5]) + 1, Finish.STOP)):
        engine.add(one)
        updates = drained(engine)
        assert [*texts_of(updates).values()] == [text[:length]]
        assert [update.finish for update in updates] == [None] * (len(updates) - 1) + [finish]
    engine.add(cut)
    updates = drained(engine)
    assert updates[-1].finish is Finish.STOP
    (made,) = texts_of(updates).values()
    assert made == text[: len(made)]
    assert 4 <= len(made) <= 6


def test_drafts_behind_a_stop_are_not_accepted() -> None:
    """Of two drafts that the target would accept, the first ends the output."""
    request, method = Request([1, 2], 10, stop_ids=frozenset({7})), engine_of()._method_of(Request([1], 1))
    update = Sequence(0, request, method, 10, [1, 2, 3]).update([7, 9, 8], 2)
    assert (update.tokens, update.accepted) == ([7], 1)


@pytest.mark.parametrize("limits", [{"stop_ids": frozenset({9})}, {"budget": 4}], ids=["stop", "budget"])
def test_a_cutter_sees_only_emitted_tokens(limits: dict[str, Any]) -> None:
    """So it may keep what it has read. Prompt 1 2, text 3 4, and a step that adds 7 9 8, of which 8 is dropped."""
    shown: list[list[int]] = []
    stops, budget = limits.get("stop_ids", frozenset()), limits.get("budget", 10)
    request, method = Request([1, 2], 10, stop_ids=stops, cut=shown.append), engine_of()._method_of(Request([1], 1))
    assert Sequence(0, request, method, budget, [1, 2, 3, 4]).update([7, 9, 8], 2).tokens == [7, 9]
    assert shown == [[3, 4, 7, 9]]
    request = replace(request, cut=lambda tokens: tokens.index(7) + 1)
    update = Sequence(0, request, method, budget, [1, 2, 3, 4]).update([7, 9, 8], 2)
    assert (update.tokens, update.finish) == ([7], Finish.STOP)


@pytest.mark.parametrize("method", ["plain", "mtp", "mtp_tree", "lookahead"])
def test_logprobs_are_those_of_a_forward_over_the_text(method: str) -> None:
    request = request_of(PIECES[0], 15, method, logprobs=2, prompt_logprobs=1)
    engine, runner = engine_of(chunk=16), runner_of()
    same_as_alone(engine, [request_of(PIECES[0], 3, method)])
    engine.add(request)
    engine.add(request_of([3, 4], 15, method))
    updates = [update for update in drained(engine) if update.request == 1]
    text = PIECES[0] + texts_of(updates)[1]
    twin = model_of("gqa", 3, torch.float32)
    right_SV = trained_forward(twin, text)[0][:, : runner.vocab_size].log_softmax(-1)
    given = [
        *(one for update in updates for one in update.prompt_logprobs),
        *(one for u in updates for one in u.logprobs),
    ]
    assert [one.token for one in given] == text[1:]
    for row, one in enumerate(given):
        assert one.logprob == pytest.approx(float(right_SV[row, text[row + 1]]), abs=1e-4)
        top = 1 if row + 1 < len(PIECES[0]) else 2
        assert [token for token, _ in one.top] == right_SV[row].topk(top).indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(right_SV[row].topk(top).values.tolist(), abs=1e-4)


def test_logprobs_of_a_preempted_prompt_are_complete() -> None:
    """The first sequence takes a third block while the second's prompt runs, one row per step."""
    engine = engine_of(blocks=4, chunk=1)
    engine.add(request_of(PIECES[0] + PIECES[1][:9], 40, "plain"))
    prompt = PIECES[1] + PIECES[2][:18]
    number = engine.add(request_of(prompt, 3, "plain", prompt_logprobs=1))
    updates = drained(engine)
    assert engine.load.preempted > 0
    given = [one.token for update in updates if update.request == number for one in update.prompt_logprobs]
    assert given == prompt[1:]


def penalized_by_hand(request: Request) -> list[int]:
    """Decode greedily by the definition, with the training forward pass."""
    twin, penalties, text = model_of("gqa", 3, torch.float32), request.penalties, list(request.prompt)
    for _ in range(request.max_new_tokens):
        logits = trained_forward(twin, text)[0][-1].tolist()
        new = text[len(request.prompt) :]
        for token, value in penalties.bias:
            logits[token] += value
        for token in set(text):
            by = penalties.repetition
            logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
        for token in set(new):
            logits[token] -= penalties.presence + penalties.frequency * new.count(token)
        for token in penalties.ends if len(new) < penalties.least else ():
            logits[token] = float("-inf")
        text.append(max(range(len(logits)), key=logits.__getitem__))
        if text[-1] in request.stop_ids:
            break
    return text[len(request.prompt) :]


@pytest.mark.parametrize("method", tiered(["plain", "mtp", "mtp_tree"], ("mtp",)))
def test_penalties_are_those_of_their_definition(method: str) -> None:
    every = [
        Penalties(1.5, 0.0),
        Penalties(0.0, 0.7),
        Penalties(repetition=1.6),
        Penalties(-1.0, 0.3, 0.8),
        Penalties(),
        Penalties(bias=((9, 1.5), (92, -100.0))),
        Penalties(0.0, 0.7, bias=((4, 2.0),)),
    ]
    engine = engine_of()
    wanted = [request_of([5, 6, 7, 5], 25, method, penalties=one) for one in every]
    some = penalized_by_hand(replace(wanted[1], max_new_tokens=5))
    ends = frozenset(some[3:5])  # an output ends at one of them, but not before the 8th token if that is requested
    for penalties in (Penalties(0.0, 0.7), Penalties(0.0, 0.7, least=8, ends=ends)):
        every.append(penalties)
        wanted.append(request_of([5, 6, 7, 5], 25, method, penalties=penalties, stop_ids=ends))
    numbers = [engine.add(request) for request in wanted]
    made = texts_of(drained(engine))
    right = [penalized_by_hand(request) for request in wanted]
    assert [made[number] for number in numbers] == right
    assert len({tuple(text) for text in right}) == len(every)
    assert len(right[-2]) < 8 < len(right[-1])


def penalties_p_value(method: str) -> float:
    """Return p of the chi-square test over the 36 outputs of four tokens, from three tokens, without an early end."""
    penalties, sampling = Penalties(0.4, 0.7, 1.3, ((1, 0.8),), 2, frozenset([2])), Sampling(1.5)
    twin, prompt, seeds = model_of("gqa"), [0, 1, 2, 0, 1, 2, 1], 3000
    engine = Engine(Runner(model_of("gqa", 3, torch.float32), vocab_size=3), EngineSettings(running=100, waiting=seeds))
    for seed in range(seeds):
        engine.add(request_of(prompt, 4, method, penalties=penalties, sampling=sampling, seed=seed))
    observed = Counter(map(tuple, texts_of(drained(engine, 20 * seeds)).values()))
    expected: dict[tuple[int, ...], float] = {(): float(seeds)}
    for _ in range(4):
        expected = {
            (*path, token): count * chance
            for path, count in expected.items()
            for logits_V in [trained_forward(twin, [*prompt, *path])[0][-1:, :3]]
            for given in [penalized(penalties, [*prompt, *path], len(prompt), logits_V)[0]]
            for token, chance in enumerate(sampling.probabilities(given).tolist())
            if chance
        }
    assert observed.keys() <= expected.keys()
    statistic = sum((observed[path] - count) ** 2 / count for path, count in expected.items())
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), torch.tensor(statistic / 2)))


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["mtp", "mtp_tree"])
def test_sampled_texts_with_penalties_have_the_distribution_of_their_definition(method: str) -> None:
    """With a bias and a minimum length, while drafting."""
    assert penalties_p_value(method) > 1e-3


@pytest.mark.parametrize("least", [0, 4])
@pytest.mark.parametrize("parents", [None, [0, 0, 2, 3]], ids=["chain", "tree"])
def test_penalties_of_a_drafted_row_count_the_drafts_before_it(parents: list[int] | None, least: int) -> None:
    """Every row is as if the drafts before it had been accepted."""
    penalties = Penalties(0.5, 0.25, 1.5, ((4, 2.0),) if least else (), least, frozenset([1, 6]))
    text, drafts = [1, 2, 2, 3], [2, 4, 4, 5]
    seen: list[torch.Tensor] = []

    def rule(logits_BRV: torch.Tensor, draft: Draft, _: Round) -> Verdict:
        seen.append(logits_BRV)
        return Verdict(torch.ones(1, 5, dtype=torch.bool), draft.tokens_BN[:, 0])

    logits_BRV = torch.randn(1, 5, 7, generator=torch.Generator().manual_seed(1))
    draft = Draft(torch.tensor([drafts]), parents_BN=None if parents is None else torch.tensor([parents]))
    noise = Noise(torch.tensor([0]), torch.tensor([4]))
    PenalizedVerifier(rule, [penalties], [2])(
        logits_BRV, draft, Round(Sampling(), noise, config_from(METHODS["mtp"]), [text])
    )
    ways = [[], drafts[:1], drafts[:2], drafts[:3], drafts] if parents is None else [[], [2], [4], [4, 4], [4, 4, 5]]
    for row, way in enumerate(ways):
        right_RV = penalized(penalties, text + way, 2, logits_BRV[0, row : row + 1])
        torch.testing.assert_close(seen[0][0, row], right_RV[0])
        impossible = (right_RV[0] == -torch.inf).nonzero()[:, 0].tolist()
        assert impossible == ([1, 6] if 2 + len(way) < least else [])


@pytest.mark.parametrize("method", ["mtp", "mtp_eagle", "draft_model"])
def test_automatic_k_changes_no_token(method: str) -> None:
    settings = {**METHODS[method], "num_speculative_tokens": "auto"}
    wanted = [replace(request_of(prompt, 40), speculative=config_from(settings)) for prompt in prompts_of(6, 40)]
    same_as_alone(engine_of(running=4), wanted)


# ---- requests that cannot be served


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": []}, "the prompt is empty; give at least one token"),
        ({"prompt": [1] * 160}, "has 160 tokens, and the model has 160 positions; give at most 159"),
        ({"prompt": [1, VOCABULARY]}, f"outside of the model's vocabulary; give 0 to {VOCABULARY - 1}"),
        ({"prompt": [-1]}, "outside of the model's vocabulary"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; give 1 or more"),
        ({"max_new_tokens": 120}, "4 blocks of the cache, which has 3; ask for less"),
        ({"seed": 2**63}, "a number of 64 bits"),
        ({"logprobs": -1}, "logprobs is -1; give 0 or more"),
        ({"penalties": Penalties(presence=3)}, "the presence penalty is 3; give -2 to 2"),
        ({"penalties": Penalties(frequency=float("nan"))}, "the frequency penalty is nan"),
        ({"penalties": Penalties(repetition=0)}, "the repetition penalty is 0"),
        ({"penalties": Penalties(bias=((VOCABULARY, 1.0),))}, f"the token id {VOCABULARY}; give 0 to {VOCABULARY - 1}"),
        ({"speculative": config_from({"method": "parallel_heads"})}, "whose MTP layers are sequential; choose mtp"),
        (
            {"speculative": config_from({"method": "lookahead", "window": 32, "ngram_size": 16})},
            "'lookahead' adds 525 rows to a step with these settings, and a sequence of the engine has room for 319",
        ),
    ],
)
def test_requests_that_can_never_run_are_rejected(changes: dict[str, Any], said: str) -> None:
    engine = engine_of(blocks=3)
    with pytest.raises(ValueError, match=said):
        engine.add(replace(request_of([1, 2], 10), **changes))
    assert not engine.busy


def test_a_full_queue_raises_an_error() -> None:
    engine = engine_of(running=1, waiting=2)
    for _ in range(2):
        engine.add(request_of([1], 3))
    with pytest.raises(QueueFull, match="2 requests are already waiting"):
        engine.add(request_of([1], 3))
    engine.step()
    same = engine.add(request_of([1], 3))
    assert len(texts_of(drained(engine))[same]) == 3


@pytest.mark.parametrize("size", ["running", "waiting", "blocks", "chunk"])
def test_sizes_below_one_are_refused(size: str) -> None:
    with pytest.raises(ValueError, match=f"{size} 0; give 1 or more"):
        EngineSettings(**{size: 0})  # type: ignore[arg-type]


def test_blocks_of_a_model_fill_the_memory_that_is_given() -> None:
    """A block takes as much as its tensors."""
    engine = engine_of(blocks=5)
    engine.add(request_of([1, 2, 3], 9))
    drained(engine)
    memory = engine.scheduler.memory
    caches = [memory.cache, *memory.depths]
    held = sum(one.nbytes for cache in caches for one in (*cache.keys, *cache.values) if one is not None)
    assert held + memory.states_N1SH.nbytes == 6 * block_bytes(runner_of())
    assert blocks_in(6.5 * block_bytes(runner_of()) / 2**30, 16, runner_of()) == 5
    with pytest.raises(ValueError, match="holds no block of 32 tokens; give at least"):
        blocks_in(1e-9, 16, runner_of())


@pytest.mark.parametrize(
    ("method", "drafted", "blocks", "positions"),
    [("plain", 3, 3, None), ("mtp", 0, 2, None), ("mtp_tree", 1, 2, None), ("mtp", 2, 9, 50)],
)
def test_without_a_limit_a_sequence_ends_when_the_cache_is_full(
    method: str, drafted: int, blocks: int, positions: int | None
) -> None:
    """Including its last drafts, whatever the engine drafts by default; one more token is rejected."""
    own = config_from({"method": "mtp", "num_speculative_tokens": drafted})
    engine = Engine(runner_of(), EngineSettings(blocks=blocks, positions=positions), own)
    of_method = Engine(runner_of(), engine.settings, config_from(METHODS[method]))
    assert engine.max_length == min(positions or 160, 32 * blocks - 1 - drafted)
    request = replace(request_of(PIECES[0], method=method), max_new_tokens=UNLIMITED)
    number, room = engine.add(request), of_method.max_length - 40
    made = drained(engine)
    assert made[-1].finish is Finish.LENGTH
    assert texts_of(made)[number] == alone(replace(request, max_new_tokens=room))
    if positions is None:
        with pytest.raises(ValueError, match="blocks of the cache"):
            engine.add(replace(request, max_new_tokens=room + 1))


def test_a_cache_without_room_for_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="32 slots, and a step of 'mtp_tree' takes them all; give"):
        Engine(runner_of(), EngineSettings(blocks=1), config_from({"method": "mtp_tree", "tree": [4, 4, 2]}))


def test_the_default_cache_takes_a_share_of_free_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * 2**30, 80 * 2**30))
    assert default_cache_gib(torch.device("cuda")) == pytest.approx(0.8 * 70)
    assert default_cache_gib(torch.device("cpu")) == 4
    monkeypatch.setattr("megatron_mtp.decoding.engine.default_cache_gib", lambda device: 2**-10)
    assert blocks_for(99, runner_of()) == blocks_in(2**-10, 99, runner_of())
    assert blocks_for(1, runner_of(), positions=40) == 3, "of 40 tokens, and of drafts behind them"


# ---- failing steps

PLACES: dict[str, tuple[type, str]] = {
    "the rows of a prompt": (PrefillBatch, "run"),
    "a first token": (PrefillBatch, "begin"),
    "a step": (DecodeBatch, "step"),
    "what a step gave": (DecodeBatch, "give"),
    "a text that joins": (DecodeBatch, "join"),
}


def plant(monkeypatch: pytest.MonkeyPatch, where: str, raises: Callable[[list[int]], bool]) -> None:
    """Raise after a call in the engine if `raises` accepts the seeds of the sequences in it."""
    owner, name = PLACES[where]
    real = getattr(owner, name)

    def stumbling(self: Any, *given: Any) -> Any:
        made = real(self, *given)
        if raises([text.request.seed for text in self.seqs]):
            raise RuntimeError("planted")
        return made

    monkeypatch.setattr(owner, name, stumbling)


def seven(method: str) -> tuple[list[Request], list[list[int]]]:
    """Return requests, and each one's tokens when run alone."""
    every = zip(prompts_of(7, 50), [3, 30, 9, 12, 17, 24, 12], SAMPLINGS * 2, strict=False)
    wanted = [request_of(p, m, method, sampling=s, seed=seed) for seed, (p, m, s) in enumerate(every)]
    return wanted, [alone(request) for request in wanted]


def check_errors(wanted: list[Request], answers: list[list[int]], bad: set[int], **sizes: Any) -> Engine:
    """Check that all but the bad requests give the tokens that they give alone, and nothing of any is left."""
    engine = engine_of(running=4, **sizes)
    numbers = [engine.add(request) for request in wanted]
    updates = drained(engine)
    made, ends = texts_of(updates), {one.request: one.finish for one in updates if one.finish is not None}
    for seed, (number, right) in enumerate(zip(numbers, answers, strict=True)):
        assert (ends[number] is Finish.ERROR) == (seed in bad)
        assert made.get(number, []) == (right[: len(made.get(number, []))] if seed in bad else right)
    assert engine.load.blocks_used == engine.load.running == engine.load.waiting == 0
    return engine


@pytest.mark.parametrize("where", PLACES)
def test_a_failing_request_does_not_fail_others(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of seven always raise, even when alone."""
    bad = set[int]() if where == "a text that joins" else {1, 5}  # a lone one joins no group
    requests = seven("mtp")
    plant(monkeypatch, where, lambda seeds: bool({1, 5} & {*seeds}))
    check_errors(*requests, bad)


@pytest.mark.parametrize("method", tiered(METHODS, ("mtp", "draft_model")))
def test_a_transient_error_costs_no_token(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fifth prefill raises once, and so does the fifth step, whichever sequences are in it."""
    requests = seven(method)
    for where in ("the rows of a prompt", "a step"):
        with monkeypatch.context() as patched:
            plant(patched, where, partial(lambda calls, _: next(calls) == 5, count(1)))
            assert check_errors(*requests, set(), chunk=16).load.preempted > 0


def test_a_device_that_has_failed_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def raised(*_: Any) -> None:
        raise torch.AcceleratorError("planted")

    monkeypatch.setattr(PrefillBatch, "run", raised)
    engine = engine_of()
    engine.add(request_of([1, 2, 3]))
    with pytest.raises(torch.AcceleratorError):
        engine.step()
