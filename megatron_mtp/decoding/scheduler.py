"""Who runs in a step: which prompts, and which texts are decoded; and what becomes of them afterwards.

A step decodes or runs prompts, by turns where there are both, so that first tokens wait for one step at most:

    make room    blocks for what the texts may write; where there are too few, the youngest text is put back
    decode       the texts in batches of those that draft alike; one that ends leaves its place
    prefill      prompts of the requests that have a place, in one forward of up to a chunk of rows; beginnings that are
                 known do not run

A text that was put back loses its rows and nothing else: its tokens are run again when there is room, and its random
numbers depend on its seed and positions. So a text depends on its request alone, whatever comes when.
"""

import heapq
from bisect import insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_mtp.decoding.batch import DecodeBatch, PrefillBatch, Text, auto_of, catch_up
from megatron_mtp.decoding.block_manager import BlockPool, Held
from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.graphs import KeptTensors
from megatron_mtp.decoding.kv_cache import BEYOND, CHUNK
from megatron_mtp.decoding.memory import Memory, entry_bytes
from megatron_mtp.decoding.pages import BLOCK, Pages
from megatron_mtp.decoding.requests import Finish, QueueFull, Update
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sequences import Sequences

Kind = tuple[SpeculativeConfig, bool]
"""Texts of one kind draft alike: their config, and whether they are greedy."""


@dataclass(frozen=True)
class EngineSettings:
    """Sizes of an engine.

    Attributes:
        running: texts in its steps, at most.
        waiting: requests that wait for a place, at most.
        blocks: of its memory; see `memory.blocks_in`.
        block_size: slots of a block.
        slots: of a text, at most; None for those of all positions, and of drafts behind the last one.
        chunk: rows of prompts in a step, at most.
        reuse: whether beginnings that texts share run once; those of a model with recurrent layers never do.
        overlap: whether a step is started before the tokens of the last one are read; they come a step later then. A
            GPU computes meanwhile; a CPU gains nothing.
        contains_errors: whether a text whose forward raises ends with an error of its own, and the others go on.

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
    overlap: bool = False
    contains_errors: bool = True

    def __post_init__(self) -> None:
        for name in ("running", "waiting", "blocks", "block_size", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"the engine was given {name} {getattr(self, name)}; give 1 or more.")


class Scheduler:
    """The texts of an engine, and what they have of its memory.

    Attributes:
        texts: by number, those that have not ended.
        waiting: numbers of those without a place, as a heap.
        prefilled: those whose prompts run, in the order in which they came.
        decoded: batches of those that have their first tokens.
        pool: the blocks of the memory.
        preempted, prompt_tokens, cached_tokens: as of `requests.Load`.
    """

    def __init__(self, runner: Runner, settings: EngineSettings, drafter: Runner | None) -> None:
        self.runner, self.settings = runner, settings
        self.has_states = entry_bytes(runner, drafter) > 0
        longest = min(settings.slots or runner.positions + BEYOND, settings.blocks * settings.block_size)
        self._pages_of_a_text = -(-(longest + 1) // settings.block_size)  # and the scratch slot
        self._spare = int(self._pages_of_a_text > 1)  # block 0, which pages without a block point to
        self._longest = longest
        self.pool = BlockPool(settings.blocks, settings.block_size, runner.depths, self._spare)
        self.memory = Memory(runner, self.pages_of([]))
        self._kept = KeptTensors()
        self.texts: dict[int, Text] = {}
        self.waiting: list[int] = []
        self.prefilled: list[Text] = []
        self.decoded: dict[tuple[Kind, int | None], DecodeBatch] = {}
        self._prompts_turn = True
        self.preempted = self.prompt_tokens = self.cached_tokens = 0

    def add(self, text: Text) -> None:
        """Let a text wait. Errors as `requests.Engine.add`."""
        slots, prompt = text.slots + text.budget, len(text.request.prompt)
        if slots > self._longest:
            raise ValueError(
                f"the prompt of {prompt} tokens and {text.budget} new ones need {self.pool.blocks_for(slots)} blocks "
                f"of the cache, which has {self.pool.count}; ask for less, or give the cache more."
            )
        if len(self.waiting) >= self.settings.waiting:
            raise QueueFull(f"{len(self.waiting)} requests wait already; try again later.")
        self.texts[text.number] = text
        heapq.heappush(self.waiting, text.number)

    def cancel(self, number: int) -> None:
        """Forget a text; nothing happens if it has ended."""
        text = self.texts.get(number)
        if text is not None:
            self._remove(text)
            self.free(text)
            del self.texts[number]

    def schedule(self) -> Iterator[PrefillBatch | DecodeBatch]:
        """The batches of a step: at most one chunk of prompts, or all texts that are decoded, by turns.

        So the first token of a prompt waits for no more than the step that runs when it comes.
        """
        rows, had_prompts = self.settings.chunk, False
        if self._prompts_turn or not self.decoded:
            while rows > 0 and (parts := self._next_parts(rows)):
                had_prompts = True
                yield self._prefill_batch(parts)
                rows -= max(sum(count for _, count in parts), 1)
        self._prompts_turn = not had_prompts
        if not had_prompts:
            self._make_room()
            yield from [*self.decoded.values()]

    def accept(self, batch: PrefillBatch | DecodeBatch, updates: list[Update]) -> None:
        """Let the texts of a batch that has run go on, or leave."""
        ended = [self.texts[update.request] for update in updates if update.finish is not None]
        if isinstance(batch, DecodeBatch):
            if ended:
                self._take_out(ended)
        else:
            numbers = {text.number for text in ended}
            self.prefilled = [text for text in self.prefilled if text.number not in numbers]
            going: dict[tuple[Kind, int | None], list[Text]] = defaultdict(list)
            for text in batch.texts:
                if text.number not in numbers:
                    going[_group(text)].append(text)
            for some in going.values():
                self._go_on(batch, some)
        for text in ended:
            self._learn(text)
            self.free(text)
            del self.texts[text.number]

    def recover(self, texts: list[Text], known: dict[int, int]) -> list[Update]:
        """Let texts of a forward that has raised begin anew, each alone; one that was alone ends.

        What their groups have on the device may be half of a step, so these are made anew as well.
        """
        gone = [self.decoded.pop(group) for group in {_group(text) for text in texts} & self.decoded.keys()]
        others = [text for group in gone for text in group.texts if text.number not in known]
        self.prefilled = [text for text in self.prefilled if text.number not in known]
        ended = []
        for text in texts:
            del text.tokens[known[text.number] :]
            text.progress.rounds = [one for one in text.progress.rounds if one[0] < len(text.tokens)]
            if text.alone:
                ended.append(Update(text.number, [], finish=Finish.ERROR))
                self.free(text)
                del self.texts[text.number]
            else:
                text.alone = True
                self._wait_again(text)
        for text in others:
            self._wait_again(text)
        return ended

    def _make_room(self) -> None:
        """Blocks for what the next step of every text may write, the oldest text's first."""
        size = self.settings.block_size
        decoded = (text for group in self.decoded.values() for text in group.texts)
        short = [text for text in decoded if text.slots > len(text.held.blocks) * size]
        for text in sorted(short, key=lambda one: one.number):
            before = len(text.held.blocks)
            if text.number in self.waiting:
                continue  # it was put back for an older one
            while not self._extend(text, text.held):
                youngest = self.texts[max(set(self.texts) - set(self.waiting))]
                self.put_back(youngest)
                if youngest is text:
                    break
            if len(text.held.blocks) > before:
                self.decoded[_group(text)].place(text)

    def put_back(self, text: Text) -> None:
        """Let a text wait again; it comes before all that have not begun."""
        self._remove(text)
        self._wait_again(text)

    def _wait_again(self, text: Text) -> None:
        """The same for one that is in no group and no forward."""
        self.free(text)
        text.progress = text.progress.anew()
        text.run = 0
        if not text.has_begun:
            text.prompt_logprobs = []
        heapq.heappush(self.waiting, text.number)
        self.preempted += 1

    def _remove(self, text: Text) -> None:
        """Take a text out of where it is."""
        if text.number in self.waiting:
            self.waiting.remove(text.number)
            heapq.heapify(self.waiting)
        elif text in self.prefilled:
            self.prefilled.remove(text)
        else:
            self._learn(text)
            self._take_out([text])

    def free(self, text: Text) -> None:
        """Let others have what a text has of the memory."""
        self.pool.give_back(text.held)
        if text.entry is not None:
            self.memory.give_entry(text.entry)
            text.entry = None

    def _take_out(self, texts: list[Text]) -> None:
        group = _group(texts[0])
        self.decoded[group].leave(texts)
        if not self.decoded[group].texts:
            del self.decoded[group]

    # ---- prompts

    def _prefill_batch(self, parts: list[tuple[Text, int]]) -> PrefillBatch:
        texts, counts = [text for text, _ in parts], [count for _, count in parts]
        tokens, seeds = [text.tokens for text in texts], [text.request.seed for text in texts]
        sequences = Sequences(self.runner, tokens, seeds, self.memory.through(self.pages_of(texts)))
        return PrefillBatch(self.runner, texts, counts, sequences)

    def _next_parts(self, rows: int) -> list[tuple[Text, int]]:
        """Prompts that run in a forward of at most so many rows, and how many rows of each.

        The oldest prompt gets half of the rows. Of the others those with the fewest rows left go first, and the oldest
        gets what they leave. So a short prompt does not wait for a long one, and a long one goes on whatever comes.
        """
        wanted = self._wanted(rows)
        while wanted < rows and (text := self._admit()):
            wanted = self._wanted(rows) if text is self.prefilled[0] else wanted + _rows_left(text)
        if not self.prefilled:
            return []
        oldest, *others = self.prefilled
        if oldest.alone:
            return [(oldest, min(_rows_left(oldest), rows))]
        others = [text for text in others if not text.alone]
        turns = [(oldest, -(-rows // 2)), *((text, rows) for text in sorted(others, key=_rows_left)), (oldest, rows)]
        counts = dict.fromkeys((text.number for text in (oldest, *others)), 0)
        for text, most in turns:
            counts[text.number] += min(_rows_left(text) - counts[text.number], most, rows - sum(counts.values()))
        parts = [(text, counts[text.number]) for text in (oldest, *others)]
        return [(text, count) for text, count in parts if count or text.has_run]

    def _wanted(self, rows: int) -> int:
        """How many of a forward's rows the prompts take that have a place; of the oldest no more than half count."""
        left = [_rows_left(text) for text in self.prefilled]
        return min(left[0], -(-rows // 2)) + sum(left[1:]) if left else 0

    def _admit(self) -> Text | None:
        """Give the oldest request that waits a place, if there are one and blocks for it."""
        if not self.waiting or len(self.texts) - len(self.waiting) >= self.settings.running:
            return None
        text = self.texts[self.waiting[0]]
        if not self._give_blocks(text):
            return None
        heapq.heappop(self.waiting)
        insort(self.prefilled, text, key=lambda one: one.number)
        return text

    def _give_blocks(self, text: Text) -> bool:
        """Blocks for a text that waits, those of a known beginning among them."""
        held = text.held
        if self._reuses(text) and text.request.prompt_logprobs is None:
            held = self.pool.find(text.tokens)
        found = len(held.blocks) * self.settings.block_size
        if not self._extend(text, held):
            self.pool.give_back(held)
            return False
        text.held, text.run, text.entry = held, found, self.memory.take_entry()
        text.progress.seen.update(self.pool.seen_of(held))
        if text.cached is None:
            text.cached = found
            self.prompt_tokens += len(text.request.prompt)
            self.cached_tokens += found
        return True

    def _extend(self, text: Text, held: Held) -> bool:
        """Blocks for all slots of a text beside those that it holds, if there are enough.

        Nothing is left there of another text: no mask keeps a NaN out of a sum, and rows may be left out.
        """
        used = self.pool.extend(held, text.slots)
        if used:
            self.memory.clear(used)
        return used is not None

    def _go_on(self, prompts: PrefillBatch, texts: list[Text]) -> None:
        """Texts that draft alike, of whose prompts parts have run."""
        self._keep_up(prompts, texts)
        for text in texts:
            self._learn(text, min(text.run + 1, len(text.tokens)))
        over = [text for text in texts if text.has_run]
        if not over:
            return
        numbers = {text.number for text in over}
        self.prefilled = [text for text in self.prefilled if text.number not in numbers]
        group, sequences = _group(over[0]), prompts.part(over)
        sequences.packs = False
        if group in self.decoded:
            self.decoded[group].join(over, sequences)
        else:
            self.decoded[group] = DecodeBatch(self.runner, over, sequences, self._kept, self.settings.overlap)

    def _keep_up(self, prompts: PrefillBatch, texts: list[Text]) -> None:
        """Let the drafter run its rows of the prompts, unless drafting does not pay.

        Texts of which it has run rows before go alone, since a forward begins at the first row that one of its texts
        has missed.
        """
        method = texts[0].method
        if not method.count or method.proposer.leaves_rows_out:  # the latter runs whole prompts
            return
        auto = auto_of(self.runner, method, len(self.texts) - len(self.waiting))
        if auto is not None and auto.rests:
            auto.fall_behind(max(len(text.tokens) for text in texts))
            return
        new = [text for text in texts if not any(text.progress.seen.values())]
        for some in [new, *([text] for text in texts if any(text.progress.seen.values()))]:
            part = prompts.part(some)
            if some and method.proposer.missed(part, method.count) > 1:
                catch_up(part, method, method.count)

    def _learn(self, text: Text, length: int | None = None) -> None:
        """Let other texts use the blocks that this one has filled."""
        if self._reuses(text):
            self.pool.learn(text.held, text.tokens[:length], text.progress.seen)

    def _reuses(self, text: Text) -> bool:
        """Whether a text shares blocks with others: all its rows must be there, and be what others would have.

        States are those of the whole text; none are kept of its beginnings.
        """
        return self.settings.reuse and not self.has_states and not text.method.proposer.leaves_rows_out

    def pages_of(self, texts: list[Text]) -> Pages:
        """Where the slots of these texts are."""
        table_BL = torch.zeros(len(texts), self._pages_of_a_text, dtype=torch.long)
        for row, text in enumerate(texts):
            table_BL[row, : len(text.held.blocks)] = torch.tensor(text.held.blocks)
        return Pages(
            table_BL.to(self.runner.device),
            self.settings.blocks + self._spare,
            self.settings.block_size,
            tuple(text.entry for text in texts if text.entry is not None),
            self.settings.running,
            tuple(text.held.blocks[0] for text in texts),
        )


def _group(text: Text) -> tuple[Kind, int | None]:
    """Texts of one kind are decoded together, and one that has to be alone in a group of its own."""
    return (text.method.config, text.method.sampling.greedy), text.number if text.alone else None


def _rows_left(text: Text) -> int:
    return text.rows - text.run
