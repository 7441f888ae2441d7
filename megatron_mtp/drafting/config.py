"""The settings of a drafting method, in the form of vLLM's `--speculative-config`: a JSON object with a `method`.

Some keys go with every method; the others are those of the method and of the verifier that were chosen.
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron_mtp.drafting.proposers import PROPOSERS
from megatron_mtp.drafting.settings import Key, Settings, keys
from megatron_mtp.drafting.verifiers import VERIFIERS
from megatron_mtp.registry import Registry

MOST_DRAFTED = 15
"""K + 1 rows of a chain at most 16: what fused decode kernels take."""

NO_SETTINGS = Settings()

_EXAMPLE = """give for example '{"method": "mtp", "num_speculative_tokens": 2}'."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """One drafting method with its verifier.

    Attributes:
        method: a name in PROPOSERS.
        num_speculative_tokens: K, the depth of a draft; 'auto' picks it per step; None takes the method's default.
        verifier: a name in VERIFIERS; None is greedy at temperature 0, and above it the lossless rule for the draft.
        use_draft_probs: verify sampled drafts with the q that they came from; without, as if they were deterministic.
        settings: the method's own; its defaults if left out.
        verifier_settings: the verifier's own, likewise.

    Raises:
        ValueError: a value that is not allowed, or settings that do not go together.
    """

    method: str
    num_speculative_tokens: int | str | None = None
    verifier: str | None = None
    use_draft_probs: bool = True
    settings: Settings = NO_SETTINGS
    verifier_settings: Settings = NO_SETTINGS

    def __post_init__(self) -> None:
        _check_names(self.method, self.verifier)
        _check_count(self.num_speculative_tokens)
        Key("use_draft_probs", (bool,), True, "").check(self.use_draft_probs)
        drafting, verifying = _settings_kinds(self.method, self.verifier)
        object.__setattr__(self, "settings", _settings_of(self.method, drafting, self.settings))
        object.__setattr__(self, "verifier_settings", _settings_of(self.verifier, verifying, self.verifier_settings))

    @property
    def lossless(self) -> bool:
        """Whether the target's distribution is kept."""
        return self.verifier is None or VERIFIERS[self.verifier].lossless

    def flat(self) -> dict[str, Any]:
        """All keys with their values, as in JSON."""
        return {key: getattr(self, key) for key in COMMON_KEYS} | asdict(self.settings) | asdict(self.verifier_settings)


COMMON_KEYS = [field.name for field in fields(SpeculativeConfig) if field.type is not Settings]
"""The keys of every method."""


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
    """The settings in a dict; errors as of `parse_config`."""
    if "method" not in given:
        raise ValueError(f"speculative config: 'method' is missing; choose one of {', '.join(PROPOSERS.names())}.")
    method, verifier = given["method"], given.get("verifier")
    _check_names(method, verifier)
    drafting, verifying = _settings_kinds(method, verifier)
    _check_keys(given, drafting, verifying)
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return SpeculativeConfig(
        **{key: value for key, value in values.items() if key in COMMON_KEYS},
        settings=drafting(**{one.name: values[one.name] for one in keys(drafting) if one.name in values}),
        verifier_settings=verifying(**{one.name: values[one.name] for one in keys(verifying) if one.name in values}),
    )


def _settings_kinds(method: str, verifier: str | None) -> tuple[type[Settings], type[Settings]]:
    """Classes of the method's and of the verifier's settings."""
    return PROPOSERS[method].settings_kind, Settings if verifier is None else VERIFIERS[verifier].settings_kind


def _settings_of(name: str | None, kind: type[Settings], given: Settings) -> Settings:
    if given == NO_SETTINGS:
        return kind()
    if type(given) is not kind:
        raise ValueError(
            f"speculative config: '{name}' was given {type(given).__name__}; give {kind.__name__}, or leave them out."
        )
    return given


def _check_names(method: object, verifier: object) -> None:
    _one_of("method", method, PROPOSERS)
    if verifier is not None:
        _one_of("verifier", verifier, VERIFIERS)


def _one_of(key: str, value: object, table: Registry[Any]) -> None:
    """All names are listed for a message alone: that asks every installed package."""
    if not isinstance(value, str) or value not in table:
        raise ValueError(f"speculative config: {key} is {value!r}; choose one of {', '.join(table.names())}.")


def _check_keys(given: dict[str, Any], drafting: type[Settings], verifying: type[Settings]) -> None:
    known = [*COMMON_KEYS, *(one.name for kind in (drafting, verifying) for one in keys(kind))]
    chosen = f"the method '{given['method']}'"
    if given.get("verifier") is not None:
        chosen += f" with the verifier '{given['verifier']}'"
    for key in given:
        if key not in known:
            raise ValueError(
                f"speculative config: {_not_here(key)}; known are {', '.join(known)}, the keys of {chosen}."
            )


def _not_here(key: str) -> str:
    """Where else a key is one."""
    for kind, table in (("method", PROPOSERS), ("verifier", VERIFIERS)):
        for name, part in table.items():
            if any(one.name == key for one in keys(part.settings_kind)):
                return f"'{key}' is a key of the {kind} '{name}', which was not chosen"
    return f"there is no key '{key}'"


def _check_count(count: int | str | None) -> None:
    if count is None or count == "auto":
        return
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError(
            f"speculative config: num_speculative_tokens is {count!r}; give a number from 0 to {MOST_DRAFTED}, or "
            "'auto'."
        )
    if count > MOST_DRAFTED:
        raise ValueError(
            f"speculative config: num_speculative_tokens is {count}, above the limit of {MOST_DRAFTED}; give fewer."
        )
