"""run -> propose -> verify -> keep -> emit: one loop for every method.

A text starts with its prompt, run in chunks, whose last row gives the first token. Then every step drafts, scores t_m
and the drafts in one forward of the trunk, keeps what the verifier accepts and adds one token of the target's own.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_mtp.drafting.auto import AutoK
from megatron_mtp.drafting.config import SpeculativeConfig
from megatron_mtp.drafting.graphs import GraphedStep, can_record
from megatron_mtp.drafting.proposers import Proposer
from megatron_mtp.drafting.rehearsal import REHEARSED, rehearse
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.sampling import RECOVER, Sampling, draw
from megatron_mtp.drafting.sequences import Sequences
from megatron_mtp.drafting.types import AcceptanceStats, Draft, Round
from megatron_mtp.drafting.verifiers import Verifier

CHUNK = 512
"""Rows of a prompt that go through the model at once."""

Emit = Callable[[int, list[int], int, int, Draft | None], None]
"""Told, after every step, a text's number, its new tokens, how many of these were drafted, how many could have been,
and the batch's draft (None for the token that follows the prompt)."""


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


@dataclass
class Method:
    """How to draft: a proposer with its verifier, and K of each step."""

    proposer: Proposer
    verifier: Verifier
    config: SpeculativeConfig
    sampling: Sampling
    count: int
    auto: AutoK | None = None
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)


@torch.inference_mode()
def decode(runner: Runner, sequences: Sequences, method: Method, limits: Limits, emit: Emit | None = None) -> None:
    """Grow every text to its end; `sequences.texts` and `method.stats` hold the outcome."""
    prefill(runner, sequences, method.sampling)
    _emit(sequences, method, limits, emit, offered=None)
    method.proposer.start(sequences)
    if method.auto is not None:
        method.auto.begin(max(sequences.lengths()), method.stats)
        _rehearse(runner, sequences, method, method.auto)
    graphed = _graphed(runner, sequences, method)
    while any(sequences.live):
        count = method.count if method.auto is None else method.auto.choose()
        before = drafted = time.perf_counter()
        if graphed is not None:
            draft = graphed()
        else:
            scene = Round(method.sampling, sequences.noise, method.config, _thinking(sequences, method.config))
            draft = propose(sequences, method, scene, count)
            drafted = time.perf_counter()
            verify(runner, sequences, method, draft, scene)
        _emit(sequences, method, limits, emit, offered=draft)
        done = time.perf_counter()
        method.stats.drafter_seconds += drafted - before
        method.stats.target_seconds += done - drafted
        if method.auto is not None:
            method.auto.learn(count, drafted - before, done - drafted, method.stats)


def _rehearse(runner: Runner, sequences: Sequences, method: Method, auto: AutoK) -> None:
    """Show automatic K how well the first depth does on the prompts, where it has not seen drafts."""
    if auto.has_seen_drafts or method.config.method not in REHEARSED:
        return
    before = time.perf_counter()
    found = rehearse(runner, sequences, method.sampling)
    if found is not None:
        seconds = time.perf_counter() - before
        method.stats.drafter_seconds += seconds
        auto.expect(*found, seconds)


def _graphed(runner: Runner, sequences: Sequences, method: Method) -> GraphedStep | None:
    """Steps as a CUDA graph, where that is possible; all of its time counts as the target's."""
    if method.auto is not None or not can_record(runner, method.proposer, method.count, str(method.config.verifier)):
        return None
    return GraphedStep(lambda: step(runner, sequences, method), sequences, method.count + 1)


def step(runner: Runner, sequences: Sequences, method: Method) -> Draft:
    """All of a step that the device does: draft K tokens, score, judge and keep them."""
    scene = Round(method.sampling, sequences.noise, method.config)
    draft = propose(sequences, method, scene, method.count)
    verify(runner, sequences, method, draft, scene)
    return draft


def propose(sequences: Sequences, method: Method, scene: Round, count: int) -> Draft:
    """K = `count` drafts, also where a text has fewer tokens to go: what it samples must not hang on its neighbours."""
    if count == 0:
        return Draft(sequences.tokens_BT[:, :0])
    return method.proposer.propose(sequences, scene, count)


@torch.inference_mode()
def verify(runner: Runner, sequences: Sequences, method: Method, draft: Draft, scene: Round) -> None:
    """Score a draft, judge it and keep what is accepted; nothing is read back to the host."""
    rows = sequences.rows_of(draft)
    tokens_BR = torch.cat([sequences.tokens_at(sequences.newest_B, 1), draft.tokens_BN], dim=1)
    hidden_SBH = runner.trunk(tokens_BR, rows, sequences.cache)
    sequences.put_states(hidden_SBH, rows)
    logits_BRV = runner.logits(hidden_SBH)
    method.proposer.observe(sequences, draft, logits_BRV)
    sequences.keep(draft, method.verifier(logits_BRV, draft, scene))


@torch.inference_mode()
def prefill(runner: Runner, sequences: Sequences, sampling: Sampling) -> None:
    """Run the prompts in chunks, and add the first token of each."""
    prompt_B = sequences.length_B
    longest = max(sequences.lengths())
    for start in range(0, longest, CHUNK):
        count = min(CHUNK, longest - start)
        first_B = torch.full_like(prompt_B, start)
        rows = sequences.chain(first_B, count, 0)
        sequences.put_states(runner.trunk(sequences.tokens_at(first_B, count), rows, sequences.cache), rows)
    last_SBH = sequences.states_at(prompt_B - 1, 1)
    probs_BV = sampling.probabilities(runner.logits(last_SBH)[:, 0])
    sequences.append(draw(probs_BV, sequences.noise.uniform(RECOVER, 1)[:, 0]))


def _emit(sequences: Sequences, method: Method, limits: Limits, emit: Emit | None, offered: Draft | None) -> None:
    """Hand out what a step has gained, up to each text's end; drafts beyond its budget count as never offered."""
    levels = [[]] * len(sequences.texts) if offered is None else offered.levels()
    for row, gained in enumerate(sequences.read_back()):
        if not sequences.live[row]:
            continue
        prompt = sequences.prompts[row]
        text = sequences.texts[row][prompt:] + gained
        budget = limits.budget(prompt)
        end = _end(text, len(gained), budget, limits)
        kept = gained if end is None else gained[: len(gained) - (len(text) - end)]
        useful = min(max([0, *levels[row]]), budget - (len(text) - len(gained)) - 1)
        accepted = min(len(gained) - 1, len(kept), useful)
        method.stats.count(useful, accepted, len(kept))
        sequences.settle(row, kept, end is not None)
        if emit is not None:
            emit(row, kept, accepted, useful, offered)


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


def _thinking(sequences: Sequences, config: SpeculativeConfig) -> Tensor | None:
    """Whether each text's newest token stands in the thinking phase: after its start, and not after its end."""
    if config.verifier != "relaxed":
        return None
    phases = []
    for text in sequences.texts:
        bounds = [token for token in text if token in (config.think_start, config.think_end)]
        phases.append(bool(bounds) and bounds[-1] == config.think_start)
    return torch.tensor(phases, device=sequences.length_B.device)
