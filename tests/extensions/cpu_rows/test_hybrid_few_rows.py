"""Few rows of hybrid stacks, in compiled code and with short layers, match the modules."""

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from drafting_single import draft_one_by_one, prompts_of, runs
from hybrid_single import drafting_hybrid
from megatron_single import VOCABULARY
from test_few_rows import compiled_stacks, compiler, drafts_of, untimed  # noqa: F401
from tiers import tiered
from torch import Tensor

from megatron_mtp.decoding import backend
from megatron_mtp.decoding.auto_count import AutoK
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.kv_cache import KVCache
from megatron_mtp.decoding.recurrent_layers import KEPT
from megatron_mtp.decoding.rows import Rows
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.extensions.cpu_rows import compiled
from megatron_mtp.extensions.cpu_rows.few_rows import MOST_ROWS

pytestmark = pytest.mark.usefixtures("megatron", "compiler")

SLOTS = 400
WIDE = {"mamba_state_dim": 24, "mamba_head_dim": 20, "linear_key_head_dim": 40, "linear_value_head_dim": 36}
TAKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "Mamba-2": ("M-M-/M-/M-", {}),
    "Gated DeltaNet": ("G-G/G-/G-", {}),
    "all kinds": ("*M-G-/-M*G/-M*G", {}),
    "wider than a vector": ("M-G*/GM-/GM-", WIDE),
    "attention and MLP": ("*-*-/*-", {}),
    "norms around zero, one group": ("MG-/M-", {"layernorm_zero_centered_gamma": True, "mamba_num_groups": 1}),
    "parallel heads": ("MG-/M-/M-", {"architecture": "parallel"}),
}
WAYS = {"compiled": {}, "short layers": {"compiled": False}, "modules": {"compiled": False, "short": False}}
"""Ways to run few rows."""


def runner_of(kind: str, way: str, dtype: torch.dtype = torch.float32) -> Runner:
    pattern, changes = TAKEN[kind]
    model, asked = drafting_hybrid(pattern, dtype, **changes), WAYS[way]
    with pytest.MonkeyPatch.context() as patch:
        if not asked.get("compiled", True):
            patch.setenv(compiled.SWITCH, "0")
        if not asked.get("short", True):
            patch.setattr(backend, "lean", lambda *_: None)
        made = Runner(model)
    assert made.backend.all_short == asked.get("short", True)
    assert all(compiled_stacks(made)) == asked.get("compiled", True)
    return made


def tokens_of(batch: int, rows: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, rows), generator=torch.Generator().manual_seed(rows))


def chains(batch: int) -> Iterator[tuple[Tensor, Rows]]:
    """Yield sequences of different lengths that grow and roll back; slots run out several times; a sequence ends."""
    first_B = torch.arange(batch) - batch + 1  # the others start with padding
    counts = [MOST_ROWS // batch + 1, *[1, 2, 5, 3] * 12, 17, MOST_ROWS // batch, *[4] * 30]
    for number, count in enumerate(counts):
        window = min(int(first_B.max()) + count, SLOTS)
        live_BR = (torch.arange(batch) < 2).unsqueeze(1).expand(-1, count) if number == 20 else None
        yield tokens_of(batch, count), Rows(first_B, count, window, runs(batch, SLOTS), live_BR)
        first_B = first_B + count - (torch.arange(batch) + number) % 3 * (count > 2)


@torch.inference_mode()
def logits_of(target: Runner, steps: Iterator[tuple[Tensor, Rows]], batch: int) -> Iterator[Tensor]:
    """Yield logits of the trunk and of every MTP layer for each step."""
    cache = KVCache(target.trunk_layers, runs(batch, SLOTS))
    depth_caches = [KVCache(target.depth_layers, runs(batch, SLOTS)) for _ in range(target.depths)]
    for tokens_BR, rows in steps:
        trunk_SBH = states_SBH = target.trunk(tokens_BR, rows, cache)
        yield counted(target.logits(trunk_SBH), rows)
        for depth, depth_cache in enumerate(depth_caches, start=1):
            given_SBH = states_SBH if target.sequential else trunk_SBH
            states_SBH = target.depth(depth, given_SBH, tokens_BR, rows, depth_cache)
            yield counted(target.draft_logits(states_SBH), rows)


def counted(logits_BRV: Tensor, rows: Rows) -> Tensor:
    """Remove padding."""
    return logits_BRV[rows.slots_BR != SLOTS]


@pytest.mark.parametrize("kind", tiered(TAKEN, ("norms around zero, one group",)))
def test_logits_are_those_of_the_modules(kind: str) -> None:
    """Against float64, as close as the modules: rounding moves the logits of some of these models by 1e-5."""
    runners = {way: runner_of(kind, way) for way in WAYS}
    exact = runner_of(kind, "modules", torch.float64)
    for batch in (1, 3):
        errors: dict[str, list[float]] = {way: [] for way in WAYS}
        steps = zip(*(logits_of(one, chains(batch), batch) for one in (exact, *runners.values())), strict=True)
        for right, *found in steps:
            for way, logits in zip(WAYS, found, strict=True):
                errors[way].append(float((logits - right).abs().max() / right.abs().max()))
        largest = {way: max(each) for way, each in errors.items()}
        assert max(largest.values()) <= max(1e-5, 4 * largest["modules"])
        assert largest["modules"] < 5e-5  # 2.9e-5 on a CPU without AVX-512


@pytest.mark.parametrize("kind", tiered(TAKEN, ("all kinds",)))
def test_texts_and_drafts_are_those_of_the_modules(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the slots of recurrent layers; MTP layers in a single call draft the same as one by one."""
    ours, theirs = (runner_of(kind, way) for way in ("compiled", "modules"))
    methods = ["mtp", "mtp_eagle"] if ours.sequential else ["parallel_heads"]
    settings = [{"method": method, "num_speculative_tokens": 1} for method in methods]
    right = generate(theirs, prompts_of(3), KEPT + 30).token_ids
    for each in (None, *settings):
        assert generate(ours, prompts_of(3), KEPT + 30, speculative=each).token_ids == right
    at_once = [drafts_of(ours, 3, each) for each in settings]
    draft_one_by_one(monkeypatch)
    assert at_once == [drafts_of(ours, 3, each) for each in settings]


def test_depths_with_states_run_in_every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """While only depth 1 drafts, depth 2 does not fall behind: its drafts equal those computed depth by depth."""
    drafts = list[Any]()
    for at_once in (True, False):
        order = cycle([1, 1, 1, 2, 2])
        monkeypatch.setattr(AutoK, "choose", lambda *_, order=order: next(order))
        if not at_once:
            draft_one_by_one(monkeypatch)
        settings = {"method": "mtp", "num_speculative_tokens": "auto"}
        drafts.append(drafts_of(runner_of("Mamba-2", "compiled"), 2, settings))
    assert drafts[0] == drafts[1]
    assert sum(len(one[0]) == 2 for one in drafts[0]) > 3


@pytest.mark.matrix
def test_bfloat16_is_as_accurate_as_the_modules() -> None:
    """Compared to float64 with the same weights. In either, a single logit may be off by a tenth of the largest."""
    ours, theirs = (runner_of("wider than a vector", way, torch.bfloat16) for way in ("compiled", "modules"))
    exact = runner_of("wider than a vector", "modules", torch.float64)
    for weight, rounded in zip(exact.model.parameters(), ours.model.parameters(), strict=True):
        weight.data.copy_(rounded)
    errors = list[tuple[Tensor, Tensor]]()
    for right, *found in zip(*(logits_of(one, chains(2), 2) for one in (exact, ours, theirs)), strict=True):
        assert all(logits.dtype == torch.bfloat16 for logits in found)
        mine, others = ((logits - right).norm() / right.norm() for logits in found)
        errors.append((mine, others))
    mine, others = (sum(each) / len(errors) for each in zip(*errors, strict=True))
    assert mine <= 1.2 * others < 0.05


def test_rows_before_the_first_position_do_not_change_the_cache() -> None:
    target = runner_of("all kinds", "compiled")
    cache, first_B = KVCache(target.trunk_layers, runs(1, SLOTS)), torch.zeros(1, dtype=torch.long)
    target.trunk(tokens_of(1, 3), Rows(first_B, 3, 3, runs(1, SLOTS)), cache)
    assert cache.recurrence is not None
    held = [one for each in cache.recurrence.layers.values() for one in vars(each).values() if isinstance(one, Tensor)]
    before = [one.clone() for one in [*held, cache.recurrence.end_E]]
    target.trunk(tokens_of(1, 2), Rows(first_B - 2, 2, 3, runs(1, SLOTS)), cache)
    assert len(before) == 11
    assert all(map(torch.equal, before, [*held, cache.recurrence.end_E]))


def test_a_stack_with_other_layers_runs_its_modules() -> None:
    """Experts are not compiled; the layers around them are short layers."""
    target = Runner(drafting_hybrid("M*E-/M-", torch.float32))
    assert compiled_stacks(target) == [False, True]
    assert [short is not None for short in target.backend.stacks[0].short] == [True, True, False, True]
    assert generate(target, prompts_of(1), 4).token_ids


@pytest.mark.parametrize(("pattern", "recordable"), [("*-*-/*-", True), ("M-*-/*-", False), ("*-/G-", False)])
def test_states_keep_steps_from_being_recorded(pattern: str, recordable: bool) -> None:
    assert Runner(drafting_hybrid(pattern)).recordable == recordable
