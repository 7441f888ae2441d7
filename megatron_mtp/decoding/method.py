"""Drafting methods: a config from JSON, and the proposer, verifier and K that it names, checked against the model.

Automatic K: the number of drafts that gives most tokens a second, 0 included.

With a_k the chance that position k is accepted given the ones before, K drafts yield 1 + sum_{j<=K} prod_{k<=j} a_k
tokens in the time of K drafts and one forward of K + 1 rows. Both are measured while decoding.

While K = 0 is best, drafting rests. A draft is tried again after 16, 32, 64, ... plain steps, as long as drafting has
cost less than `SHARE` of the time beyond plain decoding. After a rest the drafter has to run the rows of all tokens
emitted meanwhile. That is part of the price: where it exceeds the share, the next draft waits for more time to pass.
The measurements hold for all batches of one size that a model generates. A time is the lower quartile of the last ones,
without a K's first step, so that neither what is prepared or compiled nor other load on the machine decide.
"""

import json
import math
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from megatron_mtp.acceptance import AcceptanceStats
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
from megatron_mtp.drafters import DRAFTERS
from megatron_mtp.registry import Registry


@dataclass
class Method:
    """A proposer with its verifier (method.py makes one).

    Attributes:
        config: with the verifier's name filled in.
        count: K of every step.
        auto: whether K of each step is picked by cost and acceptance; `count` is the largest then.
        stats: what the last step has cost and gained.
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
        """Slots behind the tokens of a sequence that a step may write."""
        return 1 + self.proposer.nodes(self.count)


MAX_TRIED_DRAFTS = 6
"""The largest K that 'auto' considers where the method has no limit of its own."""

RECENT = 32
"""Steps of each kind whose times are remembered."""

STALE = 12
"""Steps after which the times of a K give way to its next one, since other load on the machine comes and goes."""

FAR_BEHIND = MOST_DRAFTED + 1
"""Rows that a drafter runs at most where every step drafts."""

WORTH_A_CHANGE = 1.05
"""Drafts have to promise so many times the rate of plain steps before a drafter catches up."""

TRIED_STEPS = 3
"""Steps of a K that is tried. The first one is not timed: it takes longer, as what was prepared is of another K."""

PLAIN_AGAIN, PLAIN_STEPS = 200, 8
"""Steps with drafts after which so many plain ones are timed again. The first of them are slow, as caches are cold."""

MEMORY = 0.97
"""The weight of earlier acceptances after one more step with drafts."""

FIRST_DRAFTS = 2
"""K of the first steps; more where they show that more may pay."""

FIRST_STEPS = (1,) * TRIED_STEPS + (0,) * PLAIN_STEPS
"""Which of the first steps draft."""

MOST_HELD = 15
"""Steps without another choice where K was chosen several times in a row: choosing takes as long as a small draft."""

FIRST_REST_STEPS = 16
"""Plain steps before the first trial; every further rest is twice as long."""

MAX_REST_STEPS = 512
"""Plain steps after which the price of another draft is looked at again, however far away it was."""

FEW_TIMINGS, CLOSE = 3, 0.9
"""A K that promises this share of the highest rate is tried until it was timed so often; first steps take longer."""

SHARE = 0.01
"""The share of the time so far that drafting may have cost when a draft is tried again."""

_EXAMPLE = """give for example '{"method": "mtp", "num_speculative_tokens": 2}'."""


def parse_config(text: str) -> SpeculativeConfig:
    """The settings that a JSON object spells out.

    Raises:
        ValueError: it is no JSON object, or has an unknown method, key or value; the message lists what exists.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:  # also for a number of thousands of digits
        raise ValueError(f"--speculative-config is not JSON ({error}); {_EXAMPLE}") from error
    if not isinstance(given, dict):
        raise ValueError(f"--speculative-config is {text}, not a JSON object; {_EXAMPLE}")
    return config_from(given)


def config_from(given: dict[str, Any]) -> SpeculativeConfig:
    """The settings in a dict, by this package's names or vLLM's; errors as of `parse_config`."""
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
    """True if the target's distribution is kept."""
    return config.verifier is None or VERIFIERS[config.verifier].lossless


def make_method(runner: Any, config: SpeculativeConfig | None, sampling: Sampling, drafter: Any = None) -> Method:
    """The method that a config asks for; plain decoding without one.

    Args:
        drafter: the small model, for a method that needs one.

    Raises:
        ValueError: the model, the sampling or the verifier does not go with the method.
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
    """The config with the defaults of the method and of the verifier where their settings were left out."""
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
    """Classes of the method's and of the verifier's settings; ValueError for a name that is neither's."""
    drafting = PROPOSERS[_name("method", method, PROPOSERS)].settings_kind
    if verifier is None:
        return drafting, Settings
    return drafting, VERIFIERS[_name("verifier", verifier, VERIFIERS)].settings_kind


def _name(key: str, value: object, table: Registry[Any]) -> str:
    """A name of the table; ValueError for another. Only the message lists the names: that asks every package."""
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
    """The part of the model whose states a method cannot keep; None if it can draft."""
    if runner.recurrent_trunk and proposer.drafts_trees:
        return "trunk"
    return (
        "MTP layers" if runner.recurrent_depths and proposer.depths is not None and not proposer.keeps_states else None
    )


def _count(runner: Any, config: SpeculativeConfig, proposer: Proposer) -> int:
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
        most = MAX_TRIED_DRAFTS
    elif most is None and proposer.depths is not None:
        most = runner.depths
    if most is None:
        raise ValueError(
            f"speculative config: '{config.method}' has no number of tokens to draft; give num_speculative_tokens."
        )
    return min(most, MOST_DRAFTED)


def _misfit(proposer: Proposer, verifier: Verifier, sampling: Sampling) -> str | None:
    """The reason why a verifier cannot judge what is drafted; None if it can."""
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


@dataclass
class AutoK:
    """Picks K per step.

    Attributes:
        most: the largest K to consider.
        at_once: whether a draft takes as long for any K.
    """

    most: int
    at_once: bool = False
    _hits: list[float] = field(default_factory=list)
    _offers: list[float] = field(default_factory=list)
    _target: dict[int, deque[float]] = field(default_factory=lambda: defaultdict(partial(deque, maxlen=RECENT)))
    _draft: deque[float] = field(default_factory=partial(deque, maxlen=RECENT))
    _timed_at: dict[int, int] = field(default_factory=dict)
    _behind: int = 1
    _left: float = math.inf
    _caught_up: tuple[float, int, int] = (0.0, 0, 1)
    _elapsed: float = 0.0
    _drafting: float = 0.0
    _worth: float = 0.0
    _steps: int = 0
    _last: int | None = None
    _count: int = 0
    _held: int = 0
    _span: int = 0
    _pause: int = FIRST_REST_STEPS
    _rests: bool = False

    @property
    def rests(self) -> bool:
        """True if the next step is plain whatever it would take; the same on all ranks."""
        return self._held > 0 and self._count == 0

    @property
    def holds(self) -> bool:
        """True if the next step has the K of the last one, whatever it is told."""
        return self._held > 0

    def choose(self, missed: int = 0, left: float = math.inf) -> int:
        """K of the next step; with several ranks the first one's choice, since their clocks differ.

        Args:
            missed: rows of a sequence that the drafter has not run.
            left: tokens that a sequence may still get.
        """
        if self._held:
            self._held -= 1
            return self._count
        self._behind, self._left = (missed if missed > FAR_BEHIND else 1), left
        self._count, self._held = self._plan()
        if torch.distributed.get_world_size() > 1:
            agreed = torch.tensor([self._count, self._held], device=torch.cuda.current_device())
            torch.distributed.broadcast(agreed, 0)
            self._count, self._held = agreed.tolist()
        return self._count

    def learn(self, count: int, step: AcceptanceStats, overhead: float = 0.0) -> None:
        """Take in what one step with K = `count` took and gave, and the seconds that the engine took around it."""
        drafter, target = step.drafter_seconds, step.target_seconds + overhead
        self._elapsed += drafter + target
        self._steps += 1
        if count == self._last:
            if self._steps > self._timed_at.get(count, 0) + STALE:
                self._target[count].clear()
            self._target[count].append(target)
            self._timed_at[count] = self._steps
        self._last = count
        if count == 0:
            return
        self._hits = [MEMORY * old + new for old, new in zip_longest(self._hits, step.accepted_at, fillvalue=0)]
        self._offers = [MEMORY * old + new for old, new in zip_longest(self._offers, step.offered_at, fillvalue=0)]
        self._drafting += drafter
        if self._steps > 1:
            self._drafting += target
            self._worth += step.emitted / max(step.target_forwards, 1)
        if self._behind > 1:
            self._caught_up = drafter, count, self._behind
        else:
            self._draft.append(drafter / self._passes(count))
        self._behind = 1

    def rates(self) -> list[float]:
        """Tokens a second that K = 0 .. most promise, over all that are left, once the drafter has caught up."""
        draft, catching_up = _usual(self._draft), self._catching_up() / self._left
        tokens, reached, rates = 1.0, 1.0, [1 / self._target_seconds(0)]
        for count, chance in enumerate(self._chances(), start=1):
            reached *= chance
            tokens += reached
            seconds = (self._target_seconds(count) + self._passes(count) * draft) / tokens
            rates.append(1 / (seconds + catching_up))
        return rates

    def _plan(self) -> tuple[int, int]:
        """K of the next step, and how many further steps have it without another choice."""
        if self._rests:
            missing = self._missing_seconds()
            if missing > 0:
                return 0, max(self._pause - 1, int(min(missing / self._target_seconds(0), MAX_REST_STEPS)))
            self._pause, self._rests = 2 * self._pause, False
            return 1, TRIED_STEPS - 1
        few = min(self.most, FIRST_DRAFTS)
        if self._steps < len(FIRST_STEPS):
            return few * FIRST_STEPS[self._steps], 0
        if not self._draft:
            return few, 0  # the first draft's time is that of its catching up
        if self._steps > self._timed_at[0] + PLAIN_AGAIN:
            return 0, PLAIN_STEPS - 1
        if best := self._best():
            self._pause = FIRST_REST_STEPS
            self._span = min(2 * self._span + 1, MOST_HELD) if best == self._count else TRIED_STEPS - 1
            return best, self._span
        self._rests = True
        return 0, self._pause - 1

    def _best(self) -> int:
        """K of the highest rate; if that is not 0, a larger one that is close to it and was timed a few times only."""
        rates = self.rates()
        if self._behind > 1:
            rates[0] *= WORTH_A_CHANGE
        best = rates.index(max(rates))
        close = [count for count in range(best + 1, self.most + 1) if rates[count] >= CLOSE * rates[best]]
        unsure = [count for count in close if 0 < len(self._target.get(count, ())) < FEW_TIMINGS]
        return unsure[0] if best and unsure else best

    def _missing_seconds(self) -> float:
        """Seconds of plain decoding that are missing until another draft costs no more than `SHARE` of all."""
        lost = self._drafting - self._worth * self._target_seconds(0)  # beyond plain decoding to the same tokens
        return (lost + self._price()) / SHARE - self._elapsed

    def _price(self) -> float:
        """Seconds of a trial's drafts and of the rows that the drafter has to catch up on, as the last ones took."""
        if not self._draft:
            return float("inf")
        return TRIED_STEPS * _usual(self._draft) + self._catching_up()

    def _catching_up(self) -> float:
        """Seconds that the drafter needs for the rows that it has missed, by what the last ones took."""
        if self._behind == 1:
            return 0.0
        seconds, count, rows = self._caught_up
        return self._behind * max(seconds - self._passes(count) * _usual(self._draft), 0.0) / rows

    def _passes(self, count: int) -> int:
        """Passes of a draft; all take the same time."""
        return 1 if self.at_once else count

    def _target_seconds(self, count: int) -> float:
        """Seconds of a forward of K + 1 rows; interpolated between measured K."""
        below = max((known for known in self._target if known <= count), default=min(self._target))
        above = min((known for known in self._target if known >= count), default=max(self._target))
        low = _usual(self._target[below])
        if above == below:
            return low
        return low + (_usual(self._target[above]) - low) * (count - below) / (above - below)

    def _chances(self) -> list[float]:
        """Conditional acceptance of every position. The prior is that of the position before, and 0.5 for the first."""
        hits = [*self._hits, *[0] * self.most]
        offers = [*self._offers, *[0] * self.most]
        reached, chances = [offers[0], *hits], [0.5]
        for place in range(self.most):
            chances.append((hits[place] + chances[-1]) / (min(reached[place], offers[place]) + 1))
        return chances[1:]


def _usual(times: Collection[float]) -> float:
    """The lower quartile: other load on the machine makes steps longer, and never shorter."""
    return sorted(times)[len(times) // 4]
