"""Which slots of a sequence every context-parallel rank holds.

Every document is cut into 2R chunks of equal length; of R ranks, rank r holds chunks r and 2R-1-r, so that all have as
much causal attention to compute. Two ranks and two documents of four slots:

    slots   0 1 2 3 | 4 5 6 7
    rank    0 1 1 0 | 0 1 1 0
"""

import torch
from torch import Tensor


def slots_of_ranks(offsets: Tensor, ranks: int) -> Tensor:
    """The slots of every rank, [R, T / R], in the order in which it holds them.

    Args:
        offsets: [documents + 1], where each document starts, and T; a document's length is a multiple of 2R.
        ranks: R, size of the context-parallel group.

    Raises:
        ValueError: a document cannot be cut into 2R chunks of equal length.
    """
    lengths = offsets.diff()
    if (lengths % (2 * ranks)).any():
        raise ValueError(
            f"a packed batch has documents of {sorted(set(lengths.tolist()))} slots, but --context-parallel-size "
            f"{ranks} cuts each into {2 * ranks} equal chunks; pad every document to a multiple of {2 * ranks} slots."
        )
    slot = torch.arange(int(offsets[-1]), device=offsets.device)
    document = torch.searchsorted(offsets[1:].contiguous(), slot, right=True)
    chunk = (slot - offsets[document]) // (lengths[document] // (2 * ranks))
    rank = torch.minimum(chunk, 2 * ranks - 1 - chunk)
    return rank.argsort(stable=True).view(ranks, -1)
