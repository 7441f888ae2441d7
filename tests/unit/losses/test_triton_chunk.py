"""losses/triton_chunk.py: where its kernels are used, and what they compute in Triton's interpreter."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import found_by
from tiers import tiered

from megatron_mtp.losses import linear_cross_entropy, triton_chunk
from megatron_mtp.losses.distillation import AcceptedLength, Divergence, TotalVariation
from megatron_mtp.losses.mix import Mix
from megatron_mtp.losses.table import LOSSES
from megatron_mtp.losses.token_loss import CrossEntropy, TokenLoss
from megatron_mtp.model.vocabulary import Vocabulary

pytest.importorskip("triton")
from gpu_targets import SHARED, assert_compiles

from megatron_mtp.losses import triton_kernels

SOME = {"losses": "a case of losses", "exchanges": "exchanges", "bytes": "bytes"}
EVERY = {"losses": "losses", "exchanges": "all exchanges", "bytes": "all bytes"}
OF_RANKS = ("ranks", "faults", "faults of ranks")


@pytest.fixture(scope="module")
def interpreted(pytestconfig: pytest.Config) -> dict[str, Any]:
    """Return one process's results: a loss of every class; with --all every loss, two ranks, and faults too."""
    every = pytestconfig.getoption("--all")
    sizes, more = (EVERY, OF_RANKS) if every else (SOME, ())
    found = found_by("triton_cases.py", *sizes.values(), "rounded", "masked", "empty", *more, "used")
    return found | {name: found[part] for name, part in sizes.items()}


def test_values_and_gradients_are_those_of_the_definition(interpreted: dict[str, Any]) -> None:
    """All tokens and a draft vocabulary, masks, temperatures, odd sizes."""
    losses = "AcceptedLength AdaptiveDivergence CrossEntropy Divergence NegativeLogOverlap TotalVariation"
    assert interpreted["used"] == losses.split()
    assert_close(interpreted["losses"])


def assert_close(found: dict[str, tuple[float, float]]) -> None:
    for name, (value, gradients) in found.items():
        assert value <= 1e-6, name
        assert gradients <= 1e-5, name


@pytest.mark.matrix
def test_two_ranks_find_the_values_and_gradients_of_the_definition(interpreted: dict[str, Any]) -> None:
    """Including a logit scale, padding, and a last rank with only padding."""
    assert len(interpreted["ranks"]) == len(interpreted["used"])
    assert_close(interpreted["ranks"])


def test_ranks_exchange_once_a_chunk_and_once_more_for_the_overlap(interpreted: dict[str, Any]) -> None:
    for name, exchanges in interpreted["exchanges"].items():
        assert exchanges == (1 if name.startswith(("ce", "kd")) else 2), name


def test_kernels_move_few_bytes_per_logit(interpreted: dict[str, Any]) -> None:
    for name, moved in interpreted["bytes"].items():
        assert moved <= (8 if name.startswith("ce") else 20), name


def test_half_precision_gradients_are_rounded_once(interpreted: dict[str, Any]) -> None:
    """Triton's interpreter truncates bfloat16, where a GPU rounds to nearest."""
    for dtype, bits in (("torch.bfloat16", 7), ("torch.float16", 10)):
        value, gradients = interpreted["rounded"][dtype]
        assert value <= 1e-6
        assert gradients <= 2.0**-bits


def test_masked_positions_have_no_gradient_whatever_their_logits(interpreted: dict[str, Any]) -> None:
    assert interpreted["masked"] == [0, 0]


def test_a_vocabulary_block_without_probability_adds_nothing(interpreted: dict[str, Any]) -> None:
    assert max(interpreted["empty"].values()) <= 1e-5, interpreted["empty"]


@pytest.mark.matrix
def test_the_comparison_sees_a_wrong_kernel(interpreted: dict[str, Any]) -> None:
    found = [interpreted[part] for part in ("faults", "faults of ranks")]
    assert min(map(len, found)) > 3
    for fault, difference in (found[0] | found[1]).items():
        assert difference > 1e-4, fault


SIZES = {"ENTRIES": 131_072, "TOKENS": 131_000, "BLOCK": triton_chunk.BLOCK}
GAP = {"LARGEST_GAP": 40.0, "FLOOR": 4e-18}
POINTERS = dict.fromkeys(("products", "teachers"), "*bf16") | dict.fromkeys(("labels", "taught", "columns"), "*i64")
FLOATS = "masks weights losses found slopes divergence_slopes whole of_q of_p of_drafted overlaps shorts".split()
NUMBERS = {"factor": "fp32", "temperature": "fp32", "size": "i32", "stride": "i32", "teacher_stride": "i32"}


@pytest.mark.parametrize("target", tiered(SHARED, (90,)))
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        ("statistics", {"GATHERED": True}),
        ("statistics", {"GATHERED": False}),
        ("cross_entropy", {"SMOOTHING": 0.1, "Z_LOSS": 1e-3}),
        ("divergence", {"GATHERED": True} | GAP),
        ("overlap", {"GATHERED": True, "DIVERGES": True} | GAP),
        ("overlap", {"GATHERED": False, "DIVERGES": False} | GAP),
        ("overlap_gradient", {"GATHERED": True, "DIVERGES": True}),
    ],
)
def test_kernels_compile_for_a_gpu(
    kernel: str, constants: dict[str, Any], target: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = dict.fromkeys(FLOATS, "*fp32") | POINTERS | NUMBERS
    of_kernel = getattr(triton_kernels, kernel)
    sizes = {name: size for name, size in SIZES.items() if name in of_kernel.arg_names}
    assert_compiles(of_kernel, types, sizes | constants, triton_chunk.WARPS, target, tmp_path)


class Extended(CrossEntropy):
    """A loss of an external package."""


@pytest.mark.parametrize(
    ("loss", "others", "expected"),
    [
        (CrossEntropy(), {}, True),
        (Divergence(), {"dtype": torch.float16}, True),
        (TotalVariation(), {"dtype": torch.float32}, True),
        (AcceptedLength(), {}, True),
        (Mix(((1.0, CrossEntropy()),)), {}, False),
        (Extended(), {}, False),
        (CrossEntropy(), {"is_cuda": False}, False),
        (CrossEntropy(), {"dtype": torch.float64}, False),
        (CrossEntropy(), {"all": True}, True),
        (CrossEntropy(), {"all": False}, False),
        (CrossEntropy(), {"why": "it is not installed"}, False),
    ],
)
def test_triton_kernels_are_used_where_available(
    loss: TokenLoss, others: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"is_cuda": True, "dtype": torch.bfloat16, "all": None, "why": None} | others
    monkeypatch.setattr(triton_chunk, "why_no_kernels", lambda: given["why"])
    monkeypatch.setattr(triton_chunk, "_all_launch", lambda _: given["all"])
    weight: Any = SimpleNamespace(device=torch.device("cuda" if given["is_cuda"] else "cpu"), dtype=given["dtype"])
    group: Any = None if given["all"] is None else object()
    found = linear_cross_entropy.kernels_of(loss, weight, Vocabulary(8, group))
    assert found is (triton_chunk if expected else None)


@pytest.mark.parametrize(
    ("compiler", "headers", "expected"),
    [
        ("", True, "there is no C compiler"),
        ("/usr/bin/cc", False, "there is no .*Python.h"),
        ("/usr/bin/cc", True, "RuntimeError: a driver"),
    ],
)
def test_kernels_that_cannot_be_launched_are_left_out_with_one_warning(
    compiler: str,
    headers: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("a driver that Triton does not know")

    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    monkeypatch.setattr(triton_kernels, "trial", {(1,): fail})
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    if headers:
        (tmp_path / "Python.h").touch()
    triton_chunk.why_no_kernels.cache_clear()
    found = [triton_chunk.why_no_kernels() for _ in range(2)]
    triton_chunk.why_no_kernels.cache_clear()
    assert found[0] == found[1]
    assert re.match(expected, str(found[0]))
    assert [record.args for record in caplog.records] == [(found[0],)]


def test_every_kernel_is_of_a_loss_in_the_table() -> None:
    assert set(triton_chunk.KERNELS) <= {loss for _, loss in LOSSES.items()}
