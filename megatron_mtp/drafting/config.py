"""The settings of a drafting method, in the form of vLLM's `--speculative-config`: a JSON object with a `method`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any, get_args

MOST_DRAFTED = 15
"""K + 1 rows of a chain at most 16: what fused decode kernels take."""

METHODS = [
    "mtp",
    "mtp_eagle",
    "mtp_trunk_states",
    "mtp_tree",
    "mtp_beam",
    "parallel_heads",
    "draft_model",
    "ngram",
    "lookahead",
]
MOST_NODES = 255
"""Of a tree: what is scored and walked through in every step grows with their square."""

VERIFIER_NAMES = ["greedy", "rejection", "block", "spectr", "specinfer", "relaxed", "joint", "bild"]
LOSSY = ("relaxed", "joint", "bild")
"""Verifiers that do not keep the target's distribution; they run only where `verifier` names them."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """One drafting method with its verifier.

    Attributes:
        method: one of METHODS.
        num_speculative_tokens: K, the depth of a draft; 'auto' picks it per step; None takes the checkpoint's depths.
        verifier: one of VERIFIER_NAMES; None is greedy at temperature 0, and above it the lossless rule for the draft.
        use_draft_probs: verify sampled drafts with the q that they came from; without, as if they were deterministic.
        model: the draft model's checkpoint (`draft_model`).
        tree: `mtp_tree`: candidates per level, such as [4, 2, 1]: every node of level i has tree[i] children.
        tree_nodes: `mtp_tree`: choose this many nodes by probability in every step instead (a dynamic tree).
        beam_width: `mtp_beam`: W.
        ngram_min, ngram_max: `ngram`: shortest and longest suffix that is looked up.
        window, ngram_size, guesses: `lookahead`: W, N and G of arXiv:2402.02057.
        threshold: `joint`: tau.
        top_n, delta, think_start, think_end: `relaxed`; the two token ids bound the thinking phase.
        fallback, rollback: `bild`: the drafter goes on while max q >= fallback; the target rolls back where
            -log p > rollback.

    Raises:
        ValueError: a value that is not allowed, or settings that do not go together.
    """

    method: str
    num_speculative_tokens: int | str | None = None
    verifier: str | None = None
    use_draft_probs: bool = True
    model: str | None = None
    tree: tuple[int, ...] | None = None
    tree_nodes: int | None = None
    beam_width: int = 4
    ngram_min: int = 1
    ngram_max: int = 4
    window: int = 5
    ngram_size: int = 4
    guesses: int = 3
    threshold: float = 0.5
    top_n: int = 10
    delta: float = 0.6
    think_start: int | None = None
    think_end: int | None = None
    fallback: float = 0.5
    rollback: float = 3.0

    def __post_init__(self) -> None:
        _one_of("method", self.method, METHODS)
        if self.verifier is not None:
            _one_of("verifier", self.verifier, VERIFIER_NAMES)
        _check_count(self.num_speculative_tokens)
        _check_kinds(self)
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"speculative config: {name} is {value!r}; give a number from {low} to {high}.")
        if self.ngram_min > self.ngram_max:
            raise ValueError(
                f"speculative config: ngram_min is {self.ngram_min}, above ngram_max, {self.ngram_max}; swap them."
            )
        if self.tree is not None:
            _check_tree(self.tree)
        if self.verifier == "relaxed" and (self.think_start is None or self.think_end is None):
            raise ValueError(
                "speculative config: the verifier 'relaxed' relaxes inside the thinking phase alone; give the token "
                "ids that bound it as think_start and think_end."
            )
        if self.method == "draft_model" and self.model is None:
            raise ValueError("speculative config: 'draft_model' needs 'model', the draft model's checkpoint folder.")

    @property
    def lossless(self) -> bool:
        return self.verifier not in LOSSY


_RANGES: dict[str, tuple[float, float]] = {
    "tree_nodes": (1, 63),
    "beam_width": (1, 64),
    "ngram_min": (1, 64),
    "ngram_max": (1, 64),
    "window": (1, 32),
    "ngram_size": (2, 16),
    "guesses": (1, 32),
    "threshold": (0.0, 1.0),
    "top_n": (1, 1 << 20),
    "delta": (0.0, 1.0),
    "fallback": (0.0, 1.0),
    "rollback": (0.0, float("inf")),
}


def parse_config(text: str) -> SpeculativeConfig:
    """The settings that a JSON object spells out.

    Raises:
        ValueError: it is no JSON object, or has an unknown method, key or value; the message lists what exists.
    """
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--speculative-config is not JSON ({error}); {_EXAMPLE}") from error
    if not isinstance(given, dict):
        raise ValueError(f"--speculative-config is {text}, not a JSON object; {_EXAMPLE}")
    return config_from(given)


def config_from(given: dict[str, Any]) -> SpeculativeConfig:
    """The settings in a dict; errors as of `parse_config`."""
    known = [field.name for field in fields(SpeculativeConfig)]
    for key in given:
        if key not in known:
            raise ValueError(f"speculative config: there is no key '{key}'; known are {', '.join(known)}.")
    if "method" not in given:
        raise ValueError(f"speculative config: 'method' is missing; choose one of {', '.join(METHODS)}.")
    values = dict(given)
    if isinstance(values.get("tree"), list):
        values["tree"] = tuple(values["tree"])
    return SpeculativeConfig(**values)


_EXAMPLE = """give for example '{"method": "mtp", "num_speculative_tokens": 2}'."""


def _one_of(key: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"speculative config: {key} is {value!r}; choose one of {', '.join(allowed)}.")


_KINDS = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple[int, ...]: "a list of whole numbers",
    type(None): "null",
}


def _check_kinds(config: SpeculativeConfig) -> None:
    """Of the settings that are not chosen from a list."""
    for field in fields(config):
        if field.name in ("method", "verifier", "num_speculative_tokens"):
            continue
        value, kinds = getattr(config, field.name), get_args(field.type) or (field.type,)
        if not any(_is_of(value, kind) for kind in kinds):
            words = " or ".join(_KINDS[kind] for kind in kinds)
            raise ValueError(f"speculative config: {field.name} is {value!r}; give {words}.")


def _is_of(value: object, kind: Any) -> bool:
    """JSON has no float 1, and Python counts booleans as integers."""
    if kind == tuple[int, ...]:
        return isinstance(value, tuple) and all(type(one) is int for one in value)
    return type(value) is kind or (kind is float and type(value) is int)


def _check_tree(tree: tuple[int, ...]) -> None:
    if not tree or min(tree) < 1:
        raise ValueError(f"speculative config: tree is {list(tree)}; give candidates per level, like [4, 2].")
    nodes = sum(prod(tree[:level]) for level in range(1, len(tree) + 1))
    if len(tree) > MOST_DRAFTED or nodes > MOST_NODES:
        raise ValueError(
            f"speculative config: tree is {list(tree)}, of {len(tree)} levels and {nodes} nodes; give at most "
            f"{MOST_DRAFTED} levels and {MOST_NODES} nodes."
        )


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
