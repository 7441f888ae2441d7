"""Drafting with P-EAGLE: the rows of new tokens, and masks after the newest one, in one pass.

    t_m the newest token, K = 3     (t_{m-1}, f_{m-2}) (t_m, f_{m-1})  mask  mask      the last three rows draft

The next round's rows overwrite the keys and values of the masks. Letters in names: S rows, B batch, H hidden, K drafts,
R text rows.
"""

from typing import TYPE_CHECKING, override

import torch
from torch.nn.functional import pad

from megatron_mtp.decoding.draft import Draft, Round
from megatron_mtp.decoding.proposers.mtp import OneLayer, chain_at_once

if TYPE_CHECKING:
    from megatron_mtp.decoding.sequences import Sequences


class PEagle(OneLayer):
    """Drafts a chain in one pass."""

    line = "a P-EAGLE drafter, whose masks draft all tokens in one pass, any K"
    depths = "peagle"
    at_once = True

    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        new, runner, masks = self.new_rows(sequences), self.runner, count - 1
        assert runner.attached.drafter is not None
        first_B = sequences.newest_B + new.first
        tokens_BR = pad(
            sequences.tokens_at(first_B + 1, new.count), (0, masks), value=runner.attached.drafter.mask_token
        )
        rows = sequences.chain(first_B, new.count + masks, masks)
        layer, known_SBH = runner.model.mtp.layer, sequences.states_at(first_B, new.count)[..., -runner.hidden_size :]
        mask_SBH = layer.feature(layer.mask_hidden).expand(masks, known_SBH.size(1), -1)
        given_SBH = torch.cat([known_SBH, mask_SBH])
        made_SBH = runner.depth(1, given_SBH, tokens_BR, rows, sequences.memory.depths[0])
        return chain_at_once(runner.draft_logits(made_SBH[-count:]), round)
