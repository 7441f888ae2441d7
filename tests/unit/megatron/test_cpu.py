"""On a CPU, requests for CUDA get the CPU; every substitution states its reason."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.datasets import utils as dataset_utils
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.moe import moe_utils, router

from megatron_mtp.megatron import cpu, runtime
from megatron_mtp.megatron.patches import table
from megatron_mtp.megatron.runtime import prepare

pytestmark = pytest.mark.skipif(
    not cpu.installed(),
    reason="there is a CUDA device here: nothing is substituted; run on a machine without one",
)


def test_tensors_asked_for_on_cuda_are_on_the_cpu() -> None:
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.tensor([1.0], device=torch.device("cuda", 0)).device.type == "cpu"
    assert torch.ones(2).to("cuda").cuda().device.type == "cpu"
    assert torch.ones(2).to(device="cuda", dtype=torch.float64).dtype == torch.float64
    assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"


def test_caches_of_products_are_small_unless_the_user_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cpu.ONEDNN_CACHES:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    cpu.install()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "256"
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"


GROWTH = """
import psutil, torch
from megatron_mtp.megatron.runtime import prepare
prepare()
weights, process = [torch.ones(n, 192, dtype=torch.bfloat16) for n in (192, 576, 1024)], psutil.Process()
for rows in (*range(1, 33), *range(1, 513)):
    if rows == 33:
        before = process.memory_info().rss
    for weight in weights:
        torch.nn.functional.linear(torch.ones(rows, 192, dtype=torch.bfloat16), weight)
print((process.memory_info().rss - before) >> 20)
"""


@pytest.mark.matrix
def test_products_of_512_numbers_of_rows_take_little_memory() -> None:
    """It would be about 700 MiB without a limit on the caches."""
    environment = {name: value for name, value in os.environ.items() if name not in cpu.ONEDNN_CACHES}
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, env=environment)
    assert int(done.stdout) < 300, done.stderr


def test_a_device_context_still_reaches_the_functions_that_make_tensors() -> None:
    """transformers builds models this way, and then fills what is on the meta device: RoPE's frequencies."""
    with torch.device("meta"):
        assert torch.empty(2).is_meta
        assert torch.arange(3, dtype=torch.float32).is_meta


def test_tensor_types_carry_the_names_that_optimizers_look_for() -> None:
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type(torch.float64).dtype == torch.float64


def test_cuda_random_state_is_that_of_the_cpu_generator() -> None:
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)


def test_events_measure_milliseconds() -> None:
    start, end = cpu.CpuEvent(), cpu.CpuEvent()
    start.seconds, end.seconds = 1.0, 1.25
    assert start.elapsed_time(end) == 250.0


def test_every_substitution_has_a_reason_and_is_in_place() -> None:
    for row in cpu.SUBSTITUTIONS:
        assert len(row.reason) > 20
        assert getattr(row.owner, row.name) is row.replacement, row.name


@pytest.mark.parametrize("content", ["raise OSError('libcublas.so.13: no such file')", ""], ids=["broken", "sound"])
def test_megatron_finds_no_transformer_engine_on_a_cpu(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron only treats an ImportError as absence; with a working one, the trunk's final norm would need CUDA."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(content)
    (tmp_path / "transformer_engine" / "pytorch.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    runtime.why_not.cache_clear()
    prepare()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_engine")
    runtime.why_not.cache_clear()


def test_prepare_refuses_a_megatron_with_transformer_engine_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["megatron.core.extensions.transformer_engine"], "HAVE_TE", True)
    with pytest.raises(ImportError, match="call prepare\\(\\) first"):
        prepare()


def test_preparing_twice_changes_nothing() -> None:
    before = list(cpu.SUBSTITUTIONS)
    assert prepare() is True
    assert before == cpu.SUBSTITUTIONS
    wrapped = DistributedOptimizer.sharded_param_state_fully_reshardable.__wrapped__
    assert not hasattr(wrapped, "__wrapped__")


def test_a_router_that_masks_tokens_counts_those_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: Megatron sums over ranks in place, so its count for one rank was that of both."""
    table.install()
    monkeypatch.setattr(moe_utils, "reduce_from_tensor_model_parallel_region", lambda counts, _: counts.mul_(2))
    routing_map = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])  # two experts per token; the last token is masked
    two_ranks = SimpleNamespace(size=lambda: 2)
    of_experts, of_rank, of_all = router.get_tokens_per_expert_and_token_count(routing_map, two_ranks, 2, True)
    assert of_experts.tolist() == [2, 4, 2]
    assert (of_rank, of_all) == (2, 4)


@pytest.mark.parametrize("has_makefile", [True, False])
def test_a_checkout_of_megatron_lm_compiles_its_helpers(
    has_makefile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_makefile:
        (tmp_path / "Makefile").touch()
    checkout: dict[str, Any] = {}
    exec(compile("def compile_helpers(): run('make')", tmp_path / "utils.py", "exec"), checkout)
    monkeypatch.setattr(dataset_utils, "compile_helpers", checkout["compile_helpers"])
    table.install()
    assert (dataset_utils.compile_helpers is checkout["compile_helpers"]) == has_makefile
