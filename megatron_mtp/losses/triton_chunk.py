"""Losses and gradients of a chunk by Triton kernels, on a GPU.

The logits stay in the type of the matrix product: there is no float32 copy and no pass over them other than the two or
three of the kernels. Ranks with vocabulary slices exchange row statistics once, and overlap statistics once more,
because min(p, q) needs both normalizers. Losses without a kernel, and other devices, use the TokenLoss itself, which
defines what the kernels compute.

Letters in names: N rows (positions times depths), D depths, T rows of the trunk, K rows of either, V entries of this
rank's slice of the vocabulary, W its slice of all tokens, X one of both.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mtp.losses.distillation import (
    LARGEST_GAP,
    AcceptedLength,
    AdaptiveDivergence,
    Divergence,
    NegativeLogOverlap,
    OverlapLoss,
    TotalVariation,
)
from megatron_mtp.losses.token_loss import CrossEntropy, TokenLoss
from megatron_mtp.megatron.machine import why_no_launcher, why_not
from megatron_mtp.model.draft_vocabulary import NOT_DRAFTED
from megatron_mtp.model.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK, WARPS = 4096, 8
"""Logits of a row that a program holds in registers at once, and the warps that share them."""

GAP = {"LARGEST_GAP": LARGEST_GAP, "FLOOR": math.exp(-LARGEST_GAP)}


@dataclass(frozen=True)
class Products:
    """Inputs of a kernel. The kernel overwrites the products with gradients.

    Attributes:
        products_NV: states times output layer, which are logits before `vocabulary.logit_scale`.
        labels_N: tokens, or their indices in a draft vocabulary.
        mask_N: float32 weights of the rows.
        scale_D: gradient factor of each depth; consecutive rows cycle through the depths.
        teacher_TW: the trunk's products, over V or W.
        taught_N: index of the trunk's row that each row is compared with.
        vocabulary: meaning of the columns.
    """

    products_NV: Tensor
    labels_N: Tensor
    mask_N: Tensor
    scale_D: Tensor
    teacher_TW: Tensor | None
    taught_N: Tensor | None
    vocabulary: Vocabulary

    def launch(self) -> dict[str, int]:
        """Return the constants of the kernels that write gradients, including sizes, which are equal for all chunks."""
        entries = self.products_NV.size(1)
        tokens = self.vocabulary.tokens_of(self.products_NV).size(1)
        return {"ENTRIES": entries, "TOKENS": tokens, **_program(entries)}

    def teacher(self) -> tuple[tuple[Tensor, int, Tensor, Tensor], Tensor | None]:
        """Return the trunk's products, their stride, each row's index and the pointer for the kernel, and the columns.

        Without columns, the products again.
        """
        assert self.teacher_TW is not None
        assert self.taught_N is not None
        drafts = self.vocabulary.draft_vocabulary
        is_gathered = drafts is not None and self.teacher_TW.size(1) != self.products_NV.size(1)
        columns_V = drafts.rows_K if drafts is not None and is_gathered else None
        pointer = self.taught_N if columns_V is None else columns_V
        return (self.teacher_TW, self.teacher_TW.stride(0), self.taught_N, pointer), columns_V

    def statistics(self, products_KX: Tensor, factor: float, columns_V: Tensor | None = None) -> Tensor:
        """Compute [K, 3] for this rank's slice: largest logit, sum of exponentials relative to it, sum of logits."""
        from megatron_mtp.losses import triton_kernels

        tokens = self.vocabulary.tokens_of(products_KX).size(1) if columns_V is None else len(columns_V)
        found_K3 = products_KX.new_empty(len(products_KX), 3, dtype=torch.float32)
        pointers = products_KX, products_KX.stride(0), products_KX if columns_V is None else columns_V, found_K3
        constants = {"TOKENS": tokens, "GATHERED": columns_V is not None, **_program(tokens)}
        triton_kernels.statistics[(len(products_KX),)](*pointers, factor, **constants)
        return found_K3

    def whole(self, factor: float, rows: "list[tuple[Tensor, Tensor | None]]") -> list[Tensor]:
        """Compute largest logit and sum of exponentials relative to it, [K, 2], over all ranks, with one exchange.

        Args:
            rows: products [K, X], and which columns to use, if not all.
        """
        own_K3 = torch.cat([self.statistics(products_KX, factor, columns_V) for products_KX, columns_V in rows])
        largest_K1, total_K1, _ = self.vocabulary.joined(own_K3[:, :1], own_K3[:, 1:2])
        return [*torch.cat([largest_K1, total_K1], 1).split([len(products_KX) for products_KX, _ in rows])]

    def weights_N(self) -> Tensor:
        """Return the gradient factor of each row."""
        return (self.mask_N.view(-1, len(self.scale_D)) * self.scale_D).flatten()


def has_kernel(token_loss: TokenLoss, dtype: torch.dtype, vocabulary: Vocabulary) -> bool:
    """Return whether every rank has a GPU kernel for the loss. A subclass of a loss with a kernel has none."""
    is_fitting = dtype in DTYPES and type(token_loss) in KERNELS
    return is_fitting and (why_no_kernels() is None if vocabulary.group is None else _all_launch(vocabulary.group))


def leaves_parts(token_loss: TokenLoss) -> bool:
    """Return whether the kernels leave each rank a part of the losses, to be summed after all chunks."""
    return type(token_loss) is Divergence


@cache
def _all_launch(group: ProcessGroup) -> bool:
    """Return whether all ranks can run the kernels: ranks that exchange statistics must all run them, or none."""
    launches = torch.tensor(float(why_no_kernels() is None), device="cuda")
    torch.distributed.all_reduce(launches, torch.distributed.ReduceOp.MIN, group)
    return bool(launches)


@cache
def why_no_kernels() -> str | None:
    """Return the reason why Triton kernels cannot be launched here, and warn once; None if they can."""
    reason = why_not("triton")
    if reason is None:
        from megatron_mtp.losses import triton_kernels

        try:
            triton_kernels.trial[(1,)](torch.empty(1, device="cuda"))
        except Exception as error:  # the compiler, the driver and Triton raise any type
            reason = why_no_launcher() or f"{type(error).__name__}: {error}"[:200]
    if reason is not None:
        logger.warning("the losses run without Triton's kernels, slower and in more memory: %s", reason)
    return reason


def losses_(token_loss: TokenLoss, given: Products) -> Tensor:
    """Compute losses in nats [N], float32. Overwrite the products with the gradient of the depths' scaled sums."""
    scale_D = (given.scale_D * given.vocabulary.logit_scale).to(given.mask_N.dtype)  # from products to logits
    given = replace(given, labels_N=given.labels_N.contiguous(), mask_N=given.mask_N.contiguous(), scale_D=scale_D)
    losses_N = torch.empty_like(given.mask_N)
    KERNELS[type(token_loss)](token_loss, given, losses_N)
    return losses_N


def _cross_entropy(loss: CrossEntropy, given: Products, losses_N: Tensor) -> None:
    from megatron_mtp.losses import triton_kernels

    products_NV, vocabulary, factor = given.products_NV, given.vocabulary, given.vocabulary.logit_scale
    local_N1, is_own_N1 = vocabulary.own(given.labels_N)
    label_N1 = products_NV.gather(1, local_N1).float().mul_(factor).masked_fill_(~is_own_N1, 0)
    own_N3 = given.statistics(products_NV, factor)
    linear_N2 = torch.cat([label_N1, own_N3[:, 2:]], 1)
    largest_N1, total_N1, linear_N2 = vocabulary.joined(own_N3[:, :1], own_N3[:, 1:2], linear_N2)
    losses_N.copy_(loss.of_logits((total_N1.log() + largest_N1)[:, 0], linear_N2, vocabulary.size))
    weights_N = given.weights_N()
    if vocabulary.draft_vocabulary is not None:
        for values_N in (losses_N, weights_N):
            values_N.masked_fill_(given.labels_N == NOT_DRAFTED, 0)
    triton_kernels.cross_entropy[(len(products_NV),)](
        products_NV,
        products_NV.stride(0),
        local_N1.masked_fill(~is_own_N1, -1),
        weights_N,
        torch.cat([largest_N1, total_N1], 1),
        factor,
        vocabulary.size,
        SMOOTHING=loss.label_smoothing,
        Z_LOSS=loss.z_loss,
        **given.launch(),
    )


def _divergence(loss: Divergence, given: Products, losses_N: Tensor) -> None:
    from megatron_mtp.losses import triton_kernels

    temperature, factor = loss.temperature, given.vocabulary.logit_scale / loss.temperature
    teacher, columns_V = given.teacher()
    whole = given.whole(factor, [(given.products_NV, None), (teacher[0], columns_V)])
    products = given.products_NV, given.products_NV.stride(0), *teacher, *whole
    constants = {"GATHERED": columns_V is not None, **GAP, **given.launch()}
    triton_kernels.divergence[(len(losses_N),)](
        *products, given.weights_N(), losses_N, factor, temperature, **constants
    )


def _overlap(loss: OverlapLoss, given: Products, losses_N: Tensor) -> None:
    """Launch two kernels; between them, `joined` returns the weights of a position's depths."""
    from megatron_mtp.losses import triton_kernels

    rows, temperature, factor = len(losses_N), loss.temperature, given.vocabulary.logit_scale / loss.temperature
    teacher, columns_V = given.teacher()
    compared: list[tuple[Tensor, Tensor | None]] = [(given.products_NV, None), (teacher[0], None)]
    if loss.reads_divergence and columns_V is not None:
        compared.append((teacher[0], columns_V))
    whole = given.whole(factor, compared)
    products = given.products_NV, given.products_NV.stride(0), *teacher, *whole[:2], whole[-1]
    constants = {"GATHERED": columns_V is not None, "DIVERGES": loss.reads_divergence, **given.launch()}
    found_N4 = losses_N.new_empty(rows, 4)
    triton_kernels.overlap[(rows,)](*products, found_N4, factor, temperature, **GAP, **constants)
    largest_N1, totals_N2, kd_N1 = found_N4.split([1, 2, 1], 1)
    of_slice = largest_N1.expand_as(totals_N2), totals_N2, kd_N1
    largest_N2, totals_N2, kd_N1 = given.vocabulary.joined(*of_slice)
    log_overlap_N = totals_N2[:, 0].log() + largest_N2[:, 0]
    of_overlap = loss.of_overlap(log_overlap_N, kd_N1[:, 0])
    losses_N.copy_(of_overlap.value_N)
    losses_ND = losses_N.view(-1, len(given.scale_D))
    joined_N = loss.joined(losses_ND, given.scale_D.expand_as(losses_ND)).slopes_ND.flatten().contiguous()
    by_both = of_overlap.slope_N, of_overlap.divergence_slope_N
    slopes = [joined_N if slope_N is None else slope_N * joined_N for slope_N in by_both]
    of_rows = log_overlap_N, totals_N2[:, 1] / totals_N2[:, 0], given.mask_N, *slopes
    triton_kernels.overlap_gradient[(rows,)](*products, *of_rows, factor, temperature, **constants)


def _program(entries: int) -> dict[str, int]:
    """Return how many logits of a row a program holds in registers at once, and the warps that share them."""
    return {"BLOCK": min(BLOCK, 1 << (entries - 1).bit_length()), "num_warps": WARPS}


KERNELS: dict[type[TokenLoss], Callable[[Any, Products, Tensor], None]] = {
    CrossEntropy: _cross_entropy,
    Divergence: _divergence,
    **dict.fromkeys((TotalVariation, NegativeLogOverlap, AdaptiveDivergence, AcceptedLength), _overlap),
}
"""Kernels by loss; each writes losses, and overwrites the products with the gradient."""
