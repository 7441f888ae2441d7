"""Drafting with DSpark: a block from left to right, up to the first token that is unlikely to be accepted.

Letters in names: B batch, K drafts, M rank of the bias, X a further state, N draft vocabulary, V vocabulary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, override

from torch import Tensor
from torch.nn.functional import linear

from megatron_mtp.decoding.config import Settings, setting
from megatron_mtp.decoding.draft import Draft, Round
from megatron_mtp.decoding.proposers.blocks import LeftToRight

if TYPE_CHECKING:
    from megatron_mtp.decoding.sequences import Sequences


@dataclass(frozen=True)
class DSparkSettings(Settings):
    """When to end a draft."""

    min_confidence: float = setting(
        0.0, "a draft ends before the first token whose confidence, the chance that it is accepted, is lower", 0, 1
    )


class DSpark(LeftToRight):
    """Drafts with K rows, each for the token after it.

    The confidence of a token does not depend on the token itself. So for sampled drafts, ending them by confidence does
    not change the distribution.
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
        """Add W2 W1[previous token]; tokens outside the draft vocabulary keep probability 0."""
        layer, tokens_N = self.runner.model.mtp.layer, self.runner.model.mtp.draft_vocabulary
        bias_BN = linear(before_BM, layer.markov_w2)
        if layer.head is None or tokens_N is None:
            return logits_BV + bias_BN[:, : self.runner.vocab_size]
        bias_BV = bias_BN.new_zeros(len(bias_BN), self.runner.model.vocab_size)
        return logits_BV + bias_BV.index_copy_(1, tokens_N, bias_BN)[:, : self.runner.vocab_size]

    def _ended(self, draft: Draft, confidence_BK: Tensor, few_shapes: bool) -> Draft:
        """Cut the draft where confidence ends; if shapes may vary, drop rows that no sequence drafts."""
        valid_BK = (confidence_BK >= self.settings.min_confidence).cumprod(dim=1).bool()
        if few_shapes:
            return Draft(draft.tokens_BN, draft.probs_BNV, None, valid_BK)
        count = int(valid_BK.sum(dim=1).max())
        probs_BKV = None if draft.probs_BNV is None or not count else draft.probs_BNV[:, :count]
        return Draft(draft.tokens_BN[:, :count], probs_BKV, None, valid_BK[:, :count])
