"""Logits to probabilities to tokens: penalties, sampling, log-probabilities, and per-request random numbers.

A request's random numbers depend only on its seed and position, so the rest of the batch has no influence. They are
stateless hashes of (seed, position, stream, index) (Salmon et al., SC 2011).

Letters in names: B batch, R rows of a sequence, V vocabulary; ... any leading dimensions.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-5
"""A lower temperature is greedy, as in vLLM, because logits divided by it may overflow float32."""

DRAFT, VERIFY, RECOVER = 0, 1, 2
"""Streams: drafting, accepting, and drawing the token after the accepted ones never share a number."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. A temperature below 1e-5 is greedy and ignores the others.

    Applied in this order, as in transformers; vLLM applies min-p before top-k and top-p.

    Attributes:
        temperature: divisor of the logits, in float32 or better.
        top_k: keep only the k most likely tokens; 0 for all.
        top_p: keep the smallest set of most likely tokens with at least this total probability; 1 for all.
        min_p: keep tokens with at least this fraction of the most likely token's probability; 0 for all.

    Raises:
        ValueError: a value that is not allowed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature is {self.temperature}; give 0 (greedy) or more.")
        if self.top_k < 0:
            raise ValueError(f"--top-k is {self.top_k}; give 0 (all tokens) or a number of tokens.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p is {self.top_p}; give a share of the probability in (0, 1].")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"--min-p is {self.min_p}; give 0 (all tokens) or a share up to 1.")

    @classmethod
    def of(cls, given: object) -> Self:
        """Create from attributes with these names, such as parsed flags; missing ones get neutral values."""
        values: dict[str, Any] = {field.name: getattr(given, field.name, field.default) for field in fields(cls)}
        return cls(**values)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < MIN_TEMPERATURE

    def probabilities(self, logits: Tensor) -> Tensor:
        """Convert logits [..., V] to probabilities.

        One-hot at temperature 0, so that all sampling rules become greedy.
        """
        if self.greedy:
            best = logits.argmax(dim=-1, keepdim=True)
            return torch.zeros_like(logits).scatter_(-1, best, 1.0)
        logits = _float32_or_better(logits) / self.temperature
        order = None
        if self.top_p < 1:
            logits, order = logits.sort(dim=-1, descending=True, stable=True)
        if 0 < self.top_k < logits.size(-1):
            kth = logits[..., self.top_k - 1, None] if order is not None else logits.topk(self.top_k).values[..., -1:]
            logits.masked_fill_(logits < kth, -torch.inf)
        if self.top_p < 1:  # keep a token if the more likely ones sum to less than top_p (arXiv:1904.09751)
            mass = logits.softmax(dim=-1).cumsum(dim=-1)
            logits[..., 1:].masked_fill_(mass[..., :-1] >= self.top_p, -torch.inf)
        if self.min_p > 0:  # arXiv:2407.01082
            most = logits[..., :1] if order is not None else logits.amax(dim=-1, keepdim=True)
            logits.masked_fill_(logits < most + math.log(self.min_p), -torch.inf)
        probs = logits.softmax(dim=-1)
        return probs if order is None else torch.empty_like(probs).scatter_(-1, order, probs)


@dataclass(frozen=True)
class SamplingOfEach:
    """Sampling settings of each sequence of a batch, used like one `Sampling`."""

    each: tuple[Sampling, ...]

    @property
    def greedy(self) -> bool:
        """Whether all sequences are greedy."""
        return all(one.greedy for one in self.each)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Convert logits [B, ..., V] to probabilities, each sequence by its own settings."""
        return torch.stack([one.probabilities(own) for one, own in zip(self.each, logits, strict=True)])


def sampling_of(each: list[Sampling]) -> Sampling | SamplingOfEach:
    """Return the sampling of a batch; a single one, which takes fewer operations, if all are equal."""
    return each[0] if len(set(each)) == 1 else SamplingOfEach(tuple(each))


def _float32_or_better(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the token [...] that `uniform` [...] in [0, 1) selects from `weights` [..., V], normalized or not."""
    heights = weights.cumsum(dim=-1, dtype=torch.double)
    threshold = uniform.unsqueeze(-1) * heights[..., -1:]
    return torch.searchsorted(heights, threshold, right=True).squeeze(-1).clamp(max=weights.size(-1) - 1)


@dataclass(frozen=True)
class Penalties:
    """Changes to the logits that depend on the tokens of a sequence. The defaults change nothing.

    Attributes:
        presence: subtracted once from the logit of every emitted token; -2 to 2.
        frequency: subtracted for each time a token was emitted; -2 to 2.
        repetition: logits of tokens in the prompt and output are divided by it if positive, otherwise multiplied
            (arXiv:1909.05858, section 4.1); above 0.
        bias: numbers to add to the logits of tokens, before the penalties.
        least: minimum number of new tokens before the sequence may end with one of `ends`.
        ends: tokens with probability 0 until then.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    least: int = 0
    ends: frozenset[int] = frozenset()


NO_PENALTIES = Penalties()


def penalized(
    penalties: Penalties, tokens: list[int], prompt: int, logits_RV: Tensor, drafted_RV: Tensor | None = None
) -> Tensor:
    """Return the logits [R, V] of a sequence's next tokens, in float32 or better if there are penalties.

    Each row has one more draft token before it than the previous row.
    """
    if penalties == NO_PENALTIES:
        return logits_RV
    logits_RV = _float32_or_better(logits_RV)  # counts above 256 are not exact in bfloat16
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
    """Return counts of each token, [1, V]."""
    index_T = torch.tensor(tokens, dtype=torch.long, device=like_RV.device)
    return torch.bincount(index_T, minlength=like_RV.size(-1)).to(like_RV).unsqueeze(0)


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithm of a token's probability, from the model's distribution before temperature and penalties.

    `top` lists the most probable tokens at this position with theirs, in descending order.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


def logprobs_of(logits_RV: Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
    """Return log-probabilities of one token per row and of the `top` most probable ones."""
    logprobs_RV = _float32_or_better(logits_RV).log_softmax(dim=-1)
    chosen_R1 = torch.tensor(tokens, dtype=torch.long, device=logits_RV.device).unsqueeze(1)
    own = logprobs_RV.gather(1, chosen_R1)[:, 0].tolist()
    best = logprobs_RV.topk(min(top, logits_RV.size(-1)), dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    tops = [list(zip(ids, values, strict=True)) for ids, values in pairs]
    return [TokenLogprob(*one) for one in zip(tokens, own, tops, strict=True)]


STREAMS, NUMBERS = 3, 1 << 22
"""Number of streams of a round, and the maximum of numbers of all of them together."""

LEAST_NUMBERS = 16
"""Numbers of each stream that are generated at once."""


class Noise:
    """Random numbers of one round, for every request of a batch.

    Number c of a request is a hash of its seed + c times a constant, as in SplitMix64 (Steele et al., OOPSLA 2014),
    with Lea's mixing function, whose shifts move whole halves (Steele and Vigna, OOPSLA 2021).

    Args:
        seed_B: seed of each request.
        position_B: number of its tokens, which grows from round to round.
    """

    def __init__(self, seed_B: Tensor, position_B: Tensor) -> None:
        self.seed_B, self.position_B = seed_B, position_B
        self._made_BNS: Tensor | None = None

    def uniform(self, stream: int, count: int) -> Tensor:
        """Return [B, count], float64 in [0, 1); the first ones do not depend on `count`."""
        if self._made_BNS is None or self._made_BNS.size(1) < count:
            self._made_BNS = self._made(max(count, LEAST_NUMBERS))
        return self._made_BNS[:, :count, stream]

    def _made(self, count: int) -> Tensor:
        number_X = torch.arange(count * STREAMS, device=self.seed_B.device)
        number_BX = torch.add(number_X, self.position_B.unsqueeze(1), alpha=NUMBERS)
        bits_BX = _mixed(torch.add(self.seed_B.unsqueeze(1), number_BX, alpha=_signed(0x9E3779B97F4A7C15)))
        return (bits_BX & 0xFFFFFFFF).double().mul_(2.0**-32).unflatten(1, (count, STREAMS))


def _mixed(value: Tensor) -> Tensor:
    """Apply Lea's mixing function in place, in wrapping 64-bit arithmetic; the lower half of a number is first."""
    lower, upper = value.view(torch.int32).unflatten(-1, (-1, 2)).unbind(-1)
    for _ in range(2):
        lower.bitwise_xor_(upper)
        value.mul_(_signed(0xDABA0B6EB09322E3))
    lower.bitwise_xor_(upper)
    return value


def _signed(constant: int) -> int:
    return constant - (1 << 64)
