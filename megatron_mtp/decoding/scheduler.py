"""Scheduler: which prompts run in a step, which sequences decode, and what happens to them afterwards.

A step either decodes or runs prompts, alternating if there are both, so that a first token waits for at most one step:

    make room    blocks for what the sequences may write; if there are too few, the youngest sequence is preempted
    decode       the sequences in batches with the same method; a sequence that ends frees its place
    prefill      prompts of requests with a place, in one forward pass of up to a chunk of rows; cached prefixes are
                 not run

A preempted sequence loses only its rows: its tokens are run again when there is room, and its random numbers depend
only on seed and position. So the output of a sequence depends only on its request, whatever runs alongside it.
"""

from bisect import insort
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_mtp.decoding.batch import DecodeBatch, DraftingGroup, PrefillBatch, Sequence, auto_of, catch_up
from megatron_mtp.decoding.block_manager import BlockManager, BlockTable
from megatron_mtp.decoding.block_tables import BLOCK, SLOTS_BEYOND_POSITIONS, BlockTables
from megatron_mtp.decoding.kv_cache import Memory
from megatron_mtp.decoding.requests import Finish, QueueFull, Update
from megatron_mtp.decoding.rows import CHUNK
from megatron_mtp.decoding.sequences import BatchShapes, KeptTensors, Progress, Sequences, wants_few_shapes


@dataclass(frozen=True)
class EngineSettings:
    """Sizes of an engine.

    Attributes:
        running, waiting: maximum number of running sequences, and of requests that wait for a place.
        blocks, block_size: number of blocks of its memory, and slots per block; see `engine.blocks_in`.
        slots: maximum number of slots of a sequence; None for all positions, plus drafts after the last one.
        chunk: maximum number of prompt rows in a step.
        reuse: whether to reuse cached prefixes; never done for models with recurrent layers.
        contains_errors: whether a sequence whose forward pass raises ends with an error while the others continue.
        positions: maximum number of tokens of a sequence; None for the model's positions.

    Raises:
        ValueError: a size below 1.
    """

    running: int = 16
    waiting: int = 256
    blocks: int = 1024
    block_size: int = BLOCK
    slots: int | None = None
    chunk: int = CHUNK
    reuse: bool = True
    contains_errors: bool = True
    positions: int | None = None

    def __post_init__(self) -> None:
        for name in ("running", "waiting", "blocks", "block_size", "chunk", "positions"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise ValueError(f"the engine was given {name} {size}; give 1 or more.")


class Scheduler:
    """Sequences of an engine and their share of its memory.

    Args:
        runner, drafter: the target and the small model that drafts, if any; each is a `Runner`.

    Attributes:
        seqs: sequences that have not ended, by number.
        waiting: numbers of those without a place, in order.
        prefilled: those whose prompts are running, in order of arrival.
        decoded: batches of those that have their first tokens.
        preempted, prompt_tokens, cached_tokens: as in `requests.Load`.
        closing: whether no new sequence starts; running ones continue.
        positions, longest: maximum number of tokens and of slots of a sequence.
    """

    def __init__(self, settings: EngineSettings, runner: Any, drafter: Any = None) -> None:
        self.settings = settings
        self.has_states = runner.recurrent_trunk or runner.recurrent_depths
        self.has_states |= drafter is not None and drafter.recurrent_trunk
        self._reuses = settings.reuse and not self.has_states  # prefixes have no recurrent states to share
        self.positions = min(runner.positions, settings.positions or runner.positions)
        size, slots = settings.block_size, settings.slots or self.positions + SLOTS_BEYOND_POSITIONS
        self.longest = min(slots, settings.blocks * size)
        length = -(-(self.longest + 1) // size)  # plus the scratch slot
        spare = int(length > 1)  # block 0, used by table entries without a block
        table_BL = torch.zeros(0, length, dtype=torch.long, device=runner.device)
        self._tables = BlockTables(table_BL, settings.blocks + spare, size, kept_entries=settings.running)
        self.block_manager = BlockManager(settings.blocks, size, runner.depths, spare)
        self.memory: Memory = runner.new_memory(self._tables, drafter)
        self._kept = KeptTensors()
        few = wants_few_shapes(runner.device)
        self._shapes = BatchShapes(few, packs=not few)
        self.seqs: dict[int, Sequence] = {}
        self.waiting: list[int] = []
        self.prefilled: list[Sequence] = []
        self.decoded: dict[DraftingGroup, DecodeBatch] = {}
        self._prompts_turn = True
        self.preempted = self.prompt_tokens = self.cached_tokens = 0
        self.closing = False

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises like `Engine.add`."""
        slots = seq.slots + seq.budget
        if slots > self.longest:
            blocks, most = self.block_manager.blocks_for(slots), self.block_manager.count
            raise ValueError(
                f"the prompt of {len(seq.request.prompt)} tokens and {seq.budget} new ones need {blocks} blocks of the "
                f"cache, which has {most}; ask for less, or give the cache more."
            )
        if len(self.waiting) >= self.settings.waiting:
            raise QueueFull(f"{len(self.waiting)} requests are already waiting; try again later.")
        self.seqs[seq.number] = seq
        insort(self.waiting, seq.number)

    def cancel(self, number: int) -> None:
        """Remove a sequence; no effect if it has ended."""
        seq = self.seqs.get(number)
        if seq is not None:
            self._remove(seq)
            self.free(seq)
            del self.seqs[number]

    @property
    def begun(self) -> list[Sequence]:
        """Sequences with a place, and those preempted after their first token."""
        return [seq for number, seq in self.seqs.items() if number not in self.waiting or seq.has_begun]

    def restart(self) -> None:
        """Restart all sequences from their prompts and forget all prefixes, because the weights change."""
        for seq in self.begun:
            if seq.number not in self.waiting:
                self.put_back(seq)
            del seq.tokens[len(seq.request.prompt) :]
            seq.progress, seq.prompt_logprobs, seq.alone = Progress(), [], False
        self.block_manager.forget()
        self._kept = KeptTensors()

    def schedule(self) -> list[PrefillBatch] | list[DecodeBatch]:
        """Return the batches of a step: at most one chunk of prompts, or all decoding sequences, alternating.

        So the first token of a prompt waits for at most the step that is running when it arrives.
        """
        prompts = self._prompts() if self._prompts_turn or not self.decoded else []
        self._prompts_turn = not prompts
        if prompts:
            return prompts
        self._make_room()
        return [*self.decoded.values()]

    def accept(self, batch: PrefillBatch | DecodeBatch, updates: list[Update]) -> None:
        """Process the results of a batch: its sequences continue or leave."""
        ended = [self.seqs[update.request] for update in updates if update.finish is not None]
        if isinstance(batch, DecodeBatch):
            if ended:
                self._take_out(ended)
        else:
            numbers = {seq.number for seq in ended}
            self.prefilled = [seq for seq in self.prefilled if seq.number not in numbers]
            going: dict[DraftingGroup, list[Sequence]] = defaultdict(list)
            for seq in batch.seqs:
                if seq.number not in numbers:
                    going[seq.group].append(seq)
            for some in going.values():
                self._go_on(batch, some)
        for seq in ended:
            self._learn(seq)
            self.free(seq)
            del self.seqs[seq.number]

    def recover(self, seqs: list[Sequence], known: dict[int, int]) -> list[Update]:
        """Restart the sequences of a forward pass that raised, each alone; one that was already alone ends.

        Their groups' state on the device may be that of half a step, so it is rebuilt too.
        """
        gone = [self.decoded.pop(group) for group in {seq.group for seq in seqs} & self.decoded.keys()]
        others = [seq for group in gone for seq in group.seqs if seq.number not in known]
        self.prefilled = [seq for seq in self.prefilled if seq.number not in known]
        ended = []
        for seq in seqs:
            del seq.tokens[known[seq.number] :]
            if seq.alone:
                ended.append(Update(seq.number, [], finish=Finish.ERROR))
                self.free(seq)
                del self.seqs[seq.number]
            else:
                seq.alone = True
                self._wait_again(seq)
        for seq in others:
            self._wait_again(seq)
        return ended

    def _make_room(self) -> None:
        """Allocate blocks for what the next step of every sequence may write, the oldest sequence's first."""
        size = self.settings.block_size
        decoded = (seq for group in self.decoded.values() for seq in group.seqs)
        short = [seq for seq in decoded if seq.slots > len(seq.block_table.blocks) * size]
        for seq in sorted(short, key=lambda one: one.number):
            before = len(seq.block_table.blocks)
            if seq.number in self.waiting:
                continue  # already preempted in favor of an older sequence
            while not self._extend(seq, seq.block_table):
                youngest = self.seqs[max(set(self.seqs) - set(self.waiting))]
                self.put_back(youngest)
                if youngest is seq:
                    break
            if len(seq.block_table.blocks) > before:
                self.decoded[seq.group].place(seq)

    def put_back(self, seq: Sequence) -> None:
        """Preempt a sequence; it resumes before all that have not started."""
        self._remove(seq)
        self._wait_again(seq)

    def _wait_again(self, seq: Sequence) -> None:
        """Put a sequence that is in no batch back in the queue."""
        self.free(seq)
        seq.progress = Progress(guesses=seq.progress.guesses)  # its cache rows have been freed
        seq.run = 0
        if not seq.has_begun:
            seq.prompt_logprobs = []
        insort(self.waiting, seq.number)
        self.preempted += 1

    def _remove(self, seq: Sequence) -> None:
        """Remove a sequence from its queue or batch."""
        if seq.number in self.waiting:
            self.waiting.remove(seq.number)
        elif seq in self.prefilled:
            self.prefilled.remove(seq)
        else:
            self._learn(seq)
            self._take_out([seq])

    def free(self, seq: Sequence) -> None:
        """Release a sequence's share of the memory."""
        self.block_manager.give_back(seq.block_table)
        if seq.entry is not None:
            self.memory.free_entries.append(seq.entry)
            seq.entry = None

    def _take_out(self, seqs: list[Sequence]) -> None:
        group = seqs[0].group
        self.decoded[group].leave(seqs)
        if not self.decoded[group].seqs:
            del self.decoded[group]

    # ---- prompts

    def _prompts(self) -> list[PrefillBatch]:
        """Return prompt forwards with one chunk of rows in all; a sequence that runs alone has its own forward."""
        rows, batches, left = self.settings.chunk, list[PrefillBatch](), self._admitted(self.settings.chunk)
        while rows > 0 and left:
            parts = self._parts(left, rows)
            seqs, counts = [seq for seq, _ in parts], [count for _, count in parts]
            tokens, seeds = [seq.tokens for seq in seqs], [seq.request.seed for seq in seqs]
            sequences = Sequences(tokens, seeds, self.memory, self.block_tables_of(seqs), self._shapes)
            batches.append(PrefillBatch(seqs, counts, sequences))
            rows -= max(sum(counts), 1)
            numbers = {seq.number for seq in seqs}
            left = [seq for seq in left if seq.number not in numbers]
        return batches

    def _admitted(self, rows: int) -> list[Sequence]:
        """Return sequences whose prompts run, after admitting as many more as these rows allow."""
        wanted = self._wanted(rows)
        while wanted < rows and (seq := self._admit()):
            wanted = self._wanted(rows) if seq is self.prefilled[0] else wanted + seq.rows_left
        return self.prefilled

    def _parts(self, seqs: list[Sequence], rows: int) -> list[tuple[Sequence, int]]:
        """Choose which of these run in a forward of at most this many rows, and how many rows of each.

        The oldest prompt gets half of the rows. Of the others those with the fewest rows left go first, and the oldest
        gets what they leave. So a short prompt does not wait for a long one, and a long one always progresses.
        """
        oldest, *others = seqs
        if oldest.alone:
            return [(oldest, min(oldest.rows_left, rows))]
        others = [seq for seq in others if not seq.alone]
        shortest = sorted(others, key=lambda one: one.rows_left)
        turns = [(oldest, -(-rows // 2)), *((seq, rows) for seq in shortest), (oldest, rows)]
        counts = dict.fromkeys((seq.number for seq in (oldest, *others)), 0)
        for seq, most in turns:
            counts[seq.number] += min(seq.rows_left - counts[seq.number], most, rows - sum(counts.values()))
        parts = [(seq, counts[seq.number]) for seq in (oldest, *others)]
        return [(seq, count) for seq, count in parts if count or seq.has_run]

    def _wanted(self, rows: int) -> int:
        """Return how many of a forward's rows admitted prompts need; the oldest counts for at most half."""
        left = [seq.rows_left for seq in self.prefilled]
        return min(left[0], -(-rows // 2)) + sum(left[1:]) if left else 0

    def _admit(self) -> Sequence | None:
        """Admit the oldest waiting request, if a slot and enough blocks are free."""
        if not self.waiting or len(self.seqs) - len(self.waiting) >= self.settings.running:
            return None
        number: int | None = self.waiting[0]
        if self.closing:
            number = next((one for one in self.waiting if self.seqs[one].has_begun), None)
        if number is None or not self._give_blocks(seq := self.seqs[number]):
            return None
        self.waiting.remove(number)
        insort(self.prefilled, seq, key=lambda one: one.number)
        return seq

    def _give_blocks(self, seq: Sequence) -> bool:
        """Allocate blocks for a waiting sequence, including cached blocks of its prefix."""
        block_table = seq.block_table
        if self._reuses and seq.request.prompt_logprobs is None:
            block_table = self.block_manager.find(seq.tokens)
        found = len(block_table.blocks) * self.settings.block_size
        if not self._extend(seq, block_table):
            self.block_manager.give_back(block_table)
            return False
        seq.block_table, seq.run, seq.entry = block_table, found, self.memory.take_entry()
        seq.progress.seen.update(self.block_manager.seen_of(block_table))
        if seq.cached is None:
            seq.cached = found
            self.prompt_tokens += len(seq.request.prompt)
            self.cached_tokens += found
        return True

    def _extend(self, seq: Sequence, block_table: BlockTable) -> bool:
        """Allocate blocks for all slots of a sequence that it does not hold yet, if enough are free.

        Nothing is left there of another sequence: no mask keeps a NaN out of a sum.
        """
        used = self.block_manager.extend(block_table, seq.slots)
        if used:
            self.memory.clear(used)
        return used is not None

    def _go_on(self, prompts: PrefillBatch, seqs: list[Sequence]) -> None:
        """Continue after parts of these prompts have run: move sequences with complete prompts to decoding."""
        self._keep_up(prompts, seqs)
        for seq in seqs:
            self._learn(seq, min(seq.run + 1, len(seq.tokens)))
        over = [seq for seq in seqs if seq.has_run]
        if not over:
            return
        numbers = {seq.number for seq in over}
        self.prefilled = [seq for seq in self.prefilled if seq.number not in numbers]
        group, sequences = over[0].group, prompts.part(over)
        if group in self.decoded:
            self.decoded[group].join(over, sequences)
        else:
            self.decoded[group] = DecodeBatch(over, sequences, self._kept)

    def _keep_up(self, prompts: PrefillBatch, seqs: list[Sequence]) -> None:
        """Let the drafter run its rows of the prompts, unless drafting does not pay.

        Sequences whose rows it has run before go alone, since a forward begins at the first row that one of its
        sequences has missed.
        """
        method = seqs[0].method
        if not method.count:
            return
        auto = auto_of(method, len(self.seqs) - len(self.waiting))
        if auto is not None and auto.rests:
            return
        new = [seq for seq in seqs if not any(seq.progress.seen.values())]
        for some in [new, *([seq] for seq in seqs if any(seq.progress.seen.values()))]:
            part = prompts.part(some)
            if some and method.proposer.missed(part, method.count) > 1:
                catch_up(part, method, method.count)

    def _learn(self, seq: Sequence, length: int | None = None) -> None:
        """Let other sequences reuse the blocks that this sequence has filled."""
        if self._reuses:
            self.block_manager.learn(seq.block_table, seq.tokens[:length], seq.progress.seen)

    def block_tables_of(self, seqs: list[Sequence]) -> BlockTables:
        """Return the block tables of these sequences."""
        table_BL = torch.zeros(len(seqs), self._tables.table_BL.size(1), dtype=torch.long)
        for row, seq in enumerate(seqs):
            table_BL[row, : len(seq.block_table.blocks)] = torch.tensor(seq.block_table.blocks)
        entries = tuple(seq.entry for seq in seqs if seq.entry is not None)
        firsts = tuple(seq.block_table.blocks[0] for seq in seqs)
        table_BL = table_BL.to(self._tables.table_BL.device)
        return replace(self._tables, table_BL=table_BL, entries=entries, firsts=firsts)
