"""A chunk's losses and gradients in one Triton kernel or two, where the products are on a GPU and one rank holds them.

The products keep their type: there is no float32 copy of the logits, and no pass over them but the kernel's two or
four. Losses without a kernel, other devices and a vocabulary that is cut over ranks take the TokenLoss itself, which
says what a kernel has to compute.

Letters in names: N rows (positions times depths), D depths, T rows of the trunk, V entries of the vocabulary, W all
tokens.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.losses.chain import AcceptedLength
from megatron_mtp.losses.cross_entropy import CrossEntropy
from megatron_mtp.losses.distillation import LARGEST_GAP, Divergence
from megatron_mtp.losses.overlap import AdaptiveDivergence, NegativeLogOverlap, OverlapLoss, TotalVariation
from megatron_mtp.losses.token_loss import TokenLoss
from megatron_mtp.losses.vocabulary import Vocabulary
from megatron_mtp.runtime import why_no_launcher, why_not

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK, WARPS = 4096, 8
"""Logits of a row that a program has in registers at once, and the warps that share them."""

GAP = {"LARGEST_GAP": LARGEST_GAP, "FLOOR": math.exp(-LARGEST_GAP)}
FOUND = 9
"""Numbers of a row that the first kernel of the overlap leaves to the second; the first two are log a and kd."""


@dataclass(frozen=True)
class Products:
    """Inputs of a kernel; it overwrites the products with gradients.

    Attributes:
        products_NV: states times the head: logits before `vocabulary.logit_scale`.
        labels_N: tokens, or their numbers in a draft vocabulary.
        mask_N: float32 weights of the rows.
        scale_D: by which the gradients of every depth are multiplied, whose rows take turns.
        teacher_TW: the trunk's products, over V or W.
        taught_N: which of them a row is compared with.
        vocabulary: what the columns stand for.
    """

    products_NV: Tensor
    labels_N: Tensor
    mask_N: Tensor
    scale_D: Tensor
    teacher_TW: Tensor | None
    taught_N: Tensor | None
    vocabulary: Vocabulary

    def launch(self) -> dict[str, int]:
        """Constants of every kernel; a vocabulary's sizes are among them, since they are the same for all chunks."""
        entries = self.products_NV.size(1)
        tokens = self.vocabulary.tokens_of(self.products_NV).size(1)
        block = min(BLOCK, 1 << (entries - 1).bit_length())
        return {"ENTRIES": entries, "TOKENS": tokens, "BLOCK": block, "num_warps": WARPS}

    def teacher(self) -> tuple[tuple[Tensor, int, Tensor, Tensor], bool]:
        """The trunk's products, their stride, a row's own one, the columns of the entries; whether those are needed."""
        assert self.teacher_TW is not None
        assert self.taught_N is not None
        drafts = self.vocabulary.draft_vocabulary
        is_gathered = drafts is not None and self.teacher_TW.size(1) != self.products_NV.size(1)
        columns = drafts.rows_K if drafts is not None and is_gathered else self.taught_N
        return (self.teacher_TW, self.teacher_TW.stride(0), self.taught_N, columns), is_gathered

    def weights_N(self) -> Tensor:
        """The factor of every row's gradient."""
        return (self.mask_N.view(-1, len(self.scale_D)) * self.scale_D).flatten()


def has_kernel(token_loss: TokenLoss, products_NV: Tensor, vocabulary: Vocabulary) -> bool:
    """Return whether there is a kernel for the loss here; a loss that extends one has none."""
    is_fitting = products_NV.is_cuda and products_NV.dtype in DTYPES and vocabulary.ranks == 1
    return is_fitting and type(token_loss) in KERNELS and why_no_kernels() is None


@cache
def why_no_kernels() -> str | None:
    """Why Triton's kernels cannot be launched here, warned of once; None if one was."""
    reason = why_not("triton")
    if reason is None:
        from megatron_mtp.losses import triton_kernels

        try:
            triton_kernels.trial[(1,)](torch.empty(1, device="cuda"))
        except Exception as error:  # of a compiler, a driver or Triton: of any kind
            reason = why_no_launcher() or f"{type(error).__name__}: {error}"[:200]
    if reason is not None:
        logger.warning("the losses run without Triton's kernels, slower and in more memory: %s", reason)
    return reason


def losses_(token_loss: TokenLoss, given: Products) -> Tensor:
    """Losses in nats [N], float32; the products are overwritten with the gradient of the scaled sums of the depths."""
    scale_D = (given.scale_D * given.vocabulary.logit_scale).to(given.mask_N.dtype)  # the factor that products have
    given = replace(given, labels_N=given.labels_N.contiguous(), mask_N=given.mask_N.contiguous(), scale_D=scale_D)
    losses_N = torch.empty_like(given.mask_N)
    KERNELS[type(token_loss)](token_loss, given, losses_N)
    return losses_N


def _cross_entropy(loss: CrossEntropy, given: Products, losses_N: Tensor) -> None:
    from megatron_mtp.losses import triton_kernels

    products_NV, vocabulary = given.products_NV, given.vocabulary
    triton_kernels.cross_entropy[(len(products_NV),)](
        products_NV,
        products_NV.stride(0),
        given.labels_N,
        given.weights_N(),
        losses_N,
        vocabulary.logit_scale,
        vocabulary.size,
        SMOOTHING=loss.label_smoothing,
        Z_LOSS=loss.z_loss,
        DRAFTED=vocabulary.draft_vocabulary is not None,
        **given.launch(),
    )


def _divergence(loss: Divergence, given: Products, losses_N: Tensor) -> None:
    from megatron_mtp.losses import triton_kernels

    temperature = loss.temperature
    teacher, is_gathered = given.teacher()
    triton_kernels.divergence[(len(losses_N),)](
        given.products_NV,
        given.products_NV.stride(0),
        *teacher,
        given.weights_N(),
        losses_N,
        given.vocabulary.logit_scale / temperature,
        temperature,
        GATHERED=is_gathered,
        **GAP,
        **given.launch(),
    )


def _overlap(loss: OverlapLoss, given: Products, losses_N: Tensor) -> None:
    """Two kernels: between them `joined` says how much the depths of a position count."""
    from megatron_mtp.losses import triton_kernels

    rows, temperature = len(losses_N), loss.temperature
    teacher, is_gathered = given.teacher()
    found_NF = losses_N.new_empty(rows, FOUND)
    products = given.products_NV, given.products_NV.stride(0), *teacher, found_NF
    constants = {"GATHERED": is_gathered, "DIVERGES": loss.reads_divergence, "FOUND": FOUND, **given.launch()}
    factor = given.vocabulary.logit_scale / temperature
    tokens = given.vocabulary.tokens_of(teacher[0]).size(1)
    triton_kernels.overlap[(rows,)](*products, factor, temperature, TEACHER_TOKENS=tokens, **GAP, **constants)
    of_overlap = loss.of_overlap(found_NF[:, 0], found_NF[:, 1])
    losses_N.copy_(of_overlap.value_N)
    losses_ND = losses_N.view(-1, len(given.scale_D))
    joined_N = loss.joined(losses_ND, given.scale_D.expand_as(losses_ND)).slopes_ND.flatten().contiguous()
    by_both = of_overlap.slope_N, of_overlap.divergence_slope_N
    slopes = [joined_N if slope_N is None else slope_N * joined_N for slope_N in by_both]
    triton_kernels.overlap_gradient[(rows,)](*products, given.mask_N, *slopes, factor, temperature, **constants)


KERNELS: dict[type[TokenLoss], Callable[[Any, Products, Tensor], None]] = {
    CrossEntropy: _cross_entropy,
    Divergence: _divergence,
    **dict.fromkeys((TotalVariation, NegativeLogOverlap, AdaptiveDivergence, AcceptedLength), _overlap),
}
"""Each writes losses, and the gradient over the products."""
