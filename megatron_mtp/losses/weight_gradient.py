"""Weight gradient of the output layer: what is kept between the two passes, and where the backward pass adds it.

The upstream gradient is a common factor that only the backward pass knows. Until then, the smaller of two is kept:

    Sum       the gradient itself, [V, H] in float32, to which every chunk adds
    Factors   the gradients by all logits, [N, V] in the weight's type; the backward pass multiplies them by the
              states

A chunk costs the same products either way, and the only other tensor of [V, H] is the gradient that autograd requires.
If Megatron's DDP keeps a `main_grad`, its gradient buffer, even that is not allocated: the gradient is added to
`main_grad` in place, a block of rows at a time.

Letters in names: N rows (positions times depths), H hidden, V this rank's slice of the vocabulary, X rows of anything.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES, BLOCK_BYTES_CUDA = 8 * 2**20, 128 * 2**20
"""Bytes of float32 rows of a gradient that are computed at once."""

BLOCKS = 16
"""Least number of blocks of a gradient, so that the blocks of small gradients also need almost no extra memory."""

MANY = 4
"""Number of positions, as a multiple of H, from which a CPU needs at most a fourth of the memory of a head with all
logits. With fewer, if the sum alone is larger than that, a chunk's logits are at most as large as the sum. Every chunk
costs a pass over the sum.
"""

LEAST_BYTES = 8 * 2**20
"""Least bytes of a chunk's float32 logits on a CPU, whatever the size of the sum: smaller chunks cost time and save
almost nothing.
"""

CHUNKS_BESIDE_SUM_CUDA = 2
"""On a GPU, largest share of the sum, or of a fourth of all logits if that is more, that a chunk's logits take."""


@dataclass(frozen=True)
class Sum:
    """Weight gradient, in float32 or better."""

    total_VH: Tensor

    def rows(self, where: slice) -> Tensor:
        """Return a block of rows of the gradient."""
        return self.total_VH[where]


@dataclass(frozen=True)
class Factors:
    """Two factors whose product is the weight gradient."""

    gradient_NV: Tensor
    states_NH: Tensor

    def rows(self, where: slice) -> Tensor:
        """Return a block of rows of the gradient, in float32 or better."""
        exact = torch.promote_types(self.states_NH.dtype, torch.float32)
        hidden = self.states_NH.size(1)
        return self.add_rows(where, self.states_NH.new_zeros(where.stop - where.start, hidden, dtype=exact))

    def add_rows(self, where: slice, part_XH: Tensor) -> Tensor:
        """Add some rows of the gradient to a part in float32 at least."""
        add_product(part_XH, self.gradient_NV[:, where].t(), self.states_NH)
        return part_XH


def keeps_factors(positions: int, weight_VH: Tensor) -> bool:
    """Return whether the factors of this many positions, at all depths, are smaller than the sum."""
    exact = torch.promote_types(weight_VH.dtype, torch.float32)
    return positions * weight_VH.element_size() <= weight_VH.size(1) * exact.itemsize


def positions_beside_sum(positions: int, weight_VH: Tensor) -> int:
    """Return the maximum number of positions in a chunk, given the number at all depths."""
    entries, hidden = weight_VH.shape
    if weight_VH.is_cuda:
        return max(hidden, positions // 4) // CHUNKS_BESIDE_SUM_CUDA
    least = LEAST_BYTES // (4 * entries)
    if positions < MANY * hidden:
        return max(hidden, least)
    # a quarter of the bytes of all logits and the weight gradient, less the total and the hidden gradients
    fourth = (positions + hidden) // 4
    return max(fourth - hidden - positions * hidden // entries, least)


def add_product(total_XH: Tensor, left_XN: Tensor, right_NH: Tensor) -> None:
    """Compute total += left @ right in float32, whatever the type of the factors."""
    exact = total_XH.dtype
    if left_XN.dtype == exact:
        total_XH.addmm_(left_XN, right_NH)
    elif left_XN.is_cuda:
        torch.addmm(total_XH, left_XN, right_NH, out_dtype=exact, out=total_XH)
    else:
        for rows in _blocks(total_XH):
            if left_XN.dtype != torch.float16:
                total_XH[rows] += left_XN[rows] @ right_NH
            else:  # a float16 product would overflow for frequent tokens and underflow for rare ones
                total_XH[rows].addmm_(left_XN[rows].to(exact), right_NH.to(exact))


def deliver(kept: Sum | Factors, weight_VH: Tensor, upstream: Tensor, node: Any, main_grad: bool) -> Tensor | None:
    """Return the gradient times `upstream` for autograd; None if it was added to `main_grad`.

    Args:
        kept: the gradient that was kept.
        weight_VH: the input of `node`.
        upstream: scalar, in float32 or better.
        node: node of autograd's graph whose backward pass this is.
        main_grad: whether it may be added to `main_grad`.
    """
    if main_grad and _is_added_by_ddp(weight_VH, node):
        main_grad_VH: Any = weight_VH.main_grad  # type: ignore[attr-defined]
        for rows in _blocks(weight_VH):
            main_grad_VH[rows].addcmul_(kept.rows(rows), upstream)
        return None
    if isinstance(kept, Sum):
        return scaled(kept.total_VH, upstream, weight_VH.dtype)
    if weight_VH.dtype == upstream.dtype:
        return kept.add_rows(slice(None), torch.zeros_like(weight_VH)).mul_(upstream)
    gradient_VH = torch.empty_like(weight_VH)
    for rows in _blocks(weight_VH):
        gradient_VH[rows] = kept.rows(rows) * upstream
    return gradient_VH


def scaled(gradient_XH: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient times `upstream`, rounded once; in place if nothing can need the gradient again."""
    is_last = not torch._C._autograd._get_current_graph_task_keep_graph()
    if is_last and gradient_XH.dtype == upstream.dtype == dtype:
        return gradient_XH.mul_(upstream)
    scaled_XH = gradient_XH if is_last and gradient_XH.dtype == dtype else torch.empty_like(gradient_XH, dtype=dtype)
    for rows in _blocks(gradient_XH):
        scaled_XH[rows] = gradient_XH[rows].to(upstream.dtype) * upstream  # a bfloat16 product would round upstream
    return scaled_XH


def _blocks(like_XH: Tensor) -> Iterator[slice]:
    rows, hidden = like_XH.shape
    fitting = (BLOCK_BYTES_CUDA if like_XH.is_cuda else BLOCK_BYTES) // (4 * hidden)
    at_once = max(1, min(fitting, rows // BLOCKS))
    return (slice(start, min(start + at_once, rows)) for start in range(0, rows, at_once))


def _is_added_by_ddp(weight_VH: Tensor, node: Any) -> bool:
    """Return whether the gradient is used only by DDP's hook, which adds it to `main_grad`.

    Not where something else sees it (hooks of the tensor, `torch.autograd.grad`), and not where Megatron adds in
    another way: its FSDP, its sharded weights, and modules that make their weight gradients later.
    """
    main_grad = getattr(weight_VH, "main_grad", None)
    if main_grad is None or not hasattr(weight_VH, "grad_added_to_main_grad"):
        return False
    exact = torch.promote_types(weight_VH.dtype, torch.float32)
    others = ("__fsdp_param__", "is_gtp_weight_remat", "skip_backward_post_hook")
    if main_grad.dtype != exact or any(getattr(weight_VH, name, False) for name in others):
        return False
    if weight_VH._backward_hooks or getattr(weight_VH, "_post_accumulate_grad_hooks", None):
        return False
    return _accumulates(weight_VH, node)


def _accumulates(leaf: Tensor, node: Any) -> bool:
    """Return whether this backward pass accumulates a leaf's gradient, as `backward()` does and `grad()` does not."""
    (accumulator,) = (function for function, _ in node.next_functions if getattr(function, "variable", None) is leaf)
    try:
        return torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:  # raised by autograd.grad() with respect to the leaf itself
        return False
