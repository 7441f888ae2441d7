"""Frozen trunk (--mtp-train-only): no gradients for the trunk, and zero gradients to the previous pipeline stage."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron_mtp.spec.head import HEADS


def freeze_trunk(model: nn.Module) -> None:
    """Turn gradients off for everything but the MTP block: layers, norms, embedding and its copy, output layer."""
    for module in trunk_modules(model):
        module.requires_grad_(False)


def trunk_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Return the modules of a stage that belong to the trunk."""
    return (module for name, module in model.named_children() if name not in HEADS)


def answer_with_zeros(hidden_SBH: Tensor, stage_input_SBH: Tensor) -> Tensor:
    """Return the hidden state [S, B, H]; its backward pass gives the stage's input [S, B, ..] a gradient of zeros.

    The pipeline schedule waits for a gradient from every stage but the first, even if nothing there is trained.
    """
    apply: Callable[[Tensor, Tensor], Tensor] = _ZeroGradient.apply  # torch annotates it since 2.15
    return apply(hidden_SBH, stage_input_SBH)


class _ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_SBH: Tensor, stage_input_SBH: Tensor) -> Tensor:
        ctx.like = stage_input_SBH.shape, stage_input_SBH.dtype, stage_input_SBH.device
        return hidden_SBH.clone()  # the schedule cannot free a view

    @staticmethod
    def backward(ctx: Any, gradient_SBH: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.like
        return gradient_SBH, torch.zeros(shape, dtype=dtype, device=device)
