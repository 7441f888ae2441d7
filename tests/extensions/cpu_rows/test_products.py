"""Every implementation of a product matches the weight, and timing selects the implementation."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_mtp.extensions.cpu_rows import products
from megatron_mtp.extensions.cpu_rows.products import TIMED_ROWS, WAYS


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 64), (101, 63)], ids=["whole vectors", "parts of vectors"])
def test_every_number_of_rows_gives_the_product(
    name: str, dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "fastest", lambda *_: name)
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    multiply = products.product(weight)
    for rows in (1, 3, 4, TIMED_ROWS[-1], TIMED_ROWS[-1] + 1):
        hidden = torch.randn(rows, 1, shape[1]).to(dtype)
        right = linear(hidden.double(), weight.double())
        torch.testing.assert_close(
            multiply(hidden).double(), right, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.2
        )


@pytest.mark.parametrize(
    ("seconds", "name"),
    [
        ({"compiled": 1.0, "packed": 1.0, "own": 1.0}, "compiled"),
        ({"compiled": 1.0, "packed": 0.95, "own": 0.95}, "compiled"),
        ({"compiled": 1.0, "packed": 0.8, "own": 0.75}, "packed"),
        ({"compiled": 1.0, "packed": 0.8, "own": 0.7}, "own"),
        ({"packed": 1.0, "own": 0.95}, "packed"),
    ],
)
def test_an_implementation_is_used_if_it_is_clearly_faster(
    seconds: dict[str, float], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "WAYS", {way: (lambda _, way=way: way if way in seconds else None) for way in WAYS})
    monkeypatch.setattr(products, "_seconds", lambda way, _: seconds[way])
    assert products.fastest.__wrapped__(8, 4, torch.float32, 1, 2) == name


def test_a_cpu_without_packed_bfloat16_uses_other_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert products._packed(torch.ones(64, 64)) is not None
    assert products._packed(torch.ones(64, 64, dtype=torch.bfloat16)) is None


def test_row_counts_use_the_next_larger_timed_count(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fastest(outputs: int, inputs: int, dtype: torch.dtype, threads: int, rows: int) -> str:
        asked.append(rows)
        return "own"

    monkeypatch.setattr(products, "fastest", fastest)
    multiply = products.product(torch.ones(8, 4))
    for rows in (1, 5, 1, 5, 33, 64, 65):
        multiply(torch.ones(rows, 4))
    assert asked == [1, 6, 64, 64]


def test_a_weight_is_packed_once_when_first_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Tensor] = []

    def pack(weight: Tensor) -> products.Multiply:
        packed.append(weight)
        return products._own(weight)

    monkeypatch.setitem(WAYS, "packed", pack)
    monkeypatch.setattr(products, "fastest", lambda *given: "packed" if given[-1] > 2 else "own")
    multiply = products.product(torch.ones(8, 4))
    for rows, times in ((1, 0), (3, 1), (8, 1)):
        multiply(torch.ones(rows, 4))
        assert len(packed) == times
