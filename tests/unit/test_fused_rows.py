"""drafting/fused_rows.py: where its kernels are used, and, in Triton's interpreter, what they compute."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafting_single import KINDS, model_of, place_static_experts_everywhere, two_steps
from interpreted import found_by

from megatron_mtp.drafting import fused_rows
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.sequences import Sequences

pytest.importorskip("triton")
from sm_90 import assert_compiles

from megatron_mtp.drafting import row_kernels

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    return found_by("row_kernel_cases.py", "rows", "launched")


def test_numbers_are_those_of_torchs_operations(interpreted: dict[str, Any]) -> None:
    """Odd sizes, one key head, several and as many as queries, padding, angles of some channels, norms around 1.

    In half precision every number is the same one, since the kernels round where the operations do.
    """
    kinds = {"norm", "sum", "norm of a sum", "gate", "queries", "keys", "values"}
    for dtype, allowed in (("torch.float32", 1e-6), ("torch.float16", 0), ("torch.bfloat16", 0)):
        assert interpreted["rows"][dtype].keys() == kinds
        assert max(interpreted["rows"][dtype].values()) <= allowed, dtype


@pytest.mark.matrix
def test_models_that_run_with_the_kernels_emit_the_same_tokens() -> None:
    """In float32: dense layers, experts, and layers of which only the gate has a kernel."""
    texts = found_by("row_kernel_cases.py", "texts")["texts"]
    assert len(texts) == 4
    assert all(texts.values())


def test_a_layer_launches_fewer_kernels(interpreted: dict[str, Any]) -> None:
    """Operations that compute, of which each is a kernel at least: 10 with the 4 products and attention."""
    sums = {name: sum(counts.values()) for name, counts in interpreted["launched"].items()}
    assert sums == {"before": 26, "after": 10}


@pytest.mark.matrix
def test_the_comparison_sees_a_wrong_kernel() -> None:
    faults = found_by("row_kernel_cases.py", "faults")["faults"]
    assert len(faults) > 15
    for fault, difference in faults.items():
        assert difference > 1e-4, fault


POINTERS = """
    hidden added weight sums normalised mixed cosine signed_sine query_weight key_weight queries keys values wide inner
"""
NUMBERS = "angle_stride_S angle_stride_B slot_stride_B slot_stride_R rows batch capacity"


@pytest.mark.parametrize(
    ("kernel", "constants", "warps"),
    [
        ("normalise", {"CHANNELS": 4096, "ADDS": True, "BLOCK": 4096}, 16),
        ("normalise", {"CHANNELS": 5000, "ADDS": False, "BLOCK": 4096}, 16),
        (
            "place",
            {"GROUPS": 8, "QUERIES": 4, "CHANNELS": 128, "TURNED": 64, "NORMS_QUERIES": True, "NORMS_KEYS": True},
            1,
        ),
        (
            "place",
            {"GROUPS": 4, "QUERIES": 1, "CHANNELS": 96, "TURNED": 0, "NORMS_QUERIES": False, "NORMS_KEYS": True},
            1,
        ),
        ("gate", {"WIDTH": 14_336, "BLOCK": 1024}, 4),
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_kernels_compile_for_a_gpu(
    kernel: str, constants: dict[str, Any], warps: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = dict.fromkeys(POINTERS.split(), f"*{dtype}") | dict.fromkeys(NUMBERS.split(), "i32")
    types |= {"slots": "*i64", "eps": "fp32", "query_eps": "fp32", "key_eps": "fp32"}
    assert_compiles(getattr(row_kernels, kernel), types, {"BLOCK": 128, **constants}, warps)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({}, True),
        ({"dtype": torch.float32}, True),
        ({"dtype": torch.float64}, False),
        ({"is_cuda": False}, False),
        ({"why_not": "it is not installed"}, False),
    ],
)
def test_kernels_are_used_on_cuda(others: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"is_cuda": True, "dtype": torch.bfloat16, "why_not": None} | others
    monkeypatch.setattr(fused_rows, "why_not", lambda _: given["why_not"])
    weight: Any = SimpleNamespace(is_cuda=given["is_cuda"], dtype=given["dtype"])
    assert fused_rows.has_kernels(weight) is expected


def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(fused_rows, "has_kernels", lambda weight: weight.dtype in fused_rows.DTYPES)
    monkeypatch.setenv("MEGATRON_MTP_COMPILED", "0")
    place_static_experts_everywhere(monkeypatch)


@pytest.mark.parametrize("kind", [*KINDS, "mla-moe"])
@torch.inference_mode()
def test_a_step_reads_nothing_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FakeTensorMode refuses reads of data; it knows from the operators what shapes the kernels make."""
    with_kernels(monkeypatch)
    two_steps(kind)


@torch.inference_mode()
def test_the_states_that_a_depth_continues_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer adds its MLP's product in place, to a sum of its own and not to what it was given."""
    with_kernels(monkeypatch)
    monkeypatch.setattr(fused_rows, "rms_norm", lambda hidden, *_: hidden)
    monkeypatch.setattr(fused_rows, "sum_and_rms_norm", lambda hidden, added, *_: (hidden + added, hidden))
    monkeypatch.setattr(fused_rows, "gated_silu", lambda wide: wide[..., wide.size(-1) // 2 :])
    target = Runner(model_of("parallel", dtype=torch.float32))
    monkeypatch.setattr(fused_rows, "place_rows", lambda mixed, *_: fused_rows._queries_like(mixed).zero_())
    sequences = Sequences(target, [[1, 2, 3]], [0], 20)
    hidden, first = torch.randn(3, 1, 32, device=target.device), torch.zeros(1, dtype=torch.long, device=target.device)
    before, rows = hidden.clone(), sequences.chain(first, 3, 0)
    made = target.depth(1, hidden, sequences.tokens_at(first, 3), rows, sequences.depth_caches(1)[0])
    assert torch.equal(hidden, before)
    assert not torch.equal(made, before)
