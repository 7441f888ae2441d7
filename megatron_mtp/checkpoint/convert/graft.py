"""graft: put the MTP layers of a donor on another trunk that was fine-tuned, merged or trained by RL without them.

In:  a donor with MTP layers and a target without, each a Hugging Face folder or a Megatron checkpoint.
Out: a Megatron checkpoint of the target's trunk and the donor's MTP layers, bit by bit; quantized ones as bfloat16. If
     the trunk has another dtype, the MTP layers are cast to it.

Both sides are read by Megatron's keys, a layer at a time, so their families may differ:

    model.layers.46.eh_proj.weight of the donor  ->  mtp.layers.0.eh_proj.weight  ->  the target's name in mcore-to-hf

An MTP layer uses the sizes, positions and norms of its trunk, and the trunk's embedding and output layer. So both
models must agree in every layer setting of Megatron's configuration and in the ids of their tokens. The trunk may have
more or fewer tokens, unless the MTP layers have a row for each token.

A model that Megatron cannot run has no such configuration. Its tensors are carried under their own names, so both must
have the same `model_type`, with equal config keys.
"""

import filecmp
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_mtp.checkpoint.convert.computation import differences, settings_of
from megatron_mtp.checkpoint.convert.edit import OF_DEPTHS, changed_args, copied, correct_origin
from megatron_mtp.checkpoint.convert.hf_form import kept_origin
from megatron_mtp.checkpoint.convert.import_hf import (
    common_of,
    fingerprint_of,
    groups_of,
    keep_hf_files,
    megatron_arguments,
    origin,
)
from megatron_mtp.checkpoint.convert.plan import HFModel
from megatron_mtp.checkpoint.convert.stream import (
    STAYS_WIDE,
    CheckpointFiles,
    Conversion,
    Entry,
    Group,
    Options,
    keep_files,
)
from megatron_mtp.checkpoint.convert.tokens import Tokens
from megatron_mtp.checkpoint.families import CARRIED, Family, family_of
from megatron_mtp.checkpoint.families.family import COPIES, STORED_HEAD, class_keys, computing
from megatron_mtp.checkpoint.families.inside import check_no_drafter
from megatron_mtp.checkpoint.families.trunk import ORIGINAL
from megatron_mtp.checkpoint.families.wrapped import PREFIXES
from megatron_mtp.checkpoint.hf import Shape, by
from megatron_mtp.checkpoint.hf.config import CONFIG, HFConfig
from megatron_mtp.data.tokenizer import read_tokenizer
from megatron_mtp.megatron.checkpoint import DRAFT_VOCABULARY, HF_FILES, other_key
from megatron_mtp.megatron.checkpoint.iterations import has_tokenizer, is_checkpoint, run_tokenizer
from megatron_mtp.megatron.checkpoint.reader import DistReader, StoredDepths
from megatron_mtp.megatron.patterns import SHARDED_STACK, trunk_and_depths
from megatron_mtp.model.arguments import check_trainable
from megatron_mtp.model.mtp import SHARDED_TF_LAYER

DEPTHS = "mtp."
"""Key prefix of MTP layers and of their draft vocabulary."""
OF_TRUNKS = {"num_layers", "moe_layer_freq", "hybrid_layer_pattern", "max_sequence_length"}
"""Settings in which the trunks may differ: number of layers, and maximum length."""
OF_TOKENS = {"vocab_size", "max_position_embeddings"}
"""Keys in which the configs of models that Megatron cannot run may differ, in addition to those that count MTP layers.
"""
_OWN_ROWS = re.compile(r"\b(word_embeddings|output_layer|embed_tokens|shared_head\.output)\.weight$")
"""Embedding and head of an MTP layer, where it does not use the trunk's."""
_OUTSIDE = re.compile(rf"^.*\blayers\.\d+\.({SHARDED_TF_LAYER}\.)?")
"""Prefix of a tensor's name in its layer."""


@dataclass(frozen=True)
class CarriedModel:
    """A model that Megatron cannot run.

    Attributes:
        family: determines which carried tensors belong to MTP layers.
        config: its complete config.
        folder: folder of its `config.json`.
    """

    family: Family
    config: HFConfig
    folder: Path

    @classmethod
    def of(cls, folder: Path) -> "CarriedModel":
        """Read the model of this folder's `config.json`. Raise ValueError if there is none, or no family knows it."""
        config = HFConfig.read(folder)
        family = family_of(config)
        return cls(family, family.complete(config), folder)

    def is_of_depth(self, name: str) -> bool:
        """Return whether the carried tensor with this Hugging Face name belongs to an MTP layer."""
        return self.family.depths is not None and self.family.depths.depth_of(self.config, name) is not None

    @property
    def settings(self) -> dict[str, Any]:
        """Return the keys that determine how it computes, without those in which trunks may differ."""
        counts = {"num_mtp_layers", *(self.family.depths.keys if self.family.depths else ())}
        keys = computing(class_keys(self.folder))
        return {name: value for name, value in keys.items() if name.split(".")[-1] not in OF_TOKENS | counts}


@dataclass(frozen=True)
class GraftSide:
    """A donor or a target, by Megatron's keys.

    Attributes:
        path: path given by the user.
        args: Megatron's arguments of the model.
        parts: its tensors as a conversion writes them.
        tokenizer: its tokenizer folder; None if there is none.
        rows: rows of the embedding, without padding.
        features: forms of the Hugging Face folder that it is or was.
        has: forms that such a folder may have.
        record: changes when the model changes.
        common: common state of its checkpoint.
        keep: function that copies config and tokenizer to a new checkpoint's folder.
        carried: the model of its carried tensors; None if Megatron can run it.
    """

    path: Path
    args: Namespace
    parts: list[list[Group]]
    tokenizer: Path | None
    rows: int
    features: frozenset[str]
    has: Set[str]
    record: dict[str, Any]
    common: dict[str, Any]
    keep: Callable[[Path], None]
    carried: CarriedModel | None

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Entry of every tensor, or of a slab of it, by key."""
        return {key: entry for part in self.parts for group in part for entry in group.entries for key in entry.keys}

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Shape of every tensor by key."""
        return {key: entry.whole or entry.shape for key, entry in self.entries.items()}

    def is_of_depth(self, key: str) -> bool:
        """Return whether the tensor with this key belongs to an MTP layer or its draft vocabulary."""
        if self.carried is not None and key.startswith(CARRIED):
            return self.carried.is_of_depth(key.removeprefix(CARRIED))
        return key.removeprefix(ORIGINAL).startswith(DEPTHS)

    def parts_of(self, of_depths: bool) -> list[list[Group]]:
        """Return the tensors of the MTP layers, or all others."""

        def wanted(group: Group) -> bool:
            return any(self.is_of_depth(key) for entry in group.entries for key in entry.keys) == of_depths

        return [part for whole in self.parts if (part := [*filter(wanted, whole)])]

    def check_runs(self) -> None:
        """Raise ValueError unless Megatron can run the model."""
        check_trainable(self.args, str(self.path))

    @property
    def depths(self) -> int:
        """Number of physical MTP layers."""
        return StoredDepths.of(self.shapes).layers

    @property
    def layers(self) -> tuple[str | None, list[str]]:
        """Symbols of a hybrid model's layers, in its trunk and inside an MTP layer; None and empty for a GPT."""
        pattern = getattr(self.args, "hybrid_layer_pattern", None)
        return (None, []) if pattern is None else trunk_and_depths(pattern)

    @property
    def last_layer(self) -> int:
        """Index of the trunk's last layer."""
        return max(int(key.split(".")[2]) for key in self.shapes if key.startswith("decoder.layers."))


def open_side(path: Path, options: Options | None = None) -> GraftSide:
    """Open a folder or a checkpoint without reading weights.

    The config of a folder may count MTP layers that the folder lacks, because transformers drops them.

    Args:
        path: the folder or checkpoint.
        options: conversion options.

    Raises:
        ValueError: it is damaged.
    """
    options = options or Options()
    if is_checkpoint(path) and not (path / CONFIG).is_file():
        return _checkpoint_side(path, options)
    return _folder_side(path, options)


def _folder_side(path: Path, options: Options) -> GraftSide:
    model = HFModel.read(path, lost_depths=True)
    model.check_numbers()
    args = megatron_arguments(model)
    return GraftSide(
        path,
        args,
        parts=groups_of(model, options),
        tokenizer=path if has_tokenizer(path) else None,
        rows=model.config.integer("vocab_size"),
        features=model.layout.features,
        has=model.family.features.keys(),
        record=fingerprint_of(model, options),
        common=common_of(model, args),
        keep=lambda folder: keep_hf_files(path, folder / HF_FILES, origin(model)),
        carried=CarriedModel.of(path) if _is_carried(args) else None,
    )


def _is_carried(args: Namespace) -> bool:
    return bool(getattr(args, "megatron_mtp_untrainable", None))


def _checkpoint_side(path: Path, options: Options) -> GraftSide:
    reader = DistReader(path)
    args, kept = reader.common()["args"], reader.home
    tokenizer = run_tokenizer(args, kept)
    groups = [copied(reader, key) for key in reader.keys]
    usual = _usual_type(entry for group in groups for entry in group.entries)
    carried = CarriedModel.of(kept / HF_FILES) if _is_carried(args) else None
    if carried is not None:
        rows = carried.config.integer("vocab_size")
    else:
        rows = getattr(args, "vocab_size", None) or Tokens.of(tokenizer, args).vocabulary(reader)
    return GraftSide(
        path,
        args,
        parts=[[_cast(group, lambda key, own: options.cast(key, own) if own == usual else own) for group in groups]],
        tokenizer=tokenizer,
        rows=rows,
        features=frozenset(kept_origin(kept / HF_FILES).get("layout", {}).get("features", ())),
        has=frozenset(),
        record=reader.fingerprint() | {"dtype": str(options.dtype)},
        common=changed_args(reader),
        keep=partial(keep_files, kept),
        carried=carried,
    )


def plan_graft(donor: Path, target: Path, options: Options, trust_remote_code: bool = False) -> Conversion:
    """Plan `graft`, from names and shapes.

    Args:
        donor: folder or checkpoint with MTP layers.
        target: folder or checkpoint without.
        options: conversion options.
        trust_remote_code: whether to run Python code that comes with tokenizers.

    Raises:
        ValueError: the MTP layers do not fit, or a side is damaged.
    """
    given, trunk = open_side(donor, options), open_side(target, options)
    _check_depths(given, trunk)
    if given.carried is None and trunk.carried is None:
        fits = [f"settings: the same {_check_computation(given, trunk)} of Megatron's configuration"]
        _check_layers(given, trunk)
        changes = {name: getattr(given.args, name, value) for name, value in OF_DEPTHS.items()}
    else:
        fits = [f"settings: the same {_check_carried(given, trunk)} keys of the config"]
        changes = {"mtp_num_layers": given.depths}
    fits += _compare_rows(given, trunk)
    tokens, new_tokens = _compare_tokens(given, trunk, trust_remote_code)
    if trunk.layers[0] is not None:
        pattern = trunk.args.hybrid_layer_pattern.split("/")[0]
        changes["hybrid_layer_pattern"] = "/".join([pattern, *given.layers[1]])

    types = _types_of(trunk)
    common = trunk.common | {"args": Namespace(**{**vars(trunk.args), **changes})}

    def keep(folder: Path) -> None:
        trunk.keep(folder)
        # copies of embedding and head that both the donor's folder and the target's family have in MTP layers
        added = given.features & trunk.has & COPIES.keys()
        if given.carried is not None:
            added = given.features - STORED_HEAD.keys()
        names = {key.removeprefix(CARRIED) for key in given.entries if key.startswith(CARRIED)}
        carried = {name for name in names if given.is_of_depth(CARRIED + name)}
        correct_origin(folder / HF_FILES, given.depths, added=added, carried=carried)

    return Conversion(
        (target, donor),
        "Megatron",
        given.depths,
        [*trunk.parts_of(False), *([_cast(group, types) for group in part] for part in given.parts_of(True))],
        {"donor": given.record, "target": trunk.record},
        lambda folder, _: CheckpointFiles(folder.path, common),
        keep,
        notes={
            "fits": [*fits, *tokens],
            "not known": ["how well the MTP layers draft for this trunk, which --text measures", *new_tokens],
        },
    )


def _check_depths(donor: GraftSide, target: GraftSide) -> None:
    for side, advice in ((donor, "give a donor that has some"), (target, "give its trunk alone")):
        check_no_drafter(
            (key.removeprefix(CARRIED) for key in side.entries if key.startswith(CARRIED)), side.path, advice
        )
    if not donor.depths:
        raise ValueError(f"{donor.path} has no MTP layers to graft; give a donor that has some.")
    if target.depths:
        raise ValueError(
            f"{target.path} has MTP layers already; graft on a copy of its trunk alone, which hf-to-mcore --trunk-only "
            "writes of a folder, and drop-mtp of a checkpoint."
        )
    kinds = ["a GPT" if side.layers[0] is None else "a hybrid" for side in (donor, target)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"{donor.path} is {kinds[0]}, and {target.path} is {kinds[1]}; bring one of them into the other's form by "
            "gpt-to-hybrid or hybrid-to-gpt first."
        )


def _refused(donor: GraftSide, target: GraftSide, what: str) -> ValueError:
    return ValueError(
        f"the MTP layers of {donor.path} do not fit the trunk of {target.path}: {what}; give the MTP layers of the "
        "model that the trunk was trained from, or make new ones (attach-mtp)."
    )


def _check_computation(donor: GraftSide, target: GraftSide) -> int:
    """Count Megatron's settings of both models. Raise ValueError if one differs."""
    one, other = (
        {name: value for name, value in settings_of(side.args).items() if name not in OF_TRUNKS}
        for side in (donor, target)
    )
    if different := differences(one, other, "and the trunk"):
        raise _refused(donor, target, f"the donor has {different[0]}")
    return len(one)


def _check_carried(donor: GraftSide, target: GraftSide) -> int:
    """Count the keys of both configs. Raise ValueError if one differs, or Megatron can run one of the models."""
    one, other = donor.carried, target.carried
    if one is None or other is None or one.config.model_type != other.config.model_type:
        side, beside = (donor, target) if one is not None else (target, donor)
        raise ValueError(
            f"{side.path} is a model that Megatron cannot run ({side.args.megatron_mtp_untrainable}); MTP layers are "
            f"grafted between such models only if both have one model_type, and {beside.path} has another."
        )
    if different := differences(one.settings, other.settings, "and the trunk"):
        raise _refused(donor, target, f"the donor has {different[0]}")
    if (donor.features ^ target.features) & PREFIXES.keys():
        raise _refused(donor, target, "their folders have the text model under different prefixes")
    return len(one.settings)


def _compare_rows(donor: GraftSide, target: GraftSide) -> list[str]:
    """Return how many more or fewer tokens the trunk has. Raise ValueError if MTP layers need a row for each token."""
    if DRAFT_VOCABULARY in donor.entries:
        (group,) = (group for part in donor.parts for group in part if DRAFT_VOCABULARY in group.entries[0].keys)
        if (largest := int(group.make()[0].max())) >= target.rows:
            raise _refused(donor, target, f"they draft the token {largest}, and the trunk has {target.rows} tokens")
    if donor.rows == target.rows:
        return []
    if own := sorted(key for key in donor.entries if donor.is_of_depth(key) and _OWN_ROWS.search(key)):
        rows = f"rows for the donor's {donor.rows} tokens, and the trunk has {target.rows}"
        raise _refused(donor, target, f"'{own[0].removeprefix(CARRIED)}' has {rows}")
    more = f"{abs(target.rows - donor.rows)} {'more' if target.rows > donor.rows else 'fewer'} at the trunk"
    return [f"rows of the vocabulary: {more}; the MTP layers have none of their own"]


def _usual_type(entries: Iterable[Entry]) -> torch.dtype:
    """Return the most common floating-point type, counted by numbers."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in entries:
        sizes[entry.dtype] += prod(entry.shape) * entry.dtype.is_floating_point
    return sizes.most_common(1)[0][0]


def _types_of(trunk: GraftSide) -> Callable[[str, torch.dtype], torch.dtype]:
    """Return a function from an MTP tensor's key and type to the type of the same weight in the trunk's layers."""
    usual = _usual_type(trunk.entries.values())
    layers = {_OUTSIDE.sub("", key): one.dtype for key, one in trunk.entries.items() if _OUTSIDE.match(key)}

    def type_of(key: str, own: torch.dtype) -> torch.dtype:
        if not own.is_floating_point:
            return own
        return layers.get(_OUTSIDE.sub("", key), own if key.endswith(STAYS_WIDE) else usual)

    return type_of


def _cast(group: Group, type_of: Callable[[str, torch.dtype], torch.dtype]) -> Group:
    """Return the group with its tensors converted to other types."""
    entries = [replace(entry, dtype=type_of(entry.keys[0], entry.dtype)) for entry in group.entries]
    if entries == group.entries:
        return group
    return Group(
        entries,
        group.size,
        lambda: [tensor.to(entry.dtype) for tensor, entry in zip(group.make(), entries, strict=True)],
    )


def _check_layers(donor: GraftSide, target: GraftSide) -> None:
    """Raise ValueError if an MTP layer differs in form from the trunk's last layers of the same kind."""
    for inside, layer in _counterparts(donor, target):
        of_donor, of_trunk = _form(donor.shapes, inside), _form(target.shapes, layer)
        for name in sorted(of_donor | of_trunk):
            one, other = of_donor.get(name), of_trunk.get(name)
            if one != other:
                theirs, own = ("absent" if shape is None else by(shape) for shape in (one, other))
                raise _refused(donor, target, f"'{name}' is {theirs} in their layer, and {own} in the trunk's last")


def _counterparts(donor: GraftSide, target: GraftSide) -> Iterator[tuple[str, str]]:
    """Return the prefixes of every layer inside the first MTP layer, and of a trunk layer of the same kind."""
    trunk, depths = target.layers[0], donor.layers[1]
    if trunk is None:
        yield f"mtp.layers.0.{SHARDED_TF_LAYER}.", f"decoder.layers.{target.last_layer}."
        return
    for index, kind in enumerate(depths[0]):
        if kind in trunk:
            yield f"mtp.layers.0.{SHARDED_STACK}.layers.{index}.", f"decoder.layers.{trunk.rindex(kind)}."


def _form(shapes: Mapping[str, Shape], prefix: str) -> dict[str, Shape]:
    """Return shapes of a layer's tensors by their names within it; norms under one of their two names."""
    names = {key: min(key, other_key(key) or key) for key in shapes if key.startswith(prefix)}
    return {name.removeprefix(prefix): shapes[key] for key, name in names.items()}


def _compare_tokens(donor: GraftSide, target: GraftSide, trust_remote_code: bool) -> tuple[list[str], list[str]]:
    """Describe what is known of tokens that both tokenizers have. Raise ValueError if one has another id."""
    one, other = donor.tokenizer, target.tokenizer
    if one is None or other is None:
        path = donor.path if one is None else target.path
        return [], [f"tokens: {path} has no tokenizer, so its ids may have another meaning"]
    files = [folder / "tokenizer.json" for folder in (one, other)]
    if all(file.is_file() for file in files) and filecmp.cmp(files[0], files[1], shallow=False):
        return ["tokens: the same tokenizer"], []
    theirs, own = (read_tokenizer(folder, trust_remote_code).get_vocab() for folder in (one, other))
    wrong = sorted((id, token) for token, id in theirs.items() if own.get(token, id) != id)
    if wrong:
        id, token = wrong[0]
        ids = f"the first {token!r} ({id} at the donor, {own[token]} at the trunk)"
        raise _refused(donor, target, f"{len(wrong)} of {len(theirs)} tokens have another id, {ids}")
    new = sorted(own.keys() - theirs.keys(), key=own.__getitem__)
    said = [f"tokens: {len(new)} that the donor's tokenizer lacks, the first {new[0]!r}"] if new else []
    return [f"tokens: the same ids for {len(own) - len(new)} tokens"], said
