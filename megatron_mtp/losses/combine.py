"""How the trunk's and the depths' sums of losses make one scalar: masks, weights and normaliser in one place.

Megatron's schedule divides what is returned here either by this microbatch's token count (default) or, with
`--calculate-per-token-loss`, every gradient by the token count of the global batch. So the scalar is

    default     sum_main + sum_d w_d T sum_d / T_d     then divided by T
    per token   sum_main + sum_d w_d sum_d             then divided by the global T

with w_d = lambda / D (times the depth's own weight), T the main tokens and T_d those of depth d. The second is the
paper's normaliser (arXiv:2412.19437, eq. 24 divides every depth by T), and does not depend on how a global batch is
cut. Under context parallelism each rank has a part of the sums, while T and T_d are those of the whole microbatch, so
that the ranks' scalars add up to its scalar. An empty mask gives loss 0 and gradient 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossSum:
    """A masked sum, its tokens, and those of the whole microbatch of which it is a part; scalars on the device."""

    total: Tensor
    tokens: Tensor
    whole_tokens: Tensor

    def report(self) -> Tensor:
        """[2], float: what Megatron's logs add up over microbatches and ranks, then divide.

        The smallest of counts stands for none, so that a depth without tokens logs 0 and not NaN.
        """
        return torch.stack([self.total.detach().float(), self.tokens.float().clamp(min=1e-20)])


def sum_losses(losses_BS: Tensor, mask_BS: Tensor, whole_tokens: Tensor) -> LossSum:
    """The sum over unmasked slots; a masked slot does not count, whatever its loss."""
    mask_BS = mask_BS.float()
    counted_BS = losses_BS.float().masked_fill(mask_BS == 0, 0) * mask_BS
    return LossSum(counted_BS.sum(), mask_BS.sum(), whole_tokens)


def depth_scales(whole_tokens: Tensor, weights: Sequence[float], per_token: bool) -> list[Tensor]:
    """By what the masked sum of every depth is multiplied in the scalar that goes to Megatron's schedule.

    Args:
        whole_tokens: [1 + D], unmasked tokens of the trunk and of every depth in the whole microbatch.
        weights: of depth 1 .. D; lambda / D each, times the depth's own weight.
        per_token: whether `--calculate-per-token-loss` is on.
    """
    main_tokens, *depth_tokens = whole_tokens
    if per_token:
        return [torch.full_like(main_tokens, weight) for weight in weights]
    return [
        weight * main_tokens.int() / tokens.clamp(min=1) for weight, tokens in zip(weights, depth_tokens, strict=True)
    ]
