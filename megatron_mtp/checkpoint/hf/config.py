"""A Hugging Face `config.json`, read with checks: an invalid value is an error of one sentence, never a traceback.

Only raw JSON is read, because a conversion must return every key unchanged, whether known or not.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

CONFIG = "config.json"
DRAFTED = "draft_vocabulary.pt"
"""File with the ids of the draft vocabulary, as SGLang reads it (--speculative-token-map)."""
INDEX_SHARE, INDEXER = "index_share_for_mtp_iteration", ".indexer."
"""Key by which engines let later drafts reuse the keys chosen for the first, and names of the module that chooses them.
"""
TIED = "tie_word_embeddings"
TEXT_KEYS = ("text_config", "llm_config")
"""Config keys of a text model inside a larger one; NVIDIA's folders use the second."""
LARGEST = 2**31
"""No size of a model is larger; a config with a larger one is corrupted."""
LFS = b"version https://git-lfs.github.com/spec"
"""First bytes of the placeholder for a file that `git lfs` has not fetched."""
_BESIDE_ROPE = ("rope_theta", "partial_rotary_factor")
_ROPE_PLACES = ("rope_scaling", "rope_parameters")
_ORIGINAL = "original_max_position_embeddings"
_ROPE_NUMBERS = (
    *_BESIDE_ROPE, "factor", _ORIGINAL, "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "attention_factor",
)  # fmt: skip


class ConfigError(ValueError):
    """A value that its key cannot have, whatever loads the model."""


@dataclass(frozen=True)
class HFConfig:
    """The keys of a model's text part.

    Attributes:
        keys: keys of the text model.
        model_type: type of the whole model, which names the family.
        source: where the keys were read, for messages.
    """

    keys: dict[str, Any]
    model_type: str
    source: str = CONFIG

    @classmethod
    def from_keys(cls, whole: Any, source: str = CONFIG) -> "HFConfig":
        """Make a config from parsed JSON; the text model's keys may be under `text_config`.

        A head is tied if either part has it set: transformers writes true next to `text_config`, and false into it.

        Raises:
            ValueError: it is not an object, or has no `model_type`.
        """
        if not isinstance(whole, dict) or not isinstance(whole.get("model_type"), str):
            raise ValueError(f"{source} has no 'model_type'; give a folder that transformers can load.")
        name = text_key(whole) or "text_config"
        text = whole.get(name, whole)
        if not isinstance(text, dict):
            raise ConfigError(f"{source}: '{name}' is {text!r:.40}; it must be an object.")
        tied = any(part.get(TIED) is True for part in (whole, text))
        return cls({**whole, **text, **({TIED: True} if tied else {})}, whole["model_type"], source)

    @classmethod
    def read(cls, folder: Path) -> "HFConfig":
        """Read a folder's `config.json`; ValueError for none, or a value of a kind that its key cannot have."""
        source, whole = str(folder / CONFIG), read_json(folder / CONFIG)
        config = cls.from_keys(whole, source)
        for _, says in (*wrong_kinds(whole), *contradictions(config.keys), *rope_said_twice(whole)):
            raise ConfigError(f"{source}: {says}.")
        return config

    @property
    def text_type(self) -> str | None:
        """Type of the text model inside of a larger one; None if the model is the text model."""
        found = self.keys.get("model_type") if text_key(self.keys) is not None else None
        return found if isinstance(found, str) and found != self.model_type else None

    def with_defaults(self, defaults: Mapping[str, Any]) -> "HFConfig":
        """The config with these values for absent keys; a key that is null is not absent."""
        return replace(self, keys={**defaults, **self.keys})

    def integer(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return the first of these keys that is set, an integer of at least `least`. Raise ValueError otherwise."""
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < LARGEST:
            raise ConfigError(
                f"{self.source}: '{name}' is {value!r:.40}; it must be a whole number of at least {least}, and below "
                f"{LARGEST}."
            )
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """Return the first of these keys that is set, a number above 0. Raises ValueError like `integer`."""
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < LARGEST:
            raise ConfigError(
                f"{self.source}: '{name}' is {value!r:.40}; it must be a number above 0, and below {LARGEST}."
            )
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a boolean, false if it is null or missing. Raise ValueError for anything else."""
        value = self.keys.get(name)
        if not isinstance(value, bool | None):
            raise ConfigError(f"{self.source}: '{name}' is {value!r:.40}; it must be true or false.")
        return bool(value)

    def words(self, name: str, length: int) -> list[str] | None:
        """Return the first `length` entries of a list with one word per layer; None if missing.

        Raise ValueError otherwise.
        """
        value = self.keys.get(name)
        if value is None:
            return None
        if not are_words(value) or len(value) < length:
            raise ConfigError(f"{self.source}: '{name}' must be a list of {length} words, one a layer.")
        return value[:length]

    def has(self, name: str) -> bool:
        """Return whether the key is set and not null."""
        return self.keys.get(name) is not None

    @property
    def rope(self) -> dict[str, Any]:
        """Rotary settings as transformers 5 reads them: with `rope_type`, and the original length if a scaling uses it.

        `rope_scaling`, which older files have, takes precedence over `rope_parameters`; some settings are next to them.
        ValueError where they are not objects, or a number is a text or a truth value.
        """
        nested = {name: self.keys.get(name) for name in _ROPE_PLACES}
        for name, value in nested.items():
            if value and not isinstance(value, dict):
                raise ConfigError(f"{self.source}: '{name}' is {value!r:.40}; it must be an object.")
        chosen: dict[str, Any] = next(filter(None, nested.values()), {})
        found = {name: self.keys[name] for name in _BESIDE_ROPE if self.has(name)} | chosen
        found.setdefault("rope_type", found.get("type", "default"))
        if found["rope_type"] == "deepseek_yarn":  # Sarvam's name
            found["rope_type"] = "yarn"
        if found["rope_type"] in ("llama3", "yarn", "longrope"):
            longest = self.keys.get(_ORIGINAL, found.get(_ORIGINAL, self.keys.get("max_position_embeddings")))
            found[_ORIGINAL] = longest
        for name in _ROPE_NUMBERS:
            if isinstance(found.get(name), str | bool):
                raise ConfigError(f"{self.source}: '{name}' is {found[name]!r:.40}; it must be a number.")
        return found

    def _first(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for name in names:
            if self.has(name):
                return name, self.keys[name]
        if default is None:
            kind = ConfigError if any(name in self.keys for name in names) else ValueError
            raise kind(f"{self.source} lacks '{names[0]}', which models of type '{self.model_type}' must have.")
        return names[0], default


def text_key(keys: Mapping[str, Any]) -> str | None:
    """Return the key under which a config has its text model's config; None if there is none."""
    return next((name for name in TEXT_KEYS if isinstance(keys.get(name), dict)), None)


def wrong_kinds(whole: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return keys of a config, or of its text model, with a value type that no loader accepts, and half a sentence.

    Null is a value of every key.
    """
    text = whole.get(text_key(whole) or "")
    for part in (whole, text if isinstance(text, dict) else {}):
        for kind, (names, fits) in _KINDS.items():
            for name in names.split():
                if part.get(name) is not None and not fits(part[name]):
                    yield name, f"'{name}' is {part[name]!r:.40}; it must be {kind}"


def contradictions(keys: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return keys whose values no model can have together, each with half a sentence."""
    for small, large in ((CHOSEN, EXPERTS), (("topk_group",), ("n_group",))):
        (one, few), (other, many) = (first_count(keys, names) for names in (small, large))
        if few > many > 0:
            yield one, f"'{one}' is {few}, which is more than '{other}', {many}"


def rope_said_twice(whole: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return rotary settings that a config, or its text model's, sets in two places with different values.

    Loaders differ on which place counts. Same form as `wrong_kinds`.
    """
    text = whole.get(text_key(whole) or "")
    for part in (whole, text if isinstance(text, dict) else {}):
        nested = {name: part[name] for name in _ROPE_PLACES if isinstance(part.get(name), dict)}
        for name in (*_BESIDE_ROPE, _ORIGINAL):
            places = {name: part.get(name)} | {f"{name} of {place}": one.get(name) for place, one in nested.items()}
            said = {place: value for place, value in places.items() if value is not None}
            if any(value != next(iter(said.values())) for value in said.values()):
                both = " and ".join(f"{place} is {value!r:.40}" for place, value in said.items())
                yield name, f"{both}; keep the value of the training, in one place"


def first_count(keys: Mapping[str, Any], names: Iterable[str]) -> tuple[str, int]:
    """Return the first of these keys with a number, and the number; 0 if there is none."""
    found = ((name, keys.get(name)) for name in names)
    return next(((name, n) for name, n in found if isinstance(n, int) and not isinstance(n, bool)), ("", 0))


def counted_elsewhere(keys: Mapping[str, Any]) -> tuple[str, int]:
    """The key by which MiniMax or Inkling counts MTP layers, and the number; 0 without one, or if switched off."""
    if keys.get("use_mtp") is False:
        return "", 0
    nested = keys.get("mtp_config")
    count = first_count(nested, ("num_nextn_predict_layers",))[1] if isinstance(nested, dict) else 0
    return ("mtp_config", count) if count else first_count(keys, ("num_mtp_modules",))


CHOSEN = tuple("num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts".split())
"""Config keys for the number of experts that a token is routed to."""
EXPERTS = tuple("n_routed_experts num_experts moe_num_experts num_local_experts".split())
"""Config keys for the number of experts that a router chooses from."""


def are_words(value: Any) -> bool:
    """Return whether a value is a list of words."""
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _are_ids(value: Any) -> bool:
    ids = value if isinstance(value, list) else [value]
    return all(isinstance(one, int) and not isinstance(one, bool) for one in ids)


def _are_types(value: Any) -> bool:
    names = value.values() if isinstance(value, dict) else [value]
    return all(isinstance(name, str) and name.removeprefix("torch.") in _TYPES for name in names)


_TYPES = frozenset("auto bfloat16 double float float16 float32 float64 float8_e4m3fn float8_e5m2 half".split())
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "an object": (
        "auto_map compression_config quantization_config rope_parameters rope_scaling vision_config",
        lambda value: isinstance(value, dict),
    ),
    "a list of words": ("architectures layer_types", are_words),
    "a word": ("hidden_act", lambda value: isinstance(value, str)),
    "a type such as bfloat16, or an object of types": ("dtype torch_dtype", _are_types),
    "true or false": ("tie_word_embeddings", lambda value: isinstance(value, bool)),
    "a token's id, or a list of them": ("bos_token_id eos_token_id pad_token_id", _are_ids),
}
"""What the values of some keys have to be that loaders read and rules do not: the keys, and whether a value is so."""


def check_file(path: Path) -> None:
    """Raise ValueError if a file is something else: a folder, a pipe (reading it would block), an LFS pointer."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} cannot be read: it is a folder or a pipe, not a file; fetch it again.")
    if path.exists():
        with path.open("rb") as stream:
            if stream.read(len(LFS)) == LFS:
                raise ValueError(
                    f"{path} is a pointer of Git LFS, not the file itself; run `git lfs pull` in its folder."
                )


def read_json(path: Path) -> Any:
    """Read a JSON file. Raise ValueError if it is missing, is not a file, or is not JSON."""
    check_file(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; give a folder that holds it.") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON; fetch or write it again.") from None
