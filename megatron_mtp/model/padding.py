"""Rows of the embedding and the head that stand for no token: Megatron appends them to give ranks slices of one size.

    331 tokens in 512 rows, over two ranks      rank 0: 256 tokens      rank 1: 75 tokens and 181 rows of padding

Their number depends on the layout. They must have no probability, or the losses would depend on the layout too.
"""

import torch
from torch import Tensor


def tokens_of_slice(vocab_size: int | None, rows: int, rank: int) -> int:
    """The number of a rank's `rows` that are tokens; they are the first ones.

    Args:
        vocab_size: tokens of the whole vocabulary; None if every row is one.
        rows: of one rank's slice.
        rank: the owner of the slice.
    """
    return rows if vocab_size is None else min(max(vocab_size - rank * rows, 0), rows)


@torch.no_grad()
def mask_padding_(logits: Tensor, tokens: int) -> Tensor:
    """Give the entries [..., tokens:] probability 0, in place.

    The value is finite, so that a rank with a slice of padding alone computes no inf - inf. Where the probability of a
    softmax is 0, so is its gradient: autograd need not record this.
    """
    if tokens < logits.size(-1):
        logits[..., tokens:] = max(torch.finfo(logits.dtype).min, -1e30)
    return logits
