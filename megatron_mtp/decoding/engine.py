"""Continuous batching: requests join and leave between steps, and share one memory in blocks.

A step decodes or runs prompts, by turns where there are both, so that first tokens wait for one step at most:

    make room    blocks for what the texts may write; where there are too few, the youngest text is put back
    decode       the texts in batches of those that draft alike (batch.py); one that ends leaves its place
    prefill      prompts of the requests that have a place, in one forward of up to a chunk of rows; beginnings that are
                 known do not run

A text that was put back loses its rows and nothing else: its tokens are run again when there is room, and its random
numbers depend on its seed and positions. So a text depends on its request alone, whatever comes when.

Where a forward raises, its texts are put back, and each goes on in forwards of its own. One that fails there as well
ends with `Finish.ERROR`; the others do not notice. On several tensor-parallel ranks the error is raised: the other
ranks may not have failed, and their collectives would meet those of another step.
"""

import heapq
import logging
from bisect import insort
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from megatron_mtp.decoding.auto import AutoK
from megatron_mtp.decoding.batch import DecodeBatch, PrefillBatch, Text, catch_up
from megatron_mtp.decoding.blocks import BlockPool, Held
from megatron_mtp.decoding.config import MOST_DRAFTED, SpeculativeConfig
from megatron_mtp.decoding.graphs import KeptTensors
from megatron_mtp.decoding.kv_cache import BEYOND, CHUNK
from megatron_mtp.decoding.memory import Memory, entry_bytes
from megatron_mtp.decoding.method import Method, make_method
from megatron_mtp.decoding.pages import BLOCK, Pages
from megatron_mtp.decoding.requests import Finish, Load, QueueFull, Request, Update, check_prompt
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sequences import Sequences
from megatron_mtp.decoding.stats import AcceptanceStats

SEEDS = range(-(2**63), 2**63)
"""What a seed may be."""

Kind = tuple[SpeculativeConfig, bool]
"""Texts of one kind draft alike: their config, and whether they are greedy."""

_logger = logging.getLogger(__name__)


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


class ContinuousEngine:
    """An engine as `requests.Engine` describes it.

    Args:
        runner: the target.
        settings: its sizes.
        speculative: how texts draft whose requests do not say; None decodes them plainly.
        drafter: the small model of `draft_model`.

    Attributes:
        stats: what its steps have cost and gained.

    Raises:
        ValueError: a model or config that it cannot serve.
    """

    def __init__(
        self,
        runner: Runner,
        settings: EngineSettings | None = None,
        speculative: SpeculativeConfig | None = None,
        drafter: Runner | None = None,
    ) -> None:
        self.runner, self.settings, self.drafter = runner, settings or EngineSettings(), drafter
        self.speculative = speculative or SpeculativeConfig("plain")
        self._has_states = entry_bytes(runner, drafter) > 0
        self._methods: dict[Kind, Method] = {}
        self.stats = AcceptanceStats()
        size = self.settings.block_size
        self._pool = BlockPool(self.settings.blocks, size, runner.depths)
        longest = min(self.settings.slots or runner.positions + BEYOND, self.settings.blocks * size)
        self._pages_of_a_text = self._pool.blocks_for(longest)
        self._memory = Memory(runner, self._pages([]))
        self._kept = KeptTensors()
        self._texts: dict[int, Text] = {}
        self._waiting: list[int] = []
        self._prefilled: list[Text] = []
        self._groups: dict[tuple[Kind, int | None], DecodeBatch] = {}
        self._updates: list[Update] = []
        self._decoded = True
        self._added = self._preempted = self._prompt_tokens = self._cached_tokens = 0
        self._method_of(Request([0], 1))

    def add(self, request: Request) -> int:
        """Queue a request; returns its number. Errors as `requests.Engine.add`."""
        method = self._method_of(request)
        check_request(self.runner, request)
        budget = min(request.max_new_tokens, self.runner.positions - len(request.prompt))
        text = Text(self._added, request, method, budget, list(request.prompt))
        blocks = self._pool.blocks_for(text.slots + budget)
        if blocks > self._pages_of_a_text:
            raise ValueError(
                f"the prompt of {len(request.prompt)} tokens and {budget} new ones need "
                f"{blocks} blocks of the cache, which has {self._pool.count}; ask for less, or give the cache more."
            )
        if len(self._waiting) >= self.settings.waiting:
            raise QueueFull(f"{len(self._waiting)} requests wait already; try again later.")
        self._added += 1
        self._texts[text.number] = text
        heapq.heappush(self._waiting, text.number)
        return text.number

    def cancel(self, request: int) -> None:
        """Forget a request; see `requests.Engine.cancel`."""
        text = self._texts.get(request)
        if text is not None:
            self._remove(text)
            self._free(text)
            del self._texts[request]

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """A decode step of every running text, or at most one chunk of prompts: by turns where there are both.

        So the first token of a prompt waits for no more than the step that runs when it comes.
        """
        self._updates = []
        prompts_turn = self._decoded or not self._groups
        self._decoded = not (prompts_turn and self._run_prompts())
        if self._decoded:
            self._decode()
        return self._updates

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._texts)

    @property
    def load(self) -> Load:
        """How busy it is."""
        return Load(
            running=len(self._texts) - len(self._waiting),
            waiting=len(self._waiting),
            blocks_used=self._pool.used,
            blocks=self._pool.count,
            states_used=self.settings.running - len(self._memory.free_entries) if self._has_states else 0,
            states=self.settings.running if self._has_states else 0,
            preempted=self._preempted,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            stats=self.stats,
        )

    # ---- decoding

    def _decode(self) -> None:
        self._make_room()
        for group in [*self._groups.values()]:
            self._updates += self._survive(group.texts, partial(self._step_of, group))

    def _step_of(self, group: DecodeBatch) -> list[Update]:
        updates = group.step()
        self.stats += group.method.stats
        self._leave([self._texts[one.request] for one in updates if one.finish is not None])
        return updates

    def _make_room(self) -> None:
        """Blocks for what the next step of every text may write, the oldest text's first."""
        decoded = sorted((text for group in self._groups.values() for text in group.texts), key=lambda one: one.number)
        for text in decoded:
            before = len(text.held.blocks)
            if text.number in self._waiting or text.slots <= before * self.settings.block_size:
                continue  # the first was put back for an older one
            while not self._extend(text, text.held):
                youngest = self._texts[max(set(self._texts) - set(self._waiting))]
                self._put_back(youngest)
                if youngest is text:
                    break
            if len(text.held.blocks) > before:
                self._groups[_group(text)].place(text)

    def _put_back(self, text: Text) -> None:
        """Let a text wait again; it comes before all that have not begun."""
        self._remove(text)
        self._wait_again(text)

    def _wait_again(self, text: Text) -> None:
        """The same for one that is in no group and no forward."""
        self._free(text)
        text.progress = text.progress.anew()
        text.run = 0
        if not text.has_begun:
            text.prompt_logprobs = []
        heapq.heappush(self._waiting, text.number)
        self._preempted += 1

    def _remove(self, text: Text) -> None:
        """Take a text out of where it is."""
        if text.number in self._waiting:
            self._waiting.remove(text.number)
            heapq.heapify(self._waiting)
        elif text in self._prefilled:
            self._prefilled.remove(text)
        else:
            self._learn(text)
            self._take_out([text])

    def _leave(self, texts: list[Text]) -> None:
        """These texts of one group have ended."""
        if texts:
            self._take_out(texts)
        for text in texts:
            self._learn(text)
            self._free(text)
            del self._texts[text.number]

    def _free(self, text: Text) -> None:
        """Let others have what a text has of the memory."""
        self._pool.give_back(text.held)
        if text.entry is not None:
            self._memory.give_entry(text.entry)
            text.entry = None

    def _take_out(self, texts: list[Text]) -> None:
        group = _group(texts[0])
        self._groups[group].leave(texts)
        if not self._groups[group].texts:
            del self._groups[group]

    # ---- errors

    def _survive(self, texts: list[Text], forward: Callable[[], list[Update]]) -> list[Update]:
        """Run a forward of these texts. Where it raises, they are out of it, and others are as before."""
        known = {text.number: len(text.tokens) for text in texts}
        try:
            return forward()
        except Exception as error:
            if not self.settings.contains_errors or isinstance(error, torch.AcceleratorError):
                raise
            if self.runner.model.config.tensor_model_parallel_size > 1:
                raise  # ranks may differ
            _logger.exception("a step of the requests %s has failed", sorted(known))
            return self._recover(texts, known)

    def _recover(self, texts: list[Text], known: dict[int, int]) -> list[Update]:
        """Let texts of a forward that has raised begin anew, each alone; one that was alone ends.

        What their groups have on the device may be half of a step, so these are made anew as well.
        """
        gone = [self._groups.pop(group) for group in {_group(text) for text in texts} & self._groups.keys()]
        others = [text for group in gone for text in group.texts if text.number not in known]
        self._prefilled = [text for text in self._prefilled if text.number not in known]
        ended = []
        for text in texts:
            del text.tokens[known[text.number] :]
            text.progress.rounds = [one for one in text.progress.rounds if one[0] < len(text.tokens)]
            if text.alone:
                ended.append(Update(text.number, [], finish=Finish.ERROR))
                self._free(text)
                del self._texts[text.number]
            else:
                text.alone = True
                self._wait_again(text)
        for text in others:
            self._wait_again(text)
        return ended

    # ---- prompts

    def _run_prompts(self) -> bool:
        """A chunk of rows, if any prompt can run; says whether one could."""
        rows = self.settings.chunk
        while rows > 0 and (parts := self._next_parts(rows)):
            texts, counts = [text for text, _ in parts], [count for _, count in parts]
            self._updates += self._survive(texts, partial(self._run, texts, counts))
            rows -= max(sum(count for _, count in parts), 1)
        return rows < self.settings.chunk

    def _next_parts(self, rows: int) -> list[tuple[Text, int]]:
        """Prompts that run in a forward of at most so many rows, and how many rows of each.

        The oldest prompt gets half of the rows. Of the others those with the fewest rows left go first, and the oldest
        gets what they leave. So a short prompt does not wait for a long one, and a long one goes on whatever comes.
        """
        wanted = self._wanted(rows)
        while wanted < rows and (text := self._admit()):
            wanted = self._wanted(rows) if text is self._prefilled[0] else wanted + _rows_left(text)
        if not self._prefilled:
            return []
        oldest, *others = self._prefilled
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
        left = [_rows_left(text) for text in self._prefilled]
        return min(left[0], -(-rows // 2)) + sum(left[1:]) if left else 0

    def _admit(self) -> Text | None:
        """Give the oldest request that waits a place, if there are one and blocks for it."""
        if not self._waiting or len(self._texts) - len(self._waiting) >= self.settings.running:
            return None
        text = self._texts[self._waiting[0]]
        if not self._give_blocks(text):
            return None
        heapq.heappop(self._waiting)
        insort(self._prefilled, text, key=lambda one: one.number)
        return text

    def _give_blocks(self, text: Text) -> bool:
        """Blocks for a text that waits, those of a known beginning among them."""
        held = text.held
        if self._reuses(text) and text.request.prompt_logprobs is None:
            held = self._pool.find(text.tokens)
        found = len(held.blocks) * self.settings.block_size
        if not self._extend(text, held):
            self._pool.give_back(held)
            return False
        text.held, text.run, text.entry = held, found, self._memory.take_entry()
        text.progress.seen.update(self._pool.seen_of(held))
        if text.cached is None:
            text.cached = found
            self._prompt_tokens += len(text.request.prompt)
            self._cached_tokens += found
        return True

    def _extend(self, text: Text, held: Held) -> bool:
        """Blocks for all slots of a text beside those that it holds, if there are enough.

        Nothing is left there of another text: no mask keeps a NaN out of a sum, and rows may be left out.
        """
        used = self._pool.extend(held, text.slots)
        if used:
            self._memory.clear(used)
        return used is not None

    def _run(self, texts: list[Text], counts: list[int]) -> list[Update]:
        """Run parts of prompts; texts whose prompts are over have their first tokens and join their groups."""
        seeds, memory = [text.request.seed for text in texts], self._memory.through(self._pages(texts))
        prompts = PrefillBatch(
            self.runner, texts, Sequences(self.runner, [text.tokens for text in texts], seeds, memory)
        )
        prompts.run(counts)
        first = {update.request: update for update in prompts.begin()}
        going: dict[tuple[Kind, int | None], list[Text]] = defaultdict(list)
        for text in texts:
            if text.number not in first or first[text.number].finish is None:
                going[_group(text)].append(text)
        for some in going.values():
            self._go_on(prompts, some)
        for update in first.values():
            self.stats.count(0, 0, len(update.tokens))
            if update.finish is not None:
                self._learn(self._texts[update.request])
                self.cancel(update.request)
        return [
            first.get(text.number, Update(text.number, []))
            for text in texts
            if text.number in first or not text.has_run
        ]

    def _go_on(self, prompts: PrefillBatch, texts: list[Text]) -> None:
        """Texts that draft alike, of whose prompts parts have run."""
        self._keep_up(prompts, texts)
        for text in texts:
            self._learn(text, min(text.run + 1, len(text.tokens)))
        over = [text for text in texts if text.has_run]
        if not over:
            return
        numbers = {text.number for text in over}
        self._prefilled = [text for text in self._prefilled if text.number not in numbers]
        group, sequences = _group(over[0]), prompts.part(over)
        sequences.packs = False
        if group in self._groups:
            self._groups[group].join(over, sequences)
        else:
            overlap = self.settings.overlap
            self._groups[group] = DecodeBatch(self.runner, over, sequences, self._auto_of, self._kept, overlap)

    def _keep_up(self, prompts: PrefillBatch, texts: list[Text]) -> None:
        """Let the drafter run its rows of the prompts, unless drafting does not pay.

        Texts of which it has run rows before go alone, since a forward begins at the first row that one of its texts
        has missed.
        """
        method = texts[0].method
        if not method.count or method.proposer.leaves_rows_out:  # the latter runs whole prompts
            return
        auto = self._auto_of(method, len(self._texts) - len(self._waiting))
        if auto is not None and auto.rests:
            auto.fall_behind(max(len(text.tokens) for text in texts))
            return
        new = [text for text in texts if not any(text.progress.seen.values())]
        for some in [new, *([text] for text in texts if any(text.progress.seen.values()))]:
            part = prompts.part(some)
            if some and method.proposer.missed(part, method.count) > 1:
                catch_up(part, method, method.count)

    # ---- what they share

    def _learn(self, text: Text, length: int | None = None) -> None:
        """Let other texts use the blocks that this one has filled."""
        if self._reuses(text):
            self._pool.learn(text.held, text.tokens[:length], text.progress.seen)

    def _reuses(self, text: Text) -> bool:
        """Whether a text shares blocks with others: all its rows must be there, and be what others would have.

        States are those of the whole text; none are kept of its beginnings.
        """
        return self.settings.reuse and not self._has_states and not text.method.proposer.leaves_rows_out

    def _pages(self, texts: list[Text]) -> Pages:
        pages = self._pages_of_a_text + 1  # the last one has the scratch slot
        table_BL = torch.zeros(len(texts), pages, dtype=torch.long)
        for row, text in enumerate(texts):
            table_BL[row, : len(text.held.blocks)] = torch.tensor(text.held.blocks)
        return Pages(
            table_BL.to(self.runner.device),
            self.settings.blocks + 1,
            self.settings.block_size,
            tuple(text.entry for text in texts if text.entry is not None),
            self.settings.running,
            tuple(text.held.blocks[0] for text in texts),
        )

    def _method_of(self, request: Request) -> Method:
        """How a request drafts; errors as `make_method`."""
        config = request.speculative or self.speculative
        kind = config, request.sampling.greedy
        if kind not in self._methods:
            method = make_method(self.runner, config, request.sampling, self.drafter)
            if self.settings.slots is None:
                _check_rows(method)
            self._methods[kind] = method
        return replace(self._methods[kind], sampling=request.sampling)

    def _auto_of(self, method: Method, texts: int) -> AutoK | None:
        """Automatic K of about so many texts, the next power of two; the model's, whatever engine has measured it."""
        if not method.auto:
            return None
        key = method.config, 1 << max(texts - 1, 0).bit_length()
        return self.runner.auto_counts.setdefault(key, AutoK(method.count))


def _kind(text: Text) -> Kind:
    return text.method.config, text.method.sampling.greedy


def _group(text: Text) -> tuple[Kind, int | None]:
    """Texts of one kind are decoded together, and one that has to be alone in a group of its own."""
    return _kind(text), text.number if text.alone else None


def _rows_left(text: Text) -> int:
    return text.rows - text.run


def _check_rows(method: Method) -> None:
    nodes, most = method.proposer.nodes(method.count), BEYOND - 2 * MOST_DRAFTED - 2
    if nodes > most:
        raise ValueError(
            f"'{method.config.method}' adds {nodes} rows to a step with these settings, and a text of the engine has "
            f"room for {most}; draft less."
        )


def check_request(runner: Runner, request: Request) -> None:
    """Raises ValueError, in one sentence, for what a model can never continue."""
    check_prompt(request.prompt, runner.positions, runner.vocab_size)
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {request.max_new_tokens}; give 1 or more.")
    if request.seed not in SEEDS:
        raise ValueError(f"the seed is {request.seed}; give a number of 64 bits, from -2^63 to 2^63 - 1.")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(request, name) or 0) < 0:
            raise ValueError(f"{name} is {getattr(request, name)}; give 0 or more.")
    _check_penalties(request)


def _check_penalties(request: Request) -> None:
    for name in ("presence", "frequency"):
        value = getattr(request.penalties, name)
        if not -2 <= value <= 2:
            raise ValueError(f"the {name} penalty is {value}; give -2 to 2.")
    repetition = request.penalties.repetition
    if not 0 < repetition < float("inf"):
        raise ValueError(f"the repetition penalty is {repetition}; give a number above 0, 1 for none.")
