"""Measures this machine within seconds: speed of products, attention and memory for the shapes of one model.

Works for CPU runs in float32 with `--transformer-impl local`; `benchmarks/depth_cost.py` compares with training steps.
"""

import os
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from megatron_mtp.extensions.plan.hardware import Card, Reached
from megatron_mtp.extensions.plan.memory import tokens_of
from megatron_mtp.extensions.plan.sizes import LayerSizes, Model, default_width

TURNS, ROUNDS = 5, 3
"""Calls per measurement and rounds over all measurements; medians are used."""
ReadSeconds = Callable[[], float]


def card_here(model: Model, clock: ReadSeconds = time.perf_counter) -> Card:
    """Measure this machine with the shapes of a model, in FLOP/s and bytes/s. There are no links.

    Args:
        model: model whose products are measured.
        clock: function that returns seconds; use `time.process_time` and one thread on a shared machine.
    """
    line, layer = model.line, model.layers[0]
    tokens, hidden = int(tokens_of(line)), line.whole("hidden_size")
    shapes = [(one.rows, one.columns) for one in layer.products]

    def measured() -> tuple[float, ...]:
        return (
            _products(tokens, shapes, clock),
            _products(tokens, [(hidden, line.vocabulary)], clock),
            _attention(layer, model, clock),
            _copies(tokens, [columns for _, columns in shapes], clock),
            _between(model, clock),
        )

    _, *rounds = [measured() for _ in range(1 + ROUNDS)]  # the first round is slower
    products, head, attention, bandwidth, between = map(median, zip(*rounds, strict=True))
    rate = sum(6 * tokens * rows * columns for rows, columns in shapes) / products
    head_rate = 6 * tokens * hidden * line.vocabulary / head
    passes = between / 3 * bandwidth / (tokens * line.element * sum(one.elements for one in layer.kept))
    reached = Reached(1.0, head_rate / rate, 1.0, attention / rate, 1.0, 1.0, passes)
    memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return Card("here", rate, rate, memory, bandwidth, 1.0, 1.0, 1, reached)


def _timed(work: Callable[[], object], clock: ReadSeconds) -> float:
    """Return the median seconds, without the first turn."""
    spent = []
    for _ in range(1 + TURNS):
        began = clock()
        work()
        spent.append(clock() - began)
    return median(spent[1:])


def _products(tokens: int, shapes: Iterable[tuple[int, int]], clock: ReadSeconds) -> float:
    """Return the seconds of a layer's products with weights, forward and then backward, with cold caches."""
    made = [
        tuple(torch.randn(shape) for shape in ((tokens, rows), (columns, rows), (tokens, columns), (columns, rows)))
        for rows, columns in shapes
    ]

    def work() -> None:
        for states, weight, _, _ in made:
            torch.mm(states, weight.t())
        for states, weight, gradient, total in reversed(made):
            torch.mm(gradient, weight)
            total.add_(torch.mm(gradient.t(), states))

    return _timed(work, clock)


def _attention(layer: LayerSizes, model: Model, clock: ReadSeconds) -> float:
    """Return the FLOP/s of attention, counting half of all pairs forward and 2.5 times as many backward."""
    line = model.line
    length, batch, heads = line.whole("seq_length"), line.micro_batch_size, layer.scores
    width = layer.pairs // (2 * heads)
    mask = torch.full((batch, 1, length, length), float("-inf")).triu(1)
    shape = batch, heads, length, width
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape)

    def work() -> None:
        made: Tensor = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        made.backward(gradient)

    return 3.5 * 2 * batch * length * layer.pairs * length / 2 / _timed(work, clock)


class _Gated(torch.autograd.Function):
    """silu(gate) * up with an unfused backward pass, as in Megatron without fusion."""

    @staticmethod
    def forward(ctx: Any, wide_SBF: Tensor) -> Tensor:
        ctx.save_for_backward(wide_SBF)
        gate_SBF, up_SBF = wide_SBF.chunk(2, dim=-1)
        return silu(gate_SBF) * up_SBF

    @staticmethod
    def backward(ctx: Any, gradient_SBF: Tensor) -> Tensor:
        (wide_SBF,) = ctx.saved_tensors
        gate_SBF, up_SBF = wide_SBF.chunk(2, dim=-1)
        slope_SBF = torch.sigmoid(gate_SBF) * (1 + gate_SBF * (1 - torch.sigmoid(gate_SBF)))
        return torch.cat((gradient_SBF * slope_SBF * up_SBF, gradient_SBF * silu(gate_SBF)), dim=-1)


def _between(model: Model, clock: ReadSeconds) -> float:
    """Return the seconds of a layer's operations between products, forward and backward, without fused kernels.

    These are two norms, two sums and a gated activation; splitting queries, keys and values of one product, RoPE of
    queries and keys, and the transposes of all three for attention and back.
    """
    line, layer = model.line, model.layers[0]
    hidden, ffn, heads = line.whole("hidden_size"), line.ffn_hidden_size or default_width(line), layer.scores
    first = line.whole("seq_length"), line.micro_batch_size
    width = layer.pairs // (2 * heads)
    weight, *given = (
        torch.randn(shape, requires_grad=True)
        for shape in ((hidden,), (*first, hidden), (*first, 2 * ffn), (*first, heads, 3 * width))
    )
    cosine, sine = torch.randn(2, first[0], 1, 1, width)

    def turned(one_SBNC: Tensor) -> Tensor:
        front_SBNC, back_SBNC = one_SBNC.chunk(2, dim=-1)
        return one_SBNC * cosine + torch.cat((-back_SBNC, front_SBNC), dim=-1) * sine

    def ordered(one_SBNC: Tensor) -> Tensor:
        return one_SBNC.permute(1, 2, 0, 3).contiguous()

    def work() -> None:
        states_SBH, wide_SBF, mixed_SBNC = given
        normed_SBH = rms_norm(states_SBH, (hidden,), weight)
        after_SBH = states_SBH + normed_SBH
        query_SBNC, key_SBNC, value_SBNC = mixed_SBNC.split(width, dim=-1)
        value_BNSC = ordered(value_SBNC)
        made = (
            _Gated.apply(wide_SBF),  # type: ignore[no-untyped-call]
            ordered(turned(query_SBNC)),
            ordered(turned(key_SBNC)),
            value_BNSC.permute(2, 0, 1, 3).contiguous(),
            after_SBH + rms_norm(after_SBH, (hidden,), weight),
        )
        torch.autograd.backward(made, made)

    return _timed(work, clock)


def _copies(tokens: int, widths: Iterable[int], clock: ReadSeconds) -> float:
    """Return the bytes/s that operations on activations of these widths read and write."""
    moved = seconds = 0.0
    for width in widths:
        one, other = torch.randn(tokens, width), torch.randn(tokens, width)
        moved += 12 * tokens * width
        seconds += _timed(lambda one=one, other=other: one * other, clock)  # type: ignore[misc]
    return moved / seconds
