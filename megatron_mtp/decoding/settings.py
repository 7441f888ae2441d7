"""Settings of a method or a verifier: a frozen dataclass whose fields say their kind, default, range and meaning.

    @dataclass(frozen=True)
    class EchoSettings(Settings):
        tokens: int = setting(1, "how many of the newest tokens are repeated", 1, 8)

These are keys of the speculative config. Values are checked when an object is made; help texts, the pages' tables and
error messages read the same fields. Plain Python, without torch.
"""

from dataclasses import dataclass, field, fields
from math import inf
from types import UnionType
from typing import Any, get_args, get_origin

_KINDS = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple[int, ...]: "a list of whole numbers",
    type(None): "null",
}


@dataclass(frozen=True)
class Settings:
    """The settings of a method or verifier that has none, and the base of all others.

    Raises:
        ValueError: a value of another kind, or outside of its range.
    """

    def __post_init__(self) -> None:
        for one in keys(type(self)):
            one.check(getattr(self, one.name))


def setting[T](default: T, meaning: str, *range: float) -> T:
    """A field of a `Settings`; `range` is the smallest and the largest value, if there are."""
    made: Any = field(default=default, metadata={"meaning": meaning, "range": range or None})
    return made


@dataclass(frozen=True)
class Key:
    """A key of the speculative config.

    Attributes:
        kinds: the types that it takes.
        range: the smallest and the largest value; None without.
    """

    name: str
    kinds: tuple[Any, ...]
    default: Any
    meaning: str
    range: tuple[float, float] | None = None

    def check(self, value: object) -> None:
        """Raises ValueError for a value that is not allowed."""
        if not any(_is_of(value, kind) for kind in self.kinds):
            words = " or ".join(_KINDS[kind] for kind in self.kinds)
            raise ValueError(f"speculative config: {self.name} is {value!r}; give {words}.")
        if self.range is not None and isinstance(value, int | float) and not self.range[0] <= value <= self.range[1]:
            low, high = self.range
            raise ValueError(f"speculative config: {self.name} is {value!r}; give a number from {low} to {high}.")

    @property
    def limits(self) -> str:
        """Default, as JSON has it, and range in brackets, whichever there are."""
        parts = (
            [] if self.default is None else [str([*self.default] if isinstance(self.default, tuple) else self.default)]
        )
        if self.range is not None:
            low, high = self.range
            parts.append(f"{low} or more" if high == inf else f"{low} to {high}")
        return f" ({'; '.join(filter(None, parts))})" if any(parts) else ""


def keys(kind: type[Settings]) -> list[Key]:
    """The keys of a class of settings, in their order."""
    return [
        Key(
            one.name,
            get_args(one.type) if get_origin(one.type) is UnionType else (one.type,),
            one.default,
            one.metadata["meaning"],
            one.metadata["range"],
        )
        for one in fields(kind)
    ]


def _is_of(value: object, kind: Any) -> bool:
    """JSON has no float 1, and Python counts booleans as integers."""
    if kind == tuple[int, ...]:
        return isinstance(value, tuple) and all(type(one) is int for one in value)
    return type(value) is kind or (kind is float and type(value) is int)
