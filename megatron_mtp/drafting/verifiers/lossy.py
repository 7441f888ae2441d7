"""Rules that trade the target's distribution for longer accepted drafts; each runs only where a user names it.

Letters in names: B batch, N drafted nodes, R = N + 1 rows, V vocabulary.
"""

import torch
from torch import Tensor

from megatron_mtp.drafting.sampling import RECOVER, draw
from megatron_mtp.drafting.types import Draft, Round, Verdict
from megatron_mtp.drafting.verifiers.walk import chosen, row_of, walk


def relaxed(logits_BRV: Tensor, draft: Draft, scene: Round) -> Verdict:
    """In the thinking phase accept what is among the top N and at most delta less likely than the best; else greedy.

    The phase begins after `think_start` and ends after `think_end`, inside a draft too. N = 1 or delta = 0 is strict
    (TensorRT-LLM's relaxed acceptance for DeepSeek-R1).
    """
    settings = scene.config
    probs_BRV = logits_BRV.softmax(dim=-1)
    best_BR = logits_BRV.argmax(dim=-1)
    floor_BR = probs_BRV.amax(dim=-1) - settings.delta
    top = min(settings.top_n, logits_BRV.size(-1))
    nth_BR = probs_BRV.topk(top, dim=-1).values[..., -1]
    thinking_B = torch.zeros_like(best_BR[:, 0], dtype=torch.bool) if scene.thinking_B is None else scene.thinking_B

    def is_near_the_best(node: int, here_B: Tensor, tried_B: Tensor) -> Tensor:
        nonlocal thinking_B
        token_B = draft.tokens_BN[:, node]
        p_B = chosen(row_of(probs_BRV, here_B), token_B)
        near_B = (p_B >= chosen(floor_BR, here_B)) & (p_B >= chosen(nth_BR, here_B))
        strict = settings.top_n == 1 or settings.delta == 0
        accepted_B = tried_B & ((token_B == chosen(best_BR, here_B)) | (thinking_B & near_B & (not strict)))
        begins_B, ends_B = token_B == settings.think_start, token_B == settings.think_end
        thinking_B = torch.where(accepted_B, (thinking_B | begins_B) & ~ends_B, thinking_B)
        return accepted_B

    kept_BR, last_B = walk(draft, is_near_the_best)
    return Verdict(kept_BR, chosen(best_BR, last_B))


def joint(logits_BRV: Tensor, draft: Draft, scene: Round) -> Verdict:
    """The longest prefix with min(1, p(x_1..j) / q(x_1..j)) > tau, earlier failures ignored, then one token from p.

    Multi-token assisted decoding (arXiv:2407.09722). tau = 1 accepts nothing, tau = 0 everything that p allows; what is
    accepted has p > tau q.
    """
    token_BN1 = draft.tokens_BN.unsqueeze(-1)
    p_BRV = scene.sampling.probabilities(logits_BRV)
    log_p_BN = p_BRV[:, :-1].gather(2, token_BN1).squeeze(-1).log()
    log_q_BN = torch.zeros_like(log_p_BN)
    if draft.probs_BNV is not None:
        log_q_BN = draft.probs_BNV.gather(2, token_BN1).squeeze(-1).log()
    ratio_BN = (log_p_BN - log_q_BN).cumsum(dim=1).exp().clamp(max=1)
    passes_BN = (ratio_BN > scene.config.threshold) & draft.valid().cumprod(dim=1).bool()
    return _kept_to_the_last(passes_BN, p_BRV, scene)


def bild(logits_BRV: Tensor, draft: Draft, scene: Round) -> Verdict:
    """Roll back at the first token with -log p(x) > `rollback` under the target, then one token from p.

    The big and little decoder (arXiv:2302.07863); its other half, the drafter that stops where max q < `fallback`,
    is the draft's `valid_BN`.
    """
    log_p_BN = logits_BRV[:, :-1].log_softmax(dim=-1).gather(2, draft.tokens_BN.unsqueeze(-1)).squeeze(-1)
    passes_BN = (-log_p_BN <= scene.config.rollback) & draft.valid()
    return _kept_to_the_last(passes_BN.cumprod(dim=1).bool(), scene.sampling.probabilities(logits_BRV), scene)


def _kept_to_the_last(passes_BN: Tensor, p_BRV: Tensor, scene: Round) -> Verdict:
    """Keep everything up to the last position that passes."""
    kept_BN = passes_BN.flip(1).cumsum(dim=1).flip(1) > 0
    kept_BR = torch.cat([torch.ones_like(p_BRV[:, :1, 0], dtype=torch.bool), kept_BN], dim=1)
    p_BV = row_of(p_BRV, kept_BR.sum(dim=1) - 1)
    return Verdict(kept_BR, draw(p_BV, scene.noise.uniform(RECOVER, 1)[:, 0]))
