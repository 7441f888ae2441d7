"""Products of few rows with a weight by the fastest method on this machine: torch, oneDNN, or compiled code.

A decoding step multiplies few rows, so a product takes as long as reading its weight. oneDNN needs a packed copy of the
weight. Which method is fastest depends on the CPU, the sizes and the rows. On an AMD EPYC, torch takes up to 5 times as
long as the packed product at 2 to 4 rows; on an Intel Xeon with AMX, torch is faster in float32 for up to 3 rows of a
large weight, and 4 times as fast with a small one. So each size is timed when its first product is computed.
"""

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_mtp.extensions.cpu_rows.few_rows import product_of

Multiply = Callable[[Tensor], Tensor]
"""Function from x [..., in] to x @ weight.T [..., out]."""

TIMED_ROWS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
"""Numbers of rows that are timed; numbers in between use the way of the next one. With more rows, torch's kernel is as
fast.
"""

TIMED_ENTRIES = 2**24
"""Largest number of weight entries that is timed; of a larger weight, a part of this size is timed."""

TIMED_SECONDS = 0.02
"""Time limit in seconds, after which a way is not called again."""

CLEARLY = 1.1
"""Factor by which a way must be faster than the ways before it in `WAYS`, so that noise rarely decides."""


def _own(weight: Tensor) -> Multiply:
    return lambda hidden: linear(hidden, weight)


def _packed(weight: Tensor) -> Multiply | None:
    if not torch.backends.mkldnn.is_available():
        return None
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda hidden: torch.ops.mkldnn._linear_pointwise.default(hidden, packed, None, "none", [], "")


WAYS: dict[str, Callable[[Tensor], Multiply | None]] = {"compiled": product_of, "packed": _packed, "own": _own}
"""Ways to multiply with a weight, preferred ones first; None if a way does not apply to a weight."""


def product(weight: Tensor) -> Multiply:
    """Compute x @ weight.T, [..., in] to [..., out]."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16) or _is_fake(weight):
        return _own(weight)
    weight = weight.detach()
    outputs, inputs = weight.shape
    made: dict[str, Multiply | None] = {}
    by_rows: dict[int, Multiply] = {}

    def way(rows: int) -> Multiply:
        timed = next(most for most in TIMED_ROWS if most >= rows)
        name = fastest(outputs, inputs, weight.dtype, torch.get_num_threads(), timed)
        if name not in made:
            made[name] = WAYS[name](weight)
        return made[name] or _own(weight)

    def multiply(hidden: Tensor) -> Tensor:
        rows = hidden.numel() // inputs
        if not 0 < rows <= TIMED_ROWS[-1]:
            return linear(hidden, weight)
        if rows not in by_rows:
            by_rows[rows] = way(rows)
        return by_rows[rows](hidden)

    return multiply


@cache
@torch.inference_mode()
def fastest(outputs: int, inputs: int, dtype: torch.dtype, threads: int, rows: int) -> str:
    """Return the fastest method for this many rows and threads; timed once per process."""
    weight = torch.ones(min(outputs, TIMED_ENTRIES // inputs + 1), inputs, dtype=dtype)
    hidden = torch.ones(rows, inputs, dtype=dtype)
    best, least = "", float("inf")
    for name, make in WAYS.items():
        multiply = make(weight)
        if multiply is not None and CLEARLY * (seconds := _seconds(multiply, hidden)) < least:
            best, least = name, seconds
    return best


def _seconds(multiply: Multiply, hidden: Tensor) -> float:
    """Return the shortest time of several calls, after one warm-up call."""
    multiply(hidden)
    took: list[float] = []
    while len(took) < 8 and sum(took) < TIMED_SECONDS:
        began = time.perf_counter()
        multiply(hidden)
        took.append(time.perf_counter() - began)
    return min(took)


def _is_fake(weight: Tensor) -> bool:
    return isinstance(weight, torch._subclasses.FakeTensor) or weight.is_meta
