"""Block verification: all tokens of a chain are judged together (arXiv:2403.10444, Alg. 2).

    pi_0 = 1, pi_i = min(1, pi_{i-1} p(x_i) / q(x_i))
    Z_i  = sum_v (pi_i p_{i+1}(v) - q_{i+1}(v))+            q_{K+1} = 0, so that h_K = pi_K
    h_i  = Z_i / (Z_i + 1 - pi_i)

The last i with U_i <= h_i is kept, and the next token comes from (pi_i p_{i+1} - q_{i+1})+. Lossless, and it accepts at
least as many tokens as token-wise rejection does.

Letters in names: B batch, N = K drafted nodes, R = K + 1 rows, V vocabulary.
"""

from functools import partial

import torch
from torch import Tensor

from megatron_mtp.decoding.sampling import RECOVER, VERIFY, draw
from megatron_mtp.decoding.types import Draft, Round, Verdict
from megatron_mtp.decoding.verifiers.base import Verifier
from megatron_mtp.decoding.verifiers.walk import row_of


@partial(Verifier, line="judge the whole chain at once (arXiv:2403.10444)", judges_trees=False, recordable=True)
def block(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """The verdict on a chain. Raises ValueError for a tree."""
    if not draft.is_chain:
        raise ValueError("the verifier 'block' judges chains; for a tree choose specinfer, spectr or greedy.")
    p_BRV = round.sampling.probabilities(logits_BRV).double()
    q_BRV = _drafter(draft, p_BRV)
    valid_BN = draft.valid().cumprod(dim=1).bool()
    pi_BR = _joint_ratios(p_BRV, q_BRV, draft)
    rest_BRV = (pi_BR.unsqueeze(-1) * p_BRV - q_BRV).clamp(min=0)
    total_BR = rest_BRV.sum(dim=-1)
    h_BR = total_BR / (total_BR + 1 - pi_BR).clamp(min=1e-300)
    passes_BN = (round.noise.uniform(VERIFY, draft.nodes) < h_BR[:, 1:]) & valid_BN
    # Position i is kept if any position from i on passes.
    kept_BN = passes_BN.flip(1).cumsum(dim=1).flip(1) > 0
    kept_BR = torch.cat([torch.ones_like(kept_BN[:, :1]), kept_BN], dim=1) if draft.nodes else p_BRV[:, :, 0] >= 0
    last_B = kept_BR.sum(dim=1) - 1
    rest_BV, p_BV = row_of(rest_BRV, last_B), row_of(p_BRV, last_B)
    weights_BV = torch.where(rest_BV.sum(dim=1, keepdim=True) > 0, rest_BV, p_BV)
    return Verdict(kept_BR, draw(weights_BV, round.noise.uniform(RECOVER, 1)[:, 0]))


def _drafter(draft: Draft, p_BRV: Tensor) -> Tensor:
    """q of the token after each row; 0 after the last, and where a draft has ended."""
    q_BNV = draft.distributions(p_BRV) * draft.valid().cumprod(dim=1).unsqueeze(-1)
    return torch.cat([q_BNV, torch.zeros_like(p_BRV[:, :1])], dim=1)


def _joint_ratios(p_BRV: Tensor, q_BRV: Tensor, draft: Draft) -> Tensor:
    """pi_0 .. pi_K, [B, R]."""
    token_BN1 = draft.tokens_BN.unsqueeze(-1)
    p_BN = p_BRV[:, :-1].gather(2, token_BN1).squeeze(-1)
    q_BN = q_BRV[:, :-1].gather(2, token_BN1).squeeze(-1)
    pi = [torch.ones_like(p_BRV[:, 0, 0])]
    for node in range(draft.nodes):
        pi.append((pi[-1] * p_BN[:, node] / q_BN[:, node].clamp(min=1e-300)).clamp(max=1))
    return torch.stack(pi, dim=1)
