"""Drafting with block drafters (model/block_drafter.py): a block of tokens in one pass.

The features of the tokens before t_m are the context: their keys and values are stored in their own slots as they
arrive. The block's rows come after them and attend to each other; the next round's features overwrite them:

    m = 3, K = 2        slots  0   1   2   3     4     5            then, with both drafts accepted (m = 6)
    DFlash                     f_0 f_1 f_2 t_3   mask  mask                f_0 f_1 f_2 f_3 f_4 f_5 t_6  mask  mask
    DSpark                     f_0 f_1 f_2 t_3   mask                      f_0 f_1 f_2 f_3 f_4 f_5 t_6  mask

So the caches match those of a fresh prefill after any accepted path. Letters in names: B batch, K drafts, R rows of a
block, S the same in Megatron's order, H hidden, M rank of the bias, V vocabulary.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, override

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_mtp.decoding.draft import Draft, Round
from megatron_mtp.decoding.proposers.mtp import OneCache, chain_at_once, chain_of, pick, windows

if TYPE_CHECKING:
    from megatron_mtp.decoding.runner import Runner
    from megatron_mtp.decoding.sequences import Sequences


class Blocks(OneCache):
    """Drafts K tokens with the last rows of a block, each from its own logits."""

    recordable = True
    at_once = True
    limit = "the tokens of the blocks that its drafter was trained on"
    remedy = "train one with more --drafter-steps"
    runner: "Runner"

    @property
    @override
    def most(self) -> int:
        return self.runner.depths

    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        return chain_at_once(self.runner.draft_logits(self.block(sequences, count)), round)

    @override
    def catch_up(self, sequences: "Sequences", round: Round, count: int) -> None:
        self._keep_context(sequences)

    def block(self, sequences: "Sequences", count: int) -> Tensor:
        """Return states [K, B, H] of the rows that draft, before the norm."""
        self._keep_context(sequences)
        newest_B1, drafter = sequences.tokens_at(sequences.newest_B, 1), self.runner.attached.drafter
        assert drafter is not None
        tokens_BR = pad(newest_B1, (0, count + drafter.idle_rows - 1), value=drafter.mask_token)
        place_BR = torch.arange(tokens_BR.size(1), device=tokens_BR.device).expand_as(tokens_BR)
        all_BRR = torch.ones_like(place_BR, dtype=torch.bool).unsqueeze(1).expand(-1, tokens_BR.size(1), -1)
        rows = sequences.tree(place_BR, all_BRR)
        return self.runner.block(tokens_BR, rows, sequences.memory.depths[0])[-count:]

    def _keep_context(self, sequences: "Sequences") -> None:
        """Keep the context of tokens whose features are new."""
        width = sequences.growth_since(self.own)
        sequences.mark_seen(self.own)
        for first, count, _ in windows(sequences, width):
            first_B = sequences.newest_B + first
            rows = sequences.chain(first_B, count, 0)
            self.runner.keep_context(sequences.states_at(first_B, count), rows, sequences.memory.depths[0])


class LeftToRight(Blocks, ABC):
    """Drafts tokens one by one: each token adds a bias to the next one's logits."""

    def in_turn(self, sequences: "Sequences", round: Round, count: int) -> tuple[Draft, Tensor]:
        """Return the drafts, and each state after the norm with the previous token's bias features, [K, B, H + M]."""
        state_KBH = self.block(sequences, count)
        logits_BKV, token_B = self.runner.draft_logits(state_KBH), sequences.tokens_at(sequences.newest_B, 1)[:, 0]
        memory, picked, read = None, [], list[Tensor]()
        for place, state_BH in enumerate(self.runner.model.mtp.layer.norm(state_KBH)):
            before_BM, memory = self.before(state_BH, token_B, memory)
            read.append(torch.cat([state_BH, before_BM], dim=-1))
            picked.append(pick(self.biased(logits_BKV[:, place], before_BM), round, place))
            token_B = picked[-1][0]
        return chain_of(picked), torch.stack(read)

    def before(self, state_BH: Tensor, token_B: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the previous token's bias features [B, M], and the memory for the next draft.

        Args:
            memory: memory returned for the previous draft; None for the first one.
        """
        made: Tensor = self.runner.model.mtp.layer.before(state_BH, token_B)
        return made, None

    @abstractmethod
    def biased(self, logits_BV: Tensor, before_BM: Tensor) -> Tensor:
        """Return the logits that a draft token is chosen from."""
