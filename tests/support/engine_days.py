"""Long engine runs: requests that arrive, finish and are aborted, and the output of each when run alone."""

from collections.abc import Iterable
from typing import Any

import torch
from drafting_single import model_of
from hypothesis import HealthCheck
from hypothesis import strategies as st
from megatron_single import VOCABULARY

from megatron_mtp.decoding.engine import Engine, generate
from megatron_mtp.decoding.method import config_from
from megatron_mtp.decoding.requests import Request, Update
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.decoding.scheduler import EngineSettings

CHAINS: dict[str, dict[str, Any]] = {
    "plain": {"method": "plain"},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "mtp-1": {"method": "mtp", "num_speculative_tokens": 1},
    "mtp_eagle": {"method": "mtp_eagle", "num_speculative_tokens": 4},
    "mtp_beam": {"method": "mtp_beam", "num_speculative_tokens": 3},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "draft_model": {"method": "draft_model", "model": "-", "num_speculative_tokens": 3},
}


TREES: dict[str, dict[str, Any]] = {
    "mtp_tree": {"method": "mtp_tree", "tree": [3, 2]},
    "lookahead": {"method": "lookahead"},
}


METHODS = {**CHAINS, **TREES}


SAMPLINGS = [Sampling(), Sampling(), Sampling(1.0), Sampling(0.7, top_k=20), Sampling(1.2, top_p=0.8, min_p=0.02)]


KEPT: dict[str, Runner] = {}


def runner_of(kind: str = "gqa") -> Runner:
    """Return a float32 model, shared by all tests."""
    if kind not in KEPT:
        KEPT[kind] = Runner(model_of(kind, 2 if kind == "repeated" else 3, torch.float32))
    return KEPT[kind]


def alone(request: Request, runner: Runner | None = None, drafter: Runner | None = None) -> list[int]:
    """Return the result of `generate` for a request."""
    return generate(
        runner or runner_of(),
        [request.prompt],
        request.max_new_tokens,
        request.sampling,
        request.speculative,
        [request.seed],
        request.stop_ids,
        drafter or runner_of("mha-tied-layernorm"),
    ).token_ids[0]


def drained(engine: Engine, most: int = 2000) -> list[Update]:
    updates: list[Update] = []
    for _ in range(most):
        if not engine.busy:
            return updates
        updates += engine.step()
    raise AssertionError("the engine does not come to an end")


def texts_of(updates: Iterable[Update]) -> dict[int, list[int]]:
    made: dict[int, list[int]] = {}
    for update in updates:
        made.setdefault(update.request, []).extend(update.tokens)
    return made


def request_of(prompt: list[int], new: int = 12, method: str = "mtp", **changes: Any) -> Request:
    return Request(prompt, new, speculative=config_from(METHODS[method]), **changes)


PIECES = [torch.randint(1, VOCABULARY, (40,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(3)]
"""Prefixes that prompts share."""


@st.composite
def requests(draw: st.DrawFn, methods: Iterable[str] = METHODS) -> Request:
    shared = draw(st.sampled_from([[], *PIECES, PIECES[0] + PIECES[1]]))
    own = draw(st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=20))
    return request_of(
        shared + own,
        draw(st.integers(1, 24)),
        draw(st.sampled_from(sorted(methods))),
        sampling=draw(st.sampled_from(SAMPLINGS)),
        seed=draw(st.integers(0, 2**40)),
        stop_ids=frozenset(draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=3))),
    )


Day = tuple[list[tuple[int, Request]], dict[int, int], EngineSettings]


@st.composite
def days(draw: st.DrawFn, methods: Iterable[str] = METHODS) -> Day:
    """Draw when requests arrive, when some are canceled, and an engine that may have too few blocks for all."""
    came = draw(st.lists(st.tuples(st.integers(0, 12), requests(methods)), min_size=2, max_size=7))
    gone = draw(st.dictionaries(st.integers(0, len(came) - 1), st.integers(0, 20), max_size=2))
    sizes = EngineSettings(
        running=draw(st.integers(1, 5)),
        blocks=draw(st.sampled_from([6, 8, 12, 64])),
        chunk=draw(st.sampled_from([5, 32, 512])),
        reuse=draw(st.booleans()),
    )
    return sorted(came, key=lambda one: one[0]), gone, sizes


def check_day(day: Day, runner: Runner | None = None, drafter: Runner | None = None) -> Engine:
    came, gone, sizes = day
    engine = Engine(runner or runner_of(), sizes, drafter=drafter or runner_of("mha-tied-layernorm"))
    numbers: list[int] = []
    made: dict[int, list[int]] = {}
    now = 0
    while engine.busy or len(numbers) < len(came):
        while len(numbers) < len(came) and came[len(numbers)][0] <= now:
            numbers.append(engine.add(came[len(numbers)][1]))
        for place, when in gone.items():
            if when == now and place < len(numbers):
                engine.cancel(numbers[place])
        for update in engine.step():
            made.setdefault(update.request, []).extend(update.tokens)
        now += 1
        assert now < 3000
    for place, (_, request) in enumerate(came):
        right, own = alone(request, runner, drafter), made.get(numbers[place], [])
        assert own == (right[: len(own)] if place in gone else right)
    assert engine.load.blocks_used == engine.load.states_used == 0
    return engine


QUIET: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
