"""Drafting methods: parse a config from JSON, and check its proposer, verifier and K against the model."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.decoding.config import (
    COMMON_KEYS,
    MOST_DRAFTED,
    NO_SETTINGS,
    PROPOSERS,
    VERIFIERS,
    Settings,
    SpeculativeConfig,
    from_vllm,
    keys,
)
from megatron_mtp.decoding.proposers.proposer import Proposer
from megatron_mtp.decoding.sampling import Sampling, SamplingOfEach
from megatron_mtp.decoding.verifiers import Verifier, VerifierRule
from megatron_mtp.spec.kinds import DRAFTERS
from megatron_mtp.spec.registry import Registry


@dataclass
class Method:
    """A proposer with its verifier (method.py makes one).

    Attributes:
        config: config with the verifier's name filled in.
        count: K of every step.
        auto: whether K of each step is chosen by cost and acceptance; `count` is then the maximum.
        stats: cost and gain of the last step.
    """

    proposer: Proposer
    verifier: VerifierRule
    config: SpeculativeConfig
    sampling: Sampling | SamplingOfEach
    count: int
    auto: bool = False
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)

    @property
    def slots(self) -> int:
        """Number of slots after the tokens of a sequence that a step may write."""
        return 1 + self.proposer.nodes(self.count)


MAX_TRIED_DRAFTS = 6
"""Largest K that 'auto' considers for a method without a limit of its own."""

_EXAMPLE = """give for example '{"method": "mtp", "num_speculative_tokens": 2}'."""


def parse_config(text: str) -> SpeculativeConfig:
    """Parse the settings of a JSON object.

    Raises:
        ValueError: it is not a JSON object, or has an unknown method, key or value; the message lists the known ones.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for integers of thousands of digits
        raise ValueError(f"--speculative-config is not JSON ({error}); {_EXAMPLE}") from error
    if not isinstance(given, dict):
        raise ValueError(f"--speculative-config is {text}, not a JSON object; {_EXAMPLE}")
    return config_from(given)


def config_from(given: dict[str, Any]) -> SpeculativeConfig:
    """Convert a dict to settings, with this package's names or vLLM's; errors as in `parse_config`."""
    given = from_vllm(given)
    if "method" not in given:
        raise ValueError(f"speculative config: 'method' is missing; choose one of {', '.join(PROPOSERS.names())}.")
    drafting, verifying = _settings_kinds(given["method"], given.get("verifier"))
    _check_keys(given, drafting, verifying)
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return SpeculativeConfig(
        **{key: value for key, value in values.items() if key in COMMON_KEYS},
        settings=drafting(**{one.name: values[one.name] for one in keys(drafting) if one.name in values}),
        verifier_settings=verifying(**{one.name: values[one.name] for one in keys(verifying) if one.name in values}),
    )


def is_lossless(config: SpeculativeConfig) -> bool:
    """Return whether the verifier keeps the target's distribution."""
    return config.verifier is None or VERIFIERS[config.verifier].lossless


def make_method(runner: Any, config: SpeculativeConfig | None, sampling: Sampling, drafter: Any = None) -> Method:
    """Create the method that a config describes; plain decoding if it is None.

    Args:
        drafter: the small model, for a method that needs one.

    Raises:
        ValueError: the method does not support the model, the sampling or the verifier.
    """
    config = config or SpeculativeConfig("plain")
    if config.verifier is None:
        config = replace(config, verifier="greedy" if sampling.greedy else "rejection")
    config = _with_settings(config)
    _check_depths(runner, config.method)
    _check_states(runner, config.method)
    proposer = PROPOSERS[config.method](runner, config, drafter)
    verifier = VERIFIERS[str(config.verifier)]
    count = _count(runner, config, proposer)
    if (why := _misfit(proposer, verifier, sampling)) is not None:
        fitting = [name for name, one in VERIFIERS.items() if one.lossless and _misfit(proposer, one, sampling) is None]
        raise ValueError(f"speculative config: the verifier '{config.verifier}' {why}; choose {_any_of(fitting)}.")
    return Method(proposer, verifier, config, sampling, count, config.num_speculative_tokens == "auto" and count > 0)


def _with_settings(config: SpeculativeConfig) -> SpeculativeConfig:
    """Return the config with default settings of the method and verifier for settings that were left out."""
    made: list[Settings] = []
    names, given = (config.method, config.verifier), (config.settings, config.verifier_settings)
    for name, kind, own in zip(names, _settings_kinds(*names), given, strict=True):
        if own != NO_SETTINGS and type(own) is not kind:
            raise ValueError(
                f"speculative config: '{name}' was given {type(own).__name__}; give {kind.__name__}, or leave them out."
            )
        made.append(kind() if own == NO_SETTINGS else own)
    return replace(config, settings=made[0], verifier_settings=made[1])


def _settings_kinds(method: object, verifier: object) -> tuple[type[Settings], type[Settings]]:
    """Return the settings classes of method and verifier. Raise ValueError for a name that neither has."""
    drafting = PROPOSERS[_name("method", method, PROPOSERS)].settings_kind
    if verifier is None:
        return drafting, Settings
    return drafting, VERIFIERS[_name("verifier", verifier, VERIFIERS)].settings_kind


def _name(key: str, value: object, table: Registry[Any]) -> str:
    """Return a name of the table. Raise ValueError for another.

    Only then are the names listed, which reads every package.
    """
    if value == "mtp_trunk_states":
        raise ValueError("speculative config: the method 'mtp_trunk_states' was removed; use 'mtp', as it was trained.")
    if not isinstance(value, str) or value not in table:
        raise ValueError(f"speculative config: {key} is {value!r}; choose one of {', '.join(table.names())}.")
    return value


def _check_keys(given: dict[str, Any], drafting: type[Settings], verifying: type[Settings]) -> None:
    known = [*COMMON_KEYS, *(one.name for kind in (drafting, verifying) for one in keys(kind))]
    key = next((key for key in given if key not in known), None)
    if key is None:
        return
    if key == "model" and PROPOSERS[given["method"]].depths is not None:
        raise ValueError(
            f"speculative config: '{given['method']}' drafts with what the checkpoint itself has, so leave 'model' "
            "out; megatron-mtp convert attach-drafter adds the drafter in a folder to a checkpoint."
        )
    elsewhere = (
        f"'{key}' is a key of the {kind} '{name}', which was not chosen"
        for kind, parts in (("method", PROPOSERS.items()), ("verifier", VERIFIERS.items()))
        for name, part in parts
        if any(one.name == key for one in keys(part.settings_kind))
    )
    said, verifier = next(elsewhere, f"there is no key '{key}'"), given.get("verifier")
    chosen = f"the method '{given['method']}'" + ("" if verifier is None else f" with the verifier '{verifier}'")
    raise ValueError(f"speculative config: {said}; known are {', '.join(known)}, the keys of {chosen}.")


def _check_depths(runner: Any, method: str) -> None:
    wanted, found = PROPOSERS[method].depths, runner.kind
    if wanted is None:
        return
    if not runner.depths:
        others = [name for name, one in PROPOSERS.items() if one.depths is None]
        what, lacks, flag = "MTP modules", "no MTP weights; train some", "--mtp-num-layers"
        if wanted in DRAFTERS:
            what, lacks, flag = DRAFTERS[wanted].called, "none; train or attach one", f"--drafter {wanted}"
            flag += ", or convert attach-drafter for a folder"
        raise ValueError(
            f"'{method}' drafts with {what}, and the checkpoint has {lacks} (megatron-mtp train {flag}), or choose "
            f"{_any_of(others)}."
        )
    if wanted != found:
        others = [name for name, one in PROPOSERS.items() if one.depths == found]
        has = f"that has {DRAFTERS[found].called}" if found in DRAFTERS else f"whose MTP layers are {found}"
        raise ValueError(f"'{method}' was asked of a checkpoint {has}; choose {_any_of(others)}.")


def _check_states(runner: Any, method: str) -> None:
    part = _without_branches(runner, PROPOSERS[method])
    if part is not None:
        kinds = None, runner.kind
        others = [
            name
            for name, one in PROPOSERS.items()
            if one.depths in kinds and name != "plain" and _without_branches(runner, one) is None
        ]
        raise ValueError(
            f"'{method}' runs rows that branch off, which the states of recurrent layers in this "
            f"model's {part} do not allow; choose {_any_of(others)}."
        )


def _without_branches(runner: Any, proposer: type[Proposer]) -> str | None:
    """Return the part of the model whose states a method cannot keep; None if it can draft."""
    if runner.recurrent_trunk and proposer.drafts_trees:
        return "trunk"
    return (
        "MTP layers" if runner.recurrent_depths and proposer.depths is not None and not proposer.keeps_states else None
    )


def _count(runner: Any, config: SpeculativeConfig, proposer: Proposer) -> int:
    """Return K, or with 'auto' the largest K to consider."""
    asked, most = config.num_speculative_tokens, proposer.most
    if isinstance(asked, int):
        if most is not None and asked > most:
            raise ValueError(
                f"speculative config: num_speculative_tokens is {asked}, and '{config.method}' drafts at most {most} "
                f"here, {proposer.limit}; give at most {most}, or {proposer.remedy}."
            )
        return asked
    if most is None and asked == "auto":
        most = MAX_TRIED_DRAFTS
    elif most is None and proposer.depths is not None:
        most = runner.depths
    if most is None:
        raise ValueError(
            f"speculative config: '{config.method}' has no number of tokens to draft; give num_speculative_tokens."
        )
    return min(most, MOST_DRAFTED)


def _misfit(proposer: Proposer, verifier: Verifier, sampling: Sampling) -> str | None:
    """Return why a verifier cannot judge the drafts; None if it can."""
    method = proposer.config.method
    if proposer.drafts_trees and not verifier.judges_trees:
        return f"judges chains, and '{method}' drafts trees"
    if verifier.needs_samples and not proposer.draws_siblings:
        return f"needs siblings that are samples of one q, and '{method}' does not draft them with these settings"
    if verifier.greedy_only and not sampling.greedy:
        return f"is for temperature 0, and --temperature is {sampling.temperature}"
    return None


def _any_of(names: Sequence[str]) -> str:
    """Return `a, b or c`."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
