"""Which positions of a sequence each context-parallel rank holds.

Every document is cut into 2R chunks of equal length for R ranks. Rank r holds chunks r and 2R-1-r, so that all ranks
compute the same amount of causal attention. Two ranks and two documents of four positions:

    position   0 1 2 3 | 4 5 6 7
    rank       0 1 1 0 | 0 1 1 0
"""

import torch
from torch import Tensor


def positions_of_ranks(offsets: Tensor, ranks: int) -> Tensor:
    """The positions of every rank, [R, T / R], in the order in which the rank holds them.

    Args:
        offsets: start of each document, and T, [documents + 1]; the length of a document is a multiple of 2R.
        ranks: size R of the context-parallel group.

    Raises:
        ValueError: a document cannot be cut into 2R chunks of equal length.
    """
    lengths = offsets.diff()
    if (lengths % (2 * ranks)).any():
        raise ValueError(
            f"a packed batch has documents of {sorted(set(lengths.tolist()))} positions, but --context-parallel-size "
            f"{ranks} cuts each into {2 * ranks} equal chunks; pad every document to a multiple of {2 * ranks}."
        )
    position = torch.arange(int(offsets[-1]), device=offsets.device)
    document = torch.searchsorted(offsets[1:].contiguous(), position, right=True)
    chunk = (position - offsets[document]) // (lengths[document] // (2 * ranks))
    rank = torch.minimum(chunk, 2 * ranks - 1 - chunk)
    return rank.argsort(stable=True).view(ranks, -1)
