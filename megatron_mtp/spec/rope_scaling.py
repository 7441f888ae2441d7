"""RoPE scaling: conversion between the keys of a `config.json` and Megatron's arguments.

Each row of `SCALINGS` converts in both directions, for trunks and drafters. `model/rope.py` computes the angles of
drafters; Megatron computes those of trunks. This file imports nothing of the package.

    {"rope_type": "linear", "factor": 4}    rotary_seq_len_interpolation_factor 4
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, override

LARGEST = 2**31
"""Upper limit of numbers in a scaling, exclusive."""

OTHER_KEYS = ("rope_type", "type", "rope_theta", "mrope_section", "mrope_interleaved", "finetuned")
"""Keys that are not part of a scaling. A drafter has the positions of text, which are the same in all sections."""

MSCALES = ("mscale", "mscale_all_dim")
"""Settings of YaRN that also change the scores of latent attention; in other attention they change only the angles."""

Argument = Callable[[str], Any]
"""Function from the name of one of Megatron's arguments to its value; None if it is not set."""


@dataclass(frozen=True)
class Scaling:
    """Unscaled rotary angles, and the base class of the scalings.

    Attributes:
        called: its name in messages.
        numbers: its numbers by transformers' keys, with transformers' defaults; None for a required number.
        megatrons: values that Megatron uses where its arguments do not set them.
        arguments: Megatron's argument for each number. Numbers without one are fixed in Megatron.
        further: other config keys of this scaling.
    """

    called: str
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    megatrons: Mapping[str, float] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    further: tuple[str, ...] = ()

    positions: ClassVar[str] = "rope"
    """Megatron's `position_embedding_type`, and its `rope_type` in latent attention."""
    in_latent: ClassVar[bool] = True
    """Whether Megatron's latent attention supports it."""

    def is_on(self, argument: Argument, is_latent: bool) -> bool:
        """Return whether Megatron's arguments enable this scaling, for latent or other attention."""
        return True

    def all_arguments(self, is_latent: bool) -> list[str]:
        """Return the names of Megatron's arguments of this scaling."""
        return [_named(one, is_latent) for one in self.arguments.values()]

    def complete(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in transformers' defaults for missing config keys.

        Raises:
            ValueError: a number is missing or not above 0; the message names it as the subject of a sentence.
        """
        return {name: positive(keys, name, usual) for name, usual in self.numbers.items()}

    def in_latents(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Like `complete`, but with Megatron's defaults of latent attention."""
        return self.from_megatron(self.to_megatron(keys, True).get, True)

    def to_megatron(self, keys: Mapping[str, Any], is_latent: bool) -> dict[str, Any]:
        """Convert config settings to Megatron's arguments.

        Raises:
            ValueError: Megatron would compute different angles; the message gives the reason as the subject of a
                sentence.
        """
        made = self.complete(keys)
        if any(made[name] != self.megatrons[name] for name in self.numbers.keys() - self.arguments.keys()):
            raise ValueError(f"a {self.called} rotary scaling with other numbers than Megatron's")
        return {_named(one, is_latent): float(made[name]) for name, one in self.arguments.items()}

    def from_megatron(self, argument: Argument, is_latent: bool) -> dict[str, Any]:
        """Convert Megatron's arguments, which enable this scaling, to config settings."""
        found = {name: argument(_named(one, is_latent)) for name, one in self.arguments.items()}
        unset = {**dict.fromkeys(self.numbers, 1.0), **self.megatrons}
        return {name: unset[name] if found.get(name) is None else found[name] for name in self.numbers}


class Linear(Scaling):
    """Linear scaling: positions are divided by a factor."""

    in_latent = False

    @override
    def is_on(self, argument: Argument, is_latent: bool) -> bool:
        return argument(self.arguments["factor"]) not in (None, 1)

    @override
    def to_megatron(self, keys: Mapping[str, Any], is_latent: bool) -> dict[str, Any]:
        """Require a power of two, for which both round alike: Megatron divides positions, transformers frequencies."""
        made = super().to_megatron(keys, is_latent)
        factor = made[self.arguments["factor"]]
        if factor < 1 or math.log2(factor) % 1:
            raise ValueError(f"a {self.called} rotary scaling by {factor}, which is not a power of two")
        return {self.arguments["factor"]: int(factor)}

    @override
    def from_megatron(self, argument: Argument, is_latent: bool) -> dict[str, Any]:
        return {name: float(value) for name, value in super().from_megatron(argument, is_latent).items()}


class Llama3(Scaling):
    """Llama 3.1 scaling: long wavelengths are divided by a factor, those between two bounds by less."""

    in_latent = False
    switch: ClassVar[str] = "use_rope_scaling"

    @override
    def is_on(self, argument: Argument, is_latent: bool) -> bool:
        return bool(argument(self.switch)) and not is_latent

    @override
    def all_arguments(self, is_latent: bool) -> list[str]:
        return [self.switch, *super().all_arguments(is_latent)]

    @override
    def to_megatron(self, keys: Mapping[str, Any], is_latent: bool) -> dict[str, Any]:
        return {self.switch: True, **super().to_megatron(keys, is_latent)}


class Yarn(Scaling):
    """YaRN (arXiv:2309.00071). With `truncate`, its range is rounded to whole channels.

    Without latent attention, Megatron's arguments have a prefix.
    """

    positions = "yarn"
    rounds: ClassVar[str] = "yarn_correction_range_round_to_int"

    @override
    def is_on(self, argument: Argument, is_latent: bool) -> bool:
        """YaRN is Megatron's default in latent attention; a factor of 1 has no effect."""
        if is_latent:
            return argument("rope_type") != "rope" and argument(self.arguments["factor"]) not in (None, 1)
        return bool(argument("position_embedding_type") == "yarn")

    @override
    def all_arguments(self, is_latent: bool) -> list[str]:
        own = (*MSCALES, "rope_type" if is_latent else self.rounds)
        return [*super().all_arguments(is_latent), *own]

    @override
    def complete(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Include `attention_factor` and `truncate` only where they differ from the defaults."""
        made = super().complete(keys)
        factor, fixed = made["factor"], _attention_factor(keys)
        if factor <= 1 and fixed not in (None, 1):
            raise ValueError(f"a YaRN scaling with 'attention_factor' {fixed} and a factor of 1 or less")
        mscale, whole = _mscales(keys)
        if fixed is None and mscale and whole:
            fixed = yarn_factor(factor, mscale) / yarn_factor(factor, whole)
        made |= {} if fixed in (None, yarn_factor(factor)) else {"attention_factor": fixed}
        return made | ({} if keys.get("truncate", True) else {"truncate": False})

    @override
    def to_megatron(self, keys: Mapping[str, Any], is_latent: bool) -> dict[str, Any]:
        """Set Megatron's `mscale` and `mscale_all_dim` so that YaRN matches transformers.

        With g(m) = 0.1 m ln(factor) + 1 and a = `mscale_all_dim`, latent attention multiplies its scores by g(a)^2.
        Megatron multiplies cosine and sine by g(mscale) / g(a). transformers does the same if neither is 0; otherwise
        it multiplies them by `attention_factor`, or by g(1).
        """
        made = super().to_megatron(keys, is_latent)
        truncates = bool(keys.get("truncate", True))
        if is_latent and not truncates:
            raise ValueError("a YaRN scaling with 'truncate' false")
        original = _named(self.arguments[ORIGINAL], is_latent)
        if made[original] != int(made[original]):
            raise ValueError(f"a YaRN scaling with '{ORIGINAL}' {made[original]}")
        mscale, whole = _megatrons_mscales(keys, float(keys["factor"]))
        made |= {original: int(made[original]), "mscale": mscale, "mscale_all_dim": whole}
        return made if is_latent else {**made, self.rounds: truncates}

    @override
    def from_megatron(self, argument: Argument, is_latent: bool) -> dict[str, Any]:
        mscale, whole = argument("mscale"), argument("mscale_all_dim")
        made = super().from_megatron(argument, is_latent)
        made |= {"mscale": 1.0 if mscale is None else mscale, "mscale_all_dim": 0.0 if whole is None else whole}
        return made if is_latent else {**made, "truncate": argument(self.rounds) is not False}


ORIGINAL = "original_max_position_embeddings"

SCALINGS: dict[str, Scaling] = {
    "default": Scaling("plain"),
    "linear": Linear("linear", {"factor": None}, arguments={"factor": "rotary_seq_len_interpolation_factor"}),
    "llama3": Llama3(
        "Llama 3",
        dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)),
        {"low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192},
        {"factor": "rope_scaling_factor"},
    ),
    "yarn": Yarn(
        "YaRN",
        {"factor": None, ORIGINAL: None, "beta_fast": 32.0, "beta_slow": 1.0},
        {ORIGINAL: 4096, "beta_fast": 32.0, "beta_slow": 1.0},
        {
            "factor": "rotary_scaling_factor",
            ORIGINAL: f"yarn_{ORIGINAL}",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        },
        (*MSCALES, "attention_factor", "truncate"),
    ),
}
"""Scalings by their names in transformers. If Megatron's arguments ask for several, the last one counts."""


def scaling_arguments(is_latent: bool) -> tuple[str, ...]:
    """Return the names of Megatron's arguments of all scalings, for latent or other attention."""
    rows = (row for row in SCALINGS.values() if row.in_latent or not is_latent)
    return tuple(name for row in rows for name in row.all_arguments(is_latent))


def megatrons_scaling(argument: Argument, is_latent: bool) -> dict[str, Any]:
    """Convert Megatron's arguments to a complete `rope_scaling` entry of a config, including `rope_type`."""
    kind = next(name for name in reversed(SCALINGS) if SCALINGS[name].is_on(argument, is_latent))
    return {"rope_type": kind, **SCALINGS[kind].from_megatron(argument, is_latent)}


def scaling_of(keys: Mapping[str, Any], is_latent: bool = False) -> dict[str, Any] | None:
    """Read a drafter's scaling from `rope_scaling` or `rope_parameters` of a config, and complete it; None without one.

    Numbers that are missing are Megatron's.

    Args:
        is_latent: whether the drafter has latent attention, whose YaRN has `MSCALES`.

    Raises:
        ValueError: it is of a type, or has a setting, that is not computed here; the message begins with that.
    """
    kind = str(keys.get("rope_type", keys.get("type", "default")))
    kind = "default" if kind == "mrope" else kind
    rows = {name: row for name, row in SCALINGS.items() if row.in_latent or not is_latent}
    if kind not in rows:
        raise ValueError(f"a rope_type '{kind:.40}'; known are {', '.join(rows)}{WHERE[is_latent]}")
    row = rows[kind]
    further = MSCALES if is_latent and row.numbers else row.further
    if keys.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(f"a partial_rotary_factor of {keys['partial_rotary_factor']}; a drafter turns whole heads")
    known = {*row.numbers, *further, *OTHER_KEYS, "partial_rotary_factor"}
    if unknown := sorted(keys.keys() - known):
        says = ", ".join(sorted(known))
        raise ValueError(f"a setting '{unknown[0]:.40}' of rope_type '{kind}'; known are {says}{WHERE[is_latent]}")
    given = {**row.megatrons, **{name: value for name, value in keys.items() if value is not None}}
    if not row.numbers:
        return None
    return {"rope_type": kind, **(row.in_latents(given) if is_latent else row.complete(given))}


WHERE = {True: " in latent attention", False: ""}


def yarn_factor(factor: float, mscale: float = 1) -> float:
    """Return YaRN's multiplier of cosines and sines (arXiv:2309.00071, eq. 22) for a scaling by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _mscales(keys: Mapping[str, Any]) -> tuple[float, float]:
    return number(keys, "mscale", 0.0), number(keys, "mscale_all_dim", 0.0)


def _attention_factor(keys: Mapping[str, Any]) -> float | None:
    return None if keys.get("attention_factor") is None else number(keys, "attention_factor")


def _megatrons_mscales(keys: Mapping[str, Any], factor: float) -> tuple[float, float]:
    """Return the values of Megatron's `mscale` and `mscale_all_dim`; see `Yarn.to_megatron`."""
    (mscale, whole), fixed = _mscales(keys), _attention_factor(keys)
    if fixed is None and (mscale and whole):
        return mscale, whole
    if factor <= 1 or (fixed is None and not whole):
        return 1.0, 0.0
    each = 0.1 * math.log(factor)
    scale = each + 1 if fixed is None else fixed
    return (scale * (each * whole + 1) - 1) / each, whole


def _named(argument: str, is_latent: bool) -> str:
    """Return Megatron's name of an argument, which has YaRN's prefix only outside latent attention."""
    return argument.removeprefix("yarn_") if is_latent else argument


def number(keys: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Parse a number of a rotary setting. Raise ValueError if it is missing or invalid."""
    value = default if keys.get(name) is None else keys[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise ValueError(f"a rotary setting '{name}' of {value!r:.40}, which is not a number below {LARGEST}")
    return value


def positive(keys: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Parse a number above 0. transformers treats 0 as the default."""
    value = number(keys, name, default) or default or 0
    if value <= 0:
        raise ValueError(f"a rotary setting '{name}' of {value}, which is not above 0")
    return value
