"""The parts of a step, run -> propose -> verify -> keep -> emit, what passes between them, and an engine's messages.

The trunk scores R = N + 1 rows of a sequence in one forward: row 0 is t_m, the newest token, and rows 1 .. N are the
drafted nodes. A draft is a tree: every node names the row that it continues, and a chain is a tree with one branch.

        row      0     1     2     3            the root t_m, two candidates for the next token, and one more token
        token    t_m   a     b     c            that continues b
        parent         0     0     2

A request goes into an engine (`add`), and its steps give updates until one of them ends it.

Letters in names: B batch, N drafted nodes, R = N + 1 rows, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, override

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from megatron_mtp.acceptance import AcceptanceStats
from megatron_mtp.decoding.config import Settings, SpeculativeConfig
from megatron_mtp.decoding.sampling import NO_PENALTIES, Noise, Penalties, Sampling, SamplingOfEach, TokenLogprob

Sequences = Any
"""A batch of the file sequences.py, which keeps what stands here."""

Kind = str
"""Depths that continue one another (sequential), heads that all read the trunk's state (parallel), or a drafter, of
`drafters.DRAFTERS`."""


@dataclass(frozen=True)
class Draft:
    """Tokens that a proposer offers.

    Attributes:
        tokens_BN: the drafted tokens; a node stands after its parent.
        probs_BNV: q, the distribution that each was sampled from; None for deterministic drafts.
        parents_BN: the row that each node continues; None for a chain.
        valid_BN: False where a node is padding, or scored without being a candidate; None if all are candidates.
    """

    tokens_BN: Tensor
    probs_BNV: Tensor | None = None
    parents_BN: Tensor | None = None
    valid_BN: Tensor | None = None

    @property
    def nodes(self) -> int:
        """N, drafted tokens of a sequence."""
        return self.tokens_BN.size(1)

    @property
    def is_chain(self) -> bool:
        """True if every token continues the one before."""
        return self.parents_BN is None

    def parents(self) -> Tensor:
        """[B, N], of a chain too."""
        if self.parents_BN is not None:
            return self.parents_BN
        return torch.arange(self.nodes, device=self.tokens_BN.device).expand_as(self.tokens_BN)

    def distributions(self, like: Tensor) -> Tensor:
        """q of every node, [B, N, V], of the dtype of `like` [..., V]; one-hot where the draft is deterministic."""
        return (one_hot(self.tokens_BN, like.size(-1)) if self.probs_BNV is None else self.probs_BNV).to(like)

    def valid(self) -> Tensor:
        """[B, N], bool."""
        return torch.ones_like(self.tokens_BN, dtype=torch.bool) if self.valid_BN is None else self.valid_BN

    def levels(self) -> list[list[int]]:
        """Depth of every node, from 1 on, on the host; -1 where it is no candidate, or continues none."""
        if self.is_chain and self.valid_BN is None:
            return [list(range(1, self.nodes + 1))] * self.tokens_BN.size(0)
        found = []
        for valid, parents in zip(self.valid().tolist(), self.parents().tolist(), strict=True):
            level = [0]
            for ok, parent in zip(valid, parents, strict=True):
                level.append(level[parent] + 1 if ok and level[parent] >= 0 else -1)
            found.append(level[1:])
        return found


@dataclass(frozen=True)
class Verdict:
    """The target's verdict on a draft.

    Attributes:
        kept_BR: rows on the accepted path; the root always is.
        token_B: the token after the path: recovered after a rejection, bonus after none.
    """

    kept_BR: Tensor
    token_B: Tensor

    @property
    def accepted_B(self) -> Tensor:
        """[B], accepted drafts of every sequence."""
        return self.kept_BR.sum(dim=1) - 1


@dataclass(frozen=True)
class StepOutput:
    """The tokens that a step added, on the device; a recorded step fills the same tensors again.

    Attributes:
        draft: what was judged.
        tokens_BR: the accepted drafts and the token after them; what stands behind these means nothing.
        count_B: how many of these were added.
    """

    draft: Draft
    tokens_BR: Tensor
    count_B: Tensor


@dataclass(frozen=True)
class Round:
    """Facts for proposers and verifiers beside the draft and the target's logits.

    Attributes:
        sampling: temperature, top-k, top-p and min-p, of target and drafter alike.
        noise: this round's random numbers of every request.
        config: the settings of the method and of the verifier.
        token_ids: of every sequence up to t_m, on the host; a recorded step has none.
        tokens_BT: the same on the device, and behind t_m anything; `noise.position_B` says how many they are.
    """

    sampling: Sampling | SamplingOfEach
    noise: Noise
    config: SpeculativeConfig
    token_ids: Sequence[list[int]] = ()
    tokens_BT: Tensor | None = None


class Proposer:
    """A way to draft. A class states its facts; lists, checks, help texts and the pages' tables are made of them.

    Args:
        runner: the target, a `Runner`; its type stands with those that run its layers.
        config: the method's settings among others.
        drafter: the small model, for a method that needs one; else None.

    Attributes:
        line: what it drafts from, in a line.
        settings_kind: the class of its own settings, which `settings` is an object of.
        depths: the kind of depths that it drafts with; None if it needs none.
        drafts_trees: whether a row may have several candidates.
        keeps_states: whether its depths may have recurrent layers: they run chains of rows, leave none out and go
            back by few (`rows.ROLLED_BACK`).
        recordable: whether a draft reads nothing back, and its shapes depend on the batch and K alone (`graphs.py`).
        at_once: whether a draft of any K takes one pass.
        observes: whether it reads the target's logits of every step.
        limit, remedy: where `most` comes from, and what to do about it, for the message to one who asks for more.
    """

    line: ClassVar[str]
    settings_kind: ClassVar[type[Settings]] = Settings
    depths: ClassVar[Kind | None] = None
    drafts_trees: ClassVar[bool] = False
    keeps_states: ClassVar[bool] = False
    recordable: ClassVar[bool] = False
    at_once: ClassVar[bool] = False
    observes: ClassVar[bool] = False
    limit: ClassVar[str] = ""
    remedy: ClassVar[str] = ""
    drafter: Any = None
    runner: Any

    def __init__(self, runner: Any, config: SpeculativeConfig, drafter: Any = None) -> None:
        self.runner, self.config, self.settings = runner, config, config.settings

    @classmethod
    def recurrent_layers(cls) -> str:
        """Places where a hybrid may have recurrent layers: trees branch, and so do some rows of a depth."""
        trunk, depths = not cls.drafts_trees, cls.depths is None or cls.keeps_states
        return {(True, True): "yes", (True, False): "in the trunk", (False, True): "in depths"}.get(
            (trunk, depths), "no"
        )

    @property
    def most(self) -> int | None:
        """The largest K that it can be asked for; None without a limit."""
        return None

    @property
    def has_states(self) -> bool:
        """True if recurrent layers draft."""
        return self.depths is not None and self.runner.recurrent_depths

    @property
    def draws_siblings(self) -> bool:
        """True if the candidates of a row are independent samples of one q; a chain has one a row."""
        return not self.drafts_trees

    def nodes(self, count: int) -> int:
        """Rows that a draft of K = `count` adds to the trunk's forward."""
        return count

    def caches(self, count: int) -> tuple[int, ...]:
        """Numbers of the caches in which a draft of `count` runs rows: depths from 0 on, a small model -1."""
        return ()

    def missed(self, sequences: Sequences, count: int) -> int:
        """Tokens of a sequence whose rows the drafter has to run before it drafts `count`; 0 if it runs none."""
        return max(map(sequences.growth_since, self.caches(count)), default=0)

    def mark_seen(self, sequences: Sequences, count: int) -> None:
        """The drafter has run the rows of all tokens so far, in a draft of `count`."""
        sequences.mark_seen(*self.caches(count))

    def propose(self, sequences: Sequences, round: Round, count: int) -> Draft:
        """A draft of depth `count`, at least 1."""
        raise NotImplementedError

    def catch_up(self, sequences: Sequences, round: Round, count: int) -> None:
        """Run the rows that it has missed before it can draft `count`."""
        self.propose(sequences, round, count)

    def observe(self, sequences: Sequences, draft: Draft, logits_BRV: Tensor) -> None:
        """The target's logits of the rows, before the verdict, for a proposer that `observes`."""


class Plain(Proposer):
    """Plain decoding: nothing is drafted, and every forward of the trunk gives one token."""

    line = "nothing: one token a forward"
    limit = "since it is plain decoding"
    remedy = "choose another method"
    recordable = True

    @property
    @override
    def most(self) -> int:
        return 0

    @override
    def propose(self, sequences: Sequences, round: Round, count: int) -> Draft:
        return Draft(sequences.tokens_BT[:, :0])


Rule = Callable[[Tensor, Draft, Round], Verdict]
"""From the target's logits [B, R, V] to a verdict; pure, its random numbers are the round's."""


@dataclass(frozen=True)
class Verifier:
    """A rule with its facts; is called as the rule is, and reads nothing back to the host.

    Attributes:
        line: the rule in a line, for tables.
        lossless: whether it keeps the target's distribution; one that does not runs only where a user names it.
        judges_trees: whether it can judge more than chains.
        needs_samples: whether the candidates of a row must be independent samples of one q.
        greedy_only: whether it is for temperature 0.
        is_greedy: whether it accepts the target's most probable tokens, and these alone.
        takes_path_probs: whether it reads q as the score of a path, and not as what the path was sampled from.
        settings_kind: the class of its own settings.
    """

    rule: Rule
    line: str
    lossless: bool = True
    judges_trees: bool = True
    needs_samples: bool = False
    greedy_only: bool = False
    is_greedy: bool = False
    takes_path_probs: bool = False
    settings_kind: type[Settings] = Settings

    def __call__(self, logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
        """The verdict on a draft, from the target's logits [B, R, V] of its rows."""
        return self.rule(logits_BRV, draft, round)


@dataclass
class Method:
    """A proposer with its verifier (method.py makes one).

    Attributes:
        config: with the verifier's name filled in.
        count: K of every step.
        auto: whether K of each step is picked by cost and acceptance; `count` is the largest then.
        stats: what the last step has cost and gained.
    """

    proposer: Proposer
    verifier: Rule
    config: SpeculativeConfig
    sampling: Sampling | SamplingOfEach
    count: int
    auto: bool = False
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)

    @property
    def slots(self) -> int:
        """Slots behind the tokens of a sequence that a step may write."""
        return 1 + self.proposer.nodes(self.count)


# ---- messages to and from the engine

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
    """One sequence to grow. It depends on nothing but the request and the model, whatever it shares a step with.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: at most so many, and no more than the model's positions allow.
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
