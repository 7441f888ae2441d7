"""A product is that of the weight, whichever way it goes; and which way it goes is found by timing."""

import pytest
import torch
from torch.nn.functional import linear

from megatron_mtp.drafting import products


@pytest.mark.parametrize("few", [0, 3, products.MOST_PACKED_ROWS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_of_rows_gives_the_product(few: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "own_rows", lambda *_: few)
    torch.manual_seed(0)
    weight = torch.randn(96, 64).to(dtype)
    multiply = products.product(weight)
    for rows in (1, 3, 4, products.MOST_PACKED_ROWS, products.MOST_PACKED_ROWS + 1):
        hidden = torch.randn(rows, 1, 64).to(dtype)
        right = linear(hidden.double(), weight.double())
        torch.testing.assert_close(
            multiply(hidden).double(), right, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.2
        )


@pytest.mark.parametrize(("faster_up_to", "rows"), [(0, 0), (3, 3), (10, 8), (1000, products.MOST_PACKED_ROWS)])
def test_torchs_own_product_is_taken_while_it_is_clearly_faster(
    faster_up_to: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(multiply: object) -> float:
        function, (hidden, *_) = multiply.func, multiply.args  # type: ignore[attr-defined]
        own = function is linear
        return 1.0 if own else 1.2 if len(hidden) <= faster_up_to else 1.05

    monkeypatch.setattr(products, "_seconds", seconds)
    assert products.own_rows.__wrapped__(8, 4, 1) == rows
