"""Speculative sampling: accept x ~ q with min(1, p(x) / q(x)), else go on with (p - q)+ (arXiv:2211.17192, Alg. 1).

A deterministic draft is one with q = 1 at its token: it is accepted with p(x), and p with x zeroed remains. Several
candidates of one row are tried one after another against what remains (multi-round, SpecInfer, arXiv:2305.09781):
candidates with `probs` must be independent samples of their q, those without may be any, such as the top k.

Letters in names: B batch, N drafted nodes, R = N + 1 rows, V vocabulary.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron_mtp.decoding.sampling import RECOVER, VERIFY, draw
from megatron_mtp.decoding.types import Draft, Round, Verdict
from megatron_mtp.decoding.verifiers.base import Verifier
from megatron_mtp.decoding.verifiers.walk import chosen, walk


@partial(Verifier, line="accept with min(1, p/q), else (p - q)+; without q: p(x), else p without x", recordable=True)
def rejection(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """Keeps the target's distribution, whatever the draft is."""
    probs_BRV = round.sampling.probabilities(logits_BRV)
    uniform_BN = round.noise.uniform(VERIFY, draft.nodes)
    q_BNV = draft.distributions(probs_BRV)
    remaining_BV = probs_BRV[:, 0]

    def survives(node: int, _: Tensor, tried_B: Tensor) -> Tensor:
        nonlocal remaining_BV
        token_B = draft.tokens_BN[:, node]
        q_BV = q_BNV[:, node]
        accepted_B = tried_B & (uniform_BN[:, node] * chosen(q_BV, token_B) < chosen(remaining_BV, token_B))
        rejected_BV = torch.where(tried_B.unsqueeze(1), leftover(remaining_BV, q_BV), remaining_BV)
        remaining_BV = torch.where(accepted_B.unsqueeze(1), probs_BRV[:, node + 1], rejected_BV)
        return accepted_B

    kept_BR, _ = walk(draft, survives)
    return Verdict(kept_BR, draw(remaining_BV, round.noise.uniform(RECOVER, 1)[:, 0]))


specinfer = replace(
    rejection, line="the rule of rejection, which tries a row's candidates one after another (arXiv:2305.09781)"
)
"""Multi-round rejection (SpecInfer)."""


def leftover(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """(p - q)+, normalised; p itself where nothing is left, which only rounding reaches."""
    rest_BV = (p_BV - q_BV).clamp(min=0)
    total_B1 = rest_BV.sum(dim=1, keepdim=True)
    return torch.where(total_B1 > 0, rest_BV / total_B1.clamp(min=1e-38), p_BV)
