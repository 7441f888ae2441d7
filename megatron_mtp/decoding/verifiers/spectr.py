"""SpecTr's k-sequential selection among k samples of one q (arXiv:2310.15141, Alg. 3).

    beta(rho) = sum_v min(q, p / rho)       rho in [1, k] solves 1 - (1 - beta)^k = rho beta
    x is accepted with min(1, p(x) / (rho q(x))); after k rejections: p - min(q, p / rho) P / beta

where P = 1 - (1 - beta)^k is the chance that any of the k is accepted. Letters in names: B batch, N drafted nodes,
R = N + 1 rows, V vocabulary.
"""

from functools import partial

import torch
from torch import Tensor

from megatron_mtp.decoding.sampling import RECOVER, VERIFY, draw
from megatron_mtp.decoding.types import Draft, Round, Verdict
from megatron_mtp.decoding.verifiers.base import Verifier
from megatron_mtp.decoding.verifiers.walk import chosen, row_of, walk

HALVINGS = 40
"""Bisection steps: rho to 1e-11."""


@partial(Verifier, line="choose among several samples of one q (arXiv:2310.15141)", needs_samples=True, recordable=True)
def spectr(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """Keeps the target's distribution where the candidates of a row are independent samples of the same q."""
    p_BRV = round.sampling.probabilities(logits_BRV).double()
    q_BRV, count_BR = _of_rows(draft, p_BRV)
    rho_BR = solve_rho(p_BRV, q_BRV, count_BR)
    uniform_BN = round.noise.uniform(VERIFY, draft.nodes)

    def survives(node: int, here_B: Tensor, _: Tensor) -> Tensor:
        token_B = draft.tokens_BN[:, node]
        p_B, q_B = (chosen(row_of(values_BRV, here_B), token_B) for values_BRV in (p_BRV, q_BRV))
        return uniform_BN[:, node] * chosen(rho_BR, here_B) * q_B < p_B

    kept_BR, last_B = walk(draft, survives)
    p_BV, q_BV = row_of(p_BRV, last_B), row_of(q_BRV, last_B)
    rest_BV = _after_rejections(p_BV, q_BV, chosen(rho_BR, last_B), chosen(count_BR, last_B))
    weights_BV = torch.where(rest_BV.sum(dim=1, keepdim=True) > 0, rest_BV, p_BV)
    return Verdict(kept_BR, draw(weights_BV, round.noise.uniform(RECOVER, 1)[:, 0]))


def solve_rho(p: Tensor, q: Tensor, count: Tensor) -> Tensor:
    """rho [...] for distributions [..., V] and k [...]; by bisection in [1, k]."""
    low, high = torch.ones_like(p[..., 0]), count.to(p).clamp(min=1)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        beta = _beta(p, q, middle)
        above = 1 - (1 - beta) ** count > middle * beta  # falls as rho grows
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


def _beta(p: Tensor, q: Tensor, rho: Tensor) -> Tensor:
    return torch.minimum(q, p / rho.unsqueeze(-1)).sum(dim=-1)


def _after_rejections(p_BV: Tensor, q_BV: Tensor, rho_B: Tensor, count_B: Tensor) -> Tensor:
    """What k rejected candidates leave; p itself where there were none."""
    beta_B = _beta(p_BV, q_BV, rho_B)
    share_B = (1 - (1 - beta_B) ** count_B) / beta_B.clamp(min=1e-300)
    covered_BV = torch.minimum(q_BV, p_BV / rho_B.unsqueeze(1)) * share_B.unsqueeze(1)
    return (p_BV - covered_BV).clamp(min=0)


def _of_rows(draft: Draft, p_BRV: Tensor) -> tuple[Tensor, Tensor]:
    """q of the candidates of each row [B, R, V], and their number k [B, R]."""
    q_BNV = draft.distributions(p_BRV)
    parents_BN, valid_BN = draft.parents(), draft.valid()
    count_BR = torch.zeros_like(p_BRV[:, :, 0]).scatter_add_(1, parents_BN, valid_BN.to(p_BRV))
    # Siblings share one q, so it does not matter which of them is written.
    source_BNV = torch.where(valid_BN.unsqueeze(-1), q_BNV, 0.0)
    index_BNV = parents_BN.unsqueeze(-1).expand_as(source_BNV)
    return torch.zeros_like(p_BRV).scatter_reduce_(1, index_BNV, source_BNV, "amax"), count_BR
