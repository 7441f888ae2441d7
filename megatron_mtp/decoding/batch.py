"""Batches of the engine's steps: parts of some prompts, or all sequences that use the same drafting method.

A sequence begins with its prompt, which runs in parts together with others; its last row gives the first token. Then it
joins the batch of sequences with the same method. Every step of a batch drafts, scores the newest tokens and the drafts
in one forward pass of the trunk, keeps what the verifier accepts and adds one token of the target.
"""

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.decoding.auto_count import AutoK
from megatron_mtp.decoding.block_manager import BlockTable
from megatron_mtp.decoding.config import VERIFIERS, SpeculativeConfig
from megatron_mtp.decoding.draft import Draft, Round, StepOutput, Verdict
from megatron_mtp.decoding.method import Method
from megatron_mtp.decoding.proposers.proposer import Proposer
from megatron_mtp.decoding.requests import Finish, Request, Update
from megatron_mtp.decoding.rows import MAX_ROWS_BACK, Rows, ancestors_of, rounded
from megatron_mtp.decoding.sampling import (
    NO_PENALTIES,
    Penalties,
    Sampling,
    TokenLogprob,
    logprobs_of,
    penalized,
    sampling_of,
)
from megatron_mtp.decoding.sequences import BatchShapes, KeptTensors, Progress, Sequences
from megatron_mtp.decoding.verifiers import Verifier, VerifierRule

if TYPE_CHECKING:
    from megatron_mtp.decoding.graphs import GraphedStep

DraftingKind = tuple[SpeculativeConfig, bool]
"""Sequences of one kind share steps: their config, and whether they are greedy."""

DraftingGroup = tuple[DraftingKind, int | None]
"""Sequences that are decoded together: of one kind; a sequence that must be alone is its own group, by its number."""

MAX_ROWS_BEHIND = 32
"""Maximum number of rows that a sequence's drafter may be behind to catch up together with the others; with more it
runs alone. The others rerun as many rows, so for recurrent layers this is half of what a state may go back.
"""


@dataclass(eq=False)
class Sequence:
    """A request while the engine runs it.

    Attributes:
        number: number that `add` returned; smaller ones came earlier.
        budget: maximum number of new tokens.
        tokens: prompt and emitted tokens.
        entry: index of its states in recurrent layers; None before it has a place.
        run: number of trunk rows that the prefill has run.
        alone: whether it shares no forward pass with others, after one that has failed.
        cached: number of prompt tokens found in the cache; None before the sequence first had a place.
        prompt_logprobs: log-probabilities of the prompt so far.
    """

    number: int
    request: Request
    method: Method
    budget: int
    tokens: list[int]
    block_table: BlockTable = field(default_factory=BlockTable)
    entry: int | None = None
    progress: Progress = field(default_factory=Progress)
    run: int = 0
    alone: bool = False
    cached: int | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def has_begun(self) -> bool:
        """Whether it has emitted a token."""
        return len(self.tokens) > len(self.request.prompt)

    @property
    def rows(self) -> int:
        """Number of rows to prefill. A preempted sequence continues with its newest token, whose row has not run."""
        return len(self.tokens) - self.has_begun

    @property
    def has_run(self) -> bool:
        """Whether all rows of its prompt have run."""
        return self.run == self.rows

    @property
    def rows_left(self) -> int:
        """Number of prompt rows that have not run."""
        return self.rows - self.run

    @property
    def left(self) -> int:
        """Number of tokens that it may still get."""
        return self.budget - (len(self.tokens) - len(self.request.prompt))

    @property
    def group(self) -> DraftingGroup:
        """The group of sequences that it is decoded with."""
        return (self.method.config, self.method.sampling.greedy), self.number if self.alone else None

    @property
    def slots(self) -> int:
        """Number of slots that its next step may write."""
        return len(self.tokens) + self.method.slots

    @property
    def reads_logits(self) -> bool:
        """Whether it needs logits of the target, not only tokens."""
        return self.request.logprobs is not None or self.request.penalties != NO_PENALTIES

    def update(self, gained: list[int], depth: int = 0, draft: Draft | None = None, row: int = 0) -> Update:
        """Append the tokens of a step, up to the sequence's end, from a draft of this depth.

        A stop or the budget ends it, even inside an accepted draft. Drafts beyond the budget do not count as offered.
        """
        request = self.request
        before = len(self.tokens) - len(request.prompt)
        tokens = gained[: self.budget - before]
        finish = Finish.LENGTH if before + len(tokens) == self.budget else None
        for place, token in enumerate(tokens, start=1):
            if token in request.stop_ids:
                tokens, finish = tokens[:place], Finish.STOP
                break
        if request.cut is not None:
            cut = request.cut(self.tokens[len(request.prompt) :] + tokens)
            if cut is not None:
                tokens, finish = tokens[: max(cut - before, 0)], Finish.STOP
        offered = min(depth, self.budget - before - 1)
        accepted = min(len(gained) - 1, len(tokens), offered)
        update = Update(self.number, tokens, accepted, offered, finish, draft=draft, row=row)
        if before:
            return update
        return replace(update, prompt_logprobs=self.prompt_logprobs, cached_tokens=self.cached or 0)


class PrefillBatch:
    """Runs `counts` prompt rows of each sequence in one forward pass.

    The parts are aligned at their end, so shorter ones begin with padding. While only part of a prompt has run, the
    sequence consists of these tokens plus one, so drafters catch up part by part as for any sequence.
    """

    def __init__(self, seqs: list[Sequence], counts: list[int], sequences: Sequences) -> None:
        self.runner = seqs[0].method.proposer.runner
        self.seqs, self.counts, self.sequences = seqs, counts, sequences
        self.stats = AcceptanceStats()
        sequences.progress = [seq.progress for seq in seqs]

    def step(self) -> list[Update]:
        """Run the rows. Every sequence gets its first token, or an update without tokens while its prompt runs."""
        self.run(self.counts)
        first = self.begin()
        for update in first:
            self.stats.count(0, 0, len(update.tokens))
        return first + [Update(seq.number, []) for seq in self.seqs if not seq.has_run]

    def run(self, counts: list[int]) -> None:
        """Run this many rows of each sequence, which then consists of the rows that have run, plus one token."""
        sequences, most, each = self.sequences, max(counts), [*zip(self.seqs, counts, strict=True)]
        if most:
            ends = [seq.run + count for seq, count in each]
            first_B, live_BR = self._tensor(ends) - most, None
            if any(seq.run and count < most for seq, count in each):  # earlier rows have already run
                place_BR = first_B.unsqueeze(1) + torch.arange(most, device=first_B.device)
                live_BR = place_BR >= self._tensor([seq.run for seq in self.seqs]).unsqueeze(1)
            window = min(rounded(max(ends), sequences.shapes.few), sequences.capacity)
            rows = Rows(first_B, most, window, sequences.tables, live_BR, sequences.shapes.packs)
            hidden_SBH = self.runner.trunk(sequences.tokens_at(first_B, most), rows, sequences.memory.cache)
            for row, (seq, count) in enumerate(each):
                top, after = seq.request.prompt_logprobs, seq.request.prompt[seq.run + 1 :][:count]
                if top is not None and after and not seq.has_begun:
                    logits_RV = self.runner.logits(hidden_SBH[most - count :, row : row + 1])[0, : len(after)]
                    seq.prompt_logprobs += logprobs_of(logits_RV, after, top)
        for seq, count in each:
            seq.run += count
        lengths = [min(seq.run + 1, len(seq.tokens)) for seq in self.seqs]
        sequences.token_ids = [
            seq.tokens if length == len(seq.tokens) else seq.tokens[:length]
            for seq, length in zip(self.seqs, lengths, strict=True)
        ]
        sequences.length_B.copy_(self._tensor(lengths))

    def begin(self) -> list[Update]:
        """Draw the first token of each sequence whose prompt has run, if it has none."""
        sequences, seqs = self.sequences, self.seqs
        begins = [seq.has_run and not seq.has_begun for seq in seqs]
        if not any(begins):
            return []
        sequences.live = begins
        sequences.live_B.copy_(self._tensor(begins))
        rule, draft = with_penalties(VERIFIERS["rejection"], seqs), Draft(sequences.tokens_BT[:, :0])
        logits_B1V = self.runner.logits(sequences.states_at(sequences.newest_B, 1))
        sampling, config = sampling_of([seq.request.sampling for seq in seqs]), seqs[0].method.config
        verdict = rule(logits_B1V, draft, Round(sampling, sequences.noise, config, sequences.token_ids))
        tokens_BR = sequences.accept(draft, verdict).tokens_BR.tolist()
        updates = [emit(sequences, row, seq, rule, tokens_BR[row]) for row, seq in enumerate(seqs) if begins[row]]
        sequences.live = [True] * len(seqs)
        sequences.live_B.fill_(True)
        return updates

    def part(self, seqs: list[Sequence]) -> Sequences:
        """Return some of the sequences as a separate batch."""
        numbers = {seq.number for seq in seqs}
        return self.sequences.only([row for row, seq in enumerate(self.seqs) if seq.number in numbers])

    def _tensor(self, values: list[int] | list[bool]) -> Tensor:
        return torch.tensor(values, device=self.runner.device)


class DecodeBatch:
    """Sequences that use the same drafting method. They join and leave between steps.

    If steps are captured as CUDA graphs, the number of rows is padded to a power of two, so that few sizes are
    captured; the padding rows are those of ended sequences.

    Attributes:
        method: drafting method.
        stats: cost and gain of the last step.
    """

    def __init__(self, seqs: list[Sequence], sequences: Sequences, kept: KeptTensors) -> None:
        self.sequences, self.method, self._kept = sequences, seqs[0].method, kept
        self._auto: AutoK | None = None
        self._timed: tuple[AutoK, int] | None = None  # K of the last step, if its time is still to be learned
        self._graphed: GraphedStep | None = None
        self._rows: list[Sequence] = seqs
        self._select([*range(len(seqs))])

    @property
    def seqs(self) -> list[Sequence]:
        """Sequences that have not ended."""
        return [seq for seq, live in zip(self._rows, self.sequences.live, strict=True) if live]

    def join(self, seqs: list[Sequence], sequences: Sequences) -> None:
        """Add sequences that have their first tokens."""
        self.sequences.join(sequences)
        self._rows = self._rows + seqs
        self._select([row for row, live in enumerate(self.sequences.live) if live])

    def leave(self, gone: list[Sequence]) -> None:
        """Remove these sequences."""
        numbers, rows = {seq.number for seq in gone}, self._row_of()
        staying = [row for number, row in rows.items() if number not in numbers]
        if self._graphed is not None and staying and len(self._rows) == _few_sizes(len(staying)):
            for number in numbers & rows.keys():
                self.sequences.end(rows[number])
            self._count_for(len(staying))
        else:
            self._select(staying)

    def place(self, seq: Sequence) -> None:
        """Copy a sequence's new blocks to the device."""
        table_BL, blocks = self.sequences.tables.table_BL, seq.block_table.blocks
        table_BL[self._row_of()[seq.number], : len(blocks)] = torch.tensor(blocks, device=table_BL.device)

    def choose(self) -> int:
        """Return K of the next step."""
        auto, most = self._auto, self.method.count
        if auto is None:
            return most
        if auto.holds:
            return auto.choose()
        left = [seq.left for seq in self.seqs]
        return auto.choose(self.method.proposer.missed(self.sequences, most), sum(left) / len(left))

    def step(self) -> list[Update]:
        """Choose K, draft, verify and accept on the device, and emit the new tokens of every sequence."""
        stats = self.stats = self.method.stats = AcceptanceStats()
        count, sequences, graphed = self.choose(), self.sequences, self._graphed
        began = time.perf_counter()
        self._catch_up(count)
        output = step(sequences, self.method, count) if graphed is None else graphed(count)
        self._kept.failed |= graphed is not None and graphed.failed
        gains = zip(output.tokens_BR.tolist(), output.count_B.tolist(), output.draft.levels(), strict=True)
        updates = [
            self.give(row, tokens[:gained], max(levels, default=0), output.draft)
            for row, (tokens, gained, levels) in enumerate(gains)
            if sequences.live[row]
        ]
        stats.target_seconds = time.perf_counter() - began - stats.drafter_seconds
        steady = graphed is None or graphed.is_steady
        self._timed = (self._auto, count) if self._auto is not None and steady else None
        return updates

    def learn(self, seconds: float) -> None:
        """Report the last step's time to automatic K, including the engine's own work: a larger K needs fewer steps."""
        if self._timed is not None:  # the batch may have changed size since then
            auto, count = self._timed
            auto.learn(count, self.stats, seconds - self.stats.drafter_seconds - self.stats.target_seconds)

    def give(self, row: int, gained: list[int], depth: int, draft: Draft) -> Update:
        """Emit and count what a step gave one sequence, from a draft of this depth."""
        update = emit(self.sequences, row, self._rows[row], self.method.verifier, gained, depth, draft)
        self.method.stats.count(update.offered, update.accepted, len(update.tokens))
        return update

    def _row_of(self) -> dict[int, int]:
        live = self.sequences.live
        return {seq.number: row for row, seq in enumerate(self._rows) if live[row]}

    def _catch_up(self, count: int) -> None:
        """Let sequences that are far behind catch up alone, so that the others run fewer rows."""
        proposer, sequences = self.method.proposer, self.sequences
        far = MAX_ROWS_BACK // 2 if proposer.has_states else MAX_ROWS_BEHIND
        if count == 0 or proposer.missed(sequences, count) <= far:
            return
        for row in self._row_of().values():
            alone = sequences.only([row])
            if proposer.missed(alone, count) > far:
                catch_up(alone, self.method, count)

    def _count_for(self, seqs: int) -> None:
        """Select the `AutoK` for this number of sequences."""
        before, self._auto = self._auto, auto_of(self.method, seqs)
        if self._auto is not None and self._auto is not before:
            self._auto.change_batch()

    def _select(self, rows: list[int]) -> None:
        """Keep only these rows, and recompute what a step of them is."""
        seqs, sequences = [self._rows[row] for row in rows], self.sequences
        self._graphed = None
        if not seqs:
            self._rows, sequences.live = [], []
            return
        own = seqs[0].method
        self._count_for(len(seqs))
        proposer, sampling = own.proposer, sampling_of([seq.request.sampling for seq in seqs])
        records = (
            isinstance(sampling, Sampling)
            and not self._kept.failed
            and not any(seq.alone or seq.reads_logits for seq in seqs)
            and can_record(proposer.runner, proposer, own.count)
        )
        ended = _few_sizes(len(rows)) - len(rows) if records else 0
        shapes = BatchShapes(fixed=records)
        if sequences.shapes.few:
            shapes = BatchShapes(True, own.count + 1, proposer.nodes(own.count) + 1, fixed=records)
        self.sequences = sequences = sequences.only(rows + rows[:1] * ended, shapes)
        self._rows = seqs + seqs[:1] * ended
        for row in range(len(seqs), len(self._rows)):
            sequences.end(row)
        self.method = replace(own, sampling=sampling, verifier=with_penalties(own.verifier, seqs))
        if records:
            recorded = self._kept.move(sequences, (own.config, sampling))
            from megatron_mtp.decoding.graphs import GraphedStep

            take = lambda count: step(sequences, self.method, count)  # noqa: E731
            self._graphed = GraphedStep(take, sequences, proposer, recorded)


def can_record(runner: Any, proposer: Proposer, count: int) -> bool:
    """Return whether the device supports graphs and a step with K = `count` reads nothing back to the host."""
    runners = [runner] if count == 0 or proposer.drafter is None else [runner, proposer.drafter]
    return (count == 0 or proposer.recordable) and all(one.device.type == "cuda" and one.recordable for one in runners)


def auto_of(method: Method, seqs: int) -> AutoK | None:
    """Return automatic K for about this many sequences (the next power of two), shared by all engines of the model."""
    if not method.auto:
        return None
    measured: dict[tuple[SpeculativeConfig, int], AutoK] = method.proposer.runner.auto_counts
    kind = method.config, _few_sizes(max(seqs, 1))
    if kind not in measured:
        measured[kind] = AutoK(method.count, method.proposer.at_once)
    return measured[kind]


def _few_sizes(seqs: int) -> int:
    """Return the next power of two."""
    return 1 << (seqs - 1).bit_length()


def step(sequences: Sequences, method: Method, count: int) -> StepOutput:
    """Draft, verify and accept on the device; nothing is read back to the host."""
    proposer, verifier, backend = method.proposer, method.verifier, method.proposer.runner.backend
    at_once = isinstance(verifier, Verifier) and verifier.is_greedy and not proposer.observes
    if at_once and (passes := proposer.passes(sequences, count)) is not None:
        output = backend.accept(sequences, Draft(sequences.tokens_BT.new_empty(len(sequences.live), count)), passes)
        if output is not None:
            proposer.mark_seen(sequences, count)
            method.stats.drafter_seconds += output.drafter_seconds
            return output
    round = Round(method.sampling, sequences.noise, method.config, sequences.token_ids, sequences.tokens_BT)
    draft = propose(sequences, method, round, count)
    if at_once and (output := backend.accept(sequences, draft)) is not None:
        return output
    logits_BRV = proposer.runner.verify(sequences, draft)
    proposer.observe(sequences, draft, logits_BRV)
    return sequences.accept(draft, verifier(logits_BRV, draft, round))


def propose(sequences: Sequences, method: Method, round: Round, count: int) -> Draft:
    """Draft K = `count` tokens, even for sequences with fewer left, so that samples do not depend on neighbors."""
    began = time.perf_counter()
    draft = method.proposer.propose(sequences, round, count) if count else Draft(sequences.tokens_BT[:, :0])
    method.stats.drafter_seconds += time.perf_counter() - began
    return draft


def catch_up(sequences: Sequences, method: Method, count: int) -> None:
    """Run the rows that a drafter has missed before it can draft `count` tokens; the draft is discarded."""
    began = time.perf_counter()
    method.proposer.catch_up(sequences, Round(Sampling(), sequences.noise, method.config, sequences.token_ids), count)
    method.stats.drafter_seconds += time.perf_counter() - began


def emit(
    sequences: Sequences,
    row: int,
    seq: Sequence,
    rule: VerifierRule,
    gained: list[int],
    depth: int = 0,
    draft: Draft | None = None,
) -> Update:
    """Append what a step gave one sequence, with log-probabilities if requested."""
    update, top = seq.update(gained, depth, draft, row), seq.request.logprobs
    sequences.settle(row, update.tokens, update.finish is not None)
    if isinstance(rule, PenalizedVerifier) and top is not None:
        return replace(update, logprobs=rule.logprobs(row, update.tokens, top))
    return update


def with_penalties(rule: VerifierRule, seqs: list[Sequence]) -> VerifierRule:
    """Wrap the acceptance rule if some sequences have penalties or need log-probabilities."""
    if not any(seq.reads_logits for seq in seqs):
        return rule
    return PenalizedVerifier(rule, [seq.request.penalties for seq in seqs], [len(seq.request.prompt) for seq in seqs])


@dataclass
class PenalizedVerifier:
    """Verifier for batches in which some sequences have penalties or need log-probabilities.

    Attributes:
        rule: the wrapped verifier.
        penalties: penalties of every sequence.
        prompts: prompt tokens of every sequence.
        logits_BRV, kept_BR: results of the last step, before penalties.
    """

    rule: VerifierRule
    penalties: list[Penalties]
    prompts: list[int]
    logits_BRV: Tensor | None = None
    kept_BR: Tensor | None = None

    def __call__(self, logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
        """Apply the rule to the penalized logits."""
        rows = [
            penalized(one, tokens, prompt, logits_RV, drafted_RV)
            for one, tokens, prompt, logits_RV, drafted_RV in zip(
                self.penalties, round.token_ids, self.prompts, logits_BRV, _drafted(draft, logits_BRV), strict=True
            )
        ]
        verdict = self.rule(torch.stack(rows), draft, round)
        self.logits_BRV, self.kept_BR = logits_BRV, verdict.kept_BR
        return verdict

    def logprobs(self, row: int, tokens: list[int], top: int) -> list[TokenLogprob]:
        """Return log-probabilities of the tokens that the last step gave a sequence."""
        assert self.logits_BRV is not None
        assert self.kept_BR is not None
        rows_R = self.kept_BR[row].nonzero()[:, 0]
        return logprobs_of(self.logits_BRV[row, rows_R[: len(tokens)]], tokens, top)


def _drafted(draft: Draft, like_BRV: Tensor) -> Tensor:
    """Return counts of each token on the path from the root to a row, including the row, [B, R, V]."""
    if draft.nodes == 0:
        return torch.zeros_like(like_BRV)
    ancestors_BRR, _ = ancestors_of(draft.parents())
    return ancestors_BRR[:, :, 1:].to(like_BRV) @ one_hot(draft.tokens_BN, like_BRV.size(-1)).to(like_BRV)
