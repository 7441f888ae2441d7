"""The short dense layer is not used if the model has a switch that it does not know, planted or Megatron's own.

And its version compiled for a GPU computes the same.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting_single import launches_of_a_layer, model_of, prompts_of, trained_forward
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_mtp.cli.generate import main
from megatron_mtp.decoding import dense_layer
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.megatron import cpu

pytestmark = pytest.mark.usefixtures("megatron")

MTP = {"method": "mtp", "num_speculative_tokens": 3}

SWITCHES: dict[str, dict[str, Any]] = {
    "attention output gate": {"attention_output_gate": True},
    "norm of queries and keys": {"qk_l2_norm": True},
    "clamp of activations": {"activation_func_clamp_value": 0.01},
    "offset of gated units": {"glu_linear_offset": 1.0},
}
"""Megatron's switches that the short layer does not support."""


def assert_drafts_as_trained(runner: Runner, twin: GPTModel) -> None:
    """Check that drafting outputs the argmax of the training forward pass, along whole sequences."""
    prompts = prompts_of(3)
    for prompt, new in zip(prompts, generate(runner, prompts, 12, speculative=MTP).token_ids, strict=True):
        best = trained_forward(twin, prompt + new)[0].argmax(-1)
        assert new == best[len(prompt) - 1 : -1].tolist()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == dense_layer.__name__]


def test_the_settings_of_a_usual_model_are_known() -> None:
    runner = Runner(model_of("gqa"))
    assert runner.backend.all_short
    assert dense_layer.unknown_settings(runner.model.config) == []


class TwoRanks:
    """A tensor-parallel group whose other rank adds nothing."""

    def size(self) -> int:
        return 2


@pytest.mark.parametrize("paged", [False, True])
def test_launches_of_a_layer_with_latents(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paged blocks add a copy of the latents."""
    assert launches_of_a_layer(monkeypatch, "mla", paged) == 57 + paged


@pytest.mark.parametrize(("changes", "launches"), [({}, 18), ({"qk_layernorm": True}, 21)])
def test_launches_of_a_layer(changes: dict[str, Any], launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paged blocks add two copies, and tensor parallelism two sums."""
    assert launches_of_a_layer(monkeypatch, "gqa", paged=False, **changes) == launches
    assert launches_of_a_layer(monkeypatch, "gqa", paged=True, **changes) == launches + 2
    model, summed = model_of("gqa", depths=1, **changes), list[TwoRanks]()
    monkeypatch.setattr(dense_layer, "all_reduce", lambda _, group: summed.append(group))
    for module in model.modules():
        if isinstance(module, RowParallelLinear):
            module.tp_group = TwoRanks()
    generate(Runner(model), [[1]], 1)
    assert len(summed) == 2 * model.config.num_layers


def test_a_norm_on_cuda_is_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = model_of("gqa").decoder.final_layernorm
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    assert dense_layer.short_norm(norm) is not norm
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert dense_layer.short_norm(norm) is norm


FUSED = {
    "cpu": ("aot_eager", 0.0),
    "cuda": ("inductor", 1e-5),
}
"""By device: torch.compile's backend, and the largest allowed difference from the uncompiled function."""


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.matrix),
        pytest.param("cuda", marks=pytest.mark.skipif(cpu.installed(), reason="needs a CUDA device: run it on one")),
    ],
)
def test_compiled_functions_match_and_are_compiled_once(device: str) -> None:
    """For one or more rows of one or more sequences; other counts and other layers compile nothing new."""
    backend, allowed = FUSED[device]
    command = [sys.executable, str(Path(__file__).parents[2] / "support" / "fused_functions.py"), device, backend]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    cases = json.loads(done.stdout.splitlines()[-1])
    assert [name for name, *_ in cases] == ["_kept_heads", "_kept_heads", "_sum_and_norm", "_gated"]
    assert max(largest for _, largest, _ in cases) <= allowed
    assert {compiled for *_, compiled in cases} == {4}


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors report a GPU where kernels can be launched."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(dense_layer, "why_not", lambda _: None)
    monkeypatch.setattr(dense_layer, "why_no_launcher", lambda: None)
    dense_layer._compiled.cache_clear()
    yield
    dense_layer._compiled.cache_clear()


@pytest.mark.usefixtures("pretended_gpu")
def test_functions_are_compiled_for_a_gpu_that_can_launch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: lambda *given: ("compiled", *given))
    weight = torch.ones(2)
    assert dense_layer.fused(dense_layer._gated, weight)(1, 2) == ("compiled", 1, 2)
    monkeypatch.setattr(dense_layer, "why_no_launcher", lambda: "there is no C compiler")
    assert dense_layer.fused(dense_layer._gated, weight) is dense_layer._gated
    monkeypatch.setattr(dense_layer, "why_no_launcher", lambda: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    assert dense_layer.fused(dense_layer._gated, weight) is dense_layer._gated


@pytest.mark.usefixtures("pretended_gpu")
def test_functions_that_fail_to_compile_run_uncompiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After one warning; errors of the function itself are passed on."""

    def fails(*_: Any) -> None:
        raise RuntimeError("ptxas is not there")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: fails)
    gated, wide = dense_layer.fused(dense_layer._gated, torch.ones(2)), torch.tensor([2.0, 3.0])
    for _ in range(2):
        assert gated(wide, torch.neg).tolist() == [-6.0]
    assert [text for text in warnings_of(caplog) if "ptxas" in text] == warnings_of(caplog)[:1] != []
    with pytest.raises(TypeError):
        gated(None)


@pytest.mark.parametrize("name", SWITCHES)
def test_a_layer_with_an_unknown_megatron_switch_runs_in_megatron(name: str, caplog: pytest.LogCaptureFixture) -> None:
    dense_layer._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        runner = Runner(model_of("gqa", **SWITCHES[name]))
    assert not runner.backend.all_short
    assert next(iter(SWITCHES[name])) in warnings_of(caplog)[0]
    assert len(warnings_of(caplog)) == 1
    assert_drafts_as_trained(runner, model_of("gqa", **SWITCHES[name]))


def test_the_command_shows_the_dense_layer_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("megatron", "megatron_mtp"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    monkeypatch.setattr(logging.getLogger(), "level", logging.ERROR)
    logging.getLogger()._cache.clear()  # type: ignore[attr-defined]
    with pytest.raises(SystemExit):
        main(["--load", "/nowhere", "--prompt-ids", "1"], "generate")
    assert logging.getLogger(dense_layer.__name__).isEnabledFor(logging.WARNING)
    assert not logging.getLogger("megatron.core").isEnabledFor(logging.WARNING)


@pytest.mark.parametrize(
    "name",
    ["softmax_offset", "fp32_residual_connection", "no_rope_freq", "fp8", "qk_norm_kind", "rotary_interleaved"],
)
def test_a_layer_with_an_unlisted_setting_runs_in_megatron(name: str) -> None:
    model = model_of("gqa")
    setattr(model.config, name, True)
    runner = Runner(model)
    assert dense_layer.unknown_settings(model.config) == [name]
    assert not runner.backend.all_short


def half_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A switch that a later Megatron might have: every layer's contribution is scaled."""
    forward = TransformerLayer.forward

    def scaled(self: Any, hidden_states: torch.Tensor, *given: Any, **named: Any) -> Any:
        out, context = forward(self, hidden_states, *given, **named)
        scale = getattr(self.config, "residual_scale", 1.0)
        return hidden_states + scale * (out - hidden_states), context

    monkeypatch.setattr(TransformerLayer, "forward", scaled)


def with_planted_switch() -> GPTModel:
    model = model_of("gqa")
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.residual_scale = 0.5
    return model


def test_a_layer_with_a_planted_switch_runs_in_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    half_the_layer(monkeypatch)
    runner = Runner(with_planted_switch())
    assert not runner.backend.all_short
    assert dense_layer.unknown_settings(runner.model.config) == ["residual_scale"]
    assert_drafts_as_trained(runner, with_planted_switch())


@pytest.mark.parametrize("name", ["offset of gated units", "attention output gate", "planted"])
def test_without_the_list_of_known_settings_drafts_are_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: every setting counts as known."""
    monkeypatch.setattr(dense_layer, "unknown_settings", lambda _: [])
    if name == "planted":
        half_the_layer(monkeypatch)
    model, twin = (with_planted_switch() if name == "planted" else model_of("gqa", **SWITCHES[name]) for _ in range(2))
    with pytest.raises((AssertionError, RuntimeError)):
        assert_drafts_as_trained(Runner(model), twin)
