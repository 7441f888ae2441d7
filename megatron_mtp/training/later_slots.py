"""The trunk's word on what a depth drafts stands d slots later: where that slot is, and what it holds.

Letters in names: S sequence, R context-parallel ranks.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class LaterSlots:
    """Values at the slots d = 1 .. D later, some of which stand on other context-parallel ranks.

    Only those few are exchanged: the ones next to where the sequence was cut. `lookup` puts them behind this rank's own
    values, `where` says at which row of the result the value of each slot's d-th next one stands.
    """

    def __init__(self, slots_S: Tensor, depths: int, cp_group: ProcessGroup) -> None:
        self.slots_S, self.group = slots_S, cp_group
        ranks = cp_group.size()
        of_ranks = [torch.empty_like(slots_S) for _ in range(ranks)]
        torch.distributed.all_gather(of_ranks, slots_S, group=cp_group)
        slots_RS = torch.stack(of_ranks)
        self.last = slots_RS.numel() - 1
        self.rank_of = torch.empty(self.last + 1, dtype=torch.long, device=slots_S.device)
        self.row_of = torch.empty_like(self.rank_of)
        self.rank_of[slots_RS] = torch.arange(ranks, device=slots_S.device).unsqueeze(1)
        self.row_of[slots_RS] = torch.arange(slots_S.numel(), device=slots_S.device)
        first = [torch.arange(depth, self.last + 1, device=slots_S.device) for depth in range(1, depths + 1)]
        crossing = [slot[self.rank_of[slot] != self.rank_of[slot - depth]] for depth, slot in enumerate(first, start=1)]
        self.shared = torch.cat(crossing).unique()

    def lookup(self, values_S: Tensor) -> Tensor:
        """[S + shared slots, ...]; every rank of the group calls it with values of its own slots."""
        if not self.shared.numel():
            return values_S
        shared = values_S.new_zeros((self.shared.numel(), *values_S.shape[1:]))
        own = self.rank_of[self.shared] == self.group.rank()
        shared[own] = values_S[self.row_of[self.shared[own]]]
        torch.distributed.all_reduce(shared, group=self.group)
        return torch.cat([values_S, shared])

    def where(self, depth: int) -> Tensor:
        """Rows of the result of `lookup`, [S]; beyond the end of the sequence that of the last slot."""
        later_S = (self.slots_S + depth).clamp(max=self.last)
        own_S = self.rank_of[later_S] == self.group.rank()
        return torch.where(own_S, self.row_of[later_S], self.slots_S.numel() + torch.searchsorted(self.shared, later_S))
