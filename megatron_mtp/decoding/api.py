"""The Python API: prompts in, sequences with what they cost out.

runner = load_runner("runs/quickstart/checkpoint")
generated = generate(runner, [[1, 2, 3]], 64, speculative={"method": "mtp", "num_speculative_tokens": 2})
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from megatron_mtp.acceptance import AcceptanceStats
from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.engine import Engine
from megatron_mtp.decoding.kv_cache import CHUNK, rounded
from megatron_mtp.decoding.method import config_from, make_method
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Sampling, TokenLogprob
from megatron_mtp.decoding.scheduler import EngineSettings
from megatron_mtp.decoding.sequences import wants_few_shapes
from megatron_mtp.decoding.types import Request, Update, check_prompt

LEAST_KEPT = 1024
"""Slots of a sequence in memory that is kept for later prompts, at least, so that they seldom need other memory."""


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
    engine = _engine_for(runner, requests, drafter)
    number_of = {engine.add(request): number for number, request in enumerate(requests)}
    token_ids: list[list[int]] = [[] for _ in prompts]
    found: list[list[TokenLogprob]] = [[] for _ in prompts]
    while engine.busy:
        for update in engine.step():
            number = number_of[update.request]
            token_ids[number] += update.tokens
            found[number] += update.logprobs
            if emit is not None and (update.tokens or update.finish):
                emit(replace(update, request=number))
    if wants_few_shapes(runner.device):
        runner.kept = engine  # with the steps that it has recorded
    return Generated(token_ids, engine.stats, found)


def _engine_for(runner: Runner, requests: list[Request], drafter: Runner | None) -> Engine:
    """An engine with a block for each sequence, so that attention reads its keys where they are."""
    first, few = requests[0], wants_few_shapes(runner.device)
    method = make_method(runner, first.speculative, first.sampling, drafter)
    positions = runner.positions
    slots = max(min(len(one.prompt) + one.max_new_tokens, positions) for one in requests) + method.slots
    running, slots = len(requests), rounded(max(slots, min(LEAST_KEPT, positions) if few else 0), few)
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
