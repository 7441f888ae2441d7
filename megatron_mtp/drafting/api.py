"""The Python API: prompts in, texts with what they cost out.

runner = load_runner("runs/quickstart/checkpoint")
texts = generate(runner, [[1, 2, 3]], 64, speculative={"method": "mtp", "num_speculative_tokens": 2})
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from megatron_mtp.drafting.auto import AutoK
from megatron_mtp.drafting.config import MOST_DRAFTED, SpeculativeConfig, config_from
from megatron_mtp.drafting.loop import Emit, Limits, Method, decode
from megatron_mtp.drafting.proposers import PROPOSERS, DraftModel, Proposer
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.sampling import Sampling
from megatron_mtp.drafting.sequences import Sequences
from megatron_mtp.drafting.types import AcceptanceStats
from megatron_mtp.drafting.verifiers import CHAINS_ONLY, VERIFIERS

TREES = ("mtp_tree", "lookahead")
NEEDS_DEPTHS = ("mtp", "mtp_eagle", "mtp_trunk_states", "mtp_tree", "mtp_beam", "parallel_heads")
MOST_TRIED = 6
"""The largest K that 'auto' considers where the method has no limit of its own."""


@dataclass(frozen=True)
class Generated:
    """The outcome of a batch.

    Attributes:
        token_ids: what was emitted for each prompt, the stop token included.
        stats: what it cost, summed over the batch.
    """

    token_ids: list[list[int]]
    stats: AcceptanceStats


def generate(
    runner: Runner,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    speculative: SpeculativeConfig | dict[str, Any] | None = None,
    seeds: list[int] | None = None,
    stop_ids: Iterable[int] = (),
    drafter: Runner | None = None,
    limits: Limits | None = None,
    emit: Emit | None = None,
) -> Generated:
    """Continue every prompt, all in one batch.

    Args:
        runner: the target (`load_runner`).
        prompts: token ids, at least one each.
        max_new_tokens: for each, fewer where the model's positions end before.
        sampling: greedy if None.
        speculative: how to draft, as a config or as the dict of one; None decodes plainly.
        seeds: of each prompt; its number in the list if None. A text depends on its own seed alone.
        stop_ids: a text ends with the first of these.
        drafter: the small model of `draft_model`.
        limits: more on when a text ends, in place of `max_new_tokens` and `stop_ids`.
        emit: told every step's tokens as they come.

    Raises:
        ValueError: a prompt or setting that the model does not allow.
    """
    sampling = sampling or Sampling()
    check_prompts(runner, prompts, max_new_tokens)
    config = config_from(speculative) if isinstance(speculative, dict) else speculative
    method = make_method(runner, config, sampling, drafter)
    if method.auto is not None:  # goes on with what earlier batches of this size have shown
        method = replace(method, auto=runner.auto_counts.setdefault((method.config, len(prompts)), method.auto))
    limits = replace(limits or Limits(max_new_tokens, stop_ids=frozenset(stop_ids)), positions=runner.positions)
    longest = max(len(prompt) + limits.budget(len(prompt)) for prompt in prompts)
    capacity = longest + method.proposer.nodes(method.count) + 1
    seeds = list(range(len(prompts))) if seeds is None else seeds
    if len(seeds) != len(prompts):
        raise ValueError(f"there are {len(seeds)} seeds for {len(prompts)} prompts; give one for each.")
    sequences = Sequences(runner, prompts, seeds, capacity)
    decode(runner, sequences, method, limits, emit)
    texts = [text[len(prompt) :] for text, prompt in zip(sequences.texts, prompts, strict=True)]
    return Generated(texts, method.stats)


def check_prompts(runner: Runner, prompts: list[list[int]], max_new_tokens: int) -> None:
    """Raises ValueError for what cannot be continued."""
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {max_new_tokens}; give 1 or more.")
    if not prompts:
        raise ValueError("there is no prompt; give one with --prompt, --prompt-file or --prompt-ids.")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise ValueError(f"prompt {number} is empty; give at least one token.")
        if len(prompt) >= runner.positions:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, and the model has {runner.positions} positions; give at "
                f"most {runner.positions - 1} tokens."
            )
        if not all(0 <= token < runner.vocab_size for token in prompt):
            raise ValueError(
                f"prompt {number} has token ids outside of the model's vocabulary; give 0 to {runner.vocab_size - 1}."
            )


def make_method(
    runner: Runner, config: SpeculativeConfig | None, sampling: Sampling, drafter: Runner | None = None
) -> Method:
    """Proposer, verifier and K for a config, checked against the model; plain decoding without one."""
    plain = SpeculativeConfig("ngram", 0)
    if config is None:
        return Method(Proposer(runner, plain), VERIFIERS[_verifier(plain, sampling)], plain, sampling, 0)
    if config.method in NEEDS_DEPTHS:
        _check_depths(runner, config)
    proposer = make_proposer(runner, config, drafter)
    count = _count(runner, config, proposer)
    config = replace(config, verifier=_verifier(config, sampling))
    _check_verifier(config, sampling)
    auto = AutoK(count) if config.num_speculative_tokens == "auto" else None
    return Method(proposer, VERIFIERS[str(config.verifier)], config, sampling, count, auto)


def make_proposer(runner: Runner, config: SpeculativeConfig, drafter: Runner | None) -> Proposer:
    """Raises ValueError where the draft model is missing or has another vocabulary."""
    if config.method != "draft_model":
        return PROPOSERS[config.method](runner, config)
    if drafter is None:
        raise ValueError("'draft_model' was asked for without a draft model; load one and pass it as drafter.")
    if drafter.vocab_size != runner.vocab_size:
        raise ValueError(
            f"the draft model has a vocabulary of {drafter.vocab_size} tokens and the target one of "
            f"{runner.vocab_size}; give a draft model with the same tokenizer."
        )
    if drafter.positions < runner.positions:
        raise ValueError(
            f"the draft model has {drafter.positions} positions and the target {runner.positions}; give a draft model "
            "with as many."
        )
    return DraftModel(runner, config, drafter)


def _check_depths(runner: Runner, config: SpeculativeConfig) -> None:
    if not runner.depths:
        raise ValueError(
            f"'{config.method}' drafts with MTP modules, and the checkpoint has no MTP weights; train some "
            "(megatron-mtp train --mtp-num-layers), or choose ngram, lookahead or draft_model."
        )
    if runner.chained == (config.method == "parallel_heads"):
        kind, other = ("sequential", "mtp") if runner.chained else ("parallel", "parallel_heads")
        raise ValueError(f"'{config.method}' was asked of a checkpoint whose depths are {kind}; choose {other}.")


def _count(runner: Runner, config: SpeculativeConfig, proposer: Proposer) -> int:
    asked = config.num_speculative_tokens
    if isinstance(asked, int):
        if proposer.most is not None and asked > proposer.most:
            raise ValueError(
                f"speculative config: num_speculative_tokens is {asked}, and '{config.method}' drafts at most "
                f"{proposer.most} here, {proposer.limit}; give at most {proposer.most}, or {proposer.remedy}."
            )
        return asked
    if asked == "auto":
        return min(proposer.most or MOST_TRIED, MOST_DRAFTED)
    known = proposer.most or (runner.depths if config.method in NEEDS_DEPTHS else None)
    if known is None:
        raise ValueError(
            f"speculative config: '{config.method}' does not say how many tokens to draft; give num_speculative_tokens."
        )
    return min(known, MOST_DRAFTED)


def _verifier(config: SpeculativeConfig, sampling: Sampling) -> str:
    if config.verifier is not None:
        return config.verifier
    return "greedy" if sampling.greedy else "rejection"


def _check_verifier(config: SpeculativeConfig, sampling: Sampling) -> None:
    if config.verifier in CHAINS_ONLY and config.method in TREES:
        raise ValueError(
            f"speculative config: the verifier '{config.verifier}' judges chains, and '{config.method}' drafts trees; "
            "choose greedy, rejection, specinfer or spectr."
        )
    sampled = config.method == "mtp_tree" and config.tree_nodes is None and config.use_draft_probs
    if config.verifier == "spectr" and config.method in TREES and not sampled:
        raise ValueError(
            "speculative config: the verifier 'spectr' needs siblings that are samples of one q, which only mtp_tree "
            "with 'tree' drafts; choose specinfer or rejection."
        )
    if config.verifier in ("greedy", "relaxed") and not sampling.greedy:
        raise ValueError(
            f"speculative config: the verifier '{config.verifier}' is for temperature 0, and --temperature is "
            f"{sampling.temperature}; choose rejection or block."
        )
