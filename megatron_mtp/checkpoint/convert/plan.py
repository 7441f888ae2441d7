"""The rules of a conversion, checked by names and shapes alone: every tensor has a rule, and every rule its tensors.

Rules are grouped into parts, one per layer, which are converted, recorded and resumed together. The name table at the
end shows them: rows for JSON, one per rule, or lines for people, with `*` for the numbers of layers and experts.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_mtp.checkpoint.convert.carried import REMEDY, check_carried
from megatron_mtp.checkpoint.families import CARRIED, Family, Layout, family_of
from megatron_mtp.checkpoint.families.naming import renaming
from megatron_mtp.checkpoint.families.rules import Copies, HFTensor, Piece, Rule, Zeros
from megatron_mtp.checkpoint.families.trunk import (
    ORIGINAL,
    ORIGINAL_NORMS,
    ORIGINAL_WEIGHTS,
    ZERO_QKV_BIAS,
    ZERO_ROUTER_BIAS,
)
from megatron_mtp.checkpoint.hf import Shape, by
from megatron_mtp.checkpoint.hf.config import TIED, HFConfig
from megatron_mtp.checkpoint.hf.folder import HFFolder, check_kind
from megatron_mtp.checkpoint.hf.quantized import QuantizationSettings
from megatron_mtp.megatron.checkpoint import DRAFT_VOCABULARY, DRAFTER
from megatron_mtp.megatron.checkpoint.reader import DistReader, StoredDepths

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
            f"'{name}'{_more(left)} in {stored.file} is not a tensor of a '{config.model_type}' model as {source} "
            "describes it, and nothing is dropped silently; correct the config, or the name."
        )


def _more(left: Collection[str]) -> str:
    return f" and {len(left) - 1} more" if len(left) > 1 else ""


def check_mcore(rules: list[Rule], reader: DistReader) -> None:
    """Check that every tensor of a checkpoint has one rule, and the shape that the config implies.

    A draft vocabulary is ignored, because the MTP layers of a folder draft all tokens, and so is a drafter, which has
    its own folder (`drafter-to-hf`).

    Raises:
        ValueError: a tensor is missing, unexpected, of another shape, or of a dtype that no weight has.
    """
    left = {key for key in reader.keys if key != DRAFT_VOCABULARY and not key.startswith(DRAFTER)}
    for piece in (piece for rule in rules for piece in rule.mcore):
        key = stored_key(piece, reader)
        left -= {piece.key, *piece.aliases}
        dtype, shape, wanted = reader.dtype(key), reader.shape(key), piece.whole or piece.shape
        if not dtype.is_floating_point and not key.startswith(CARRIED):
            raise ValueError(
                f"'{key}' in {reader.folder} is of type {str(dtype).removeprefix('torch.')}, but weights are "
                "floating-point numbers; the checkpoint is damaged."
            )
        if wanted is not None and not piece.fits(shape):
            wrong = f"is {by(shape)}, but the config makes it {by(wanted)}"
            raise ValueError(f"'{key}' in {reader.folder} {wrong}; one of the two is wrong.")
    if left:
        raise ValueError(
            f"'{min(left)}'{_more(left)} in {reader.folder} has no place in this family, and nothing is dropped "
            "silently; export to another family (--family)."
        )


def stored_key(piece: Piece, reader: DistReader) -> str:
    """Return the key under which a checkpoint stores a piece, its own or an alias.

    Raise ValueError if there is none.
    """
    for key in (piece.key, *piece.aliases):
        if reader.holds(key):
            return key
    raise ValueError(f"{reader.folder} lacks '{piece.key}', which the model's config calls for.")


def stored_layout(reader: DistReader, features: Iterable[str] = (), carried: Iterable[str] = ()) -> Layout:
    """Return the layout of a checkpoint's export: its stored MTP layers, and the forms of the folder."""
    return Layout(StoredDepths.of(reader.keys).layers, frozenset(features) - lost_features(reader), tuple(carried))


def lost_features(reader: DistReader) -> frozenset[str]:
    """Return forms that training removes from a converted checkpoint, because Megatron saves no originals."""
    kept = any(key.startswith(ORIGINAL) for key in reader.keys)
    return frozenset() if kept else frozenset({ORIGINAL_NORMS, ORIGINAL_WEIGHTS})


def zero_features(reader: DistReader) -> tuple[str, ...]:
    """Return forms with biases that the model does not have and some engines expect; they are written as zeros."""
    names = {ZERO_QKV_BIAS: "self_attention.linear_qkv.bias", ZERO_ROUTER_BIAS: "mlp.router.expert_bias"}
    return tuple(feature for feature, name in names.items() if not any(key.endswith(f".{name}") for key in reader.keys))


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

    def beside(self, reader: DistReader) -> "HFModel":
        """Return the model with rules for this checkpoint, which may lack zero biases and carried tensors."""
        features = (self.layout.features | set(zero_features(reader))) - lost_features(reader)
        layout = replace(self.layout, features=features)
        if self.family.untrainable is None:  # Megatron has trained it, and does not save what surrounds a text model
            held = tuple(name for name in layout.carried if reader.holds(f"{CARRIED}{name}"))
            layout = replace(layout, carried=held)
        return replace(self, layout=layout, rules=self.family.all_rules(self.config, layout))


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


Pair = tuple[str, Tensor, Tensor]
"""A name, the folder's tensor, and the checkpoint's: one as stored, the other converted."""


@dataclass(frozen=True)
class RuleSides:
    """The tensors of one rule on both sides, each read once, and what each side converts to.

        folder    q_proj  k_proj  v_proj    to_mcore ->    linear_qkv   there: equal to the stored one?
                  back: equal to these?        <- to_hf    linear_qkv   checkpoint

    Verification asks whether all pairs are bit-identical (verify/verify.py); an audit explains those that differ
    (audit/comparing.py).

    Attributes:
        rule: the rule.
        theirs: the folder's tensors by name; an audit may lack some.
        ours: the checkpoint's pieces, in the order of the rule.
    """

    rule: Rule
    theirs: Mapping[str, Tensor]
    ours: Sequence[Tensor]

    def back(self) -> Iterator[Pair]:
        """Return the folder's tensors paired with those converted from the checkpoint, by the folder's names.

        Zeros, and norms whose original was lost in training, are computed in float32 and rounded to the folder's dtype.
        """
        for tensor, made in zip(self.rule.hf, self.rule.to_hf(self.ours), strict=True):
            if (held := self.theirs.get(tensor.name)) is not None:
                has_no_type = self.rule.rounds or not self.rule.mcore
                yield tensor.name, held, made.to(held.dtype) if has_no_type else made

    def there(self) -> Iterator[Pair]:
        """Return the checkpoint's tensors paired with those converted from the folder, by the checkpoint's keys.

        Raises:
            ValueError: copies in the folder differ, or zeros are not zero.
        """
        made = self.rule.to_mcore([self.theirs[tensor.name] for tensor in self.rule.hf])
        for piece, one, stored in zip(self.rule.mcore, made, self.ours, strict=True):
            yield piece.key, one, stored


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
