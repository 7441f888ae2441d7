"""Head and loss together, in chunks of tokens: all logits are never in memory at once.

In:  hidden states, the head's weight, and the targets of every position.
Out: one weighted sum of losses.

The weights of all positions are known in the forward pass, and the sum reaches the total loss through one factor, the
upstream gradient. So the gradients are computed in the forward pass, while a chunk's logits are in memory, and the
backward pass scales them. A chunk costs three matrix products, as a head with all logits does. The memory is

    one chunk of logits + hidden gradients [D N, H] + the smaller one of [V, H] in float32 and [D N, V]

The last is kept for the weight gradient (weight_gradient.py); a frozen head needs neither, and one product less. A head
with all logits holds both at once.

Depths are taken one after another. Where a loss couples the depths of a position, all of them are one sequence of rows,
position by position and depth by depth within it, and a chunk has whole positions: as many rows as before.

Letters in names: N positions, H hidden, V this rank's slice of the vocabulary, D depths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.losses import triton_chunk
from megatron_mtp.losses.chunks import blocks, chunks
from megatron_mtp.losses.token_loss import Chunk, TokenLoss
from megatron_mtp.losses.vocabulary import Vocabulary
from megatron_mtp.losses.weight_gradient import (
    Factors,
    Sum,
    add_product,
    deliver,
    keeps_factors,
    positions_beside_sum,
    scaled,
)

FLOAT16_GRADIENT = 2.0**8
"""The size to which the largest gradient of a float16 logit is scaled in the forward pass, before Megatron's loss scale
applies: unscaled gradients of unlikely tokens would be smaller than float16's smallest number. Hidden gradients,
which are sums over V, need the range above."""


ENTRIES = 512
"""Logits of a position that one product makes on a CPU: the library first copies the weight into an order of its own,
and what it copies then stays in a core's cache. With 64 to 128 positions that takes a seventh less time."""


@dataclass(frozen=True)
class Targets:
    """The targets of one depth.

    Attributes:
        labels_N: tokens; of a draft vocabulary their numbers in it.
        mask_N: float, the weight of each position in the depth's sum; 0 leaves it out.
        scale: scalar tensor, the weight of the depth's sum in the total; [D] where rows of D depths take turns.
        teacher_NH: the trunk's states whose logits are the soft labels, if the loss needs a teacher.
    """

    labels_N: Tensor
    mask_N: Tensor
    scale: Tensor
    teacher_NH: Tensor | None = None


def linear_loss(
    token_loss: TokenLoss,
    hidden: Sequence[Tensor],
    targets: Sequence[Targets],
    weight_VH: Tensor,
    vocabulary: Vocabulary,
    teacher_weight_VH: Tensor | None = None,
    main_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """sum_d scale_d sum_d, to be trained on, and the depths' own masked sums [D], to be logged.

    A loss that couples depths makes its own total of the scales and the depths at a position (`TokenLoss.joined`).

    Args:
        token_loss: the loss of every chunk.
        hidden: states of every depth, [N, H]. Every tensor-parallel rank has all positions, and computes the part of
            their gradients that its slice gives (Megatron's copy or gather into the tensor-parallel region adds them).
        targets: one for every depth; of the same positions and masks, where the loss couples depths.
        weight_VH: this rank's slice of the head.
        vocabulary: what its rows stand for.
        teacher_weight_VH: the head for the teacher's logits; `weight_VH` if None.
        main_grad: the weight's gradient may be added to Megatron's `main_grad`, and autograd gets none. Some other
            loss of the same backward pass has to give the weight one: with `--overlap-grad-reduce` DDP asks for it.
    """
    rows = [states_NH.to(weight_VH.dtype) for states_NH in hidden]
    if not torch.is_grad_enabled():  # autograd functions ignore no_grad, so detach here
        weight_VH, rows = weight_VH.detach(), [states_NH.detach() for states_NH in rows]
    if teacher_weight_VH is not None:
        teacher_weight_VH = teacher_weight_VH.detach()
    if token_loss.couples_depths:
        rows, targets = [_in_turn(rows)], [_targets_in_turn(targets)]
    arguments = token_loss, targets, vocabulary, teacher_weight_VH, main_grad, weight_VH, *rows
    total, sums_D = _LinearLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    return total, sums_D


class _LinearLoss(torch.autograd.Function):
    """Forward: losses, and the gradients of their sum. Backward: these, times the upstream gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        token_loss: TokenLoss,
        targets: Sequence[Targets],
        vocabulary: Vocabulary,
        teacher_weight_VH: Tensor | None,
        main_grad: bool,
        weight_VH: Tensor,
        *hidden: Tensor,
    ) -> tuple[Tensor, Tensor]:
        taught_by_VH = weight_VH if teacher_weight_VH is None else teacher_weight_VH
        trains_weight, *trains_hidden = ctx.needs_input_grad[5:]
        exact = torch.promote_types(weight_VH.dtype, torch.float32)
        positions = sum(map(len, hidden))
        factors = trains_weight and keeps_factors(positions, weight_VH)
        sum_VH = torch.zeros_like(weight_VH, dtype=exact) if trains_weight and not factors else None
        most = None if sum_VH is None else positions_beside_sum(positions, weight_VH)
        lift = _lift(targets, vocabulary, weight_VH.dtype)
        head = _Head(token_loss, vocabulary, weight_VH, taught_by_VH, sum_VH, most, lift)
        hidden_grads = [
            torch.empty_like(states_NH) if trains else None
            for states_NH, trains in zip(hidden, trains_hidden, strict=True)
        ]
        gradients = [states_NH.new_empty(len(states_NH), len(weight_VH)) if factors else None for states_NH in hidden]
        totals = [head.run(*each) for each in zip(hidden, targets, hidden_grads, gradients, strict=True)]
        ctx.main_grad, ctx.lift, ctx.parts, ctx.factors = main_grad, lift, len(hidden), factors
        kept = (*gradients, *hidden) if factors else (sum_VH,)
        ctx.save_for_backward(weight_VH, *hidden_grads, *kept)
        sums_D = torch.cat([sums_D for _, sums_D in totals])
        ctx.mark_non_differentiable(sums_D)
        return torch.stack([total for total, _ in totals]).sum(), sums_D

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        weight_VH, *saved = ctx.saved_tensors
        upstream = upstream / ctx.lift
        hidden_grads, kept = saved[: ctx.parts], saved[ctx.parts :]
        weight_grad_VH = None
        if kept[0] is not None:
            gradient = Factors(kept[: ctx.parts], kept[ctx.parts :]) if ctx.factors else Sum(kept[0])
            weight_grad_VH = deliver(gradient, weight_VH, upstream, ctx, ctx.main_grad)
        scaled_grads = (None if each is None else scaled(each, upstream, each.dtype) for each in hidden_grads)
        return None, None, None, None, None, weight_grad_VH, *scaled_grads


@dataclass(frozen=True)
class _Head:
    """What the chunks of all depths have in common; their weight gradients are added to `sum_VH`, if there is one."""

    token_loss: TokenLoss
    vocabulary: Vocabulary
    weight_VH: Tensor
    taught_by_VH: Tensor
    sum_VH: Tensor | None
    most: int | None
    lift: Tensor | float

    def run(
        self, states_NH: Tensor, target: Targets, hidden_grad_NH: Tensor | None, gradient_NV: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """A depth's part of the total, and the masked sum of its losses [1]; [D] of depths whose rows take turns.

        Gradients of the total, times `lift`, are written to those that are given.

        Args:
            gradient_NV: by the logits.
        """
        weight_VH, is_cuda, depths = self.weight_VH, self.weight_VH.is_cuda, target.scale.numel()
        exact = torch.promote_types(weight_VH.dtype, torch.float32)
        sums = torch.zeros(1 + depths, dtype=exact, device=weight_VH.device)
        entries = max(self.vocabulary.widest, len(self.taught_by_VH) * (self.taught_by_VH is not weight_VH))
        logits = _Rows(gradient_NV, weight_VH)
        taught = _Rows(None, self.taught_by_VH)
        for chunk in chunks(len(states_NH), entries, is_cuda, self.most, depths):
            teacher_NV = None if target.teacher_NH is None else taught.product(target.teacher_NH, chunk)
            logits_NV = logits.product(states_NH, chunk)
            sums += self._sums_(logits_NV, teacher_NV, target, chunk)
            if hidden_grad_NH is not None:
                torch.mm(logits_NV, weight_VH, out=hidden_grad_NH[chunk])
            if self.sum_VH is not None:
                add_product(self.sum_VH, logits_NV.t(), states_NH[chunk])
        return sums[0], sums[1:]

    def _sums_(self, product_NV: Tensor, teacher_NV: Tensor | None, target: Targets, chunk: slice) -> Tensor:
        """[1 + D], a chunk's part of the total and its masked sums; the product is overwritten with the gradient."""
        exact = torch.promote_types(product_NV.dtype, torch.float32)
        scale_D = target.scale.to(exact).view(-1)
        target = Targets(target.labels_N[chunk], target.mask_N[chunk].to(exact), scale_D)
        if triton_chunk.has_kernel(self.token_loss, product_NV, self.vocabulary):
            scale = scale_D * self.lift
            given = triton_chunk.Products(
                product_NV, target.labels_N, target.mask_N, scale, teacher_NV, self.vocabulary
            )
            losses_N = triton_chunk.losses_(self.token_loss, given)
        else:
            losses_N = self._losses_(product_NV, teacher_NV, target)
        depths = scale_D.numel()
        joined = self.token_loss.joined(losses_N.view(-1, depths), scale_D)
        mask_N = target.mask_N[::depths]
        parts = torch.cat([joined.value_N.unsqueeze(1), joined.shown_ND], dim=1)
        return mask_N @ parts.masked_fill(mask_N.unsqueeze(1) == 0, 0)

    def _losses_(self, product_NV: Tensor, teacher_NV: Tensor | None, target: Targets) -> Tensor:
        """Losses of a chunk, block by block; the product is overwritten with the gradient."""
        vocabulary, depths, losses = self.vocabulary, target.scale.numel(), []
        positions, entries = product_NV.shape
        as_one = product_NV.is_cuda or vocabulary.ranks > 1
        for rows in blocks(positions, entries, as_one, depths):
            soft_NV = None if teacher_NV is None else _logits(teacher_NV[rows], vocabulary)
            logits_NV = _logits(product_NV[rows], vocabulary)
            loss_N, gradient_NV = self.token_loss(Chunk(logits_NV, target.labels_N[rows], soft_NV, vocabulary))
            slopes_N = self.token_loss.joined(loss_N.view(-1, depths), target.scale).slopes_ND.flatten()
            slopes_N = target.mask_N[rows] * slopes_N * (vocabulary.logit_scale * self.lift)
            product_NV[rows] = gradient_NV.mul_(slopes_N.unsqueeze(1))
            losses.append(loss_N)
        return torch.cat(losses)


def _lift(targets: Sequence[Targets], vocabulary: Vocabulary, dtype: torch.dtype) -> Tensor | float:
    """The factor that gradients have in the forward pass; the backward pass divides by it in float32."""
    if dtype != torch.float16:
        return 1.0
    largest = torch.stack([target.scale.max() for target in targets]).max() * vocabulary.logit_scale
    return FLOAT16_GRADIENT / largest.clamp(min=1e-30)


def _in_turn(values: Sequence[Tensor]) -> Tensor:
    """[D N, ...] of D depths' [N, ...]: position by position, depth by depth within a position."""
    return torch.stack(list(values), dim=1).flatten(0, 1)


def _targets_in_turn(targets: Sequence[Targets]) -> Targets:
    taught = [target.teacher_NH for target in targets if target.teacher_NH is not None]
    return Targets(
        _in_turn([target.labels_N for target in targets]),
        _in_turn([target.mask_N for target in targets]),
        torch.stack([target.scale for target in targets]),
        _in_turn(taught) if taught else None,
    )


class _Rows:
    """A head's products with chunks of states, in the rows of `kept_NV`, or all in the memory of the first one.

    Memory that is asked for anew is handed out page by page, which took a CPU a tenth of the loss's time.
    """

    def __init__(self, kept_NV: Tensor | None, weight_VH: Tensor) -> None:
        self.kept_NV, self.weight_VH = kept_NV, weight_VH
        self._first_NV: Tensor | None = None

    def product(self, states_NH: Tensor, chunk: slice) -> Tensor:
        """[N, V] of the chunk's positions."""
        states_NH, weight_VH = states_NH[chunk].to(self.weight_VH.dtype), self.weight_VH
        if self.kept_NV is not None:
            out_NV = self.kept_NV[chunk]
        elif self._first_NV is None:
            out_NV = self._first_NV = weight_VH.new_empty(len(states_NH), len(weight_VH))
        else:
            out_NV = self._first_NV[: len(states_NH)]
        entries = len(weight_VH) if weight_VH.is_cuda else ENTRIES
        for start in range(0, len(weight_VH), entries):
            these = slice(start, start + entries)
            torch.matmul(states_NH, weight_VH[these].t(), out=out_NV[:, these])
        return out_NV


def _logits(product_NV: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Logits in float32 at least, in the product's memory if it has that type; padding gets no probability."""
    logits_NV = product_NV.to(torch.promote_types(product_NV.dtype, torch.float32))
    if vocabulary.logit_scale != 1:
        logits_NV.mul_(vocabulary.logit_scale)
    return vocabulary.mask_padding_(logits_NV)
