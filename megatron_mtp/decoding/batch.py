"""What a step of the engine runs: a part of some prompts, or all sequences that draft alike.

A sequence begins with its prompt, run in parts beside others, whose last row gives the first token. Then it joins the
batch of those that draft alike. Every step of a batch drafts, scores the newest tokens and the drafts in one forward of
the trunk, keeps what the verifier accepts and adds one token of the target's own.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_mtp.acceptance import AcceptanceStats
from megatron_mtp.decoding.auto import AutoK
from megatron_mtp.decoding.block_manager import BlockTable
from megatron_mtp.decoding.graphs import GraphedStep, KeptTensors
from megatron_mtp.decoding.penalties import NO_PENALTIES, PenalizedVerifier, logprobs_of, penalized
from megatron_mtp.decoding.proposers.base import Method, Proposer
from megatron_mtp.decoding.recurrent_state import ROLLED_BACK
from megatron_mtp.decoding.requests import Finish, Request, TokenLogprob, Update
from megatron_mtp.decoding.rows import Rows, rounded
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import RECOVER, Sampling, draw, sampling_of
from megatron_mtp.decoding.sequences import Progress, Sequences
from megatron_mtp.decoding.types import Draft, Round, StepOutput
from megatron_mtp.decoding.verifiers import VERIFIERS

FAR_BEHIND = 32
"""Rows that a sequence's drafter may be behind to catch up with the others' rows; with more it runs them alone. The
others run as many rows anew, so where these change states they are half of what a state goes back."""


@dataclass(eq=False)
class Sequence:
    """A request while the engine has it.

    Attributes:
        number: what `add` returned; a smaller one came earlier.
        budget: new tokens that it may have.
        tokens: the prompt and what was emitted.
        held: its blocks.
        entry: where recurrent layers keep its states; None where it has no place.
        run: rows of the trunk that the prefill has done.
        alone: whether it shares no forward with others, after one that has failed.
        cached: tokens of the prompt whose rows were found; None before the sequence first had a place.
        prompt_logprobs: as far as the prompt has run.
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
        """Rows to prefill; a sequence that was put back goes on with its newest token, whose row has not run."""
        return len(self.tokens) - self.has_begun

    @property
    def has_run(self) -> bool:
        """Whether all rows of its prompt have run."""
        return self.run == self.rows

    @property
    def slots(self) -> int:
        """Slots that its next step may write, and the one before, whose tokens the host may not know."""
        return len(self.tokens) + self.method.slots

    @property
    def reads_logits(self) -> bool:
        """Whether more than a token is asked of the target."""
        return self.request.logprobs is not None or self.request.penalties != NO_PENALTIES

    def update(self, gained: list[int], depth: int = 0, draft: Draft | None = None, row: int = 0) -> Update:
        """What stays of the tokens that a step gave it, up to its end, from a draft of this depth.

        A stop or the budget ends it, also inside an accepted draft. Drafts beyond the budget count as never offered.
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
    """Sequences whose prompts are run, a part of each, in one forward.

    Their parts end together, so a shorter one begins with padding. While only a part of a prompt has run, it is a
    sequence of so many tokens and one more: so drafters catch up part by part, by what they do for any sequence.

    Args:
        counts: rows of each sequence to run.
        sequences: a row for each sequence.
    """

    def __init__(self, runner: Runner, seqs: list[Sequence], counts: list[int], sequences: Sequences) -> None:
        self.runner, self.seqs, self.counts, self.sequences = runner, seqs, counts, sequences
        self.stats = AcceptanceStats()
        sequences.prompt_lengths = [len(seq.request.prompt) for seq in seqs]
        sequences.progress = [seq.progress for seq in seqs]
        sequences.packs = not sequences.few_shapes

    def step(self) -> list[Update]:
        """Run the rows; every sequence has its first token, or an update without any while its prompt runs."""
        self.run(self.counts)
        first = {update.request: update for update in self.begin()}
        for update in first.values():
            self.stats.count(0, 0, len(update.tokens))
        return [
            first.get(seq.number, Update(seq.number, [])) for seq in self.seqs if seq.number in first or not seq.has_run
        ]

    def run(self, counts: list[int]) -> None:
        """Run so many rows of each sequence through the trunk."""
        if any(counts):
            self._forward(counts)
        for seq, count in zip(self.seqs, counts, strict=True):
            seq.run += count
        self._show()

    def begin(self) -> list[Update]:
        """Draw the first token of each sequence whose prompt has run, if it has none."""
        sequences = self.sequences
        begins = [seq.has_run and not seq.has_begun for seq in self.seqs]
        if not any(begins):
            return []
        sequences.live = begins
        sequences.live_B.copy_(self._tensor(begins))
        logits_BV = self.runner.logits(sequences.states_at(sequences.length_B - 1, 1))[:, 0]
        drawn_B = self._drawn(logits_BV)
        sequences.append(drawn_B)
        made = [self._began(row, [token], logits_BV) for row, token in enumerate(drawn_B.tolist()) if begins[row]]
        sequences.live = [True] * len(self.seqs)
        sequences.live_B.fill_(True)
        return made

    def part(self, seqs: list[Sequence]) -> Sequences:
        """Some of the sequences as a batch of their own."""
        numbers = {seq.number for seq in seqs}
        return self.sequences.only([row for row, seq in enumerate(self.seqs) if seq.number in numbers])

    def _forward(self, counts: list[int]) -> None:
        sequences, most = self.sequences, max(counts)
        ends = [seq.run + count for seq, count in zip(self.seqs, counts, strict=True)]
        first_B = self._tensor(ends) - most
        window = min(rounded(max(ends), sequences.few_shapes), sequences.capacity)
        live_BR = self._not_yet_run(first_B, counts)
        rows = Rows(first_B, most, window, sequences.tables, live_BR, sequences.packs)
        hidden_SBH = self.runner.trunk(sequences.tokens_at(first_B, most), rows, sequences.memory.cache)
        sequences.put_states(hidden_SBH, rows)
        for row, (seq, count) in enumerate(zip(self.seqs, counts, strict=True)):
            if seq.request.prompt_logprobs is not None:
                self._read_prompt(seq, hidden_SBH[most - count :, row : row + 1], seq.request.prompt_logprobs)

    def _not_yet_run(self, first_B: Tensor, counts: list[int]) -> Tensor | None:
        """False for rows that have run; None where there are none beside those before slot 0."""
        most = max(counts)
        if all(seq.run == 0 or count == most for seq, count in zip(self.seqs, counts, strict=True)):
            return None
        place_BR = first_B.unsqueeze(1) + torch.arange(most, device=first_B.device)
        return place_BR >= self._tensor([seq.run for seq in self.seqs]).unsqueeze(1)

    def _show(self) -> None:
        """Let each sequence be one of its rows that have run, and one more."""
        shown = [(seq.tokens, min(seq.run + 1, len(seq.tokens))) for seq in self.seqs]
        self.sequences.token_ids = [whole if length == len(whole) else whole[:length] for whole, length in shown]
        self.sequences.length_B.copy_(self._tensor([length for _, length in shown]))

    def _drawn(self, logits_BV: Tensor) -> Tensor:
        """The token after each sequence."""
        if any(seq.reads_logits for seq in self.seqs):
            rows = [
                penalized(seq.request.penalties, seq.tokens, len(seq.request.prompt), own_1V)
                for seq, own_1V in zip(self.seqs, logits_BV.split(1), strict=True)
            ]
            logits_BV = torch.cat(rows)
        probs_BV = sampling_of([seq.request.sampling for seq in self.seqs]).probabilities(logits_BV)
        return draw(probs_BV, self.sequences.noise.uniform(RECOVER, 1)[:, 0])

    def _began(self, row: int, gained: list[int], logits_BV: Tensor) -> Update:
        seq = self.seqs[row]
        update, top = seq.update(gained), seq.request.logprobs
        self.sequences.settle(row, update.tokens, update.finish is not None)
        if top is None:
            return update
        return replace(update, logprobs=logprobs_of(logits_BV[row : row + 1], update.tokens, top))

    def _read_prompt(self, seq: Sequence, hidden_S1H: Tensor, top: int) -> None:
        after = seq.request.prompt[seq.run + 1 :][: hidden_S1H.size(0)]
        if after and not seq.has_begun:
            seq.prompt_logprobs += logprobs_of(self.runner.logits(hidden_S1H)[0, : len(after)], after, top)

    def _tensor(self, values: list[int] | list[bool]) -> Tensor:
        return torch.tensor(values, device=self.runner.device)


class PendingOutput:
    """What a step gave its sequences, being copied to the host while the next step runs.

    Args:
        seqs: of the rows; None where one has ended.
    """

    def __init__(self, seqs: list[Sequence | None], output: StepOutput) -> None:
        self.seqs, self.nodes = seqs, output.draft.nodes
        parts = [output.count_B.unsqueeze(1), output.tokens_BR, output.draft.valid()]
        self._read = on_its_way(torch.cat(parts, dim=1))

    def gained(self) -> Iterator[tuple[Sequence, list[int], int]]:
        """Every sequence with its new tokens and the depth of its draft; waits for them."""
        for seq, (count, *values) in zip(self.seqs, self._read(), strict=True):
            valid = values[self.nodes + 1 :]
            if seq is not None:
                yield seq, values[:count], next((n for n, ok in enumerate(valid) if not ok), self.nodes)


def on_its_way(values_BX: Tensor) -> Callable[[], list[list[int]]]:
    """Start to copy numbers to the host; what is returned waits for them, and for nothing that is begun later."""
    if not values_BX.is_cuda:
        return values_BX.tolist
    held_BX = torch.empty(values_BX.shape, dtype=values_BX.dtype, pin_memory=True)
    held_BX.copy_(values_BX, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[list[int]]:
        copied.synchronize()
        return held_BX.tolist()

    return wait


class DecodeBatch:
    """Sequences that draft alike. They join and leave between steps.

    Where steps are recorded as CUDA graphs, the batch has a power of two of rows, so that few sizes are recorded; rows
    beyond the sequences are those of ended ones.

    With overlap a step is started before the tokens of the last one are read. So the host learns one step late that a
    sequence has ended; what the step in between gave it is dropped. Lengths that the host does not know are bounded by
    `Sequences.ahead`.

    Args:
        kept: tensors that recorded steps read, where steps are recorded.
        overlap: whether to do so where a step reads nothing back.

    Attributes:
        method: how they draft; its `stats` are the last step's.
    """

    def __init__(
        self,
        runner: Runner,
        seqs: list[Sequence],
        sequences: Sequences,
        kept: KeptTensors,
        overlap: bool = False,
    ) -> None:
        self.runner, self.sequences, self._overlap = runner, sequences, overlap
        self.method = seqs[0].method
        self._kept = kept
        self._auto: AutoK | None = None
        self._pending: PendingOutput | None = None
        self._rows: list[Sequence] = seqs
        self._keep([*range(len(seqs))])

    @property
    def stats(self) -> AcceptanceStats:
        """What the last step has cost and gained."""
        return self.method.stats

    @property
    def seqs(self) -> list[Sequence]:
        """Those that have not ended."""
        return [seq for seq, live in zip(self._rows, self.sequences.live, strict=True) if live]

    def join(self, seqs: list[Sequence], sequences: Sequences) -> None:
        """More sequences, which have their first tokens."""
        self.sequences.join(sequences)
        self._rows = self._rows + seqs
        self._keep([row for row, live in enumerate(self.sequences.live) if live])

    def leave(self, gone: list[Sequence]) -> None:
        """Go on without these sequences."""
        numbers, live = {seq.number for seq in gone}, self.sequences.live
        staying = [row for row, seq in enumerate(self._rows) if live[row] and seq.number not in numbers]
        if self._graphed is not None and staying and len(self._rows) == _few_sizes(len(staying)):
            for row, seq in enumerate(self._rows):
                if live[row] and seq.number in numbers:
                    self.sequences.end(row)
        else:
            self._keep(staying)

    def place(self, seq: Sequence) -> None:
        """Tell the device of a sequence's new blocks."""
        table_BL, blocks = self.sequences.tables.table_BL, seq.block_table.blocks
        table_BL[self._row_of()[seq.number], : len(blocks)] = torch.tensor(blocks, device=table_BL.device)

    def choose(self) -> int:
        """K of the next step."""
        if not self.method.auto:
            return self.method.count
        self._auto = auto_of(self.runner, self.method, len(self.seqs))
        return self.method.count if self._auto is None else self._auto.choose()

    def step(self) -> list[Update]:
        """Take a step; returns what it gave, with overlap what the one before gave."""
        stats = self.method.stats = AcceptanceStats()
        if self._pending is not None and not self._overlaps:
            return self._arrived()
        count, sequences, graphed = self.choose(), self.sequences, self._graphed
        began = time.perf_counter()
        self._catch_up(count)
        output = step(self.runner, sequences, self.method, count) if graphed is None else graphed(count)
        self._kept.failed |= graphed is not None and graphed.failed
        if self._overlaps:
            rows = [seq if live else None for seq, live in zip(self._rows, sequences.live, strict=True)]
            taken = PendingOutput(rows, output)
            updates = self._arrived()
            self._pending = taken
        else:
            draft, levels = output.draft, output.draft.levels()
            gains = zip(output.tokens_BR.tolist(), output.count_B.tolist(), [*sequences.live], strict=True)
            updates = [
                self.give(row, tokens[:gained], max(levels[row], default=0), draft)
                for row, (tokens, gained, live) in enumerate(gains)
                if live
            ]
        stats.target_seconds = time.perf_counter() - began - stats.drafter_seconds
        if self._auto is not None and (graphed is None or graphed.is_steady):
            self._auto.learn(count, stats)
        return updates

    def give(self, row: int, gained: list[int], depth: int, draft: Draft | None) -> Update:
        """Count and append what a step gave one sequence, from a draft of this depth."""
        seq, rule = self._rows[row], self.method.verifier
        update, top = seq.update(gained, depth, draft, row), seq.request.logprobs
        self.method.stats.count(update.offered, update.accepted, len(update.tokens))
        self.sequences.settle(row, update.tokens, update.finish is not None)
        if isinstance(rule, PenalizedVerifier) and top is not None:
            return replace(update, logprobs=rule.logprobs(row, update.tokens, top))
        return update

    def _arrived(self) -> list[Update]:
        """What the step before gave; of sequences that were cancelled or put back since then, nothing."""
        pending, self._pending = self._pending, None
        rows, given = self._row_of(), () if pending is None else pending.gained()
        return [self.give(rows[seq.number], gained, n, None) for seq, gained, n in given if seq.number in rows]

    def _row_of(self) -> dict[int, int]:
        live = self.sequences.live
        return {seq.number: row for row, seq in enumerate(self._rows) if live[row]}

    def _may_overlap(self) -> bool:
        """Whether steps of these sequences read nothing back, and need no tokens that the host does not know.

        A drafter that does not know how far sequences have come runs more rows anew than its states go back.
        """
        proposer, rule = self.method.proposer, VERIFIERS[str(self.method.config.verifier)]
        reads = isinstance(self.method.verifier, PenalizedVerifier) or proposer.drafts_trees or proposer.has_states
        return not reads and proposer.recordable and rule.recordable

    def _catch_up(self, count: int) -> None:
        """Sequences that are far behind catch up alone, so that the others need not run as many rows."""
        proposer, sequences = self.method.proposer, self.sequences
        sequences.ahead = 0 if self._pending is None else self.method.count + 1
        far = 0 if proposer.leaves_rows_out else ROLLED_BACK // 2 if proposer.has_states else FAR_BEHIND
        if count == 0 or proposer.missed(sequences, count) <= far:
            return
        for row in self._row_of().values():
            alone = sequences.only([row])
            if proposer.missed(alone, count) > far:
                catch_up(alone, self.method, count)

    def _keep(self, rows: list[int]) -> None:
        """Go on with these rows alone, and find out anew what a step of them is."""
        seqs, sequences = [self._rows[row] for row in rows], self.sequences
        self._graphed: GraphedStep | None = None
        if not seqs:
            self._rows, sequences.live = [], []
            return
        own = seqs[0].method
        rule, sampling = own.verifier, sampling_of([seq.request.sampling for seq in seqs])
        records = (
            isinstance(sampling, Sampling)
            and not self._kept.failed
            and not any(seq.reads_logits or seq.alone for seq in seqs)
            and can_record(self.runner, own.proposer, own.count, str(own.config.verifier))
        )
        ended = _few_sizes(len(rows)) - len(rows) if records else 0
        if rows != [*range(len(sequences.live))] or ended:
            sequences.select(rows + rows[:1] * ended)
        self._rows = seqs + seqs[:1] * ended
        for row in range(len(seqs), len(self._rows)):
            sequences.end(row)
        if any(seq.reads_logits for seq in seqs):
            rule = PenalizedVerifier(rule, [seq.request.penalties for seq in seqs], sequences.prompt_lengths)
        self.method = replace(own, sampling=sampling, verifier=rule)
        self._overlaps = self._overlap and self._may_overlap()
        sequences.fixed = False
        if sequences.few_shapes:
            sequences.growth = (own.count + 1) * (2 if self._overlaps else 1)
            sequences.reach = own.proposer.nodes(own.count) + 1
        if records:
            recorded = self._kept.move(sequences, (own.config, sampling))
            take = lambda count: step(self.runner, sequences, self.method, count)  # noqa: E731
            self._graphed = GraphedStep(take, sequences, own.proposer, recorded)


def can_record(runner: Runner, proposer: Proposer, count: int, verifier: str) -> bool:
    """Whether the device has graphs, and a step of K = `count` reads nothing back to the host."""
    runners = [runner] if count == 0 or proposer.drafter is None else [runner, proposer.drafter]
    recordable = VERIFIERS[verifier].recordable and (count == 0 or proposer.recordable)
    return recordable and all(one.recordable and one.device.type == "cuda" for one in runners)


def auto_of(runner: Runner, method: Method, seqs: int) -> AutoK | None:
    """Automatic K of about so many sequences, the next power of two, as any engine of the model has measured it."""
    if not method.auto:
        return None
    key = method.config, _few_sizes(max(seqs, 1))
    if key not in runner.auto_counts:
        runner.auto_counts[key] = AutoK(method.count)
    return runner.auto_counts[key]


def _few_sizes(seqs: int) -> int:
    """The next power of two."""
    return 1 << (seqs - 1).bit_length()


def step(runner: Runner, sequences: Sequences, method: Method, count: int) -> StepOutput:
    """All of a step that the device does: draft K = `count` tokens, score, judge and keep them."""
    round = Round(method.sampling, sequences.noise, method.config, sequences.token_ids, sequences.tokens_BT)
    began = time.perf_counter()
    draft = propose(sequences, method, round, count)
    method.stats.drafter_seconds += time.perf_counter() - began
    return verify(runner, sequences, method, draft, round)


def propose(sequences: Sequences, method: Method, round: Round, count: int) -> Draft:
    """K = `count` drafts, also where one has fewer tokens to go: its samples must not depend on its neighbours."""
    if count == 0:
        return Draft(sequences.tokens_BT[:, :0])
    return method.proposer.propose(sequences, round, count)


def catch_up(sequences: Sequences, method: Method, count: int) -> None:
    """Run the rows that a drafter has missed before it can draft `count`; its draft is not used."""
    began = time.perf_counter()
    method.proposer.catch_up(sequences, Round(Sampling(), sequences.noise, method.config, sequences.token_ids), count)
    method.stats.drafter_seconds += time.perf_counter() - began


def verify(runner: Runner, sequences: Sequences, method: Method, draft: Draft, round: Round) -> StepOutput:
    """Score a draft, judge it and keep what is accepted; nothing is read back to the host."""
    rows = sequences.rows_of(draft)
    newest_B1 = sequences.tokens_BT.gather(1, rows.first_B.unsqueeze(1))
    tokens_BR = torch.cat([newest_B1, draft.tokens_BN], dim=1) if draft.nodes else newest_B1
    hidden_SBH = runner.trunk(tokens_BR, rows, sequences.memory.cache)
    sequences.put_states(hidden_SBH, rows)
    logits_BRV = runner.logits(hidden_SBH)
    method.proposer.observe(sequences, draft, logits_BRV)
    return sequences.keep(draft, method.verifier(logits_BRV, draft, round))
