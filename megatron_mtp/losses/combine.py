"""One scalar out of the trunk's and the depths' per-token losses: masks, weights and normaliser in one place.

Megatron's schedule divides what is returned here either by this microbatch's token count (default) or, with
`--calculate-per-token-loss`, every gradient by the token count of the global batch. So the scalar is

    default     sum_main + T * (lambda / D) * sum_d sum_d / T_d     then divided by T
    per token   sum_main +     (lambda / D) * sum_d sum_d           then divided by the global T

with T the main tokens and T_d those of depth d. The second is the paper's normaliser (arXiv:2412.19437, eq. 24 divides
every depth by T), and does not depend on how a global batch is cut. Under context parallelism each rank has a part of
the sums, while T and T_d are those of the whole microbatch, so that the ranks' scalars add up to its scalar. An empty
mask gives loss 0 and gradient 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mtp.data.batch import DepthBatch


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


def sum_depths(depth_losses: Sequence[Tensor], batch: DepthBatch) -> list[LossSum]:
    """The masked sum of every depth; `depth_losses` holds [B, S] each."""
    triples = zip(depth_losses, batch.loss_mask_DBS, batch.whole_tokens[1:], strict=True)
    return [sum_losses(*triple) for triple in triples]


def combine(main: LossSum, depths: Sequence[LossSum], scaling_factor: float, per_token: bool) -> Tensor:
    """The scalar to return to Megatron's schedule, before its division by tokens.

    Args:
        main: the trunk's.
        depths: of depth 1 .. D; may be empty.
        scaling_factor: lambda, `mtp_loss_scaling_factor`.
        per_token: whether `--calculate-per-token-loss` is on.
    """
    if not depths:
        return main.total
    weight = scaling_factor / len(depths)
    if per_token:
        return main.total + weight * torch.stack([depth.total for depth in depths]).sum()
    means = torch.stack([depth.total / depth.whole_tokens.clamp(min=1) for depth in depths])
    return main.total + weight * main.whole_tokens.int() * means.sum()
