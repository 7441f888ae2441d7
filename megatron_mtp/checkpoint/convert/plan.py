"""The rules of a folder, checked by names and shapes alone: every tensor has a rule, and every rule its tensors.

Rules are grouped into parts, one per layer, which are converted, recorded and resumed together. The name table at the
end shows them: rows for JSON, one per rule, or lines for people, with `*` for the numbers of layers and experts.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_mtp.checkpoint.convert.carried import REMEDY, check_carried
from megatron_mtp.checkpoint.families import CARRIED, Family, Layout, family_of
from megatron_mtp.checkpoint.families.naming import renaming
from megatron_mtp.checkpoint.families.rules import Copies, HFTensor, Piece, Rule, Zeros
from megatron_mtp.checkpoint.hf import Shape, by
from megatron_mtp.checkpoint.hf.config import TIED, HFConfig
from megatron_mtp.checkpoint.hf.folder import HFFolder, check_kind
from megatron_mtp.checkpoint.hf.quantized import QuantizationSettings

_LAYER = re.compile(r"^(decoder|mtp)\.layers\.(\d+)\.")


def parts_of(rules: Iterable[Rule]) -> dict[str, list[Rule]]:
    """Group rules by the prefix of their layer, in order; all rules outside layers are one part."""
    parts: dict[str, list[Rule]] = {}
    for rule in rules:
        match = _LAYER.match(rule.mcore[0].key) if rule.mcore else None
        parts.setdefault(match.group(0) if match else "model.", []).append(rule)
    return parts


def check_hf(rules: list[Rule], folder: HFFolder, config: HFConfig) -> None:
    """Raise ValueError if a folder's tensor has no rule, or another shape or dtype than the config implies."""
    left, source = dict(folder.tensors), config.source
    wanted = [tensor for rule in rules for tensor in rule.hf]
    strange = min(left.keys() - {tensor.name for tensor in wanted}, default=None)
    for tensor in wanted:
        stored = left.pop(tensor.name, None)
        if stored is None:
            beside = "" if strange is None else f" and has '{strange:.100}', which it does not call for"
            raise ValueError(
                f"{folder.folder} lacks '{tensor.name}', which {source} ({config.model_type}) calls for{beside}; "
                f"{REMEDY}, or save the bare model."
            )
        if tensor.shape is not None and stored.shape != tensor.shape:
            wrong = f"is {by(stored.shape)}, but {source} makes it {by(tensor.shape)}"
            raise ValueError(f"'{tensor.name}' in {stored.file} {wrong}; one of the two is wrong.")
        folder.check_type(tensor.name, must_be_weight=tensor.shape is not None)
    for name, stored in left.items():
        raise ValueError(
            f"'{name}'{and_more(left)} in {stored.file} is not a tensor of a '{config.model_type}' model as {source} "
            "describes it, and nothing is dropped silently; correct the config, or the name."
        )


def and_more(left: Collection[str]) -> str:
    """Return how many more names there are than one, for a message."""
    return f" and {len(left) - 1} more" if len(left) > 1 else ""


@dataclass(frozen=True)
class HFModel:
    """A Hugging Face folder whose tensors fit its family.

    Attributes:
        config: its config, with the family's defaults.
        family: family of its `model_type`.
        layout: what its tensors determine.
        folder: its tensors.
        rules: rule of every tensor.
        left_out: names of the MTP layers' tensors that were left out.
    """

    config: HFConfig
    family: Family
    layout: Layout
    folder: HFFolder
    rules: list[Rule]
    left_out: frozenset[str] = frozenset()

    @classmethod
    def read(cls, path: Path, lost_depths: bool = False, trunk_only: bool = False) -> "HFModel":
        """Read and check a folder without reading tensors.

        Args:
            path: the folder.
            lost_depths: whether the config may count MTP layers that the folder lacks, because transformers drops them.
            trunk_only: whether to leave out all MTP layers, complete or not.

        Raises:
            ValueError: the folder is of a kind that does not convert, is damaged or contradicts itself, or its tensors
                have names that no loader looks for.
        """
        check_kind(path)
        config = HFConfig.read(path)
        family = family_of(config)
        config = family.complete(config)
        folder = HFFolder(path, QuantizationSettings.of(path, config.keys).numbers, config.flag(TIED))
        if wrong := family.misnamed(config, folder.tensors):
            raise ValueError(f"{path} has {renaming(wrong, family.title)}.")
        left_out = family.of_depths(config, folder.tensors) if trunk_only else frozenset[str]()
        folder.tensors = {name: one for name, one in folder.tensors.items() if name not in left_out}
        if (lost_depths or trunk_only) and family.depths is not None and not family.depths.stored(folder.tensors):
            counts = [key for key in family.depths.keys if config.has(key)]
            config = replace(config, keys=config.keys | dict.fromkeys(counts, 0))
        layout = family.layout(config, folder.tensors)
        rules = family.all_rules(config, layout)
        check_hf(rules, folder, config)
        if family.untrainable is not None:
            check_carried(path, config, family, layout, {name: one.shape for name, one in folder.tensors.items()})
        return cls(config, family, layout, folder, rules, left_out)

    def check_numbers(self) -> None:
        """Raise ValueError if copies differ or zeros are not zero: the tensors whose values may contradict a rule."""
        for rule in self.rules:
            if isinstance(rule.map, Zeros) or (isinstance(rule.map, Copies) and len(rule.hf) > 1):
                rule.to_mcore([self.folder.read(tensor.name) for tensor in rule.hf])


def has_lost_depths(path: Path) -> bool:
    """Return whether a folder's config counts MTP layers of which the folder has no tensor.

    Raises:
        ValueError: the folder cannot be read, or its family is unknown.
    """
    config = HFConfig.read(path)
    family = family_of(config)
    config = family.complete(config)
    if family.depths is None or not family.depths.configured(config):
        return False
    folder = HFFolder(path, QuantizationSettings.of(path, config.keys).numbers, config.flag(TIED))
    return not family.of_depths(config, folder.tensors)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def name_rows(rules: Iterable[Rule], shape_of: Callable[[Rule], Shape]) -> list[dict[str, Any]]:
    """Return one row per rule: `hugging_face`, `megatron` and `map`; `shape_of` returns shapes of carried tensors."""

    def shape(tensor: HFTensor | Piece, rule: Rule) -> Shape:
        return shape_of(rule) if tensor.shape is None else tensor.shape

    return [
        {
            "hugging_face": [{"name": hf.name, "shape": shape(hf, rule)} for hf in rule.hf],
            "megatron": [
                {"key": piece.key, "shape": piece.whole or shape(piece, rule)}
                | ({"aliases": piece.aliases} if piece.aliases else {})
                | ({"slab": {"offset": piece.offset, "shape": piece.shape}} if piece.offset else {})
                for piece in rule.mcore
            ],
            "map": rule.map.what,
        }
        for rule in rules
    ]


def name_lines(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return `HF name [shape], ... -> Megatron key [shape]  (map)  (N times)`, one line per kind of rule."""

    def line(row: dict[str, Any]) -> str:
        old = unnumbered(f"{one['name']} {list(one['shape'])}" for one in row["hugging_face"])
        new = unnumbered(f"{one['key']} {list(one['shape'])}" for one in row["megatron"])
        return f"{old} -> {new or 'nothing'}" + (f"  ({row['map']})" if row["map"] else "")

    return counted(map(line, rows))


def moved(pairs: Iterable[tuple[Iterable[str], Iterable[str]]]) -> list[str]:
    """Return old and new names where they differ, one line for all layers and experts of the same kind."""
    kinds = ((unnumbered(old), unnumbered(new)) for old, new in pairs)
    return counted(f"{old or 'zeros'} -> {new}" for old, new in kinds if old != new)


def counted(lines: Iterable[str]) -> list[str]:
    """Merge equal lines and add their number."""
    return [f"{line}  ({count} times)" if count > 1 else line for line, count in Counter(lines).items()]


def unnumbered(names: Iterable[str]) -> str:
    """Replace the numbers of layers and experts in names: `model.layers.*.mlp.experts.*.up_proj.weight`."""
    return ", ".join(dict.fromkeys(_NUMBER.sub("*", name) for name in names))


def sides(rule: Rule) -> tuple[list[str], list[str]]:
    """Return the names of a rule's tensors in the folder and in the checkpoint."""
    return [tensor.name for tensor in rule.hf], [piece.key for piece in rule.mcore]


def carried(rules: Iterable[Rule]) -> list[str] | str:
    """Return the names of the carried tensors."""
    keys = [piece.key for rule in rules for piece in rule.mcore if piece.key.startswith(CARRIED)]
    return [key.removeprefix(CARRIED) for key in keys] or "nothing"
