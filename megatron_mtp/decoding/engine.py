"""The engine: requests join and leave between steps and share one block memory. `generate` runs a temporary engine.

runner = load_runner("runs/quickstart/checkpoint")
generated = generate(runner, [[1, 2, 3]], 64, speculative={"method": "mtp_eagle", "num_speculative_tokens": 2})

If a forward pass raises, its sequences are put back, and each continues in forward passes of its own. A sequence that
fails there again ends with `Finish.ERROR`; the others are not affected. On several tensor-parallel ranks the error is
raised, because the other ranks may not have failed and would wait in the collectives of another step.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.decoding.alarm import Alarm
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
"""Default cache size in host memory."""

DEFAULT_GPU_SHARE = 0.8
"""Default fraction of a GPU's free memory for the cache; steps and their graphs need the rest."""

MIN_KEPT_SLOTS = 1024
"""Minimum number of slots of a sequence in memory that is kept for later prompts, to avoid reallocation."""

WARM_STEPS = 4
"""Steps of a kind until it is captured, plus one."""

_logger = logging.getLogger(__name__)


class Engine:
    """Runs requests step by step. Call it from one thread only.

    Args:
        runner: the target.
        settings: sizes of the engine.
        speculative: drafting method of requests without one; None for plain decoding.
        drafter: the small model of `draft_model`.

    Attributes:
        scheduler: decides what runs in a step.
        stats: cost and gain of its steps.
        policy_version: number of weight updates (`update_weights`), or the number that the last update set.
        is_torn: whether a weight update has failed halfway, so no step can run.

    Raises:
        ValueError: the model or config is not supported.
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
        if self.max_length < 2:  # a prompt token and a new token
            raise ValueError(
                f"the cache has {self.scheduler.longest} slots, and a step of '{self.speculative.method}' takes them "
                "all; give the cache more, or draft less."
            )

    def add(self, request: Request) -> int:
        """Queue a request and return its number. Raise ValueError if it can never be served, QueueFull if not now."""
        method = self._method_of(request)
        check_request(request, self.scheduler.positions, self.runner.vocab_size)
        goes_on = request.max_new_tokens == UNLIMITED
        length = self._length_with(method) if goes_on else self.scheduler.positions
        budget = min(request.max_new_tokens, max(length - len(request.prompt), 1))
        self.scheduler.add(Sequence(self._added, request, method, budget, list(request.prompt)))
        self._added += 1
        return self._added - 1

    def cancel(self, request: int) -> None:
        """Remove a request; its place and blocks are free in the next step. No effect if it has ended."""
        self.scheduler.cancel(request)

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Run a decode step of every running sequence, or a chunk of prompts; see `Scheduler.schedule`."""
        if self.is_torn:
            raise RuntimeError("an update of the weights failed halfway; update all of them again.")
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
                ranks = self.runner.model.config.tensor_model_parallel_size  # errors may differ between ranks
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
        """Whether any request has not ended."""
        return bool(self.scheduler.seqs)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a prompt and its output, for requests without a method of their own."""
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
        """Return the largest number of tokens of a sequence, including room for its drafts."""
        return min(self.scheduler.positions, self.scheduler.longest - method.slots)

    def _method_of(self, request: Request) -> Method:
        """Return the method of a request; raises the errors of `make_method`."""
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
    """Run steps with every number of sequences, greedy and sampled, so that requests do not wait for compilation.

    Counts and measurements are reset afterwards.

    Args:
        engine: an engine without requests.
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
        except ValueError:  # the acceptance rule supports only greedy or only sampled sequences
            continue
        while engine.busy:
            engine.step()
    runner.alarm = alarm
    runner.auto_counts.clear()
    engine.stats, engine.scheduler.prompt_tokens, engine.scheduler.cached_tokens = AcceptanceStats(), 0, 0


def block_bytes(runner: Runner, drafter: Runner | None = None) -> int:
    """Return the bytes of one block: keys and values of trunk, MTP layers and a small model, and the trunk's states."""
    kept = sum(one.numbers * of.dtype.itemsize for of, one in _keeping(runner, drafter))
    return (kept + runner.state_size * runner.dtype.itemsize) * BLOCK


def entry_bytes(runner: Runner, drafter: Runner | None = None) -> int:
    """Return the bytes of one sequence's states in all recurrent layers; 0 if there are none."""
    return sum(size.state_bytes(of.dtype) for of, one in _keeping(runner, drafter) for size in one.states)


def _keeping(runner: Runner, drafter: Runner | None) -> list[tuple[Runner, Keeping]]:
    small = [] if drafter is None else [(drafter, drafter.trunk_keeps)]
    return [*((runner, one) for one in (runner.trunk_keeps, *runner.depths_keep)), *small]


def blocks_in(gib: float, running: int, runner: Runner, drafter: Runner | None = None) -> int:
    """Return the number of blocks that fit in this much memory, besides the recurrent states of the running sequences.

    Raises:
        ValueError: not even one block fits.
    """
    each, states = block_bytes(runner, drafter), running * entry_bytes(runner, drafter)
    blocks = int((gib * 2**30 - states) / each) - 1  # one block is reserved and belongs to no sequence
    if blocks < 1:
        least = (2 * each + states) / 2**30
        beside, fewer = (f" in addition to the states of {running} sequences", ", or run fewer") if states else ("", "")
        raise ValueError(
            f"a cache of {gib} GiB holds no block of {BLOCK} tokens{beside}; give at least {least:.6f}{fewer}."
        )
    return blocks


def blocks_for(running: int, runner: Runner, drafter: Runner | None = None, positions: int | None = None) -> int:
    """Return the number of blocks for this many sequences of this many tokens, limited by `default_cache_gib`.

    Raises ValueError like `blocks_in`.

    Args:
        positions: tokens per sequence; None for all of the model's positions.
    """
    each = -(-(positions or runner.positions) // BLOCK) + 1  # includes drafts beyond the last position
    return min(running * each, blocks_in(default_cache_gib(runner.device), running, runner, drafter))


def default_cache_gib(device: torch.device) -> float:
    """Return the default cache size in GiB: a share of the GPU's free memory, on the rank with the least."""
    if device.type != "cuda":
        return DEFAULT_CACHE_GIB
    free: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(free, torch.cuda.mem_get_info(device)[0])
    return DEFAULT_GPU_SHARE * min(free) / 2**30


@dataclass(frozen=True)
class Generated:
    """Result of a batch.

    Attributes:
        token_ids: emitted tokens of each prompt, including the stop token.
        stats: cost and acceptance, summed over the batch.
        logprobs: log-probabilities of every token, if requested; otherwise empty lists.
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
    """Continue all prompts in one batch.

    Args:
        runner: the target (`load_runner`).
        prompts: token ids, at least one per prompt.
        max_new_tokens: for all sequences, or for each; limited by the model's positions.
        sampling: greedy if None.
        speculative: drafting method, as a config or a dict of one; None for plain decoding.
        seeds: seed of each prompt; None for its index. A sequence depends only on its own seed.
        stop_ids: the sequence ends at the first of these tokens.
        drafter: the small model of `draft_model`.
        cut: function from the emitted tokens to how many of them to keep, or None to continue (stop strings).
        emit: called with the prompt's index and the new tokens of every step.
        logprobs: number of most probable tokens to list for each emitted one, with log-probabilities of the target; 0
            for only the emitted token's, None for no log-probabilities.

    Raises:
        ValueError: the model does not support a prompt or a setting.
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
    """Run the engine on these requests until all have ended, and return the results."""
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
        engine.runner.kept = engine  # keeps its recorded CUDA graphs
    return Generated(token_ids, engine.stats, found)


def _engine_for(runner: Runner, requests: list[Request], drafter: Runner | None) -> Engine:
    """Create an engine with one block for each sequence, so that attention reads keys without a copy."""
    first, few = requests[0], wants_few_shapes(runner.device)
    method = make_method(runner, first.speculative, first.sampling, drafter)
    positions = runner.positions
    slots = max(min(len(one.prompt) + one.max_new_tokens, positions) for one in requests) + method.slots
    running, slots = len(requests), rounded(max(slots, min(MIN_KEPT_SLOTS, positions) if few else 0), few)
    kept, runner.kept = runner.kept, None  # a nested call, or a call after an error, allocates its own memory
    if isinstance(kept, Engine):
        had = kept.settings
        if kept.drafter is drafter and had.running >= running and had.block_size > slots:
            kept.stats = AcceptanceStats()
            return kept
        running, slots = max(running, had.running), max(slots, had.block_size - 1)
    del kept
    sizes = running, running, running, slots + 1, slots, CHUNK * running  # one block per sequence
    settings = EngineSettings(*sizes, reuse=False, contains_errors=False)
    return Engine(runner, settings, drafter=drafter)


def check_prompts(runner: Runner, prompts: list[list[int]], max_new_tokens: int) -> None:
    """Raise ValueError for prompts that cannot be continued."""
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {max_new_tokens}; give 1 or more.")
    if not prompts:
        raise ValueError("there is no prompt; give one with --prompt, --prompt-file or --prompt-ids.")
    for number, prompt in enumerate(prompts, start=1):
        check_prompt(prompt, runner.positions, runner.vocab_size, f"prompt {number}")
