"""drafting/split_attention.py: where attention is split, and, in Triton's interpreter, what its kernels compute."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import found_by
from torch._subclasses import FakeTensorMode

from megatron_mtp.drafting import cached_attention, split_attention
from megatron_mtp.drafting.cached_attention import attend_to_window

pytest.importorskip("triton")
from sm_90 import assert_compiles

from megatron_mtp.drafting import split_kernels


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    return found_by("split_kernel_cases.py", "chains", "tree", "many rows", "one part")


def test_parts_make_what_attention_over_all_slots_does(interpreted: dict[str, Any]) -> None:
    """One key head, several, as many as queries; texts of unequal length, padding, trees; odd channels and windows.

    Half precision rounds the weights of values and the output.
    """
    allowed = {"torch.float32": 1e-6, "torch.float16": 2.0**-11, "torch.bfloat16": 2.0**-8}
    assert len(interpreted["chains"]) == 4
    for name, found in interpreted["chains"].items():
        for dtype, difference in found.items():
            assert difference <= allowed[dtype], (name, dtype)
    for case in ("tree", "many rows", "one part"):
        assert interpreted[case] <= 1e-6, case


@pytest.mark.matrix
def test_a_model_that_splits_attention_emits_the_same_tokens() -> None:
    assert found_by("split_kernel_cases.py", "same texts")["same texts"]


@pytest.mark.matrix
def test_the_comparison_sees_a_wrong_kernel() -> None:
    faults = found_by("split_kernel_cases.py", "faults")["faults"]
    assert len(faults) > 10
    for fault, difference in faults.items():
        assert difference > 1e-4, fault


POINTERS = {"masks": "*fp32", "made": "*fp32", "largest": "*fp32", "total": "*fp32"}
NUMBERS = """
    key_stride_B key_stride_G value_stride_B value_stride_G mask_stride_B mask_stride_R rows window batch parts
"""


@pytest.mark.parametrize(
    ("dtype", "channels", "block", "each"),
    [
        ("bf16", 128, 16, 128),
        pytest.param("bf16", 256, 64, 128, marks=pytest.mark.matrix),
        ("fp16", 64, 64, 1024),
        pytest.param("fp32", 64, 16, 128, marks=pytest.mark.matrix),
        pytest.param("fp32", 128, 64, 128, marks=pytest.mark.matrix),
    ],
)
def test_kernels_compile_for_a_gpu(
    dtype: str, channels: int, block: int, each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest tiles too; `WIDEST` says which they are."""
    assert channels * {"bf16": 2, "fp16": 2, "fp32": 4}[dtype] <= split_attention.WIDEST
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = POINTERS | dict.fromkeys(("queries", "keys", "values", "attended"), f"*{dtype}")
    types |= dict.fromkeys(NUMBERS.split(), "i32") | {"scale": "fp32"}
    sizes = {"GROUPS": 8, "QUERIES": 4, "VALUES": channels, "BLOCK_D": channels}
    parts = {"EACH": each, "CHANNELS": channels, "BLOCK_C": channels, "BLOCK_M": block}
    parts["BLOCK_W"] = split_attention.BLOCK_W
    assert_compiles(split_kernels.attend_to_part, types, sizes | parts, split_attention.WARPS)
    assert_compiles(split_kernels.merge, types, sizes | {"BLOCK_P": 64}, split_attention.WARPS)


class OnGPU(torch.Tensor):
    """A tensor that says so."""

    is_cuda = True  # type: ignore[assignment]


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta").as_subclass(OnGPU)


@pytest.mark.parametrize(
    ("batch", "heads", "groups", "rows", "window", "channels", "expected"),
    [
        (1, 32, 8, 4, 4096, 128, True),
        (1, 32, 8, 1, 512, 128, True),
        (16, 32, 8, 4, 4096, 128, True),
        (1, 32, 8, 4, 384, 128, False),
        (17, 32, 8, 4, 4096, 128, False),
        (1, 32, 8, 17, 4096, 128, False),
        (1, 32, 8, 4, 4096, 257, False),
        (1, 16, 1, 4, 4096, 576, False),
    ],
)
def test_attention_is_split_where_processors_would_be_idle(
    batch: int,
    heads: int,
    groups: int,
    rows: int,
    window: int,
    channels: int,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not over short windows, for many texts, for a prompt's rows, or for latents of many channels."""
    monkeypatch.setattr(split_attention, "processors", lambda _: 132)
    query, key = on_gpu(batch, heads, rows, channels), on_gpu(batch, groups, window, channels)
    assert split_attention.is_worth(query, key, key) is expected
    if expected:
        for other in (torch.empty_like(query, dtype=torch.float64), torch.empty(query.shape)):
            assert not split_attention.is_worth(other, key, key)


@pytest.mark.parametrize(
    ("batch", "groups", "window", "each"),
    [(1, 8, 512, 128), (1, 8, 8192, 256), (1, 8, 131_072, 4096), (4, 8, 4096, 512), (1, 1, 131_072, 512)],
)
def test_every_processor_has_a_part_or_two(
    batch: int, groups: int, window: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a part has the fewest slots that it may have; FakeTensorMode and the op's shapes, without a read of data."""
    given: list[int] = []
    monkeypatch.setattr(split_attention, "processors", lambda _: 132)
    make = split_attention.attend_in_parts
    monkeypatch.setattr(
        split_attention, "attend_in_parts", lambda *all_given: given.append(all_given[-1]) or make(*all_given)
    )
    with FakeTensorMode():
        query = torch.empty(batch, 32, 4, 128, dtype=torch.bfloat16)
        key, mask = torch.empty(batch, groups, window, 128, dtype=torch.bfloat16), torch.empty(batch, 1, 4, window)
        assert split_attention.split_attention(query, key, key, mask, 0.1).shape == (batch, 32, 4, 128)
    assert given == [each]
    programs = batch * groups * -(-window // each)
    assert programs <= 2 * 132 + batch * groups
    assert programs >= 132 or each == split_attention.LEAST_EACH


def test_the_window_decides_how_rows_attend(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(cached_attention, "is_worth", lambda query, key, value: key.size(2) > 100)
    monkeypatch.setattr(cached_attention, "split_attention", lambda query, *_: seen.append("split") or query)
    attention = lambda query, *_, **__: seen.append("whole") or query  # noqa: E731
    monkeypatch.setattr(cached_attention, "scaled_dot_product_attention", attention)
    scope: Any = SimpleNamespace(rows=SimpleNamespace(mask_B1RW=None), mask=lambda *_: None)
    for window in (100, 101):
        rows = torch.zeros(1, 2, window, 4)
        attend_to_window(scope, torch.zeros(1, 2, 3, 4), rows, rows, 1.0)
    assert seen == ["whole", "split"]
