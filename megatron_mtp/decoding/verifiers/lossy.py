"""Rules that trade the target's distribution for longer accepted drafts; each runs only where a user names it.

Letters in names: B batch, N drafted nodes, R = N + 1 rows, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_mtp.decoding.config import Settings, setting
from megatron_mtp.decoding.sampling import RECOVER, draw
from megatron_mtp.decoding.types import Draft, Round, Verdict, Verifier
from megatron_mtp.decoding.verifiers.lossless import chosen, row_of, walk


@dataclass(frozen=True)
class RelaxedSettings(Settings):
    """Settings of relaxed acceptance."""

    top_n: int = setting(10, "a token must be among so many likeliest tokens", 1, 1 << 20)
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
    """The paper's tau."""

    threshold: float = setting(0.5, "tau, which p/q of a kept prefix exceeds", 0.0, 1.0)


@dataclass(frozen=True)
class BildSettings(Settings):
    """When the drafter stops, and when the target rolls back."""

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
    """In the thinking phase accept what is among the top N and at most delta less likely than the best; else greedy.

    The phase begins after `think_start` and ends after `think_end`, inside a draft too. N = 1 or delta = 0 is strict
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
    """True if each sequence's newest token stands in the thinking phase: after its start, not after its end."""
    tokens_BT = round.tokens_BT
    assert tokens_BT is not None
    bounds = [bound for bound in (settings.think_start, settings.think_end) if bound is not None]
    place_T = torch.arange(1, 1 + tokens_BT.size(1), device=tokens_BT.device)
    place_BT = torch.where(place_T <= round.noise.position_B.unsqueeze(1), place_T, 0)
    starts_B, ends_B = (place_BT.where(tokens_BT.eq(bound), 0).amax(dim=1) for bound in bounds)
    return starts_B > ends_B


@partial(
    Verifier,
    line="keep the longest prefix with p/q above threshold, for mtp_beam (arXiv:2407.09722)",
    lossless=False,
    judges_trees=False,
    takes_path_probs=True,
    settings_kind=JointSettings,
)
def joint(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """The longest prefix with min(1, p(x_1..j) / q(x_1..j)) > tau, earlier failures ignored, then one token from p.

    Multi-token assisted decoding (arXiv:2407.09722). tau = 1 accepts nothing, tau = 0 everything that p allows; what is
    accepted has p > tau q.
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
    line="stop drafting where unsure, roll back at the first unlikely token (arXiv:2302.07863)",
    lossless=False,
    judges_trees=False,
    settings_kind=BildSettings,
)
def bild(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """Roll back at the first token with -log p(x) > `rollback` under the target, then one token from p.

    The big and little decoder (arXiv:2302.07863); its other half, the drafter that stops where max q < `fallback`,
    is the draft's `valid_BN`.
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
