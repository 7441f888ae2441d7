"""Continuous batching of hybrids with recurrent layers against `generate` in float32: states belong to a whole
sequence.
"""

import random
from typing import Any

import pytest
import torch
from drafting_single import POSITIONS
from engine_days import PIECES, QUIET, alone, check_day, days, drained, request_of, texts_of
from hybrid_single import drafting_hybrid
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_single import VOCABULARY
from parrot import running

from megatron_mtp.decoding import recurrent_layers
from megatron_mtp.decoding.batch import DecodeBatch
from megatron_mtp.decoding.engine import Engine, block_bytes, blocks_in, entry_bytes
from megatron_mtp.decoding.method import config_from
from megatron_mtp.decoding.requests import Request
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.decoding.scheduler import EngineSettings
from megatron_mtp.server.codec import Codec

pytestmark = pytest.mark.usefixtures("megatron")

EVERYWHERE = ("plain", "mtp-1", "mtp_eagle", "ngram", "draft_model")
IN_THE_TRUNK = (*EVERYWHERE, "mtp_beam")
METHODS = {
    "M-*-/M-/M-/M-": EVERYWHERE,
    "G-*-/*-/*-/*-": IN_THE_TRUNK,
    "M*EG/GM*/GM*/GM*": EVERYWHERE,
    "*-*-/G-/G-/G-": EVERYWHERE,
}
"""Methods per pattern. The third one's experts keep its trunk out of compiled code."""

KEPT: dict[str, Runner] = {}


def runner_of(pattern: str) -> Runner:
    """Return a float32 model, shared by all tests."""
    if pattern not in KEPT:
        model = drafting_hybrid(pattern, torch.float32)
        model.max_sequence_length = POSITIONS
        KEPT[pattern] = Runner(model)
    return KEPT[pattern]


def engine_of(pattern: str, **sizes: Any) -> Engine:
    return Engine(runner_of(pattern), EngineSettings(**sizes), drafter=runner_of("M-*G"))


@pytest.fixture(autouse=True)
def states_take_in_rows_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every few rows of a sequence of a hundred."""
    monkeypatch.setattr(recurrent_layers, "KEPT", 104)
    monkeypatch.setattr(recurrent_layers, "PIECE", 16)


# ---- tokens


def day_of(patterns: list[str]) -> st.SearchStrategy[tuple[str, Any]]:
    """Draw a pattern, and arrivals of requests."""
    return st.sampled_from(patterns).flatmap(lambda one: days(METHODS[one]).map(lambda day: (one, day)))


@settings(max_examples=8, **QUIET)
@given(day_of([*METHODS][:3]))
def test_tokens_match_generate_for_any_arrival_order(case: Any) -> None:
    check_day(case[1], runner_of(case[0]), runner_of("M-*G"))


@pytest.mark.matrix
@settings(max_examples=80, **QUIET)
@given(day_of([*METHODS]))
def test_tokens_match_generate_in_many_more_cases(case: Any) -> None:
    check_day(case[1], runner_of(case[0]), runner_of("M-*G"))


def test_consecutive_sequences_do_not_share_recurrent_state() -> None:
    """One slot, one entry; prompts with more rows than compiled code takes, and with fewer."""
    engine = engine_of("M-*-/M-/M-/M-", running=1)
    for prompt in (PIECES[0] + PIECES[1], PIECES[2], [5], PIECES[1]):
        request = request_of(prompt, 9, "mtp_eagle")
        number = engine.add(request)
        assert texts_of(drained(engine))[number] == alone(request, engine.runner)


@pytest.mark.parametrize("pattern", [*METHODS][:3])
def test_prompts_that_run_in_one_forward_do_not_mix(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """70, 3 and 40 rows, without the padding between them; then the rest of the longest ones."""
    runner, rows = runner_of(pattern), list[int]()
    embed = runner.backend._embed
    monkeypatch.setattr(runner.backend, "_embed", lambda tokens: rows.append(tokens.numel()) or embed(tokens))
    wanted = [request_of(prompt, 12, "mtp-1") for prompt in (PIECES[0] + PIECES[1][:30], [1, 2, 3], PIECES[2])]
    engine = engine_of(pattern, chunk=100)
    numbers = [engine.add(request) for request in wanted]
    updates = engine.step()
    assert rows[0] == 100
    made = texts_of([*updates, *drained(engine)])
    assert [made[number] for number in numbers] == [alone(request, runner) for request in wanted]


def test_a_hybrid_does_not_reuse_a_prefix() -> None:
    """Its blocks would have keys, but no state."""
    engine = engine_of("G-*-/*-/*-/*-")
    for _ in range(2):
        request = request_of(PIECES[0] + PIECES[1], 5, "mtp")
        number = engine.add(request)
        assert texts_of(drained(engine))[number] == alone(request, engine.runner)
    assert engine.load.cached_tokens == 0


FAR = config_from({"method": "mtp_eagle", "num_speculative_tokens": 15})
"""Drafts that end 13 rows after the sequence, so that the next rows roll back 13."""


def test_a_sequence_with_a_lagging_drafter_does_not_roll_back_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafter has paused for 30 tokens when two sequences join, whose states have absorbed all but 20 rows."""
    rests = [True]
    monkeypatch.setattr(DecodeBatch, "choose", lambda self: 0 if rests[0] else self.method.count)
    engine = engine_of("M-*-/M-/M-/M-")
    engine.add(Request([3, 4], 34, Sampling(1.0), speculative=FAR))
    for _ in range(31):
        engine.step()
    rests[0] = False
    prompt = (PIECES[0] + PIECES[1] + PIECES[2])[:96]
    others = [Request(prompt, 3, Sampling(1.0), seed, speculative=FAR) for seed in range(2)]
    numbers = [engine.add(other) for other in others]
    made = texts_of(drained(engine))
    assert [made[number] for number in numbers] == [alone(other, engine.runner) for other in others]


def test_a_server_answers_with_a_hybrid() -> None:
    """Three outputs of one request share two slots."""
    engine, prompts = engine_of("M-*-/M-/M-/M-", running=2), [PIECES[0], [1, 2], PIECES[1] + PIECES[2]]
    with running(engine, Codec(None)) as server:
        fields = {"prompt": prompts, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        body = {**fields, "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
        choices = server.post("/v1/completions", body).json()["choices"]
        assert server.metric("recurrent_states") == 2
        assert server.metric("recurrent_states_used") == 0
    assert [one["token_ids"] for one in choices] == [alone(Request(one, 12), engine.runner) for one in prompts]


# ---- memory


def soak(requests: int) -> Engine:
    """Run random requests, many of which are aborted while they wait, run or are preempted."""
    chance, engine = random.Random(4), engine_of("M-*-/M-/M-/M-", running=4, blocks=7, chunk=48, waiting=1000)
    live: list[int] = []
    for _ in range(requests):
        prompt = [chance.randrange(1, VOCABULARY) for _ in range(chance.randint(1, 60))]
        live.append(engine.add(request_of(prompt, chance.randint(1, 30), chance.choice(EVERYWHERE))))
        while engine.load.waiting > 3:
            engine.step()
            assert engine.load.states_used == engine.load.running
            if chance.random() < 0.2:
                engine.cancel(chance.choice(live[-9:]))
    drained(engine)
    return engine


def check_soak(engine: Engine) -> None:
    assert engine.load.preempted > 0
    assert (engine.load.blocks_used, engine.load.states_used, engine.load.states) == (0, 0, 4)
    assert sorted(engine.scheduler.memory.free_entries) == [0, 1, 2, 3]
    pool = engine.scheduler.block_manager
    assert sorted(pool._unused) == list(range(1, pool.count + 1))


def test_no_entry_is_lost() -> None:
    check_soak(soak(25))


@pytest.mark.matrix
def test_no_entry_is_lost_by_many_requests() -> None:
    check_soak(soak(200))


@pytest.mark.parametrize("pattern", METHODS)
def test_blocks_and_entries_fill_the_memory_that_is_given(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take as much as the tensors of target and drafter."""
    engine = engine_of(pattern, running=3, blocks=5)
    for method in ("mtp", "draft_model"):
        engine.add(request_of([1, 2, 3], 9, method))
    drained(engine)
    kept = [*engine.scheduler.memory.caches]
    assert len(kept) == 5
    keys = sum(one.nbytes for cache in kept for one in (*cache.keys, *cache.values) if one is not None)
    layers = [one for cache in kept if cache.recurrence is not None for one in cache.recurrence.layers.values()]
    held = keys + engine.scheduler.memory.states_N1SH.nbytes + sum(part.nbytes for one in layers for part in one.parts)
    both = runner_of(pattern), runner_of("M-*G")
    each, states = block_bytes(*both), 3 * entry_bytes(*both)
    assert held == 6 * each + states
    assert blocks_in((6.5 * each + states) / 2**30, 3, *both) == 5
    with pytest.raises(ValueError, match=r"no block of 32 tokens .* 3 sequences; .* or run fewer"):
        blocks_in((1.5 * each + states) / 2**30, 3, *both)
