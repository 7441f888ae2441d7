"""Hidden-state mixing (--mtp-hidden-state-mixing): which states an MTP layer continues from in training.

Depth d at position i reads the state of depth d - 1, which predicts token i + d. The state of depth d - 1 - k at
position i + k predicts the same token: it is k positions later and k depths shallower. One of the d states is chosen,
each with equal probability. Depth 3 has three to choose from, and fewer at the end of a document:

    position              0        1        2        3        4 |
    k = 0, the newest     h_2(0)   h_2(1)   h_2(2)   h_2(3)   h_2(4)
    k = 1                 h_1(1)   h_1(2)   h_1(3)   h_1(4)   -
    k = 2, the trunk's    h_0(2)   h_0(3)   h_0(4)   -        -

If the choice falls beyond the end of the document, the newest state is used.
"""

from dataclasses import dataclass, field

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_mtp.data.batch import DepthBatch, LaterPositions, to_device


@dataclass
class Mixer:
    """Chooses the inputs of the MTP layers in one forward pass.

    Attributes:
        ages_DS: result of `drawn_ages`, on the device of the states.
        inside_DBS: whether the position d later is in the same document.
        later: index of that position.
        states: states of the trunk and of every depth so far, each with copies from other ranks.
    """

    ages_DS: Tensor
    inside_DBS: Tensor
    later: LaterPositions
    states: list[Tensor] = field(default_factory=list)

    def next_input(self, state_SBH: Tensor) -> Tensor:
        """Return the input of the next depth, given the newest state.

        Call it for depth 1 with the trunk's state, and so on.
        """
        mixed_SBH = state_SBH
        ages_S = self.ages_DS[len(self.states)]
        for age, older_TBH in enumerate(reversed(self.states), start=1):
            takes_SB = (ages_S == age).unsqueeze(1) & self.inside_DBS[age - 1].t()
            later_S = to_device(self.later.where(age), older_TBH.device)
            mixed_SBH = torch.where(takes_SB.unsqueeze(2), older_TBH[later_S], mixed_SBH)
        if len(self.states) + 1 < len(self.ages_DS):
            self.states.append(self.later.lookup(state_SBH))
        return mixed_SBH


def mixer_of(batch: DepthBatch, config: TransformerConfig, groups: ProcessGroupCollection) -> Mixer | None:
    """Return the mixer of this rank's positions, which sequence parallelism splits again.

    None for a batch without ages.
    """
    if batch.ages_DS is None:
        return None
    group, positions_S = groups.cp, batch.positions_S
    ages_DS, inside_DBS = batch.ages_DS, batch.inside_DBS
    if config.sequence_parallel:
        ranks, rank = groups.tp.size(), groups.tp.rank()
        positions_S, ages_DS = positions_S.chunk(ranks)[rank], ages_DS.chunk(ranks, dim=1)[rank]
        group, inside_DBS = groups.tp_cp, inside_DBS.chunk(ranks, dim=2)[rank]
    return Mixer(ages_DS, inside_DBS, LaterPositions(positions_S.contiguous(), len(ages_DS) - 1, group))
