"""The engine: requests join and leave between steps, and share one memory in blocks.

Where a forward raises, its sequences are put back, and each goes on in forwards of its own. One that fails there as
well ends with `Finish.ERROR`; the others do not notice. On several tensor-parallel ranks the error is raised: the other
ranks may not have failed, and their collectives would meet those of another step.
"""

import logging
from dataclasses import replace

import torch

from megatron_mtp.acceptance import AcceptanceStats
from megatron_mtp.decoding.batch import DecodeBatch, PrefillBatch, Sequence
from megatron_mtp.decoding.config import MOST_DRAFTED, SpeculativeConfig
from megatron_mtp.decoding.kv_cache import BEYOND
from megatron_mtp.decoding.method import make_method
from megatron_mtp.decoding.proposers.base import Method
from megatron_mtp.decoding.requests import Load, Request, Update, check_prompt
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.scheduler import EngineSettings, Kind, Scheduler

SEEDS = range(-(2**63), 2**63)
"""What a seed may be."""

_logger = logging.getLogger(__name__)


class Engine:
    """An engine as `requests.EngineCore` describes it.

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
        """Queue a request; returns its number. Errors as `requests.EngineCore.add`."""
        method = self._method_of(request)
        check_request(self.runner, request)
        budget = min(request.max_new_tokens, self.runner.positions - len(request.prompt))
        self.scheduler.add(Sequence(self._added, request, method, budget, list(request.prompt)))
        self._added += 1
        return self._added - 1

    def cancel(self, request: int) -> None:
        """Forget a request; see `requests.EngineCore.cancel`."""
        self.scheduler.cancel(request)

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """A decode step of every running sequence, or a chunk of prompts; see `Scheduler.schedule`."""
        if self.is_torn:
            raise RuntimeError("an update of the weights has failed half-way; update them again, whole.")
        updates: list[Update] = []
        for batch in self.scheduler.schedule():
            updates += self._run(batch)
        if self.policy_version:
            updates = [replace(update, policy_version=self.policy_version) for update in updates]
        return updates

    def _run(self, batch: PrefillBatch | DecodeBatch) -> list[Update]:
        """Draft, verify and accept. Where that raises, the sequences are out of the batch, and others are as before."""
        seqs = [*batch.seqs]
        known = {seq.number: len(seq.tokens) for seq in seqs}
        try:
            updates = batch.step()
            self.stats += batch.stats
            self._notice(batch)
            self.scheduler.accept(batch, updates)
            return updates
        except Exception as error:
            if not self.settings.contains_errors or isinstance(error, torch.AcceleratorError):
                raise
            if self.runner.model.config.tensor_model_parallel_size > 1:
                raise  # ranks may differ
            _logger.exception("a step of the requests %s has failed", sorted(known))
            return self.scheduler.recover(seqs, known)

    def _notice(self, batch: PrefillBatch | DecodeBatch) -> None:
        """Warn once where drafts of the MTP layers are accepted far less than recorded, or never."""
        if isinstance(batch, DecodeBatch) and batch.method.proposer.depths and batch.stats.drafted:
            said = self.runner.alarm.learn(batch.stats)
            if said is not None:
                _logger.warning("%s", said)

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.scheduler.seqs)

    @property
    def load(self) -> Load:
        """How busy it is."""
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
        """How a request drafts; errors as `make_method`."""
        config = request.speculative or self.speculative
        kind = config, request.sampling.greedy
        if kind not in self._methods:
            method = make_method(self.runner, config, request.sampling, self.drafter)
            if self.settings.slots is None:
                _check_rows(method)
            self._methods[kind] = method
        return replace(self._methods[kind], sampling=request.sampling)


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
    _check_penalties(request, runner.vocab_size)


def _check_penalties(request: Request, vocabulary: int) -> None:
    for name in ("presence", "frequency"):
        value = getattr(request.penalties, name)
        if not -2 <= value <= 2:
            raise ValueError(f"the {name} penalty is {value}; give -2 to 2.")
    repetition = request.penalties.repetition
    if not 0 < repetition < float("inf"):
        raise ValueError(f"the repetition penalty is {repetition}; give a number above 0, 1 for none.")
    if outside := [token for token, _ in request.penalties.bias if not 0 <= token < vocabulary]:
        raise ValueError(f"the logit bias has the token id {outside[0]}; give 0 to {vocabulary - 1}.")
