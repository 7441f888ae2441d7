"""run -> propose -> verify -> keep -> emit: one loop for every method.

A text starts with its prompt, run in chunks, whose last row gives the first token. Then every step drafts, scores t_m
and the drafts in one forward of the trunk, keeps what the verifier accepts and adds one token of the target's own.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatron_mtp.decoding.graphs import GraphedStep
from megatron_mtp.decoding.kv_cache import CHUNK
from megatron_mtp.decoding.method import Method
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import RECOVER, Sampling, SamplingByText, draw
from megatron_mtp.decoding.sequences import Sequences
from megatron_mtp.decoding.types import Draft, Emitted, End, Round

Emit = Callable[[Emitted], None]
"""Called with what every step gave every text, as it comes."""


@dataclass(frozen=True)
class Limits:
    """When a text ends.

    Attributes:
        new_tokens: at most so many.
        positions: the model's; no text grows beyond them. None without a limit.
        stop_ids: after any of these tokens, which still counts as emitted.
        cut: given the tokens emitted so far, how many of them to keep, or None to go on (stop strings).
    """

    new_tokens: int
    positions: int | None = None
    stop_ids: frozenset[int] = frozenset()
    cut: Callable[[list[int]], int | None] | None = None

    def budget(self, prompt: int) -> int:
        """New tokens that a text may have after a prompt of so many."""
        return self.new_tokens if self.positions is None else min(self.new_tokens, self.positions - prompt)


class Group:
    """Texts that take their steps together: those of a batch, or those of an engine that draft alike.

    Args:
        method: how they draft; `stats` and `auto` learn from every step.
        limits: of every text.
        emit: called with what every step gave every text.
    """

    def __init__(
        self,
        runner: Runner,
        sequences: Sequences,
        method: Method,
        limits: list[Limits],
        emit: Emit | None = None,
    ) -> None:
        self.runner, self.sequences, self.method, self.limits, self.emit = runner, sequences, method, limits, emit
        self._graphed = _graphed(runner, sequences, method)

    def step(self) -> None:
        """Draft, verify, keep and emit; with automatic K, learn what it took."""
        count, graphed = self.choose(), self._graphed
        method, stats = self.method, self.method.stats
        began, drafted_before = time.perf_counter(), stats.drafter_seconds
        self.prepare(count)
        draft = step(self.runner, self.sequences, method, count) if graphed is None else graphed(count)
        self.hand_out(draft)
        drafter = stats.drafter_seconds - drafted_before
        target = time.perf_counter() - began - drafter
        stats.target_seconds += target
        if method.auto is not None and (graphed is None or graphed.is_steady):
            method.auto.learn(count, drafter, target, stats)

    def choose(self) -> int:
        """K of the next step."""
        return self.method.count if self.method.auto is None else self.method.auto.choose()

    def prepare(self, count: int) -> None:
        """What goes before a step with K = `count`; nothing for a batch that began together."""

    def hand_out(self, draft: Draft | None) -> None:
        """Count and emit what a step gave each text, and end the texts that are complete."""
        sequences = self.sequences
        levels = [[]] * len(sequences.texts) if draft is None else draft.levels()
        for text, gained in enumerate(sequences.read_back()):
            if not sequences.live[text]:
                continue
            self.give(text, gained, max([0, *levels[text]]), draft)

    def give(self, text: int, gained: list[int], depth: int, draft: Draft | None) -> None:
        """The same for one text, which gained these tokens from a draft of this depth."""
        emitted = emitted_of(self.sequences, self.limits[text], text, gained, depth, draft)
        self.method.stats.count(emitted.offered, emitted.accepted, len(emitted.tokens))
        self.sequences.settle(text, emitted.tokens, emitted.end is not None)
        if self.emit is not None:
            self.emit(emitted)


@torch.inference_mode()
def decode(
    runner: Runner,
    sequences: Sequences,
    method: Method,
    limits: Limits | list[Limits],
    emit: Emit | None = None,
) -> None:
    """Grow every text to its end; `sequences.texts` and `method.stats` hold the outcome.

    Args:
        limits: of all texts, or of each.
    """
    sequences.growth = method.count + 1 if sequences.few_shapes else 1
    sequences.reach = method.proposer.nodes(method.count) + 1 if sequences.few_shapes else 0
    prefill(runner, sequences, method.sampling)
    each = limits if isinstance(limits, list) else [limits] * len(sequences.texts)
    group = Group(runner, sequences, method, each, emit)
    group.hand_out(draft=None)
    method.proposer.start(sequences)
    if method.auto is not None:
        method.auto.begin(max(sequences.lengths()), method.stats)
    while any(sequences.live):
        group.step()


def _graphed(runner: Runner, sequences: Sequences, method: Method) -> GraphedStep | None:
    """Steps as CUDA graphs, where they are recorded; the time of a replay counts as the target's."""
    if not sequences.records:
        return None
    kind = method.config, method.sampling
    return GraphedStep(lambda count: step(runner, sequences, method, count), sequences, method.proposer, kind)


def step(runner: Runner, sequences: Sequences, method: Method, count: int) -> Draft:
    """All of a step that the device does: draft K = `count` tokens, score, judge and keep them."""
    round = Round(method.sampling, sequences.noise, method.config, sequences.texts, sequences.tokens_BT)
    began = time.perf_counter()
    draft = propose(sequences, method, round, count)
    method.stats.drafter_seconds += time.perf_counter() - began
    verify(runner, sequences, method, draft, round)
    return draft


def propose(sequences: Sequences, method: Method, round: Round, count: int) -> Draft:
    """K = `count` drafts, also where a text has fewer tokens to go: its samples must not depend on its neighbours."""
    if count == 0:
        return Draft(sequences.tokens_BT[:, :0])
    return method.proposer.propose(sequences, round, count)


@torch.inference_mode()
def catch_up(sequences: Sequences, method: Method, count: int) -> None:
    """Run the rows that a drafter has missed before it can draft `count`; its draft is not used."""
    began = time.perf_counter()
    method.proposer.catch_up(sequences, Round(Sampling(), sequences.noise, method.config, sequences.texts), count)
    method.stats.drafter_seconds += time.perf_counter() - began


@torch.inference_mode()
def verify(runner: Runner, sequences: Sequences, method: Method, draft: Draft, round: Round) -> None:
    """Score a draft, judge it and keep what is accepted; nothing is read back to the host."""
    rows = sequences.rows_of(draft)
    tokens_BR = torch.cat([sequences.tokens_at(sequences.newest_B, 1), draft.tokens_BN], dim=1)
    hidden_SBH = runner.trunk(tokens_BR, rows, sequences.cache)
    sequences.put_states(hidden_SBH, rows)
    logits_BRV = runner.logits(hidden_SBH)
    method.proposer.observe(sequences, draft, logits_BRV)
    sequences.keep(draft, method.verifier(logits_BRV, draft, round))


@torch.inference_mode()
def prefill(runner: Runner, sequences: Sequences, sampling: Sampling | SamplingByText) -> None:
    """Run the prompts in chunks, and add the first token of each."""
    prompt_B = sequences.length_B
    longest = max(sequences.lengths())
    for start in range(0, longest, CHUNK):
        count = min(CHUNK, longest - start)
        first_B = torch.full_like(prompt_B, start)
        rows = sequences.chain(first_B, count, 0, prompt_B if runner.recurrent_trunk else None)
        sequences.put_states(runner.trunk(sequences.tokens_at(first_B, count), rows, sequences.cache), rows)
    last_SBH = sequences.states_at(prompt_B - 1, 1)
    probs_BV = sampling.probabilities(runner.logits(last_SBH)[:, 0])
    sequences.append(draw(probs_BV, sequences.noise.uniform(RECOVER, 1)[:, 0]))


def emitted_of(
    sequences: Sequences, limits: Limits, text: int, gained: list[int], depth: int, draft: Draft | None
) -> Emitted:
    """What stays of the tokens that a text gained from a draft of this depth."""
    prompt = sequences.prompt_lengths[text]
    before, budget = len(sequences.texts[text]) - prompt, limits.budget(prompt)
    place, end = min(_own_ends(before, gained, budget, limits), default=(None, None))
    tokens = gained if place is None else gained[: place - before]
    if limits.cut is not None and (cut := limits.cut(sequences.texts[text][prompt:] + tokens)) is not None:
        tokens, end = tokens[: max(cut - before, 0)], End.STOP
    offered = min(depth, budget - before - 1)  # drafts beyond the budget count as never offered
    return Emitted(text, tokens, min(len(gained) - 1, len(tokens), offered), offered, draft, end)


def _own_ends(before: int, gained: list[int], budget: int, limits: Limits) -> Iterator[tuple[int, End]]:
    """How many of the emitted tokens stay, and why, where a stop or the budget ends the text."""
    stop = next((place for place, token in enumerate(gained, start=1) if token in limits.stop_ids), None)
    if stop is not None:
        yield before + stop, End.STOP
    if before + len(gained) >= budget:
        yield budget, End.BUDGET
