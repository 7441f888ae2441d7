"""Products of few rows with a weight: torch's own, or oneDNN's with the weight packed, whichever is faster here.

A step of drafting multiplies few rows, so a product takes as long as reading its weight: with a packed weight from 1 to
16 rows. Torch's own product takes up to 5 times as long at 2 to 4 rows on an AMD EPYC. On an Intel Xeon with AMX it is
faster in float32, up to 3 rows of a large weight, and 4 times as fast with a small one.
"""

import time
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import linear

MOST_PACKED_ROWS = 64
"""With more rows a product is bound by arithmetic, and torch's own is as good."""

TIMED_ROWS = (1, 2, 3, 4, 6, 8, 16, 32, MOST_PACKED_ROWS)

TIMED_ENTRIES = 2**24
"""Of a larger weight, a part of so many entries is timed."""

CLEARLY = 1.1
"""Torch's own is used where it is faster by this factor, so that noise seldom decides."""

_packed_linear = torch.ops.mkldnn._linear_pointwise.default


def product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """x [..., in] to x @ weight.T [..., out]."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16) or _is_fake(weight):
        return lambda hidden: linear(hidden, weight)
    weight = weight.detach()
    outputs, inputs = weight.shape
    few_rows = own_rows(outputs, inputs, torch.get_num_threads()) if weight.dtype == torch.float32 else 0
    if few_rows == MOST_PACKED_ROWS:
        return lambda hidden: linear(hidden, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    few, most = few_rows * inputs, MOST_PACKED_ROWS * inputs

    def multiply(hidden: Tensor) -> Tensor:
        if few < hidden.numel() <= most:
            return _packed_linear(hidden, packed, None, "none", [], "")
        return linear(hidden, weight)

    return multiply


@cache
@torch.inference_mode()
def own_rows(outputs: int, inputs: int, threads: int) -> int:
    """Up to how many rows torch's own product in float32 is faster with so many threads; timed once in a process."""
    weight = torch.ones(min(outputs, TIMED_ENTRIES // inputs + 1), inputs)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    few = 0
    for rows in TIMED_ROWS:
        hidden = torch.ones(rows, inputs)
        own = _seconds(partial(linear, hidden, weight))
        if own * CLEARLY > _seconds(partial(_packed_linear, hidden, packed, None, "none", [], "")):
            break
        few = rows
    return few


def _seconds(multiply: Callable[[], Tensor]) -> float:
    """The shortest of several calls, after one that is not counted."""
    took = []
    for _ in range(8):
        began = time.perf_counter()
        multiply()
        took.append(time.perf_counter() - began)
    return min(took[1:])


def _is_fake(weight: Tensor) -> bool:
    return isinstance(weight, torch._subclasses.FakeTensor) or weight.is_meta
