"""Hidden-state mixing: in training, the states that a depth continues from are of different depths (--mtp-hsm).

Depth d at position i reads the state of depth d - 1, which predicts token i + d. The state of depth d - 1 - k at
position i + k predicts the same token: it is k positions later and k depths shallower. One of the d states is taken,
each with the same probability. Depth 3 has three to choose from, and at the end of a document fewer:

    position              0        1        2        3        4 |
    k = 0, the newest     h_2(0)   h_2(1)   h_2(2)   h_2(3)   h_2(4)
    k = 1                 h_1(1)   h_1(2)   h_1(3)   h_1(4)   -
    k = 2, the trunk's    h_0(2)   h_0(3)   h_0(4)   -        -

Where the choice falls on one that is beyond the end, the newest is taken.

Letters in names: D depths, S sequence, B batch, H hidden.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_mtp.data.batch import LaterPositions


def drawn_ages(depths: int, seed: tuple[int, int], positions_S: Tensor, whole: int) -> Tensor:
    """k for every depth and position, [D, S]; depth 1 has the trunk's state alone.

    They depend on the seed, which is (run, step), and on the position alone: all ranks of all layouts draw the same.

    Args:
        positions_S: these positions' numbers in the whole sequence.
        whole: positions of the whole sequence.
    """
    drawn = []
    for depth in range(1, depths + 1):
        generator = torch.Generator(device="cpu").manual_seed(hash((*seed, depth)) % 2**63)
        drawn.append(torch.randint(depth, (whole,), generator=generator, device="cpu"))
    return torch.stack(drawn).to(positions_S.device)[:, positions_S]


@dataclass
class Mixer:
    """Inputs of the depths in one forward pass.

    Attributes:
        ages_DS: from `drawn_ages`.
        inside_DBS: whether the position d later is in the same document.
        later: where it is.
        states: of the trunk and of every depth so far, each with copies from other ranks.
    """

    ages_DS: Tensor
    inside_DBS: Tensor
    later: LaterPositions
    states: list[Tensor] = field(default_factory=list)

    def next_input(self, state_SBH: Tensor) -> Tensor:
        """The input of the next depth, given the newest state: called for depth 1 with the trunk's, and so on."""
        mixed_SBH = state_SBH
        ages_S = self.ages_DS[len(self.states)]
        for age, older_TBH in enumerate(reversed(self.states), start=1):
            takes_SB = (ages_S == age).unsqueeze(1) & self.inside_DBS[age - 1].t()
            mixed_SBH = torch.where(takes_SB.unsqueeze(2), older_TBH[self.later.where(age)], mixed_SBH)
        if len(self.states) + 1 < len(self.ages_DS):
            self.states.append(self.later.lookup(state_SBH))
        return mixed_SBH
