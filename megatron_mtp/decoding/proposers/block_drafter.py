"""Drafting with DFlash, DSpark and DFlash2 (model/block_drafter.py, dflash2.py): a block of tokens in one pass.

The features of the tokens before t_m are the context: their keys and values are kept at their own slots, as they come.
The block's rows stand behind them and see one another; the next round's features overwrite them:

    m = 3, K = 2        slots  0   1   2   3     4     5            then, with both drafts accepted (m = 6)
    DFlash                     f_0 f_1 f_2 t_3   mask  mask                f_0 f_1 f_2 f_3 f_4 f_5 t_6  mask  mask
    DSpark                     f_0 f_1 f_2 t_3   mask                      f_0 f_1 f_2 f_3 f_4 f_5 t_6  mask

The rows of DFlash2 are those of DFlash. So the caches are those of a fresh prefill after any accepted path. Letters in
names: B batch, K drafts, R rows of a block, S the same as Megatron has them, H hidden, M rank of the bias, N drafted
tokens, C candidates, V vocabulary.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, override

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from megatron_mtp.decoding.config import Settings, setting
from megatron_mtp.decoding.draft import Draft, Round
from megatron_mtp.decoding.proposers.mtp import OneCache, chain_of, pick, windows
from megatron_mtp.decoding.proposers.proposer import HeadKind
from megatron_mtp.spec.kinds import CANDIDATES

if TYPE_CHECKING:
    from megatron_mtp.decoding.runner import Runner
    from megatron_mtp.decoding.sequences import Sequences


class DFlash(OneCache):
    """K + 1 rows; the last K draft the tokens of their own places."""

    line = "a DFlash drafter, which fills a block of tokens in one pass; K is at most that of its training"
    depths: ClassVar[HeadKind | None] = "dflash"
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
        logits_BKV = self.runner.draft_logits(self.block(sequences, count))
        return chain_of([pick(logits_BKV[:, place], round, place) for place in range(count)])

    @override
    def catch_up(self, sequences: "Sequences", round: Round, count: int) -> None:
        self._keep_context(sequences)

    def block(self, sequences: "Sequences", count: int) -> Tensor:
        """States [K, B, H] of the rows that draft, before the norm."""
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


class LeftToRight(DFlash, ABC):
    """Drafts one by one: a draft gives the next one's logits a bias."""

    def in_turn(self, sequences: "Sequences", round: Round, count: int) -> tuple[Draft, Tensor]:
        """The drafts, and for each the state after the norm beside what the token before gives it, [K, B, H + M]."""
        state_KBH = self.block(sequences, count)
        logits_BKV, token_B = self.runner.draft_logits(state_KBH), sequences.tokens_at(sequences.newest_B, 1)[:, 0]
        layer, picked, read = self.runner.model.mtp.layer, [], list[Tensor]()
        for place, state_BH in enumerate(layer.norm(state_KBH)):
            before_BM = layer.before(state_BH, token_B)
            read.append(torch.cat([state_BH, before_BM], dim=-1))
            picked.append(pick(self.biased(logits_BKV[:, place], before_BM), round, place))
            token_B = picked[-1][0]
        return chain_of(picked), torch.stack(read)

    @abstractmethod
    def biased(self, logits_BV: Tensor, before_BM: Tensor) -> Tensor:
        """The logits that a draft is picked by."""


@dataclass(frozen=True)
class DSparkSettings(Settings):
    """Settings of the end of a draft."""

    min_confidence: float = setting(
        0.0, "a draft ends before the first token whose confidence, the chance that it is accepted, is lower", 0, 1
    )


class DSpark(LeftToRight):
    """K rows that draft the tokens after them.

    A confidence does not depend on the token that it is of. So where drafts are sampled, to end them by it changes no
    distribution.
    """

    line = "a DSpark drafter, whose block is sampled from left to right; K is at most that of its training"
    depths = "dspark"
    settings_kind = DSparkSettings
    settings: DSparkSettings

    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        draft, read_KBX = self.in_turn(sequences, round, count)
        if not self.settings.min_confidence:
            return draft
        confidence_BK = self.runner.model.mtp.layer.confidence(read_KBX).t().sigmoid()
        return self._ended(draft, confidence_BK, sequences.shapes.few)

    @override
    def biased(self, logits_BV: Tensor, before_BM: Tensor) -> Tensor:
        """With W2 W1[token before]; tokens that may not be drafted stay without probability."""
        layer, tokens_N = self.runner.model.mtp.layer, self.runner.model.mtp.draft_vocabulary
        bias_BN = linear(before_BM, layer.markov_w2)
        if layer.head is None or tokens_N is None:
            return logits_BV + bias_BN[:, : self.runner.vocab_size]
        bias_BV = bias_BN.new_zeros(len(bias_BN), self.runner.model.vocab_size)
        return logits_BV + bias_BV.index_copy_(1, tokens_N, bias_BN)[:, : self.runner.vocab_size]

    def _ended(self, draft: Draft, confidence_BK: Tensor, few_shapes: bool) -> Draft:
        """The draft up to where it is confident; where shapes may be many, without the rows that no sequence drafts."""
        valid_BK = (confidence_BK >= self.settings.min_confidence).cumprod(dim=1).bool()
        if few_shapes:
            return Draft(draft.tokens_BN, draft.probs_BNV, None, valid_BK)
        count = int(valid_BK.sum(dim=1).max())
        probs_BKV = None if draft.probs_BNV is None or not count else draft.probs_BNV[:, :count]
        return Draft(draft.tokens_BN[:, :count], probs_BKV, None, valid_BK[:, :count])


class DFlash2(LeftToRight):
    """K + 1 rows; each draft is one of the tokens with the largest logits, by these with the bias."""

    line = "a DFlash2 drafter, which chooses among likely tokens from left to right; K is at most that of its training"
    depths = "dflash2"

    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        return self.in_turn(sequences, round, count)[0]

    @override
    def biased(self, logits_BV: Tensor, before_BM: Tensor) -> Tensor:
        """Logits of the candidates, with the bias; all other tokens have no probability."""
        unary_BC, token_BC = logits_BV.topk(min(CANDIDATES, logits_BV.size(-1)))
        chosen_BCM = self.runner.model.mtp.layer.markov_w2[token_BC]
        scores_BC = unary_BC + (chosen_BCM @ before_BM.unsqueeze(-1)).squeeze(-1)
        return torch.full_like(logits_BV, -torch.inf).scatter_(1, token_BC, scores_BC)
