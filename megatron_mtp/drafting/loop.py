"""run -> propose -> verify -> keep -> emit: one loop for every method.

A text starts with its prompt, run in chunks, whose last row gives the first token. Then every step drafts, scores t_m
and the drafts in one forward of the trunk, keeps what the verifier accepts and adds one token of the target's own.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_mtp.drafting.auto import AutoK
from megatron_mtp.drafting.graphs import GraphedStep
from megatron_mtp.drafting.method import Method
from megatron_mtp.drafting.rehearsal import rehearse
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.sampling import RECOVER, Sampling, draw
from megatron_mtp.drafting.sequences import Sequences
from megatron_mtp.drafting.types import Draft, Emitted, Round

CHUNK = 512
"""Rows of a prompt that go through the model at once."""

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


@torch.inference_mode()
def decode(runner: Runner, sequences: Sequences, method: Method, limits: Limits, emit: Emit | None = None) -> None:
    """Grow every text to its end; `sequences.texts` and `method.stats` hold the outcome."""
    sequences.growth = method.count + 1 if sequences.few_shapes else 1
    sequences.reach = method.proposer.nodes(method.count) + 1 if sequences.few_shapes else 0
    prefill(runner, sequences, method.sampling)
    _hand_out(sequences, method, limits, emit, draft=None)
    method.proposer.start(sequences)
    if method.auto is not None:
        method.auto.begin(max(sequences.lengths()), method.stats)
        _rehearse(runner, sequences, method, method.auto)
    graphed, stats = _graphed(runner, sequences, method), method.stats
    while any(sequences.live):
        count = method.count if method.auto is None else method.auto.choose()
        began, drafted_before = time.perf_counter(), stats.drafter_seconds
        draft = step(runner, sequences, method, count) if graphed is None else graphed(count)
        _hand_out(sequences, method, limits, emit, draft)
        drafter = stats.drafter_seconds - drafted_before
        target = time.perf_counter() - began - drafter
        stats.target_seconds += target
        if method.auto is not None and (graphed is None or graphed.is_steady):
            method.auto.learn(count, drafter, target, stats)


def _rehearse(runner: Runner, sequences: Sequences, method: Method, auto: AutoK) -> None:
    """Show automatic K how well the first depth does on the prompts, where it has not seen drafts."""
    proposer = method.proposer
    if not auto.may_rehearse or proposer.depths is None or proposer.drafts_trees:
        return
    before = time.perf_counter()
    found = rehearse(runner, sequences, method.sampling)
    if found is not None:
        seconds = time.perf_counter() - before
        method.stats.drafter_seconds += seconds
        auto.expect(*found, seconds)


def _graphed(runner: Runner, sequences: Sequences, method: Method) -> GraphedStep | None:
    """Steps as CUDA graphs, where they are recorded; the time of a replay counts as the target's."""
    if not sequences.records:
        return None
    kind = method.config, method.sampling
    return GraphedStep(lambda count: step(runner, sequences, method, count), sequences, method.proposer, kind)


def step(runner: Runner, sequences: Sequences, method: Method, count: int) -> Draft:
    """All of a step that the device does: draft K = `count` tokens, score, judge and keep them."""
    round = Round(method.sampling, sequences.noise, method.config, sequences.texts)
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
def prefill(runner: Runner, sequences: Sequences, sampling: Sampling) -> None:
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


def _hand_out(sequences: Sequences, method: Method, limits: Limits, emit: Emit | None, draft: Draft | None) -> None:
    """Count and emit what a step gave each text, and end the texts that are complete."""
    levels = [[]] * len(sequences.texts) if draft is None else draft.levels()
    for text, gained in enumerate(sequences.read_back()):
        if not sequences.live[text]:
            continue
        tokens, left, ended = _kept(sequences, limits, text, gained)
        offered = min(max([0, *levels[text]]), left - 1)  # drafts beyond the budget count as never offered
        emitted = Emitted(text, tokens, min(len(gained) - 1, len(tokens), offered), offered, draft)
        method.stats.count(offered, emitted.accepted, len(tokens))
        sequences.settle(text, tokens, ended)
        if emit is not None:
            emit(emitted)


def _kept(sequences: Sequences, limits: Limits, text: int, gained: list[int]) -> tuple[list[int], int, bool]:
    """The tokens that stay of those that a text gained, how many it could still take before, and whether it ends."""
    prompt = sequences.prompt_lengths[text]
    before = len(sequences.texts[text]) - prompt
    budget = limits.budget(prompt)
    end = _end(sequences.texts[text][prompt:] + gained, len(gained), budget, limits)
    return gained if end is None else gained[: end - before], budget - before, end is not None


def _end(text: list[int], gained: int, budget: int, limits: Limits) -> int | None:
    """How many of the emitted tokens stay, if the text ends among the last `gained` of them."""
    ends = []
    for place in range(len(text) - gained, len(text)):
        if text[place] in limits.stop_ids:
            ends.append(place + 1)
            break
    if limits.cut is not None and (cut := limits.cut(text)) is not None:
        ends.append(max(cut, len(text) - gained))
    if len(text) >= budget:
        ends.append(budget)
    return min(ends, default=None)
