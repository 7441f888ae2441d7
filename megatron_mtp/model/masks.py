"""Which keys a query may attend to: masks for queries at any positions. Letters in names: S positions of queries."""

import torch
from torch import Tensor


def causal_mask(positions: Tensor, keys: int) -> Tensor:
    """Return a mask [..., S, keys] that is True where attention is not allowed: at keys after the query's position.

    Args:
        positions: positions of the queries [..., S]; like those of keys, they start at 0.
    """
    return torch.arange(keys, device=positions.device) > positions.unsqueeze(-1)


def in_window(ahead: Tensor, window: tuple[int, int]) -> Tensor:
    """Return whether keys are in the windows of queries, given how many positions they are ahead; -1 means no limit."""
    before, after = window
    inside = ahead >= -before if before >= 0 else torch.ones_like(ahead, dtype=torch.bool)
    return inside if after < 0 else inside & (ahead <= after)
