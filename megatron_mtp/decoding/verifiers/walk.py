"""One pass over the nodes of a draft: how most rules find the accepted path.

A node stands after its parent. So one pass tries the candidates of the row that the path has reached, moves on to the
accepted one, and finds the candidates of that one further right.

Letters in names: B batch, N drafted nodes, R = N + 1 rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_mtp.decoding.types import Draft


def walk(draft: Draft, accepts: Callable[[int, Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The rows on the accepted path [B, R], and the last of them [B].

    Args:
        accepts: called for every node in turn with its number, the row that each sequence has reached and whether the
            node is a candidate there; returns where it is accepted, and is ignored where it is no candidate.
    """
    parents_BN, valid_BN = draft.parents(), draft.valid()
    here_B = torch.zeros_like(parents_BN[:, 0]) if draft.nodes else parents_BN.new_zeros(parents_BN.size(0))
    kept = [torch.ones_like(here_B, dtype=torch.bool)]
    for node in range(draft.nodes):
        tried_B = (parents_BN[:, node] == here_B) & valid_BN[:, node]
        accepted_B = accepts(node, here_B, tried_B) & tried_B
        here_B = torch.where(accepted_B, node + 1, here_B)
        kept.append(accepted_B)
    return torch.stack(kept, dim=1), here_B


def row_of(values_BRV: Tensor, row_B: Tensor) -> Tensor:
    """[B, V]: one row of every sequence."""
    return values_BRV.gather(1, row_B.view(-1, 1, 1).expand(-1, 1, values_BRV.size(-1))).squeeze(1)


def chosen(values_BV: Tensor, token_B: Tensor) -> Tensor:
    """[B]: the value of one token of every sequence."""
    return values_BV.gather(1, token_B.unsqueeze(1)).squeeze(1)
