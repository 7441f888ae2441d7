"""From a Megatron distributed checkpoint to a Hugging Face folder, a layer at a time."""

import functools
import json
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_mtp.checkpoint.convert.options import Converted, Options
from megatron_mtp.checkpoint.convert.passes import pass_keys
from megatron_mtp.checkpoint.convert.plan import check_mcore, parts_of, stored_key, stored_layout
from megatron_mtp.checkpoint.convert.streaming import Budget, PartialFolder, Report, run_parts
from megatron_mtp.checkpoint.families import Family, Layout, family_of
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.hf.config import CONFIG, HFConfig, read_json
from megatron_mtp.checkpoint.hf.shards import NOT_KEPT, HFShards
from megatron_mtp.checkpoint.mcore.iterations import HF_FILES, ORIGIN
from megatron_mtp.checkpoint.mcore.stored_depths import StoredDepths
from megatron_mtp.checkpoint.mcore.tensors import DistReader


@dataclass(frozen=True)
class HFForm:
    """The form of the folder that an export makes.

    Attributes:
        keys: keys of its `config.json`.
        features: names of the forms that it uses, out of the family's.
        carried: names of the tensors that no rule covers.
        files: folder of the tokenizer and other files to copy; None for none.
        texts: further files, by name.
    """

    keys: dict[str, Any]
    features: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    files: Path | None = None
    texts: dict[str, str] = field(default_factory=dict)


def kept_form(folder: Path) -> HFForm | None:
    """The form that an import kept beside its checkpoint; None if there is none.

    Raises:
        ValueError: what it kept is damaged.
    """
    kept = folder / HF_FILES
    if not (kept / CONFIG).is_file():
        return None
    keys, origin = read_json(kept / CONFIG), kept_origin(kept)
    HFConfig.from_keys(keys, str(kept / CONFIG))
    layout = origin.get("layout", {})
    if origin.get("quantised", False):
        keys.pop("quantization_config", None)  # its tensors were read as bfloat16
    return HFForm(keys, tuple(layout.get("features", ())), tuple(layout.get("carried", ())), kept)


def kept_origin(kept: Path) -> dict[str, Any]:
    """The record of an import (`importing.origin`), beside the files that it kept; empty without one.

    Raises:
        ValueError: it is damaged.
    """
    if not (kept / ORIGIN).is_file():
        return {}
    origin = read_json(kept / ORIGIN)
    layout = origin.get("layout", {}) if isinstance(origin, dict) else None
    lists = [layout.get(name, []) for name in ("features", "carried")] if isinstance(layout, dict) else [None]
    if not all(isinstance(one, list) and all(isinstance(word, str) for word in one) for one in lists):
        raise ValueError(f"{kept / ORIGIN} is no record of a conversion; fetch the checkpoint again, or convert anew.")
    return dict(origin)


def mcore_to_hf(source: Path, target: Path, options: Options, form: HFForm) -> Converted:
    """Write the model of a distributed checkpoint as a folder that transformers, vLLM and SGLang load.

    Args:
        source: the checkpoint.
        target: the folder to make.
        options: how to convert.
        form: the form of the folder.

    Raises:
        ValueError: the checkpoint is damaged or does not fit the form's family, or the target is taken.
        OSError: the target cannot be written.
    """
    export = Export.of(source, target, form)
    reader, rules, keys = export.reader, export.rules, export.keys
    partial = PartialFolder(target, source, _fingerprint(reader, keys, options), options.resume)
    tensors = export.tensors(options)
    shards = HFShards(partial.path, tensors, options.shard_bytes, partial.resumed)
    budget = Budget()
    work = [
        (_bytes(part, reader), functools.partial(_write_part, reader, part, shards, budget))
        for part in parts_of(rules).values()
    ]
    run_parts(partial, work, options.workers, options.quiet, shards.holds)
    _write_files(partial.path, form, with_dtype(keys, tensors))
    partial.finish()
    return Converted(export.family.title, export.depths, len(tensors), export.bytes())


@dataclass(frozen=True)
class Export:
    """A checkpoint whose tensors fit a form, and the config keys of the folder to make."""

    reader: DistReader
    family: Family
    depths: int
    keys: dict[str, Any]
    rules: list[Rule]

    @classmethod
    def of(cls, source: Path, target: Path, form: HFForm) -> "Export":
        """Match a checkpoint with a form.

        Raises:
            ValueError: the checkpoint is damaged, or does not fit the form's family.
        """
        reader = DistReader(source)
        layout = stored_layout(reader, form.features, form.carried)
        keys = with_depths(form.keys, layout.depths, pattern_of(reader))
        keys |= pass_keys(reader.common()["args"]) if layout.depths else {}
        config = HFConfig.from_keys(keys, f"the {CONFIG} for {target}")
        family = family_of(config)
        config = config.with_defaults(family.defaults)
        _check_depths(family, reader, layout)
        rules = family.all_rules(config, layout)
        check_mcore(rules, reader)
        return cls(reader, family, layout.depths, keys, rules)

    def tensors(self, options: Options) -> "list[Written]":
        """The tensors that will be in the folder."""
        return [entry for rule in self.rules for entry in _written(rule, self.reader, options)]

    def bytes(self) -> int:
        """Size of the checkpoint's tensors."""
        return _bytes(self.rules, self.reader)


def pattern_of(reader: DistReader) -> str | None:
    """The pattern of a hybrid checkpoint; None for a GPT's."""
    return getattr(reader.common()["args"], "hybrid_layer_pattern", None)


def with_depths(keys: dict[str, Any], depths: int, pattern: str | None = None) -> dict[str, Any]:
    """The config's keys for this number of depths; unchanged if they imply it already.

    Args:
        keys: of the config.
        depths: number of depths.
        pattern: of a hybrid, from which keys that name the layers of a depth are written.
    """
    config = HFConfig.from_keys(keys)
    stored = family_of(config).depths
    if stored is None:
        return keys
    configured = stored.configured(config)
    if (stored.default if configured is None else configured) in (None, depths):
        return keys
    counts: dict[str, Any] = {key: depths for key in stored.keys if config.has(key)} or {stored.keys[0]: depths}
    if depths and stored.layers_key is not None and pattern is not None:
        counts[stored.layers_key] = pattern.rpartition("/")[2]
    whole = {**keys, **{key: count for key, count in counts.items() if key in keys}}
    if "text_config" not in keys:
        return whole | counts
    return {**whole, "text_config": {**keys["text_config"], **counts}}


Written = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and type of a tensor in the folder."""


def with_dtype(keys: dict[str, Any], tensors: list[Written]) -> dict[str, Any]:
    """The config's keys with the commonest type of the tensors' numbers in `dtype` and `torch_dtype`, if present."""
    counts: Counter[torch.dtype] = Counter()
    for _, shape, dtype in tensors:
        counts[dtype] += torch.Size(shape).numel() * dtype.is_floating_point
    name = str(counts.most_common(1)[0][0]).removeprefix("torch.")
    types: dict[str, Any] = {key: name for key in ("dtype", "torch_dtype") if key in keys}
    inner = {"text_config": with_dtype(keys["text_config"], tensors)} if "text_config" in keys else {}
    return {**keys, **types, **inner}


def _check_depths(family: Family, reader: DistReader, layout: Layout) -> None:
    if not layout.depths:
        return
    if family.depths is None:
        raise ValueError(
            f"{reader.folder} has {layout.depths} MTP depth(s), for which {family.title} folders have no place; export "
            "it to a family with MTP (--family), or without the depths (drop-mtp)."
        )
    if family.depths.limit is not None and layout.depths > family.depths.limit:
        raise ValueError(
            f"{reader.folder} has {layout.depths} MTP depths, but {family.title} holds at most {family.depths.limit}; "
            "choose another family (--family)."
        )
    if not StoredDepths.of(reader.keys).sequential:
        raise ValueError(
            f"{reader.folder} has parallel heads (--mtp-architecture parallel), which no Hugging Face family stores; "
            "export it without them (drop-mtp)."
        )


def _written(rule: Rule, reader: DistReader, options: Options) -> list[Written]:
    """The tensors that a rule makes in the folder."""
    if not rule.mcore:
        return [(tensor.name, tensor.shape or (), torch.float32) for tensor in rule.hf]
    key = stored_key(rule.mcore[0], reader)
    out = []
    for tensor in rule.hf:
        shape = reader.shape(key) if tensor.shape is None else tensor.shape
        dtype = torch.float32 if rule.rounds else reader.dtype(key)
        out.append((tensor.name, shape, options.cast(tensor.name, dtype)))
    return out


def _write_part(
    reader: DistReader, rules: list[Rule], shards: HFShards, budget: Budget, report: Report
) -> dict[str, int]:
    """Write the tensors of these rules; returns the checksum of each by its name."""
    checksums = {}
    for rule in rules:
        size = _bytes([rule], reader)
        with budget.taking(size):
            pieces = [reader.read(stored_key(piece, reader), piece.offset, piece.shape) for piece in rule.mcore]
            for tensor, value in zip(rule.hf, rule.to_hf(pieces), strict=True):
                checksums[tensor.name] = shards.write(tensor.name, value)
        report(size)
    shards.sync(checksums)
    return checksums


def _bytes(rules: list[Rule], reader: DistReader) -> int:
    sizes = ((piece.shape, stored_key(piece, reader)) for rule in rules for piece in rule.mcore)
    return sum(
        torch.Size(reader.shape(key) if shape is None else shape).numel() * reader.dtype(key).itemsize
        for shape, key in sizes
    )


def _fingerprint(reader: DistReader, keys: dict[str, Any], options: Options) -> dict[str, Any]:
    return {
        "source": reader.fingerprint(),
        "config": keys,
        "dtype": str(options.dtype),
        "shard_bytes": options.shard_bytes,
    }


def _write_files(folder: Path, form: HFForm, keys: dict[str, Any]) -> None:
    if form.files is not None:
        for file in sorted(form.files.iterdir()):
            if file.is_file() and file.name not in (ORIGIN, CONFIG) and not file.name.endswith(NOT_KEPT):
                shutil.copyfile(file, folder / file.name)
    for name, text in {**form.texts, CONFIG: json.dumps(keys, indent=2) + "\n"}.items():
        (folder / name).write_text(text)
