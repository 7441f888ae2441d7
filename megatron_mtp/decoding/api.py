"""The Python API: prompts in, texts with what they cost out.

runner = load_runner("runs/quickstart/checkpoint")
texts = generate(runner, [[1, 2, 3]], 64, speculative={"method": "mtp", "num_speculative_tokens": 2})
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.graphs import kept_sequences
from megatron_mtp.decoding.loop import Emit, Limits, decode
from megatron_mtp.decoding.method import config_from, make_method
from megatron_mtp.decoding.requests import check_prompt
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.decoding.stats import AcceptanceStats


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
    limits: Limits | list[Limits] | None = None,
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
        limits: more on when a text ends, in place of `max_new_tokens` and `stop_ids`; for all texts, or for each.
        emit: called with what every step gave every text, as it comes.

    Raises:
        ValueError: a prompt or setting that the model does not allow.
    """
    sampling = sampling or Sampling()
    check_prompts(runner, prompts, max_new_tokens)
    config = config_from(speculative) if isinstance(speculative, dict) else speculative
    method = make_method(runner, config, sampling, drafter)
    if method.auto is not None:  # what earlier batches of this size have shown still holds
        method = replace(method, auto=runner.auto_counts.setdefault((method.config, len(prompts)), method.auto))
    limits = limits or Limits(max_new_tokens, stop_ids=frozenset(stop_ids))
    each = limits if isinstance(limits, list) else [limits] * len(prompts)
    seeds = list(range(len(prompts))) if seeds is None else seeds
    for name, given in (("seeds", seeds), ("limits", each)):
        if len(given) != len(prompts):
            raise ValueError(f"there are {len(given)} {name} for {len(prompts)} prompts; give one for each.")
    each = [replace(one, positions=runner.positions) for one in each]
    longest = max(len(prompt) + one.budget(len(prompt)) for prompt, one in zip(prompts, each, strict=True))
    with kept_sequences(runner, method, prompts, seeds, longest + method.proposer.nodes(method.count) + 1) as sequences:
        decode(runner, sequences, method, each, emit)
    texts = [text[len(prompt) :] for text, prompt in zip(sequences.texts, prompts, strict=True)]
    return Generated(texts, method.stats)


def check_prompts(runner: Runner, prompts: list[list[int]], max_new_tokens: int) -> None:
    """Raises ValueError for what cannot be continued."""
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {max_new_tokens}; give 1 or more.")
    if not prompts:
        raise ValueError("there is no prompt; give one with --prompt, --prompt-file or --prompt-ids.")
    for number, prompt in enumerate(prompts, start=1):
        check_prompt(prompt, runner.positions, runner.vocab_size, f"prompt {number}")
