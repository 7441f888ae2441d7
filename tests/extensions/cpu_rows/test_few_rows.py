"""Few rows in compiled code match the modules, for all rows, masks and kinds of layers that it supports."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from drafting_single import draft_one_by_one, model_of, prefilled, prompts_of, runs, tree_of
from megatron_single import VOCABULARY
from tiers import tiered
from torch import Tensor

from megatron_mtp.decoding import batch
from megatron_mtp.decoding.draft import StepOutput
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.kv_cache import KVCache
from megatron_mtp.decoding.rows import Rows, ancestors_of
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.extensions.cpu_rows import compiled, few_rows, products
from megatron_mtp.extensions.cpu_rows.backend import CpuRows
from megatron_mtp.extensions.cpu_rows.few_rows import MOST_ROWS, product_of
from megatron_mtp.model.norms import PortableNorm

pytestmark = pytest.mark.usefixtures("megatron", "compiler")

SLOTS = 140
TAKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped queries": ("gqa", {}),
    "norms of queries and keys": ("gqa", {"qk_layernorm": True}),
    "norms around zero": ("gqa", {"layernorm_zero_centered_gamma": True}),
    "wider than a vector": ("gqa", {"hidden_size": 80, "kv_channels": 40, "ffn_hidden_size": 136}),
    "parallel heads": ("parallel", {}),
    "one depth for all": ("repeated", {}),
}
LEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "LayerNorm": ("mha-tied-layernorm", {}),
    "experts": ("moe", {}),
    "biases": ("bias-ungated-qknorm", {}),
    "another gated activation": ("gqa", {"activation_func": torch.nn.functional.gelu}),
}
"""Models with modules that the compiled code does not support."""


@pytest.fixture(scope="module")
def compiler() -> None:
    if None in map(compiled.library, compiled.NUMBERS):
        pytest.skip("there is no compiled code: no C++ compiler, or it is switched off")


@pytest.fixture(autouse=True)
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use torch for all other products, without timing them."""
    monkeypatch.setattr(products, "fastest", lambda *_: "own")


@pytest.fixture(scope="module", params=TAKEN)
def pair(request: pytest.FixtureRequest) -> tuple[Runner, Runner]:
    kind, changes = TAKEN[request.param]
    return both(kind, torch.float32, **changes)


def both(kind: str, dtype: torch.dtype, **changes: Any) -> tuple[Runner, Runner]:
    """Return the same model with and without compiled code."""
    model = model_of(kind, dtype=dtype, **changes)
    for module in model.modules():
        if isinstance(module, PortableNorm) and module.centered:
            module.weight.data -= 1  # all other norms have weights around 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compiled.SWITCH, "0")
        modules = Runner(model)
    runner = Runner(model)
    assert not any(compiled_stacks(modules))
    assert all(compiled_stacks(runner))
    return runner, modules


def compiled_stacks(runner: Runner) -> list[bool]:
    """Return whether few rows of the trunk and of each MTP layer run in compiled code."""
    backend = runner.backend
    stacks = backend.few_rows if isinstance(backend, CpuRows) else [None] * len(backend.stacks)
    return [one is not None for one in stacks]


class Forwards:
    """Forward passes of one runner over one batch: logits of the trunk and of an MTP layer."""

    def __init__(self, runner: Runner, batch: int) -> None:
        self.runner, self.batch = runner, batch
        self.cache, self.depth_cache = KVCache(runner.trunk_layers, runs(batch, SLOTS)), KVCache(1, runs(batch, SLOTS))

    @torch.inference_mode()
    def run(self, tokens_BR: Tensor, rows: Rows) -> Iterator[Tensor]:
        states_SBH = self.runner.trunk(tokens_BR, rows, self.cache)
        yield self.runner.logits(states_SBH)
        yield self.runner.draft_logits(self.runner.depth(1, states_SBH, tokens_BR, rows, self.depth_cache))


def tokens_of(batch: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(VOCABULARY, (batch, rows + 1), generator=generator)[:, 1:]  # a view, as in drafting


def chains(batch: int) -> Iterator[tuple[Tensor, Rows]]:
    """Yield growing sequences of different lengths: a long prompt, then fewer rows; a sequence ends."""
    first_B = torch.arange(batch) - batch + 1  # the others start with padding
    for number in (MOST_ROWS // batch + 1, 1, 2, 3, 4, 5, 8, 16, MOST_ROWS // batch):
        window = min(int(first_B.max()) + number, SLOTS)
        live_BR = (torch.arange(batch) < 2).unsqueeze(1).expand(-1, number) if number == 4 else None
        yield tokens_of(batch, number), Rows(first_B, number, window, runs(batch, SLOTS), live_BR)
        first_B = (first_B + number) % 60


def trees(batch: int) -> Iterator[tuple[Tensor, Rows]]:
    base_B = torch.zeros(batch, dtype=torch.long)
    yield tokens_of(batch, 5), Rows(base_B, 5, 5, runs(batch, SLOTS))
    ancestors_BRR, depth_BR = ancestors_of(torch.tensor([[0, 0, 2, 2, 1]]).expand(batch, -1))
    yield tokens_of(batch, 6), tree_of(base_B + 5, depth_BR, ancestors_BRR, 30, runs(batch, SLOTS))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("steps", [chains, trees], ids=["chains", "trees"])
def test_logits_are_those_of_the_modules(pair: tuple[Runner, Runner], steps: Any, batch: int) -> None:
    ours, theirs = (Forwards(runner, batch) for runner in pair)
    for tokens_BR, rows in steps(batch):
        for mine, right in zip(ours.run(tokens_BR, rows), theirs.run(tokens_BR, rows), strict=True):
            assert (mine - right).abs().max() <= 1e-5 * right.abs().max()


def test_texts_are_those_of_the_modules(pair: tuple[Runner, Runner]) -> None:
    method = "mtp" if pair[0].sequential else "parallel_heads"
    settings = [None, {"method": method, "num_speculative_tokens": 2}]
    texts = [generate(one, prompts_of(3), 24, speculative=each).token_ids for one in pair for each in settings]
    assert texts == [texts[0]] * 4


@pytest.mark.parametrize("batch", [1, 3])
def test_drafting_in_one_call_equals_drafting_depth_by_depth(
    pair: tuple[Runner, Runner], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = ["mtp", "mtp_eagle"] if pair[0].sequential else ["parallel_heads"]
    all_settings = [{"method": method, "num_speculative_tokens": 2} for method in methods]
    at_once = [drafts_of(pair[0], batch, settings) for settings in all_settings]
    assert all(len(drafts) > 5 for drafts in at_once)
    draft_one_by_one(monkeypatch)
    assert at_once == [drafts_of(pair[0], batch, settings) for settings in all_settings]


@pytest.mark.parametrize("threads", [2, 3])
def test_several_threads_draft_the_same_tokens_as_one(
    pair: tuple[Runner, Runner], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"method": "mtp" if pair[0].sequential else "parallel_heads", "num_speculative_tokens": 2}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    of_one = drafts_of(pair[0], 2, settings)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert drafts_of(pair[0], 2, settings) == of_one


@torch.inference_mode()
@pytest.mark.parametrize("texts", [1, 3])
def test_a_round_in_one_call_leaves_the_same_state_as_its_parts(pair: tuple[Runner, Runner], texts: int) -> None:
    method = "mtp_eagle" if pair[0].sequential else "parallel_heads"
    settings = {"method": method, "num_speculative_tokens": 2}
    for speculative in (None, settings):
        at_once, of_parts = (prefilled(pair[0], prompts_of(texts), speculative) for _ in range(2))
        for _ in range(5):
            assert at_once.sequences.all_live
            at_once.step()
            with pytest.MonkeyPatch.context() as patch:
                draft_one_by_one(patch)
                of_parts.step()
            ours, right = at_once.sequences, of_parts.sequences
            lengths = [len(tokens) for tokens in right.token_ids]
            assert ours.length_B.tolist() == right.length_B.tolist() == lengths
            for row, length in enumerate(lengths):
                assert ours.tokens_BT[row, :length].tolist() == ours.token_ids[row] == right.token_ids[row]
            kept = [one.states_at(0 * one.length_B, min(lengths) - 1) for one in (ours, right)]
            torch.testing.assert_close(*kept)


def drafts_of(runner: Runner, texts: int, settings: dict[str, Any]) -> list[list[Any]]:
    """Return the tokens of every draft before any sequence has ended."""
    drafts = list[list[Any]]()
    with pytest.MonkeyPatch.context() as patch:

        def step(*given: Any) -> StepOutput:
            output = take_step(*given)
            if len(given[0].token_ids) == texts:
                drafts.append(output.draft.tokens_BN.tolist())
            return output

        take_step = batch.step
        patch.setattr(batch, "step", step)
        generate(runner, prompts_of(texts), 24, speculative=settings)
    return drafts


def test_bfloat16_differs_by_its_rounding() -> None:
    ours, theirs = (Forwards(runner, 2) for runner in both("gqa", torch.bfloat16))
    for tokens_BR, rows in chains(2):
        for mine, right in zip(ours.run(tokens_BR, rows), theirs.run(tokens_BR, rows), strict=True):
            assert mine.dtype == torch.bfloat16
            assert (mine - right).abs().max() <= 0.06 * right.abs().max()


@pytest.mark.parametrize("vectors", tiered(("native", "haswell"), ("native",)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_rows_beside_it(
    dtype: torch.dtype, vectors: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU without AVX-512 too, which processes rows in blocks of a different size."""
    if vectors != "native":
        if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
            pytest.skip(f"this CPU does not run code for {vectors}; run it on one with AVX2")
        monkeypatch.setattr(compiled, "FLAGS", [*compiled.FLAGS, f"-march={vectors}", "-mtune=znver3"])
        narrow = ctypes.CDLL(str(compiled.built(tmp_path, dtype)))
        monkeypatch.setattr(few_rows, "library", lambda _: narrow)
    runner = Runner(model_of("gqa", dtype=dtype, hidden_size=80, ffn_hidden_size=136))
    assert all(compiled_stacks(runner))
    tokens_BR, first_B = tokens_of(1, 11), torch.zeros(1, dtype=torch.long)
    caches = [KVCache(runner.trunk_layers, runs(1, SLOTS)) for _ in range(2)]
    at_once_SBH = runner.trunk(tokens_BR, Rows(first_B, 11, 11, runs(1, SLOTS)), caches[0])
    for row in range(11):
        where = Rows(first_B + row, 1, row + 1, runs(1, SLOTS))
        alone_SBH = runner.trunk(tokens_BR[:, row : row + 1], where, caches[1])
        assert torch.equal(alone_SBH[0], at_once_SBH[row])


@pytest.mark.parametrize("kind", LEFT)
def test_layers_of_other_kinds_run_as_before(kind: str) -> None:
    name, changes = LEFT[kind]
    runner = Runner(model_of(name, dtype=torch.float32, **changes))
    assert not any(compiled_stacks(runner))
    assert generate(runner, prompts_of(1), 4).token_ids


def test_without_memory_for_packed_weights_the_modules_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("gqa", dtype=torch.float32)
    needed = sum(weight.nbytes for weight in model.parameters())
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * needed - 1))
    assert not any(compiled_stacks(Runner(model)))
    assert "packed weights need 0.0 GiB, and 0.0 GiB are free" in caplog.text
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * needed))
    assert all(compiled_stacks(Runner(model)))


def test_rows_before_the_first_position_do_not_change_the_cache() -> None:
    runner, _ = both("gqa", torch.float32)
    cache, first_B = KVCache(runner.trunk_layers, runs(1, SLOTS)), torch.zeros(1, dtype=torch.long)
    runner.trunk(tokens_of(1, 3), Rows(first_B, 3, 3, runs(1, SLOTS)), cache)
    before = [keys[1:].clone() for keys in cache.keys if keys is not None]
    runner.trunk(tokens_of(1, 2), Rows(first_B - 2, 2, 3, runs(1, SLOTS)), cache)
    after = [keys[1:] for keys in cache.keys if keys is not None]
    assert len(before) == runner.trunk_layers
    assert all(map(torch.equal, before, after))


def test_a_long_window_is_attended_to_up_to_the_last_visible_slot() -> None:
    runner, _ = both("gqa", torch.float32)
    tokens_BR, first_B = tokens_of(1, 5), torch.zeros(1, dtype=torch.long)
    tables = runs(1, SLOTS)
    short, long = (next(Forwards(runner, 1).run(tokens_BR, Rows(first_B, 5, one, tables))) for one in (5, SLOTS))
    assert torch.equal(short, long)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [7, 64, 100])
def test_matrix_products_of_any_size_are_correct(inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for outputs in (1, 5, 43):
        weight = torch.randn(outputs, inputs).to(dtype)
        multiply = product_of(weight)
        assert multiply is not None
        for rows in (1, 2, 3, 4, 7):
            hidden = torch.randn(rows, 2, inputs).to(dtype).transpose(0, 1)
            right = hidden.double() @ weight.double().T
            torch.testing.assert_close(
                multiply(hidden).double(), right, rtol=1e-2 if dtype == torch.bfloat16 else 0, atol=2e-5 * inputs**0.5
            )


def test_nan_and_infinity_are_preserved() -> None:
    multiply = product_of(torch.full((4, 64), torch.inf, dtype=torch.bfloat16))
    assert multiply is not None
    hidden = torch.zeros(1, 64, dtype=torch.bfloat16)
    assert multiply(hidden).isnan().all()
    assert multiply(hidden + 1).isinf().all()
