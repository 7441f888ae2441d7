"""The causal mask, for queries at any positions: whole sequences, ranks of context parallelism, rows of a draft."""

import torch
from torch import Tensor


def causal_mask(positions: Tensor, keys: int) -> Tensor:
    """True where a query must not look, [..., S, keys]: at the keys that stand after its position.

    Args:
        positions: of the queries [..., S], counted as the keys are, from 0.
    """
    return torch.arange(keys, device=positions.device) > positions.unsqueeze(-1)


def square_mask(positions: int, device: torch.device | str) -> Tensor:
    """The mask of a whole sequence as Megatron's modules take it, [1, 1, S, S]."""
    return causal_mask(torch.arange(positions, device=device), positions)[None, None]
