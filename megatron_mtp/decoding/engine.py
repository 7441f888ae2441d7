"""The engine: requests join and leave between steps, and share one memory in blocks.

Where a forward raises, its sequences are put back, and each goes on in forwards of its own. One that fails there as
well ends with `Finish.ERROR`; the others do not notice. On several tensor-parallel ranks the error is raised: the other
ranks may not have failed, and their collectives would meet those of another step.
"""

import logging
from dataclasses import replace

import torch

from megatron_mtp.acceptance import AcceptanceStats
from megatron_mtp.decoding.batch import DecodeBatch, Kind, Sequence
from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.kv_cache import BEYOND, BLOCK
from megatron_mtp.decoding.method import make_method
from megatron_mtp.decoding.runner import Keeping, Runner
from megatron_mtp.decoding.scheduler import EngineSettings, Scheduler
from megatron_mtp.decoding.types import Load, Method, Request, Update, check_request

MOST_GIB = 4.0
"""Cache that is taken unasked."""

_logger = logging.getLogger(__name__)


class Engine:
    """Sequences of requests, which grow step by step. Only one thread calls it.

    Args:
        runner: the target.
        settings: its sizes.
        speculative: how sequences draft whose requests do not say; None decodes them plainly.
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
        self._methods: dict[Kind, Method] = {}
        self._added = self.policy_version = 0
        self.is_torn = False
        self._method_of(Request([0], 1))

    def add(self, request: Request) -> int:
        """Queue a request; returns its number. ValueError where it can never be served, QueueFull if not now."""
        method = self._method_of(request)
        check_request(request, self.runner.positions, self.runner.vocab_size)
        budget = min(request.max_new_tokens, self.runner.positions - len(request.prompt))
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

    def _method_of(self, request: Request) -> Method:
        """The method of a request; errors as `make_method`."""
        config = request.speculative or self.speculative
        kind = config, request.sampling.greedy
        if kind not in self._methods:
            method = make_method(self.runner, config, request.sampling, self.drafter)
            nodes, most = method.proposer.nodes(method.count), BEYOND - 1
            if self.settings.slots is None and nodes > most:
                raise ValueError(
                    f"'{config.method}' adds {nodes} rows to a step with these settings, and a sequence of the engine "
                    f"has room for {most}; draft less."
                )
            self._methods[kind] = method
        return replace(self._methods[kind], sampling=request.sampling)


def block_bytes(runner: Runner, drafter: Runner | None = None) -> int:
    """Bytes of one block: keys and values of the trunk, of depths and of a small model, and the trunk's states."""
    kept = sum(one.attending * _slot_numbers(of) * of.dtype.itemsize for of, one in _keeping(runner, drafter))
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
        beside, fewer = (f" beside the states of {running} sequences", ", or run fewer") if states else ("", "")
        raise ValueError(
            f"a cache of {gib} GiB holds no block of {BLOCK} tokens{beside}; give at least {least:.6f}{fewer}."
        )
    return blocks


def blocks_for(running: int, runner: Runner, drafter: Runner | None = None) -> int:
    """Blocks that so many sequences of full length need, as far as `MOST_GIB` holds them; errors as `blocks_in`."""
    each = -(-runner.positions // BLOCK) + 1  # and the drafts behind the last position
    return min(running * each, blocks_in(MOST_GIB, running, runner, drafter))


def _slot_numbers(runner: Runner) -> int:
    """Numbers that a layer keeps of a token."""
    config = runner.model.config
    if config.multi_latent_attention:
        return int(config.kv_lora_rank + config.qk_pos_emb_head_dim)
    groups = config.num_query_groups or config.num_attention_heads
    return int(2 * config.kv_channels * groups // config.tensor_model_parallel_size)
