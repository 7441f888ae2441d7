"""The engine: requests join and leave between steps, and share one memory in blocks; `generate` runs one.

runner = load_runner("runs/quickstart/checkpoint")
generated = generate(runner, [[1, 2, 3]], 64, speculative={"method": "mtp_eagle", "num_speculative_tokens": 2})

Where a forward raises, its sequences are put back, and each goes on in forwards of its own. One that fails there as
well ends with `Finish.ERROR`; the others do not notice. On several tensor-parallel ranks the error is raised: the other
ranks may not have failed, and their collectives would meet those of another step.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from megatron_mtp.common.acceptance import AcceptanceStats, Alarm
from megatron_mtp.decoding.batch import DecodeBatch, DraftingKind, Sequence
from megatron_mtp.decoding.block_tables import BLOCK, SLOTS_BEYOND_POSITIONS
from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.method import Method, config_from, make_method
from megatron_mtp.decoding.requests import UNLIMITED, Load, Request, Update, check_prompt, check_request
from megatron_mtp.decoding.rows import CHUNK, rounded
from megatron_mtp.decoding.runner import Keeping, Runner
from megatron_mtp.decoding.sampling import Sampling, TokenLogprob
from megatron_mtp.decoding.scheduler import EngineSettings, Scheduler
from megatron_mtp.decoding.sequences import wants_few_shapes

DEFAULT_CACHE_GIB = 4.0
"""Cache that is taken unasked in a host's memory."""

DEFAULT_GPU_SHARE = 0.8
"""Share of a GPU's free memory that the cache takes unasked; steps and their graphs need the rest."""

MIN_KEPT_SLOTS = 1024
"""Slots of a sequence in memory that is kept for later prompts, at least, so that they seldom need other memory."""

WARM_STEPS = 4
"""Steps of a kind until it is recorded, and one more."""

_logger = logging.getLogger(__name__)


class Engine:
    """Sequences of requests, which grow step by step. Only one thread calls it.

    Args:
        runner: the target.
        settings: its sizes.
        speculative: how sequences draft whose requests have no method; None decodes them plainly.
        drafter: the small model of `draft_model`.

    Attributes:
        scheduler: who runs in a step.
        stats: what its steps have cost and gained.
        policy_version: how often the weights were updated (`update_weights`), or the number that the last update gave.
        is_torn: an update of the weights has failed half-way, so that no step can be taken.

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
        self.scheduler = Scheduler(self.settings, runner, drafter)
        self.stats = AcceptanceStats()
        self._methods: dict[DraftingKind, Method] = {}
        self._added = self.policy_version = 0
        self.is_torn = False
        if self.max_length < 2:  # a token of a prompt, and a new one
            raise ValueError(
                f"the cache has {self.scheduler.longest} slots, and a step of '{self.speculative.method}' takes them "
                "all; give the cache more, or draft less."
            )

    def add(self, request: Request) -> int:
        """Queue a request; returns its number. ValueError where it can never be served, QueueFull if not now."""
        method = self._method_of(request)
        check_request(request, self.scheduler.positions, self.runner.vocab_size)
        goes_on = request.max_new_tokens == UNLIMITED
        length = self._length_with(method) if goes_on else self.scheduler.positions
        budget = min(request.max_new_tokens, max(length - len(request.prompt), 1))
        self.scheduler.add(Sequence(self._added, request, method, budget, list(request.prompt)))
        self._added += 1
        return self._added - 1

    def cancel(self, request: int) -> None:
        """Forget a request; its place and blocks are free in the next step. Nothing happens if it has ended."""
        self.scheduler.cancel(request)

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """A decode step of every running sequence, or a chunk of prompts; see `Scheduler.schedule`."""
        if self.is_torn:
            raise RuntimeError("an update of the weights has failed half-way; update them again, whole.")
        updates: list[Update] = []
        began = time.perf_counter()
        for batch in self.scheduler.schedule():
            seqs = [*batch.seqs]
            known = {seq.number: len(seq.tokens) for seq in seqs}
            try:
                gained = batch.step()
                self.stats += batch.stats
                drafts = isinstance(batch, DecodeBatch) and batch.method.proposer.depths and batch.stats.drafted
                if drafts and (warning := self.runner.alarm.learn(batch.stats)) is not None:
                    _logger.warning("%s", warning)
                self.scheduler.accept(batch, gained)
                ended = time.perf_counter()
                if isinstance(batch, DecodeBatch):
                    batch.learn(ended - began)
                began = ended
            except Exception as error:
                ranks = self.runner.model.config.tensor_model_parallel_size  # which may differ in what has failed
                if not self.settings.contains_errors or isinstance(error, torch.AcceleratorError) or ranks > 1:
                    raise
                _logger.exception("a step of the requests %s has failed", sorted(known))
                gained = self.scheduler.recover(seqs, known)
            updates += gained
        if self.policy_version:
            updates = [replace(update, policy_version=self.policy_version) for update in updates]
        return updates

    @property
    def busy(self) -> bool:
        """True if any request has not ended."""
        return bool(self.scheduler.seqs)

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and its output, at most, for requests without a method of their own."""
        return self._length_with(self._method_of(Request([0], 1)))

    @property
    def load(self) -> Load:
        """Load of the engine."""
        scheduler, running = self.scheduler, self.settings.running
        return Load(
            running=len(scheduler.seqs) - len(scheduler.waiting),
            waiting=len(scheduler.waiting),
            blocks_used=scheduler.block_manager.used,
            blocks=scheduler.block_manager.count,
            states_used=running - len(scheduler.memory.free_entries) if scheduler.has_states else 0,
            states=running if scheduler.has_states else 0,
            preempted=scheduler.preempted,
            prompt_tokens=scheduler.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            stats=self.stats,
            expected=tuple(self.runner.alarm.expected or ()),
        )

    def _length_with(self, method: Method) -> int:
        """Tokens of a sequence whose drafts take room as well, at most."""
        return min(self.scheduler.positions, self.scheduler.longest - method.slots)

    def _method_of(self, request: Request) -> Method:
        """The method of a request; errors as `make_method`."""
        config = request.speculative or self.speculative
        kind = config, request.sampling.greedy
        if kind not in self._methods:
            method = make_method(self.runner, config, request.sampling, self.drafter)
            nodes, most = method.proposer.nodes(method.count), SLOTS_BEYOND_POSITIONS - 1
            if self.settings.slots is None and nodes > most:
                raise ValueError(
                    f"'{config.method}' adds {nodes} rows to a step with these settings, and a sequence of the engine "
                    f"has room for {most}; draft less."
                )
            self._methods[kind] = method
        return replace(self._methods[kind], sampling=request.sampling)


def warm_up(engine: Engine) -> None:
    """Take steps of every number of sequences, greedy and sampled, so that requests need not wait for a compiler.

    What is compiled or recorded at its first use is then ready. Counts and measurements begin anew.

    Args:
        engine: without requests.
    """
    runner, most = engine.runner, engine.speculative.num_speculative_tokens
    drafted = most if isinstance(most, int) else runner.depths
    alarm, runner.alarm = runner.alarm, Alarm()
    for running, sampling in product(range(1, engine.settings.running + 1), (Sampling(), Sampling(1.0))):
        tokens = min((2 * running + WARM_STEPS) * (1 + drafted), engine.max_length - 1)
        try:
            for number in range(running):
                engine.add(Request([number % runner.vocab_size], tokens, sampling, seed=number))
                while engine.load.waiting:
                    engine.step()
        except ValueError:  # the verifier is for greedy sequences alone, or for sampled ones
            continue
        while engine.busy:
            engine.step()
    runner.alarm = alarm
    runner.auto_counts.clear()
    engine.stats, engine.scheduler.prompt_tokens, engine.scheduler.cached_tokens = AcceptanceStats(), 0, 0


def block_bytes(runner: Runner, drafter: Runner | None = None) -> int:
    """Bytes of one block: keys and values of the trunk, of MTP layers and of a small model, and the trunk's states."""
    kept = sum(one.numbers * of.dtype.itemsize for of, one in _keeping(runner, drafter))
    return (kept + runner.state_size * runner.dtype.itemsize) * BLOCK


def entry_bytes(runner: Runner, drafter: Runner | None = None) -> int:
    """Bytes that the recurrent layers of all these keep of one sequence; 0 where there are none."""
    return sum(size.state_bytes(of.dtype) for of, one in _keeping(runner, drafter) for size in one.states)


def _keeping(runner: Runner, drafter: Runner | None) -> list[tuple[Runner, Keeping]]:
    small = [] if drafter is None else [(drafter, drafter.trunk_keeps)]
    return [*((runner, one) for one in (runner.trunk_keeps, *runner.depths_keep)), *small]


def blocks_in(gib: float, running: int, runner: Runner, drafter: Runner | None = None) -> int:
    """Blocks that so much memory holds, beside what recurrent layers keep of so many running sequences.

    Raises:
        ValueError: not even one.
    """
    each, states = block_bytes(runner, drafter), running * entry_bytes(runner, drafter)
    blocks = int((gib * 2**30 - states) / each) - 1  # one belongs to no sequence
    if blocks < 1:
        least = (2 * each + states) / 2**30
        beside, fewer = (f" in addition to the states of {running} sequences", ", or run fewer") if states else ("", "")
        raise ValueError(
            f"a cache of {gib} GiB holds no block of {BLOCK} tokens{beside}; give at least {least:.6f}{fewer}."
        )
    return blocks


def blocks_for(running: int, runner: Runner, drafter: Runner | None = None, positions: int | None = None) -> int:
    """Blocks of so many sequences of so many tokens, as far as `default_cache_gib` holds them; errors as `blocks_in`.

    Args:
        positions: None for all of the model's.
    """
    each = -(-(positions or runner.positions) // BLOCK) + 1  # and the drafts behind the last position
    return min(running * each, blocks_in(default_cache_gib(runner.device), running, runner, drafter))


def default_cache_gib(device: torch.device) -> float:
    """GiB of cache that are taken unasked: a share of a GPU's free memory, of the rank that has the least."""
    if device.type != "cuda":
        return DEFAULT_CACHE_GIB
    free: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(free, torch.cuda.mem_get_info(device)[0])
    return DEFAULT_GPU_SHARE * min(free) / 2**30


@dataclass(frozen=True)
class Generated:
    """The outcome of a batch.

    Attributes:
        token_ids: what was emitted for each prompt, the stop token included.
        stats: what it cost, summed over the batch.
        logprobs: of every token, if they were asked for; else empty lists.
    """

    token_ids: list[list[int]]
    stats: AcceptanceStats
    logprobs: list[list[TokenLogprob]]


def generate(
    runner: Runner,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: Sampling | None = None,
    speculative: SpeculativeConfig | dict[str, Any] | None = None,
    seeds: list[int] | None = None,
    stop_ids: Iterable[int] = (),
    drafter: Runner | None = None,
    cut: Callable[[list[int]], int | None] | None = None,
    emit: Callable[[Update], None] | None = None,
    logprobs: int | None = None,
) -> Generated:
    """Continue every prompt, all at once.

    Args:
        runner: the target (`load_runner`).
        prompts: token ids, at least one each.
        max_new_tokens: for all sequences, or for each; fewer where the model's positions end before.
        sampling: greedy if None.
        speculative: how to draft, as a config or as the dict of one; None decodes plainly.
        seeds: of each prompt; its number in the list if None. A sequence depends on its own seed alone.
        stop_ids: a sequence ends with the first of these.
        drafter: the small model of `draft_model`.
        cut: given the tokens emitted so far, how many of them to keep, or None to go on (stop strings).
        emit: called with what every step gave every sequence, by the prompt's number, as it comes.
        logprobs: how many of the most probable tokens to list beside each emitted one, with the target's
            log-probabilities, drafted or not; 0 for the emitted ones alone, None for none.

    Raises:
        ValueError: a prompt or setting that the model does not allow.
    """
    budgets = max_new_tokens if isinstance(max_new_tokens, list) else [max_new_tokens] * len(prompts)
    seeds = list(range(len(prompts))) if seeds is None else seeds
    check_prompts(runner, prompts, min(budgets, default=1))
    for name, given in (("seeds", seeds), ("max_new_tokens", budgets)):
        if len(given) != len(prompts):
            raise ValueError(f"there are {len(given)} {name} for {len(prompts)} prompts; give one for each.")
    config = config_from(speculative) if isinstance(speculative, dict) else speculative or SpeculativeConfig("plain")
    sampling, stops = sampling or Sampling(), frozenset(stop_ids)
    requests = [
        Request(prompt, new, sampling, seed, stop_ids=stops, cut=cut, speculative=config, logprobs=logprobs)
        for prompt, new, seed in zip(prompts, budgets, seeds, strict=True)
    ]
    return _generated(_engine_for(runner, requests, drafter), requests, emit)


def _generated(engine: Engine, requests: list[Request], emit: Callable[[Update], None] | None) -> Generated:
    """What the engine makes of requests, run until all have ended."""
    number_of = {engine.add(request): number for number, request in enumerate(requests)}
    token_ids: list[list[int]] = [[] for _ in requests]
    found: list[list[TokenLogprob]] = [[] for _ in requests]
    while engine.busy:
        for update in engine.step():
            number = number_of[update.request]
            token_ids[number] += update.tokens
            found[number] += update.logprobs
            if emit is not None and (update.tokens or update.finish):
                emit(replace(update, request=number))
    if wants_few_shapes(engine.runner.device):
        engine.runner.kept = engine  # with the steps that it has recorded
    return Generated(token_ids, engine.stats, found)


def _engine_for(runner: Runner, requests: list[Request], drafter: Runner | None) -> Engine:
    """An engine with a block for each sequence, so that attention reads its keys where they are."""
    first, few = requests[0], wants_few_shapes(runner.device)
    method = make_method(runner, first.speculative, first.sampling, drafter)
    positions = runner.positions
    slots = max(min(len(one.prompt) + one.max_new_tokens, positions) for one in requests) + method.slots
    running, slots = len(requests), rounded(max(slots, min(MIN_KEPT_SLOTS, positions) if few else 0), few)
    kept, runner.kept = runner.kept, None  # a call within this one has memory of its own, as one after an error
    if isinstance(kept, Engine):
        had = kept.settings
        if kept.drafter is drafter and had.running >= running and had.block_size > slots:
            kept.stats = AcceptanceStats()
            return kept
        running, slots = max(running, had.running), max(slots, had.block_size - 1)
    del kept
    sizes = running, running, running, slots + 1, slots, CHUNK * running  # one block for each sequence
    settings = EngineSettings(*sizes, reuse=False, contains_errors=False)
    return Engine(runner, settings, drafter=drafter)


def check_prompts(runner: Runner, prompts: list[list[int]], max_new_tokens: int) -> None:
    """Raises ValueError for what cannot be continued."""
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {max_new_tokens}; give 1 or more.")
    if not prompts:
        raise ValueError("there is no prompt; give one with --prompt, --prompt-file or --prompt-ids.")
    for number, prompt in enumerate(prompts, start=1):
        check_prompt(prompt, runner.positions, runner.vocab_size, f"prompt {number}")
