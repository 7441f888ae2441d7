"""Penalties on the target's logits, and log-probabilities of emitted tokens.

`PenalizedVerifier` stands in the place of a batch's verifier: it changes the logits that the rule sees, and keeps those
that log-probabilities are made of. Penalties change the distribution that a lossless rule keeps, and not the drafts.

Letters in names: B batch, N drafted nodes, R = N + 1 rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from megatron_mtp.decoding.kv_cache import ancestors_of
from megatron_mtp.decoding.requests import Penalties, TokenLogprob
from megatron_mtp.decoding.types import Draft, Round, Rule, Verdict

NO_PENALTIES = Penalties()


@dataclass
class PenalizedVerifier:
    """A verifier for sequences of which some have penalties or want log-probabilities.

    Attributes:
        rule: the verifier proper.
        penalties: of every sequence.
        prompts: tokens of every sequence's prompt.
        logits_BRV, kept_BR: of the last step, before penalties.
    """

    rule: Rule
    penalties: Sequence[Penalties]
    prompts: Sequence[int]
    logits_BRV: Tensor | None = None
    kept_BR: Tensor | None = None

    def __call__(self, logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
        """The rule's verdict on the penalized logits."""
        rows = [
            penalized(one, tokens, prompt, logits_RV, drafted_RV)
            for one, tokens, prompt, logits_RV, drafted_RV in zip(
                self.penalties, round.token_ids, self.prompts, logits_BRV, _drafted(draft, logits_BRV), strict=True
            )
        ]
        verdict = self.rule(torch.stack(rows), draft, round)
        self.logits_BRV, self.kept_BR = logits_BRV, verdict.kept_BR
        return verdict

    def logprobs(self, row: int, tokens: list[int], top: int) -> list[TokenLogprob]:
        """Log-probabilities of the tokens that the last step gave a sequence."""
        assert self.logits_BRV is not None
        assert self.kept_BR is not None
        rows_R = self.kept_BR[row].nonzero()[:, 0]
        return logprobs_of(self.logits_BRV[row, rows_R[: len(tokens)]], tokens, top)


def _drafted(draft: Draft, like_BRV: Tensor) -> Tensor:
    """Counts of each token on the way from the root to a row, the row itself included, [B, R, V]."""
    if draft.nodes == 0:
        return torch.zeros_like(like_BRV)
    ancestors_BRR, _ = ancestors_of(draft.parents())
    return ancestors_BRR[:, :, 1:].to(like_BRV) @ one_hot(draft.tokens_BN, like_BRV.size(-1)).to(like_BRV)


def penalized(
    penalties: Penalties, tokens: list[int], prompt: int, logits_RV: Tensor, drafted_RV: Tensor | None = None
) -> Tensor:
    """The logits [R, V] of a sequence's next tokens, of which each row has drafted some more."""
    if penalties == NO_PENALTIES:
        return logits_RV
    emitted_RV = _counts(tokens[prompt:], logits_RV) + (0 if drafted_RV is None else drafted_RV)
    if penalties.bias:
        biased, values = zip(*penalties.bias, strict=True)
        index_T = torch.tensor(biased, device=logits_RV.device)
        logits_RV = logits_RV.index_add(1, index_T, logits_RV.new_tensor(values).expand(len(logits_RV), -1))
    there_RV = (emitted_RV > 0) | (_counts(tokens[:prompt], logits_RV) > 0)
    by = penalties.repetition
    logits_RV = torch.where(there_RV, torch.where(logits_RV > 0, logits_RV / by, logits_RV * by), logits_RV)
    logits_RV = logits_RV - penalties.presence * (emitted_RV > 0) - penalties.frequency * emitted_RV
    if penalties.least and penalties.ends:
        too_early_R1 = emitted_RV.sum(dim=1, keepdim=True) < penalties.least
        end_1V = _counts([token for token in penalties.ends if 0 <= token < logits_RV.size(-1)], logits_RV) > 0
        logits_RV = logits_RV.masked_fill(too_early_R1 & end_1V, -torch.inf)
    return logits_RV


def _counts(tokens: list[int], like_RV: Tensor) -> Tensor:
    """Counts of each token, [1, V]."""
    index_T = torch.tensor(tokens, dtype=torch.long, device=like_RV.device)
    return torch.bincount(index_T, minlength=like_RV.size(-1)).to(like_RV).unsqueeze(0)


def logprobs_of(logits_RV: Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of one token a row and of the `top` most probable ones."""
    logprobs_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)).log_softmax(dim=-1)
    chosen_R1 = torch.tensor(tokens, dtype=torch.long, device=logits_RV.device).unsqueeze(1)
    own = logprobs_RV.gather(1, chosen_R1)[:, 0].tolist()
    best = logprobs_RV.topk(min(top, logits_RV.size(-1)), dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    tops = [list(zip(ids, values, strict=True)) for ids, values in pairs]
    return [TokenLogprob(*one) for one in zip(tokens, own, tops, strict=True)]
