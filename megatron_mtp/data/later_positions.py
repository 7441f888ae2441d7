"""Values d positions later, also from other ranks of the sequence, with their gradients.

The trunk predicts the token that depth d drafts at position i at position i + d.

Letters in names: S sequence, R ranks that hold parts of it, by context or sequence parallelism.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.nn.functional import all_reduce


class LaterPositions:
    """Where the positions d = 1 .. D later are; other ranks hold some of them.

    Only positions next to a cut of the sequence are exchanged. `lookup` appends their values to this rank's own, and
    `where` gives the rows of the result.

    Args:
        positions_S: the numbers of this rank's positions in the whole sequence.
        depths: D.
        group: the ranks that hold the sequence, each its own part.
    """

    def __init__(self, positions_S: Tensor, depths: int, group: ProcessGroup) -> None:
        self.positions_S, self.group = positions_S, group
        ranks = group.size()
        of_ranks = [torch.empty_like(positions_S) for _ in range(ranks)]
        torch.distributed.all_gather(of_ranks, positions_S, group=group)
        positions_RS = torch.stack(of_ranks)
        self.last = positions_RS.numel() - 1
        self.rank_of = torch.empty(self.last + 1, dtype=torch.long, device=positions_S.device)
        self.row_of = torch.empty_like(self.rank_of)
        self.rank_of[positions_RS] = torch.arange(ranks, device=positions_S.device).unsqueeze(1)
        self.row_of[positions_RS] = torch.arange(positions_S.numel(), device=positions_S.device)
        first = [torch.arange(depth, self.last + 1, device=positions_S.device) for depth in range(1, depths + 1)]
        crossing = [
            position[self.rank_of[position] != self.rank_of[position - depth]]
            for depth, position in enumerate(first, start=1)
        ]
        self.shared = torch.cat(crossing).unique()

    def lookup(self, values_S: Tensor) -> Tensor:
        """[S + exchanged positions, ...]; every rank of the group calls it with the values of its own positions."""
        if not self.shared.numel():
            return values_S
        own = self.rank_of[self.shared] == self.group.rank()
        shared = values_S.new_zeros((self.shared.numel(), *values_S.shape[1:]))
        shared = shared.index_put((own.nonzero()[:, 0],), values_S[self.row_of[self.shared[own]]])
        return torch.cat([values_S, all_reduce(shared, group=self.group)])

    def where(self, depth: int) -> Tensor:
        """The rows, [S], in the result of `lookup` that are `depth` positions later; at the end, the last position."""
        later_S = (self.positions_S + depth).clamp(max=self.last)
        own_S = self.rank_of[later_S] == self.group.rank()
        return torch.where(
            own_S, self.row_of[later_S], self.positions_S.numel() + torch.searchsorted(self.shared, later_S)
        )
