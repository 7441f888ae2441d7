"""The chunked losses on this device: values and gradients against float64, then memory and time against all logits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.part import DEVICE, ON_CPU, Setting
from benchmarks.harness import Found, Goal, Table, allocated_peak, interleave
from megatron_mtp.checkpoint.verify.prompt import exact_float32
from megatron_mtp.losses.linear_cross_entropy import Targets, Teacher, linear_loss
from megatron_mtp.losses.reference import plain_loss
from megatron_mtp.losses.table import depth_loss
from megatron_mtp.model.vocabulary import Vocabulary
from megatron_mtp.spec.config import MTPConfig

LOSSES = ("ce", "kd", "tv")
ALL_LOGITS = "ce, all logits"
SMALL = 64, 32, 512
"""Tokens, hidden size and entries of a quick run."""
JUMPING = ("tv",)
"""Losses whose gradient jumps where two probabilities are equal. Among many entries some are equal up to rounding, so
even the definition in float32 deviates from float64. In float32 these losses are compared at the small size.
"""
EXACT, ROUNDED = 1e-5, 2.5
"""Largest error of a gradient in float32; in bfloat16, relative to the error of the definition in bfloat16."""


def losses(setting: Setting) -> Found:
    """Measure the losses. Correctness comes first: a fast but wrong loss is worthless."""
    exact = against_float64(setting)
    setting.keep(exact)
    fast = memory_and_time(setting)
    return Found(exact.results | fast.results, [*exact.goals, *fast.goals], [*exact.tables, *fast.tables])


@exact_float32()
def against_float64(setting: Setting) -> Found:
    """Return errors relative to the largest entry in float64; in bfloat16 also errors of the definition in bfloat16."""
    tokens, hidden, entries = SMALL if setting.quick else (4096, 1024, 32768)
    rows: list[tuple[Any, ...]] = []
    goals = []
    for name in LOSSES:
        exact, _ = errors_of(name, torch.float32, *(SMALL if name in JUMPING else (tokens, hidden, entries)))
        rounded, plain = errors_of(name, torch.bfloat16, tokens, hidden, entries)
        sides = ((name, "float32", exact), (name, "bfloat16", rounded), (f"{name}, all logits", "bfloat16", plain))
        rows += [(side, dtype, *(f"{error:.1e}" for error in found)) for side, dtype, found in sides]
        goals.append(Goal(f"losses: {name} in float32, gradients against float64", max(exact[1:]), EXACT))
        ratio = max(rounded[1:]) / max(plain[1:])
        goals.append(Goal(f"losses: {name} in bfloat16, error over that of all logits", ratio, ROUNDED))
    header = ("loss", "dtype", "loss's error", "hidden gradient's", "weight gradient's")
    title = f"Errors against float64, {tokens} tokens x {hidden} x {entries}"
    return Found({"against float64": [list(row) for row in rows]}, goals, [Table(title, header, rows)])


Errors = tuple[float, ...]
"""Errors of the loss, and of the gradients of states and head."""


def errors_of(name: str, dtype: torch.dtype, tokens: int, hidden: int, entries: int) -> tuple[Errors, Errors]:
    """Return errors of the chunked loss, and of the definition in the same dtype.

    Both start from the same rounded numbers.
    """
    states_NH, weight_VH, labels_N = problem(tokens, hidden, entries, dtype)
    ours = chunked(name, states_NH, weight_VH, labels_N), states_NH.grad, weight_VH.grad
    exact = defined(name, states_NH, weight_VH, labels_N, torch.float64)
    plain = defined(name, states_NH, weight_VH, labels_N, dtype)
    return errors(ours, exact), errors(plain, exact)


def defined(
    name: str, states_NH: Tensor, weight_VH: Tensor, labels_N: Tensor, dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    """Return loss and gradients by the definition, with all logits at once."""
    own_NH, own_VH = (each.detach().to(dtype).requires_grad_() for each in (states_NH, weight_VH))
    drafted_K, trunk_NH = torch.arange(len(weight_VH), device=DEVICE), own_NH.detach()
    targets = targets_of(labels_N, dtype)
    total = plain_loss(MTPConfig(mtp_loss=name), [own_NH], targets, own_VH, 1.0, drafted_K, trunk_NH)
    total.backward()
    return total, own_NH.grad, own_VH.grad


def errors(found: Sequence[Tensor | None], exact: Sequence[Tensor | None]) -> Errors:
    return tuple(relative(one, other) for one, other in zip(found, exact, strict=True))


def relative(one: Tensor | None, exact: Tensor | None) -> float:
    assert one is not None
    assert exact is not None
    return ((one.detach().double() - exact.detach()).abs().max() / exact.detach().abs().max()).item()


def problem(tokens: int, hidden: int, entries: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return states, head and labels; the first two need gradients."""
    generator = torch.Generator().manual_seed(1)
    states_NH = torch.randn(tokens, hidden, generator=generator).to(DEVICE, dtype).requires_grad_()
    weight_VH = (torch.randn(entries, hidden, generator=generator) / hidden**0.5).to(DEVICE, dtype).requires_grad_()
    return states_NH, weight_VH, torch.randint(entries, (tokens,), generator=generator).to(DEVICE)


def chunked(name: str, states_NH: Tensor, weight_VH: Tensor, labels_N: Tensor) -> Tensor:
    """Return one depth's loss, with its gradients."""
    token_loss = depth_loss(MTPConfig(mtp_loss=name))
    teacher = Teacher(states_NH.detach()) if token_loss.needs_teacher else None
    targets = targets_of(labels_N, torch.float32)
    total, _ = linear_loss(token_loss, [states_NH], targets, weight_VH, Vocabulary(len(weight_VH)), teacher)
    total.backward()
    return total


def targets_of(labels_N: Tensor, dtype: torch.dtype) -> Targets:
    """Return targets with equal weights, and the depth's states in another order as the teacher's."""
    tokens = len(labels_N)
    ones, scale = torch.ones(tokens, dtype=dtype, device=DEVICE), torch.tensor([1 / tokens], dtype=dtype, device=DEVICE)
    return Targets(labels_N[None], ones[None], scale, torch.arange(tokens, device=DEVICE).flip(0)[None])


def memory_and_time(setting: Setting) -> Found:
    """Measure one depth's loss and gradients in bfloat16; 'all logits' is torch's cross-entropy."""
    tokens, hidden, entries = (64, 32, 512) if setting.quick else (16384, 2048, 131072)
    states_NH, weight_VH, labels_N = problem(tokens, hidden, entries, torch.bfloat16)

    def in_chunks(name: str) -> None:
        chunked(name, states_NH, weight_VH, labels_N)
        states_NH.grad = weight_VH.grad = None

    def whole() -> None:
        torch.nn.functional.cross_entropy((states_NH @ weight_VH.t()).float(), labels_N).backward()
        states_NH.grad = weight_VH.grad = None

    sides: dict[str, Callable[[], None]] = {name: (lambda name=name: in_chunks(name)) for name in LOSSES}  # type: ignore[misc]
    sides[ALL_LOGITS] = whole
    spent = interleave(sides, 1 if setting.quick else 3, 1, torch.cuda.synchronize)
    seconds = {name: round(median, 5) for name, median in spent.medians().items()}
    mib = {name: allocated_peak(step, ON_CPU) for name, step in sides.items()}
    rows = [(name, mib[name], 1000 * seconds[name]) for name in sides]
    goals = []
    if not setting.quick:  # its sizes are smaller than a chunk
        ratio = mib["ce"] / mib[ALL_LOGITS]
        goals.append(Goal("losses: memory of ce in chunks over that of all logits", ratio, 0.25))
    return Found(
        {"tokens": tokens, "hidden": hidden, "entries": entries, "MiB": mib, "seconds": seconds},
        goals,
        [Table(f"Memory of a loss, {tokens} tokens x {entries} entries", ("loss", "MiB", "ms"), rows)],
    )
