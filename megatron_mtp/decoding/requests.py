"""Messages to and from an engine: `add` takes a request, and steps return updates until one of them ends it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.draft import Draft
from megatron_mtp.decoding.sampling import NO_PENALTIES, Penalties, Sampling, TokenLogprob

UNLIMITED = sys.maxsize
"""`max_new_tokens` of a request that continues as long as there is room."""

SEEDS = range(-(2**63), 2**63)
"""Range of seeds."""


class Finish(StrEnum):
    """Why a sequence ended, as in OpenAI's API. An error is a bug, whose traceback is logged.

    A weight update aborts a sequence and keeps the tokens that it has.
    """

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    ABORT = "abort"


@dataclass(frozen=True)
class Request:
    """A sequence to generate. Its output depends only on the request and the model, whatever it shares a step with.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: maximum number of new tokens, limited by the model's positions; `UNLIMITED` for as many as the
            engine has room for.
        stop_ids: the sequence ends after any of these tokens, which is part of the output.
        cut: function from the emitted tokens to how many of them to keep, or None to continue (stop strings).
        logprobs: number of most probable tokens to return with log-probabilities for each emitted token; None for no
            log-probabilities.
        prompt_logprobs: the same for every token of the prompt but the first.
        speculative: drafting method; None for the engine's.
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    penalties: Penalties = NO_PENALTIES
    stop_ids: frozenset[int] = frozenset()
    cut: Callable[[list[int]], int | None] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculative: SpeculativeConfig | None = None


def check_prompt(prompt: list[int], positions: int, vocabulary: int, name: str = "the prompt") -> None:
    """Raise ValueError, in one sentence, for a prompt that a model with these positions and tokens cannot continue."""
    if not prompt:
        raise ValueError(f"{name} is empty; give at least one token.")
    if len(prompt) >= positions:
        raise ValueError(
            f"{name} has {len(prompt)} tokens, and the model has {positions} positions; give at most {positions - 1} "
            "tokens."
        )
    if not (min(prompt) >= 0 and max(prompt) < vocabulary):
        raise ValueError(f"{name} has token ids outside of the model's vocabulary; give 0 to {vocabulary - 1}.")


def check_request(request: Request, positions: int, vocabulary: int) -> None:
    """Raise ValueError, in one sentence, for a request that a model with these positions and tokens can never serve."""
    check_prompt(request.prompt, positions, vocabulary)
    penalties = request.penalties
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {request.max_new_tokens}; give 1 or more.")
    if request.seed not in SEEDS:
        raise ValueError(f"the seed is {request.seed}; give a number of 64 bits, from -2^63 to 2^63 - 1.")
    for name, top in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if top is not None and top < 0:
            raise ValueError(f"{name} is {top}; give 0 or more.")
    for name, value in (("presence", penalties.presence), ("frequency", penalties.frequency)):
        if not -2 <= value <= 2:
            raise ValueError(f"the {name} penalty is {value}; give -2 to 2.")
    if not 0 < penalties.repetition < float("inf"):
        raise ValueError(f"the repetition penalty is {penalties.repetition}; give a number above 0, 1 for none.")
    if outside := [token for token, _ in penalties.bias if not 0 <= token < vocabulary]:
        raise ValueError(f"the logit bias has the token id {outside[0]}; give 0 to {vocabulary - 1}.")


@dataclass(frozen=True)
class Update:
    """Tokens that a step gave a sequence.

    Attributes:
        request: number that `add` returned.
        tokens: new tokens, up to the sequence's end; empty if the step only ran part of the prompt.
        accepted: how many of these were drafted; they come first.
        offered: number of draft tokens that could have been accepted.
        finish: why the sequence ended; None while it continues.
        logprobs: log-probabilities of `tokens`, if requested.
        prompt_logprobs: log-probabilities of the prompt, if requested; once, with the first tokens.
        cached_tokens: number of prompt tokens found in the cache; with the first tokens.
        draft: draft of all sequences of the step; None for the first token.
        row: row of this sequence in the draft.
        policy_version: version of the weights that generated the tokens (`update_weights`). A sequence has one version:
            updates with an earlier one are void.
    """

    request: int
    tokens: list[int]
    accepted: int = 0
    offered: int = 0
    finish: Finish | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    draft: Draft | None = None
    row: int = 0
    policy_version: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the step for a file. Reads the draft back to the host, which takes a little time.

        `drafted` are the nodes of the tree and `parents` the rows that they continue, as in `Draft`. A node that was
        not a candidate, or is beyond the sequence's end, is None.
        """
        drafted: list[int | None] = []
        parents: list[int] = []
        if self.draft is not None and self.draft.nodes:
            nodes = zip(self.draft.tokens_BN[self.row].tolist(), self.draft.levels()[self.row], strict=True)
            drafted = [token if 0 < level <= self.offered else None for token, level in nodes]
            parents = self.draft.parents()[self.row].tolist()
        return {"drafted": drafted, "parents": parents, "accepted": self.accepted, "emitted": self.tokens}


@dataclass(frozen=True)
class Load:
    """Load of an engine.

    Attributes:
        running, waiting: sequences in the steps, and requests that wait for a place.
        blocks_used, blocks: blocks of the cache; blocks with a reusable prefix but no live sequence count as free.
        states_used, states: sequences with recurrent states, and the maximum number of them; 0 without recurrent
            layers.
        preempted: number of sequences that were preempted, to be recomputed later.
        prompt_tokens, cached_tokens: prompt tokens so far, and how many of them were in the cache.
        stats: acceptance so far.
        expected: recorded acceptance of the model by position; empty without a record.
    """

    running: int
    waiting: int
    blocks_used: int
    blocks: int
    preempted: int
    prompt_tokens: int
    cached_tokens: int
    stats: AcceptanceStats
    states_used: int = 0
    states: int = 0
    expected: tuple[float, ...] = ()


class QueueFull(Exception):  # noqa: N818 - named after queue.Full
    """Raised when the engine's queue of waiting requests is full."""
