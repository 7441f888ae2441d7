"""The name table of a model: each Hugging Face tensor and the Megatron tensor that holds the same numbers.

In:  the rules of a family for one model.
Out: rows for JSON, one per rule, or lines for people, one per kind of rule: numbers of layers and experts become `*`.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from megatron_mtp.checkpoint.families.rules import HFTensor, Piece, Rule, Shape

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
ShapeOf = Callable[[Rule], Shape]
"""Returns the shape of a carried tensor, from its rule, which has none."""


def name_rows(rules: Iterable[Rule], shape_of: ShapeOf) -> list[dict[str, Any]]:
    """A row per rule: `hugging_face` (name, shape), `megatron` (key, shape, aliases, slab), and `map`."""
    return [
        {
            "hugging_face": [{"name": hf.name, "shape": _shape(hf, rule, shape_of)} for hf in rule.hf],
            "megatron": [
                {"key": piece.key, "shape": piece.whole or _shape(piece, rule, shape_of)}
                | ({"aliases": piece.aliases} if piece.aliases else {})
                | ({"slab": {"offset": piece.offset, "shape": piece.shape}} if piece.offset else {})
                for piece in rule.mcore
            ],
            "map": rule.map.what,
        }
        for rule in rules
    ]


def name_lines(rules: Iterable[Rule], shape_of: ShapeOf) -> list[str]:
    """`HF name [shape], ... -> Megatron key [shape]  (map)  (N times)`, a line per kind of rule."""
    counts = Counter(_line(rule, shape_of) for rule in rules)
    return [times(line, count) for line, count in counts.items()]


def times(line: str, count: int) -> str:
    """The line, with the number of its repetitions if there are some."""
    return f"{line}  ({count} times)" if count > 1 else line


def unnumbered(names: Iterable[str]) -> str:
    """Names of layers and experts as one pattern: `model.layers.*.mlp.experts.*.up_proj.weight`."""
    return ", ".join(dict.fromkeys(_NUMBER.sub("*", name) for name in names))


def _line(rule: Rule, shape_of: ShapeOf) -> str:
    hf = unnumbered(f"{tensor.name} {list(_shape(tensor, rule, shape_of))}" for tensor in rule.hf)
    keys = (f"{piece.key} {list(piece.whole or _shape(piece, rule, shape_of))}" for piece in rule.mcore)
    what = f"  ({rule.map.what})" if rule.map.what else ""
    return f"{hf} -> {unnumbered(keys) or 'nothing'}{what}"


def _shape(tensor: HFTensor | Piece, rule: Rule, shape_of: ShapeOf) -> Shape:
    return shape_of(rule) if tensor.shape is None else tensor.shape
