"""Verifiers (acceptance rules): pure functions from the target's logits and a draft to a verdict, with their facts.

Rules that keep the target's distribution come first: greedy, rejection, specinfer, block, spectr. The others trade it
for longer accepted drafts or more likely output: relaxed, joint, mtjd, bild. They are only used if chosen explicitly.

Letters in names: B batch, N drafted nodes, R = N + 1 rows, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_mtp.decoding.config import Settings, setting
from megatron_mtp.decoding.draft import Draft, Round, Verdict
from megatron_mtp.decoding.rows import ancestors_of
from megatron_mtp.decoding.sampling import RECOVER, VERIFY, draw

VerifierRule = Callable[[Tensor, Draft, Round], Verdict]
"""From the target's logits [B, R, V] to a verdict; pure, with the round's random numbers."""


@dataclass(frozen=True)
class Verifier:
    """An acceptance rule with its facts. Call it like the rule; it reads nothing back to the host.

    Attributes:
        line: one-line description, for tables.
        lossless: whether it keeps the target's distribution; other rules must be chosen explicitly.
        judges_trees: whether it supports trees.
        needs_samples: whether the candidates of a row must be independent samples of one q.
        greedy_only: whether it is only for temperature 0.
        is_greedy: whether it accepts exactly the target's most probable tokens.
        takes_path_probs: whether it uses q as the score of a path rather than as the distribution that it was sampled
            from.
        settings_kind: class of its own settings.
    """

    rule: VerifierRule
    line: str
    lossless: bool = True
    judges_trees: bool = True
    needs_samples: bool = False
    greedy_only: bool = False
    is_greedy: bool = False
    takes_path_probs: bool = False
    settings_kind: type[Settings] = Settings

    def __call__(self, logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
        """Return the verdict on a draft from the target's logits [B, R, V] of its rows."""
        return self.rule(logits_BRV, draft, round)


HALVINGS = 40
"""Bisection steps: rho to 1e-11."""


@partial(Verifier, line="accept the trunk's argmax", greedy_only=True, is_greedy=True)
def greedy(logits_BRV: Tensor, draft: Draft, _: Round) -> Verdict:
    """Accept the target's argmax: token-identical to plain greedy decoding.

    The token after the path is the argmax too.
    """
    best_BR = logits_BRV.argmax(dim=-1)
    if draft.nodes == 0:
        return Verdict(torch.ones_like(best_BR, dtype=torch.bool), best_BR[:, 0])
    if draft.is_chain:
        return _chain(best_BR, draft)

    def is_the_best(node: int, here_B: Tensor, _: Tensor) -> Tensor:
        return draft.tokens_BN[:, node] == chosen(best_BR, here_B)

    kept_BR, last_B = walk(draft, is_the_best)
    return Verdict(kept_BR, chosen(best_BR, last_B))


def _chain(best_BR: Tensor, draft: Draft) -> Verdict:
    """Judge a chain by argmax, without a pass over nodes."""
    right_BN = draft.tokens_BN == best_BR[:, :-1]
    if draft.valid_BN is not None:
        right_BN = right_BN & draft.valid_BN
    kept_BR = pad(right_BN, (1, 0), value=True).cumprod(dim=1)
    return Verdict(kept_BR.bool(), chosen(best_BR, kept_BR.sum(dim=1) - 1))


@partial(Verifier, line="accept with min(1, p/q), else (p - q)+; without q: p(x), else p without x")
def rejection(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """Accept x ~ q with probability min(1, p(x) / q(x)), otherwise continue with (p - q)+ (arXiv:2211.17192, Alg. 1).

    A deterministic draft has q = 1 at its token: it is accepted with probability p(x), and otherwise p with x set to 0
    remains. Several candidates of one row are tried one after another against what remains (multi-round, SpecInfer,
    arXiv:2305.09781): candidates with `probs` must be independent samples of their q; candidates without may be
    anything, such as the top k.
    """
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
    """Return (p - q)+, normalized; p itself if nothing is left, which happens only by rounding."""
    rest_BV = (p_BV - q_BV).clamp(min=0)
    total_B1 = rest_BV.sum(dim=1, keepdim=True)
    return torch.where(total_B1 > 0, rest_BV / total_B1.clamp(min=1e-38), p_BV)


@partial(Verifier, line="judge the whole chain at once (arXiv:2403.10444)", judges_trees=False)
def block(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """Judge all tokens of a chain together (arXiv:2403.10444, Alg. 2). Raises ValueError for a tree.

        pi_0 = 1, pi_i = min(1, pi_{i-1} p(x_i) / q(x_i))
        Z_i  = sum_v (pi_i p_{i+1}(v) - q_{i+1}(v))+            q_{K+1} = 0, so that h_K = pi_K
        h_i  = Z_i / (Z_i + 1 - pi_i)

    The last i with U_i <= h_i is kept, and the next token comes from (pi_i p_{i+1} - q_{i+1})+. It accepts at least as
    many tokens as token-wise rejection does.
    """
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
    # Keep position i if any position from i on passes.
    kept_BN = passes_BN.flip(1).cumsum(dim=1).flip(1) > 0
    kept_BR = torch.cat([torch.ones_like(kept_BN[:, :1]), kept_BN], dim=1) if draft.nodes else p_BRV[:, :, 0] >= 0
    last_B = kept_BR.sum(dim=1) - 1
    rest_BV, p_BV = row_of(rest_BRV, last_B), row_of(p_BRV, last_B)
    weights_BV = torch.where(rest_BV.sum(dim=1, keepdim=True) > 0, rest_BV, p_BV)
    return Verdict(kept_BR, draw(weights_BV, round.noise.uniform(RECOVER, 1)[:, 0]))


def _drafter(draft: Draft, p_BRV: Tensor) -> Tensor:
    """Return q of the token after each row; 0 after the last row and where a draft has ended."""
    q_BNV = draft.distributions(p_BRV) * draft.valid().cumprod(dim=1).unsqueeze(-1)
    return torch.cat([q_BNV, torch.zeros_like(p_BRV[:, :1])], dim=1)


def _joint_ratios(p_BRV: Tensor, q_BRV: Tensor, draft: Draft) -> Tensor:
    """Return pi_0 .. pi_K, [B, R]."""
    token_BN1 = draft.tokens_BN.unsqueeze(-1)
    p_BN = p_BRV[:, :-1].gather(2, token_BN1).squeeze(-1)
    q_BN = q_BRV[:, :-1].gather(2, token_BN1).squeeze(-1)
    pi = [torch.ones_like(p_BRV[:, 0, 0])]
    for node in range(draft.nodes):
        pi.append((pi[-1] * p_BN[:, node] / q_BN[:, node].clamp(min=1e-300)).clamp(max=1))
    return torch.stack(pi, dim=1)


@partial(Verifier, line="choose among several samples of one q (arXiv:2310.15141)", needs_samples=True)
def spectr(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """Select among k independent samples of one q sequentially (K-SEQ, arXiv:2310.15141, Alg. 3).

        beta(rho) = sum_v min(q, p / rho)       rho in [1, k] solves 1 - (1 - beta)^k = rho beta
        x is accepted with min(1, p(x) / (rho q(x))); after k rejections: p - min(q, p / rho) P / beta

    where P = 1 - (1 - beta)^k is the probability that any of the k is accepted.
    """
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
    """Solve for rho [...], given distributions [..., V] and k [...], by bisection in [1, k]."""
    low, high = torch.ones_like(p[..., 0]), count.to(p).clamp(min=1)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        beta = _beta(p, q, middle)
        above = 1 - (1 - beta) ** count > middle * beta  # decreases as rho grows
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


def _beta(p: Tensor, q: Tensor, rho: Tensor) -> Tensor:
    return torch.minimum(q, p / rho.unsqueeze(-1)).sum(dim=-1)


def _after_rejections(p_BV: Tensor, q_BV: Tensor, rho_B: Tensor, count_B: Tensor) -> Tensor:
    """Return the distribution after k rejected candidates; p itself without rejections."""
    beta_B = _beta(p_BV, q_BV, rho_B)
    share_B = (1 - (1 - beta_B) ** count_B) / beta_B.clamp(min=1e-300)
    covered_BV = torch.minimum(q_BV, p_BV / rho_B.unsqueeze(1)) * share_B.unsqueeze(1)
    return (p_BV - covered_BV).clamp(min=0)


def _of_rows(draft: Draft, p_BRV: Tensor) -> tuple[Tensor, Tensor]:
    """Return q of each row's candidates [B, R, V], and their number k [B, R]."""
    q_BNV = draft.distributions(p_BRV)
    parents_BN, valid_BN = draft.parents(), draft.valid()
    count_BR = torch.zeros_like(p_BRV[:, :, 0]).scatter_add_(1, parents_BN, valid_BN.to(p_BRV))
    # Siblings share one q, so it does not matter whose is written.
    source_BNV = torch.where(valid_BN.unsqueeze(-1), q_BNV, 0.0)
    index_BNV = parents_BN.unsqueeze(-1).expand_as(source_BNV)
    return torch.zeros_like(p_BRV).scatter_reduce_(1, index_BNV, source_BNV, "amax"), count_BR


def walk(draft: Draft, accepts: Callable[[int, Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the rows on the accepted path [B, R], and the last of them [B].

    Args:
        accepts: called for every node in order with its number, the row that each sequence has reached, and whether the
            node is a candidate there; returns where it is accepted. The result is ignored where the node is not a
            candidate.
    """
    parents_BN, valid_BN = draft.parents(), draft.valid()
    here_B = torch.zeros_like(parents_BN[:, 0]) if draft.nodes else parents_BN.new_zeros(parents_BN.size(0))
    kept = [torch.ones_like(here_B, dtype=torch.bool)]
    for node in range(draft.nodes):
        tried_B = (parents_BN[:, node] == here_B) & valid_BN[:, node]
        accepted_B = accepts(node, here_B, tried_B) & tried_B
        here_B = torch.where(accepted_B, node + 1, here_B)
        kept.append(accepted_B)
    return torch.stack(kept, dim=1), here_B


def row_of(values_BRV: Tensor, row_B: Tensor) -> Tensor:
    """Return one row of every sequence, [B, V]."""
    return values_BRV.gather(1, row_B.view(-1, 1, 1).expand(-1, 1, values_BRV.size(-1))).squeeze(1)


def chosen(values_BV: Tensor, token_B: Tensor) -> Tensor:
    """Return the value of one token of every sequence, [B]."""
    return values_BV.gather(1, token_B.unsqueeze(1)).squeeze(1)


# ---- rules that change the output distribution


@dataclass(frozen=True)
class RelaxedSettings(Settings):
    """Settings of relaxed acceptance."""

    top_n: int = setting(10, "a token must be among this many likeliest tokens", 1, 1 << 20)
    delta: float = setting(0.6, "and its probability at most this much below the best", 0.0, 1.0)
    think_start: int | None = setting(None, "token id that begins the thinking phase; required")
    think_end: int | None = setting(None, "token id that ends it; required")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.think_start is None or self.think_end is None:
            raise ValueError(
                "speculative config: the verifier 'relaxed' relaxes inside the thinking phase alone; give the token "
                "ids that bound it as think_start and think_end."
            )


@dataclass(frozen=True)
class JointSettings(Settings):
    """tau of the paper."""

    threshold: float = setting(0.5, "tau, which p/q of a kept prefix exceeds", 0.0, 1.0)


@dataclass(frozen=True)
class BildSettings(Settings):
    """Thresholds at which the drafter stops and the target rolls back."""

    fallback: float = setting(0.5, "`draft_model` goes on while max q is at least this", 0.0, 1.0)
    rollback: float = setting(3.0, "the trunk rolls back where -log p exceeds this", 0.0, float("inf"))


@partial(
    Verifier,
    line="in the thinking phase accept what is among the top_n and within delta of the best; else greedy",
    lossless=False,
    greedy_only=True,
    settings_kind=RelaxedSettings,
)
def relaxed(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """Relaxed acceptance: in the thinking phase, accept tokens among the top N and within delta of the best.

    Else greedy.

    The phase begins after `think_start` and ends after `think_end`, even inside a draft. N = 1 or delta = 0 is strict
    (TensorRT-LLM's relaxed acceptance for DeepSeek-R1).
    """
    settings = round.config.verifier_settings
    assert isinstance(settings, RelaxedSettings)
    probs_BRV = logits_BRV.softmax(dim=-1)
    best_BR = logits_BRV.argmax(dim=-1)
    floor_BR = probs_BRV.amax(dim=-1) - settings.delta
    top = min(settings.top_n, logits_BRV.size(-1))
    nth_BR = probs_BRV.topk(top, dim=-1).values[..., -1]
    thinking_B = _are_thinking(round, settings)

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


def _are_thinking(round: Round, settings: RelaxedSettings) -> Tensor:
    """Return whether each sequence's newest token is in the thinking phase: after its start, not after its end."""
    tokens_BT = round.tokens_BT
    assert tokens_BT is not None
    bounds = [bound for bound in (settings.think_start, settings.think_end) if bound is not None]
    place_T = torch.arange(1, 1 + tokens_BT.size(1), device=tokens_BT.device)
    place_BT = torch.where(place_T <= round.noise.position_B.unsqueeze(1), place_T, 0)
    starts_B, ends_B = (place_BT.where(tokens_BT.eq(bound), 0).amax(dim=1) for bound in bounds)
    return starts_B > ends_B


@partial(
    Verifier,
    line="keep the longest prefix with p/q above threshold, for beams (arXiv:2407.09722)",
    lossless=False,
    judges_trees=False,
    takes_path_probs=True,
    settings_kind=JointSettings,
)
def joint(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """Accept the longest prefix with min(1, p(x_1..j) / q(x_1..j)) > tau, ignoring earlier failures.

    Then one token from p.

    Multi-token assisted decoding (arXiv:2407.09722). tau = 1 accepts nothing, tau = 0 everything that p allows;
    accepted prefixes have p > tau q.
    """
    settings = round.config.verifier_settings
    assert isinstance(settings, JointSettings)
    token_BN1 = draft.tokens_BN.unsqueeze(-1)
    p_BRV = round.sampling.probabilities(logits_BRV)
    log_p_BN = p_BRV[:, :-1].gather(2, token_BN1).squeeze(-1).log()
    log_q_BN = torch.zeros_like(log_p_BN)
    if draft.probs_BNV is not None:
        log_q_BN = draft.probs_BNV.gather(2, token_BN1).squeeze(-1).log()
    ratio_BN = (log_p_BN - log_q_BN).cumsum(dim=1).exp().clamp(max=1)
    passes_BN = (ratio_BN > settings.threshold) & draft.valid().cumprod(dim=1).bool()
    return _kept_to_the_last(passes_BN, p_BRV, round)


@partial(
    Verifier,
    line="emit the likeliest of all drafted sequences with one token more, for trees (arXiv:2407.09722)",
    lossless=False,
    greedy_only=True,
)
def mtjd(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """Return the K draft tokens of full depth and one more token with the highest joint probability.

    Multi-token joint decoding (arXiv:2407.09722), exact over the draft: with the proposer `exhaustive`, the argmax of
    p(x_1 .. x_{K+1}). Paths that are not chains of candidates from the root are ignored.
    """
    log_p_BRV = logits_BRV.log_softmax(dim=-1).double()
    if draft.nodes == 0:
        return Verdict(torch.ones_like(log_p_BRV[:, :, 0], dtype=torch.bool), log_p_BRV[:, 0].argmax(dim=-1))
    ancestors_BRR, depth_BR = ancestors_of(draft.parents())
    before_BNV = log_p_BRV.gather(1, draft.parents().unsqueeze(-1).expand(-1, -1, log_p_BRV.size(-1)))
    own_BN = before_BNV.gather(2, draft.tokens_BN.unsqueeze(-1)).squeeze(-1)
    own_BR = pad(own_BN.masked_fill(~draft.valid(), -torch.inf), (1, 0))
    path_BR = torch.where(ancestors_BRR, own_BR.unsqueeze(1), 0.0).sum(dim=2)
    depth_BR = torch.where(path_BR.isneginf(), 0, depth_BR)
    is_deepest_BR = depth_BR == depth_BR.amax(dim=1, keepdim=True)
    joint_BRV = (path_BR.unsqueeze(2) + log_p_BRV).masked_fill(~is_deepest_BR.unsqueeze(2), -torch.inf)
    best_B, tokens = joint_BRV.flatten(1).argmax(dim=1), log_p_BRV.size(-1)
    row_B11 = (best_B // tokens).view(-1, 1, 1).expand(-1, 1, ancestors_BRR.size(2))
    return Verdict(ancestors_BRR.gather(1, row_B11).squeeze(1), best_B % tokens)


@partial(
    Verifier,
    line="stop drafting where unsure, roll back at the first unlikely token (arXiv:2302.07863)",
    lossless=False,
    judges_trees=False,
    settings_kind=BildSettings,
)
def bild(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """Roll back at the first token whose -log p(x) under the target exceeds `rollback`, then take one token from p.

    Big Little Decoder (arXiv:2302.07863). Its other half, a drafter that stops where max q < `fallback`, is the draft's
    `valid_BN`.
    """
    settings = round.config.verifier_settings
    assert isinstance(settings, BildSettings)
    log_p_BN = logits_BRV[:, :-1].log_softmax(dim=-1).gather(2, draft.tokens_BN.unsqueeze(-1)).squeeze(-1)
    passes_BN = (-log_p_BN <= settings.rollback) & draft.valid()
    return _kept_to_the_last(passes_BN.cumprod(dim=1).bool(), round.sampling.probabilities(logits_BRV), round)


def _kept_to_the_last(passes_BN: Tensor, p_BRV: Tensor, round: Round) -> Verdict:
    """Keep everything up to the last position that passes."""
    kept_BN = passes_BN.flip(1).cumsum(dim=1).flip(1) > 0
    kept_BR = torch.cat([torch.ones_like(p_BRV[:, :1, 0], dtype=torch.bool), kept_BN], dim=1)
    p_BV = row_of(p_BRV, kept_BR.sum(dim=1) - 1)
    return Verdict(kept_BR, draw(p_BV, round.noise.uniform(RECOVER, 1)[:, 0]))
