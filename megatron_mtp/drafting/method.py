"""How to draft, as chosen for a model: proposer, verifier and K, checked against each other and against the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_mtp.drafting.auto import AutoK
from megatron_mtp.drafting.config import MOST_DRAFTED, SpeculativeConfig
from megatron_mtp.drafting.proposers import PROPOSERS
from megatron_mtp.drafting.proposers.base import Proposer
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.sampling import Sampling, SamplingByText
from megatron_mtp.drafting.stats import AcceptanceStats
from megatron_mtp.drafting.verifiers import VERIFIERS
from megatron_mtp.drafting.verifiers.base import Rule, Verifier

MOST_TRIED = 6
"""The largest K that 'auto' considers where the method has no limit of its own."""


@dataclass
class Method:
    """A proposer with its verifier.

    Attributes:
        config: with the verifier's name filled in.
        count: K of every step, without `auto`.
        auto: picks K of each step; None for a fixed K.
        stats: what the steps have cost and gained.
    """

    proposer: Proposer
    verifier: Rule
    config: SpeculativeConfig
    sampling: Sampling | SamplingByText
    count: int
    auto: AutoK | None = None
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)


def make_method(
    runner: Runner, config: SpeculativeConfig | None, sampling: Sampling, drafter: Runner | None = None
) -> Method:
    """The method that a config asks for; plain decoding without one.

    Args:
        drafter: the small model, for a method that needs one.

    Raises:
        ValueError: the model, the sampling or the verifier does not go with the method.
    """
    config = config or SpeculativeConfig("plain")
    if config.verifier is None:
        config = replace(config, verifier="greedy" if sampling.greedy else "rejection")
    _check_depths(runner, config.method)
    _check_states(runner, config.method)
    proposer = PROPOSERS[config.method](runner, config, drafter)
    verifier = VERIFIERS[str(config.verifier)]
    count = _count(runner, config, proposer)
    _check_verifier(proposer, verifier, config, sampling)
    auto = AutoK(count) if config.num_speculative_tokens == "auto" and count else None
    return Method(proposer, verifier, config, sampling, count, auto)


def _check_depths(runner: Runner, method: str) -> None:
    wanted, found = PROPOSERS[method].depths, "sequential" if runner.sequential else "parallel"
    if wanted is None:
        return
    if not runner.depths:
        others = [name for name, one in PROPOSERS.items() if one.depths is None]
        raise ValueError(
            f"'{method}' drafts with MTP modules, and the checkpoint has no MTP weights; train some "
            f"(megatron-mtp train --mtp-num-layers), or choose {_any_of(others)}."
        )
    if wanted != found:
        others = [name for name, one in PROPOSERS.items() if one.depths == found]
        raise ValueError(f"'{method}' was asked of a checkpoint whose depths are {found}; choose {_any_of(others)}.")


def _check_states(runner: Runner, method: str) -> None:
    part = _without_branches(runner, PROPOSERS[method])
    if part is not None:
        kinds = None, "sequential" if runner.sequential else "parallel" if runner.depths else None
        others = [
            name
            for name, one in PROPOSERS.items()
            if one.depths in kinds and name != "plain" and _without_branches(runner, one) is None
        ]
        raise ValueError(
            f"'{method}' runs rows that branch off or leaves rows out, which the states of recurrent layers in this "
            f"model's {part} do not allow; choose {_any_of(others)}."
        )


def _without_branches(runner: Runner, proposer: type[Proposer]) -> str | None:
    """The part of the model whose states a method cannot keep; None if it can draft."""
    if runner.recurrent_trunk and proposer.drafts_trees:
        return "trunk"
    return "depths" if runner.recurrent_depths and proposer.depths is not None and not proposer.keeps_states else None


def _count(runner: Runner, config: SpeculativeConfig, proposer: Proposer) -> int:
    """K, or with 'auto' the largest K to consider."""
    asked, most = config.num_speculative_tokens, proposer.most
    if isinstance(asked, int):
        if most is not None and asked > most:
            raise ValueError(
                f"speculative config: num_speculative_tokens is {asked}, and '{config.method}' drafts at most {most} "
                f"here, {proposer.limit}; give at most {most}, or {proposer.remedy}."
            )
        return asked
    if most is None and asked == "auto":
        most = MOST_TRIED
    elif most is None and proposer.depths is not None:
        most = runner.depths
    if most is None:
        raise ValueError(
            f"speculative config: '{config.method}' does not say how many tokens to draft; give num_speculative_tokens."
        )
    return min(most, MOST_DRAFTED)


def _check_verifier(proposer: Proposer, verifier: Verifier, config: SpeculativeConfig, sampling: Sampling) -> None:
    """Raises ValueError, with the lossless verifiers that fit, where this one does not."""
    why = _misfit(proposer, verifier, sampling)
    if why is not None:
        fitting = [name for name, one in VERIFIERS.items() if one.lossless and _misfit(proposer, one, sampling) is None]
        raise ValueError(f"speculative config: the verifier '{config.verifier}' {why}; choose {_any_of(fitting)}.")


def _misfit(proposer: Proposer, verifier: Verifier, sampling: Sampling) -> str | None:
    """Why a verifier cannot judge what is drafted; None if it can."""
    method = proposer.config.method
    if proposer.drafts_trees and not verifier.judges_trees:
        return f"judges chains, and '{method}' drafts trees"
    if verifier.needs_samples and not proposer.draws_siblings:
        return f"needs siblings that are samples of one q, and '{method}' does not draft them with these settings"
    if verifier.greedy_only and not sampling.greedy:
        return f"is for temperature 0, and --temperature is {sampling.temperature}"
    return None


def _any_of(names: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
