"""Messages to and from an engine: a request goes in (`add`), and steps give updates until one of them ends it."""

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
"""`max_new_tokens` of a request that goes on for as long as there is room."""

SEEDS = range(-(2**63), 2**63)
"""What a seed may be."""


class Finish(StrEnum):
    """Reason for a sequence's end, as OpenAI's API names it; an error is a bug, whose traceback is logged.

    A sequence is aborted by an update of the weights, with the tokens that it had.
    """

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    ABORT = "abort"


@dataclass(frozen=True)
class Request:
    """A sequence to grow. It depends on nothing but the request and the model, whatever it shares a step with.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: at most so many, and no more than the model's positions allow; `UNLIMITED` for as many as the
            engine has room for.
        stop_ids: the sequence ends after any of these tokens, which counts as emitted.
        cut: given the tokens emitted so far, how many of them to keep, or None to go on (stop strings).
        logprobs: for each emitted token so many of the most probable tokens with their log-probabilities; None for no
            log-probabilities at all.
        prompt_logprobs: the same for every token of the prompt but the first.
        speculative: how to draft; None as the engine was set up.
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
    """Raises ValueError, in one sentence, for what a model of so many positions and tokens cannot continue."""
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
    """Raises ValueError, in one sentence, for what a model of so many positions and tokens can never continue."""
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
        request: the number that `add` returned.
        tokens: the new ones, up to the sequence's end; empty where a step only ran a part of the prompt.
        accepted: how many of these were drafted; they come first.
        offered: drafted tokens that could have been accepted.
        finish: why the sequence ended; None while it goes on.
        logprobs: of `tokens`, if the request asked for them.
        prompt_logprobs: of the prompt, once, with the first tokens, if the request asked for them.
        cached_tokens: of the prompt, which were found in the cache and not run; with the first tokens.
        draft: of all sequences of the step; None for the first token.
        row: of this sequence in the draft.
        policy_version: of the weights that made the tokens (`update_weights`). A sequence has one version: what
            came with an earlier one is void.
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
        """The step for a file; reads the draft back to the host, which costs a little time.

        `drafted` are the nodes of the tree and `parents` the rows that they continue, as in `Draft`. A node that was no
        candidate, or that lies beyond the sequence's end, is None.
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
        blocks_used, blocks: of the cache; blocks that hold a reusable prefix and no live sequence are free.
        states_used, states: sequences whose recurrent layers have states, and for how many there is room; 0 without
            any.
        preempted: sequences that were put back since the start, to be computed anew.
        prompt_tokens, cached_tokens: tokens of prompts since the start, and those of them that the cache already held.
        stats: acceptance since the start.
        expected: acceptance by position that was recorded of the model; empty without a record.
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


class QueueFull(Exception):  # noqa: N818 - named like queue.Full
    """Raised when as many requests wait as the engine was set up for."""
