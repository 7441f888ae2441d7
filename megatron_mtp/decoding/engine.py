"""Continuous batching: requests join and leave between steps, and share one memory in blocks.

A step decodes or runs prompts, by turns where there are both, so that first tokens wait for one step at most:

    make room    blocks for what the texts may write; where there are too few, the youngest text is put back
    decode       the texts in groups of those that draft alike (live.py); one that ends leaves its place
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
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from megatron_mtp.decoding.auto import AutoK
from megatron_mtp.decoding.blocks import BlockPool, Held
from megatron_mtp.decoding.config import MOST_DRAFTED, SpeculativeConfig
from megatron_mtp.decoding.kv_cache import BEYOND, CHUNK
from megatron_mtp.decoding.live import LiveGroup, Prompts, Shown, Text
from megatron_mtp.decoding.loop import Limits, catch_up
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
        blocks: of its memory, of `pages.BLOCK` slots each; see `memory.blocks_in`.
        chunk: rows of prompts in a step, at most.
        reuse: whether beginnings that texts share run once; those of a model with recurrent layers never do.
        overlap: whether a step is started before the tokens of the last one are read; they come a step later then. A
            GPU computes meanwhile; a CPU gains nothing.

    Raises:
        ValueError: a size below 1.
    """

    running: int = 16
    waiting: int = 256
    blocks: int = 1024
    chunk: int = CHUNK
    reuse: bool = True
    overlap: bool = False

    def __post_init__(self) -> None:
        for name in ("running", "waiting", "blocks", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"the engine was given {name} {getattr(self, name)}; give 1 or more.")


class ContinuousEngine:
    """An engine as `requests.Engine` describes it.

    Args:
        runner: the target.
        settings: its sizes.
        speculative: how texts draft whose requests do not say; None decodes them plainly.
        drafter: the small model of `draft_model`.

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
        self._shown: dict[tuple[Kind, int], Shown] = {}
        self._firsts = AcceptanceStats()
        self._pool = BlockPool(self.settings.blocks, BLOCK, runner.depths)
        longest = min(runner.positions, self.settings.blocks * BLOCK)
        self._capacity = -(-(longest + BEYOND) // BLOCK) * BLOCK
        self._memory = Memory(runner, 1, self._capacity, self._pages([]))
        self._texts: dict[int, Text] = {}
        self._waiting: list[int] = []
        self._prefilled: list[Text] = []
        self._groups: dict[tuple[Kind, int | None], LiveGroup] = {}
        self._updates: list[Update] = []
        self._decoded = True
        self._added = self._preempted = self._prompt_tokens = self._cached_tokens = 0
        self._method_of(Request([0], 1))

    def add(self, request: Request) -> int:
        """Queue a request; returns its number. Errors as `requests.Engine.add`."""
        method = self._method_of(request)
        check_request(self.runner, request)
        limits = Limits(request.max_new_tokens, self.runner.positions, request.stop_ids, request.cut)
        longest = len(request.prompt) + limits.budget(len(request.prompt))
        text = Text(self._added, request, method, limits, list(request.prompt))
        blocks = self._pool.blocks_for(longest + text.slots - len(text.tokens))
        if blocks > self._pool.count:
            raise ValueError(
                f"the prompt of {len(request.prompt)} tokens and {longest - len(request.prompt)} new ones need "
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
        stats = sum((one.stats for one in self._shown.values()), self._firsts)
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
            stats=stats,
        )

    # ---- decoding

    def _decode(self) -> None:
        self._make_room()
        for group in [*self._groups.values()]:
            if self._survives(group.texts, group.step):
                self._leave([text for text, live in zip(group.texts, group.sequences.live, strict=True) if not live])

    def _make_room(self) -> None:
        """Blocks for what the next step of every text may write, the oldest text's first."""
        decoded = sorted((text for group in self._groups.values() for text in group.texts), key=lambda one: one.number)
        for text in decoded:
            before = len(text.held.blocks)
            if text.slots <= before * BLOCK or text.number in self._waiting:  # put back for an older one
                continue
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
        elif any(text is one for one in self._prefilled):
            self._prefilled = [one for one in self._prefilled if one is not text]
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

    def _survives(self, texts: list[Text], forward: Callable[[], None]) -> bool:
        """Run a forward of these texts. Where it raises, they are out of it, and others are as before."""
        texts, known = [*texts], {text.number: len(text.tokens) for text in texts}
        try:
            forward()
        except Exception as error:
            if isinstance(error, torch.AcceleratorError) or self.runner.model.config.tensor_model_parallel_size > 1:
                raise  # a device that has failed, or ranks that may differ
            _logger.exception("a step of the requests %s has failed", sorted(known))
            self._recover(texts, known)
            return False
        return True

    def _recover(self, texts: list[Text], known: dict[int, int]) -> None:
        """Let texts of a forward that has raised begin anew, each alone; one that was alone ends.

        What their groups have on the device may be half of a step, so these are made anew as well.
        """
        gone = [self._groups.pop(group) for group in {_group(text) for text in texts} & self._groups.keys()]
        others = [text for group in gone for text in group.texts if text.number not in known]
        self._prefilled = [text for text in self._prefilled if text.number not in known]
        for text in texts:
            given = [update for update in self._updates if update.request == text.number]
            del text.tokens[known[text.number] + sum(len(update.tokens) for update in given) :]
            text.progress.rounds = [one for one in text.progress.rounds if one[0] < len(text.tokens)]
            has_ended = any(update.finish is not None for update in given)
            if text.alone and not has_ended:
                self._updates.append(Update(text.number, [], finish=Finish.ERROR))
            if text.alone or has_ended:
                self._free(text)
                del self._texts[text.number]
            else:
                text.alone = True
                self._wait_again(text)
        for text in others:
            self._wait_again(text)

    # ---- prompts

    def _run_prompts(self) -> bool:
        """A chunk of rows, if any prompt can run; says whether one could."""
        rows = self.settings.chunk
        while rows > 0 and (parts := self._next_parts(rows)):
            texts, counts = [text for text, _ in parts], [count for _, count in parts]
            self._survives(texts, partial(self._run, texts, counts))
            rows -= max(sum(count for _, count in parts), 1)
        return rows < self.settings.chunk

    def _next_parts(self, rows: int) -> list[tuple[Text, int]]:
        """Prompts that run in a forward of at most so many rows, and how many rows of each.

        The oldest prompt gets half of the rows. Of the others those with the fewest rows left go first, and the oldest
        gets what they leave. So a short prompt does not wait for a long one, and a long one goes on whatever comes.
        """
        while self._wanted(rows) < rows and self._admit():
            pass
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

    def _admit(self) -> bool:
        """Give the oldest request that waits a place, if there are one and blocks for it."""
        if not self._waiting or len(self._texts) - len(self._waiting) >= self.settings.running:
            return False
        text = self._texts[self._waiting[0]]
        if not self._give_blocks(text):
            return False
        heapq.heappop(self._waiting)
        self._prefilled = sorted([*self._prefilled, text], key=lambda one: one.number)
        return True

    def _give_blocks(self, text: Text) -> bool:
        """Blocks for a text that waits, those of a known beginning among them."""
        held = text.held
        if self._reuses(text) and text.request.prompt_logprobs is None:
            held = self._pool.find(text.tokens)
        found = len(held.blocks) * BLOCK
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
        """Blocks for all slots of a text beside those that it holds, if there are enough."""
        before = len(held.blocks)
        given = self._pool.extend(held, text.slots)
        if text.method.proposer.leaves_rows_out:
            self._memory.clear_depths(held.blocks[before:])
        return given

    def _run(self, texts: list[Text], counts: list[int]) -> None:
        """Run parts of prompts; texts whose prompts are over have their first tokens and join their groups."""
        pages, seeds = self._pages(texts), [text.request.seed for text in texts]
        prompts = Prompts(
            self.runner,
            texts,
            Sequences(self.runner, [text.tokens for text in texts], seeds, self._capacity, self._memory.through(pages)),
        )
        prompts.run(counts)
        first = {update.request: update for update in prompts.begin()}
        for update in first.values():
            self._firsts.count(0, 0, len(update.tokens))
        self._updates += [
            first.get(text.number, Update(text.number, []))
            for text in texts
            if text.number in first or not text.has_run
        ]
        ended = [text for text in texts if text.number in first and first[text.number].finish is not None]
        for text in ended:
            self._learn(text)
            self.cancel(text.number)
        going: dict[tuple[Kind, int | None], list[Text]] = defaultdict(list)
        for text in texts:
            if text.number in self._texts:
                going[_group(text)].append(text)
        for some in going.values():
            self._go_on(prompts, some)

    def _go_on(self, prompts: Prompts, texts: list[Text]) -> None:
        """Texts that draft alike, of whose prompts parts have run."""
        self._keep_up(prompts, texts)
        for text in texts:
            self._learn(text, min(text.run + 1, len(text.tokens)))
        over = [text for text in texts if text.has_run]
        self._prefilled = [text for text in self._prefilled if not any(text is one for one in over)]
        if over:
            self._join(over, prompts.part(over))

    def _keep_up(self, prompts: Prompts, texts: list[Text]) -> None:
        """Let the drafter run its rows of the prompts, unless drafting does not pay.

        Texts of which it has run rows before go alone, since a forward begins at the first row that one of its texts
        has missed.
        """
        method = texts[0].method
        shown = self._shown_by(_kind(texts[0]), len(self._texts) - len(self._waiting))
        rests = shown.auto is not None and shown.auto.rests
        if not method.count or rests or method.proposer.leaves_rows_out:  # the latter runs whole prompts
            return
        new = [text for text in texts if not any(text.progress.seen.values())]
        for some in [new, *([text] for text in texts if any(text.progress.seen.values()))]:
            part = prompts.part(some)
            if some and method.proposer.missed(part, method.count) > 1:
                catch_up(part, method, method.count)

    def _join(self, texts: list[Text], sequences: Sequences) -> None:
        kind, group = _kind(texts[0]), _group(texts[0])
        sequences.packs = False
        if group in self._groups:
            self._groups[group].join(texts, sequences)
        else:
            self._groups[group] = LiveGroup(
                self.runner,
                texts,
                sequences,
                lambda texts: self._shown_by(kind, texts),
                self._hand,
                self.settings.overlap,
            )

    # ---- what they share

    def _hand(self, _: Text, update: Update) -> None:
        self._updates.append(update)

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
        table_BL = torch.zeros(len(texts), self._capacity // BLOCK + 1, dtype=torch.long, device=self.runner.device)
        entries = tuple(text.entry for text in texts if text.entry is not None)
        return Pages(table_BL, self.settings.blocks + 1, entries=entries, kept_entries=self.settings.running)

    def _method_of(self, request: Request) -> Method:
        """How a request drafts; errors as `make_method`."""
        config = request.speculative or self.speculative
        kind = config, request.sampling.greedy
        if kind not in self._methods:
            method = make_method(self.runner, config, request.sampling, self.drafter)
            _check_rows(method)
            self._methods[kind] = method
        return replace(self._methods[kind], sampling=request.sampling)

    def _shown_by(self, kind: Kind, texts: int) -> Shown:
        """What groups of about so many texts have shown: the next power of two."""
        size = 1 << max(texts - 1, 0).bit_length()
        if (kind, size) not in self._shown:
            method = next(one for one in self._methods.values() if (one.config, one.sampling.greedy) == kind)
            self._shown[kind, size] = Shown(None if method.auto is None else AutoK(method.count))
        return self._shown[kind, size]


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
