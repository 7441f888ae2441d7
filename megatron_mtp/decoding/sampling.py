"""Logits to probabilities to tokens, with random numbers that belong to a request.

A request's numbers depend on its seed and position alone, so the rest of the batch changes nothing.
They are hashes of (seed, position, stream, index), made without state (Salmon et al., SC 2011).

Letters in names: B batch, V vocabulary; ... any leading dimensions.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

LEAST_TEMPERATURE = 1e-6
"""Below it, logits divided by the temperature overflow float32."""

DRAFT, VERIFY, RECOVER = 0, 1, 2
"""Streams: drafting, accepting, and the token after the accepted ones never share a number."""


@dataclass(frozen=True)
class Sampling:
    """Choice of a token; temperature 0 is greedy, and then the other settings change nothing.

    Applied in this order, which is that of transformers; vLLM applies min-p before top-k and top-p.

    Attributes:
        temperature: logits are divided by it, in float32 or better.
        top_k: only the k most likely tokens; 0 for all.
        top_p: only the smallest set of most likely tokens that holds this much probability; 1 for all.
        min_p: only tokens with at least this share of the most likely token's probability; 0 for all.

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
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"--temperature is {self.temperature}, too small to divide by; give 0 (greedy) or at least "
                f"{LEAST_TEMPERATURE}."
            )
        if self.top_k < 0:
            raise ValueError(f"--top-k is {self.top_k}; give 0 (all tokens) or a number of tokens.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p is {self.top_p}; give a share of the probability in (0, 1].")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"--min-p is {self.min_p}; give 0 (all tokens) or a share up to 1.")

    @classmethod
    def of(cls, given: object) -> Self:
        """From the attributes of these names, of parsed flags for example; those that are not there are at rest."""
        values: dict[str, Any] = {field.name: getattr(given, field.name, field.default) for field in fields(cls)}
        return cls(**values)

    @property
    def greedy(self) -> bool:
        """True if the most probable token is taken, without randomness."""
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """[..., V] to [..., V]; one-hot at temperature 0, so that every sampling rule turns into the greedy one."""
        if self.greedy:
            best = logits.argmax(dim=-1, keepdim=True)
            return torch.zeros_like(logits).scatter_(-1, best, 1.0)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        order = None
        if self.top_p < 1:
            logits, order = logits.sort(dim=-1, descending=True, stable=True)
        if 0 < self.top_k < logits.size(-1):
            kth = logits[..., self.top_k - 1, None] if order is not None else logits.topk(self.top_k).values[..., -1:]
            logits.masked_fill_(logits < kth, -torch.inf)
        if self.top_p < 1:  # a token stays if more likely ones hold less than top_p together (arXiv:1904.09751)
            mass = logits.softmax(dim=-1).cumsum(dim=-1)
            logits[..., 1:].masked_fill_(mass[..., :-1] >= self.top_p, -torch.inf)
        if self.min_p > 0:  # arXiv:2407.01082
            most = logits[..., :1] if order is not None else logits.amax(dim=-1, keepdim=True)
            logits.masked_fill_(logits < most + math.log(self.min_p), -torch.inf)
        probs = logits.softmax(dim=-1)
        return probs if order is None else torch.empty_like(probs).scatter_(-1, order, probs)


@dataclass(frozen=True)
class SamplingOfEach:
    """Choice of tokens where the sequences of a batch differ, in their order; in the place of one `Sampling`."""

    each: tuple[Sampling, ...]

    @property
    def greedy(self) -> bool:
        """True if all sequences take the most probable token."""
        return all(one.greedy for one in self.each)

    def probabilities(self, logits: Tensor) -> Tensor:
        """[B, ..., V] to the same; every sequence as it would be alone."""
        return torch.stack([one.probabilities(own) for one, own in zip(self.each, logits, strict=True)])


def sampling_of(each: list[Sampling]) -> Sampling | SamplingOfEach:
    """Sampling of a batch; one for all where they do not differ, which takes fewer operations."""
    return each[0] if len(set(each)) == 1 else SamplingOfEach(tuple(each))


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token [...] that `uniform` [...] in [0, 1) picks from `weights` [..., V], which need not sum to one."""
    heights = weights.cumsum(dim=-1, dtype=torch.double)
    threshold = uniform.unsqueeze(-1) * heights[..., -1:]
    return torch.searchsorted(heights, threshold, right=True).squeeze(-1).clamp(max=weights.size(-1) - 1)


STREAMS, NUMBERS = 3, 1 << 22
"""Streams of a round, and the most numbers of all of them together."""

LEAST_NUMBERS = 16
"""Numbers of each stream that are made at once."""


class Noise:
    """Random numbers of one round, for every request of a batch.

    Number c of a request is a hash of its seed + c times a constant, as SplitMix64's is (Steele et al., OOPSLA 2014),
    with the mixing function of Lea, whose shifts move whole halves (Steele and Vigna, OOPSLA 2021).

    Args:
        seed_B: of each request.
        position_B: tokens that it has; it grows from round to round.
    """

    def __init__(self, seed_B: Tensor, position_B: Tensor) -> None:
        self.seed_B, self.position_B = seed_B, position_B
        self._made_BNS: Tensor | None = None

    def uniform(self, stream: int, count: int) -> Tensor:
        """[B, count], float64 in [0, 1); the first ones do not depend on `count`."""
        if self._made_BNS is None or self._made_BNS.size(1) < count:
            self._made_BNS = self._made(max(count, LEAST_NUMBERS))
        return self._made_BNS[:, :count, stream]

    def _made(self, count: int) -> Tensor:
        number_X = torch.arange(count * STREAMS, device=self.seed_B.device)
        number_BX = torch.add(number_X, self.position_B.unsqueeze(1), alpha=NUMBERS)
        bits_BX = _mixed(torch.add(self.seed_B.unsqueeze(1), number_BX, alpha=_signed(0x9E3779B97F4A7C15)))
        return (bits_BX & 0xFFFFFFFF).double().mul_(2.0**-32).unflatten(1, (count, STREAMS))


def _mixed(value: Tensor) -> Tensor:
    """Lea's mixing function, in place and in wrapping 64-bit arithmetic; the lower half of a number stands first."""
    lower, upper = value.view(torch.int32).unflatten(-1, (-1, 2)).unbind(-1)
    for _ in range(2):
        lower.bitwise_xor_(upper)
        value.mul_(_signed(0xDABA0B6EB09322E3))
    lower.bitwise_xor_(upper)
    return value


def _signed(constant: int) -> int:
    return constant - (1 << 64)
