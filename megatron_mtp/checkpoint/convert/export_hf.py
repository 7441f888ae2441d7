"""mcore-to-hf: from a Megatron distributed checkpoint to a Hugging Face folder, a layer at a time."""

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.checkpoint.convert.hf_form import HFForm, pattern_of, with_depths
from megatron_mtp.checkpoint.convert.import_hf import pass_keys
from megatron_mtp.checkpoint.convert.partial_folder import PartialFolder
from megatron_mtp.checkpoint.convert.plan import carried, moved, parts_of, sides
from megatron_mtp.checkpoint.convert.quantizing import PLAIN, Quantize, loaded_by
from megatron_mtp.checkpoint.convert.quantizing import config as quantization_config
from megatron_mtp.checkpoint.convert.stored import check_mcore, stored_key, stored_layout
from megatron_mtp.checkpoint.convert.stream import Conversion, Entry, Group, Made, Options
from megatron_mtp.checkpoint.families import CARRIED, Family, Layout, family_of
from megatron_mtp.checkpoint.families.inside import InnerDrafter
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.families.trained import epsilon_note
from megatron_mtp.checkpoint.hf.config import CONFIG, DRAFTED, INDEX_SHARE, INDEXER, HFConfig, text_key
from megatron_mtp.checkpoint.hf.folder import HFFolder
from megatron_mtp.checkpoint.hf.forms.form import Form, name_of
from megatron_mtp.checkpoint.hf.quantized import SIDE_FILES, module_of
from megatron_mtp.checkpoint.hf.writer import HFShards
from megatron_mtp.common.acceptance import RECORD
from megatron_mtp.common.files import without_weights
from megatron_mtp.common.record import carry_record
from megatron_mtp.data.sentence_pieces import model_in
from megatron_mtp.megatron.checkpoint import DRAFT_VOCABULARY, DRAFTER, EMBEDDING, ORIGIN, RELEASE
from megatron_mtp.megatron.checkpoint.reader import DistReader, StoredDepths

DRAFTS_ALL = f"in {DRAFTED}, which hf-to-mcore and SGLang (--speculative-token-map) read; others draft all tokens"
"""What happens to a checkpoint's draft vocabulary: the folder's output layer has all rows."""


SENTENCE_PIECES = "a SentencePiece model alone, which transformers may read with other ids; encode with sentencepiece"
"""Note for an export whose tokenizer transformers does not support."""


def mcore_to_hf(source: Path | DistReader, target: Path, options: Options, form: HFForm) -> dict[str, Any]:
    """Export the model of a distributed checkpoint to a folder that transformers, vLLM and SGLang load."""
    return plan_export(source, target, options, form).write(target, options)


def plan_export(source: Path | DistReader, target: Path, options: Options, form: HFForm) -> Conversion:
    """Plan `mcore-to-hf`, from names and shapes alone. Raise ValueError if the form does not fit the checkpoint."""
    export = Export.of(source, target, form)
    reader, coded = export.reader, export.coded(options.quantize)
    parts = [[export.group(rule, options, coded) for rule in part] for part in parts_of(export.rules).values()]
    shapes = {key: entry.shape for part in parts for group in part for entry in group.entries for key in entry.keys}
    drafted = reader.read(DRAFT_VOCABULARY).tolist() if reader.holds(DRAFT_VOCABULARY) else None

    def keep(folder: Path) -> None:
        _write_files(folder, form, export.config(options, coded))
        if drafted is not None:
            torch.save(drafted, folder / DRAFTED)
        carry_record(reader.home, folder)

    record = {
        "source": reader.fingerprint(),
        "config": export.keys,
        "dtype": str(options.dtype),
        "shard_bytes": options.shard_bytes,
        "quantize": asdict(options.quantize),
    }
    lenders = sorted({folder.folder for folder in export.lent.values()})
    if lenders:
        files = sorted({folder.tensors[name].file for name, folder in export.lent.items()})
        record["lent"] = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return Conversion(
        (reader.home, *lenders),
        export.family.title,
        export.depths,
        parts,
        record,
        lambda folder, options: FolderFiles(folder, parts, options),
        keep,
        facts={
            "carried as they are": carried(export.rules),
            "left out": [key for key in reader.keys if key == DRAFT_VOCABULARY or key.startswith(DRAFTER)] or "nothing",
            "names": moved(sides(rule)[::-1] for rule in export.rules),
        },
        notes=({} if drafted is None else {"draft vocabulary": f"{len(drafted)} tokens, {DRAFTS_ALL}"})
        | ({"tokenizer": SENTENCE_PIECES} if form.files is not None and model_in(form.files) else {})
        | ({"loaded by": loaded_by(coded, shapes)} if coded else {})
        | ({"carried from": f"{lenders[0]}: {len(export.lent)} tensors that the checkpoint lacks"} if lenders else {})
        | _drafter_note(export)
        | epsilon_note(reader.common()["args"]),
    )


def _drafter_note(export: "Export") -> dict[str, str]:
    """Return a note that the drafter inside the model was made for the trunk's hidden states before training."""
    inner = InnerDrafter.of({}, (tensor.name for rule in export.rules for tensor in rule.hf))
    if inner is None or export.reader.folder.name == RELEASE:
        return {}
    return {"drafter inside": f"{inner.says}, was made for the states of the trunk before its training: train it anew"}


@dataclass(frozen=True)
class Export:
    """A checkpoint whose tensors fit a form.

    Attributes:
        depths: number of physical MTP layers.
        keys: keys of the `config.json` to write, without dtypes and quantization.
        rules: rule of every tensor.
        settings: the keys with the family's defaults.
        lent: carried tensors that the checkpoint lacks, by name, in the folder that provides them.
    """

    reader: DistReader
    family: Family
    depths: int
    keys: dict[str, Any]
    rules: list[Rule]
    settings: HFConfig
    lent: Mapping[str, HFFolder] = MappingProxyType({})

    @classmethod
    def of(cls, source: Path | DistReader, target: Path, form: HFForm) -> "Export":
        """Match a checkpoint, by path or reader, with a form. Raise ValueError if it does not fit."""
        reader = source if isinstance(source, DistReader) else DistReader(source)
        layout = stored_layout(reader, form.features, form.carried)
        keys = with_depths(form.keys, layout.depths, pattern_of(reader))
        passes = pass_keys(reader.common()["args"]) if layout.depths else {}
        keys |= passes
        config = HFConfig.from_keys(keys, f"the {CONFIG} for {target}")
        family = family_of(config)
        config = family.complete(config)
        _check_depths(family, reader, layout)
        rules, lent = family.all_rules(config, layout), _lent(reader, family, layout, form.folder)
        if INDEX_SHARE in passes and not any(INDEXER in tensor.name for rule in rules for tensor in rule.hf):
            raise ValueError(
                f"the MTP layer of {reader.folder} was trained without a chain (--mtp-repeated-layer-first-pass-kv), "
                "and engines draft with one unless the layer has an indexer; draft with megatron-mtp generate, train "
                "it with --mtp-repeated-layer-shares-kv, or export a copy with the trunk alone (drop-mtp)."
            )
        check_mcore([rule for rule in rules if rule.hf[0].name not in lent], reader)
        return cls(reader, family, layout.depths, keys, rules, config, lent)

    def group(self, rule: Rule, options: Options, coded: Mapping[str, Form] = MappingProxyType({})) -> Group:
        """Return the tensors of a rule; for quantized weights (`coded`), their parts."""
        first = rule.hf[0].name
        if (folder := self.lent.get(first)) is not None:
            return Group(self._whole(rule, options), folder.tensors[first].bytes, lambda: [folder.read(first)])
        entries = []
        for entry in self._whole(rule, options):
            name = entry.keys[0]
            encoding = coded[name].encoding if name in coded else None
            parts = {} if encoding is None else encoding.parts(entry.shape)
            entries += [Entry([name_of(name, part)], shape, kind) for part, (shape, kind) in parts.items()]
            if not parts:
                plain = options.quantize.depths == PLAIN and name in self.depth_names
                kind = replace(options, dtype=torch.bfloat16).cast(name, entry.dtype) if plain else entry.dtype
                entries.append(replace(entry, dtype=kind))
        stored = [(stored_key(piece, self.reader), piece) for piece in rule.mcore]
        size = sum(
            prod(self.reader.shape(key) if piece.shape is None else piece.shape) * self.reader.dtype(key).itemsize
            for key, piece in stored
        )

        def make() -> list[Tensor]:
            made = rule.to_hf([self.reader.read(key, piece.offset, piece.shape) for key, piece in stored])
            values = {tensor.name: value for tensor, value in zip(rule.hf, made, strict=True)}
            names = [name for name in values if name in coded]
            if names and (encoding := coded[names[0]].encoding) is not None:
                for name, parts in zip(names, encoding.encode([values.pop(name) for name in names]), strict=True):
                    values |= {name_of(name, part): tensor for part, tensor in parts.items()}
            return [values[entry.keys[0]] for entry in entries]

        return Group(entries, size, make)

    def _whole(self, rule: Rule, options: Options) -> list[Entry]:
        """Return the tensors that a rule produces, without quantization."""
        first = rule.hf[0].name
        if (folder := self.lent.get(first)) is not None:
            return [Entry([first], folder.shape(first), options.cast(first, folder.dtype(first)))]
        key = stored_key(rule.mcore[0], self.reader) if rule.mcore else None
        entries = []
        for tensor in rule.hf:
            if key is None:  # no stored tensor: zeros
                entries.append(Entry([tensor.name], tensor.shape or (), torch.float32))
                continue
            shape = self.reader.shape(key) if tensor.shape is None else tensor.shape
            dtype = torch.float32 if rule.rounds else self.reader.dtype(key)
            entries.append(Entry([tensor.name], shape, options.cast(tensor.name, dtype)))
        return entries

    @cached_property
    def depth_names(self) -> frozenset[str]:
        """Return the folder's names of the MTP layers' tensors."""
        stored, config = self.family.depths, self.settings
        return frozenset(
            one.name
            for rule in self.rules
            for one in rule.hf
            if any(piece.key.startswith("mtp.") for piece in rule.mcore)
            or (stored is not None and stored.depth_of(config, one.name) is not None)
        )

    def coded(self, quantize: Quantize) -> dict[str, Form]:
        """Return the forms of the weights to quantize, by name."""
        found: dict[str, Form] = {}
        depths = self.family.depths
        for rule in self.rules if quantize != Quantize() else ():
            for entry in self._whole(rule, Options()):
                name = entry.keys[0]
                if depths is not None and depths.is_never_quantized(module_of(name)):
                    continue
                form = quantize.form(rule, name, entry.shape, name in self.depth_names)
                found |= {} if form is None else {name: form}
        return found

    def config(self, options: Options, coded: Mapping[str, Form]) -> dict[str, Any]:
        """Return the keys of `config.json`, including dtype and the quantization of the weights in `coded`."""
        whole = [entry for rule in self.rules for entry in self._whole(rule, options)]
        keys = with_dtype(self.keys, whole)
        if not coded:
            return keys
        embedding = {
            tensor.name for rule in self.rules for tensor in rule.hf if rule.mcore and rule.mcore[0].key == EMBEDDING
        }
        matrices = [entry.keys[0] for entry in whole if len(entry.shape) > 1]
        plain = [name for name in matrices if name not in coded and name not in embedding]
        stored = self.family.depths
        in_vllm = str if stored is None else partial(stored.in_vllm, self.settings, self.depths)
        return {**keys, "quantization_config": quantization_config(coded, plain, self.depth_names, in_vllm)}


class FolderFiles:
    """Safetensors files of a Hugging Face folder with a place for all tensors of `parts`."""

    def __init__(self, folder: PartialFolder, parts: list[list[Group]], options: Options) -> None:
        entries = [entry for part in parts for group in part for entry in group.entries]
        tensors = [(key, entry.shape, entry.dtype) for entry in entries for key in entry.keys]
        self._shards = HFShards(folder.path, tensors, options.shard_bytes, folder.resumed)
        self.holds = self._shards.holds

    def write(self, part: int, made: Made) -> dict[str, int]:
        """Write tensors in their places. The record has the checksum of each by name."""
        checksums = {}
        for entry, tensor in made:
            checksums[entry.keys[0]] = self._shards.write(entry.keys[0], tensor)
            del tensor
        self._shards.sync(checksums)
        return checksums

    def finish(self, records: list[Any]) -> None:
        """Do nothing, because the headers were written first."""


def _lent(reader: DistReader, family: Family, layout: Layout, folder: HFFolder | None) -> dict[str, HFFolder]:
    """Return carried tensors that Megatron did not save in the checkpoint. Raise ValueError if no source has them.

    The layers of a trunk that Megatron cannot run are never taken from elsewhere.
    """
    lacks = [name for name in layout.carried if not reader.holds(f"{CARRIED}{name}")]
    if not lacks or family.untrainable is not None:
        return {}
    if folder is None:
        more = f" and {len(lacks) - 1} more tensors" if len(lacks) > 1 else ""
        raise ValueError(
            f"{reader.folder} lacks '{lacks[0]}'{more} around the text model, which Megatron does not save; give the "
            "Hugging Face folder that the model came from (--like FOLDER)."
        )
    return dict.fromkeys(lacks, folder)


def with_dtype(keys: dict[str, Any], tensors: list[Entry]) -> dict[str, Any]:
    """Set `dtype` and `torch_dtype`, if present, to the most common dtype of the tensors' values."""
    counts: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        counts[tensor.dtype] += prod(tensor.shape) * tensor.dtype.is_floating_point
    name = str(counts.most_common(1)[0][0]).removeprefix("torch.")
    types: dict[str, Any] = {key: name for key in ("dtype", "torch_dtype") if key in keys}
    text = text_key(keys)
    inner = {} if text is None else {text: with_dtype(keys[text], tensors)}
    return {**keys, **types, **inner}


def _check_depths(family: Family, reader: DistReader, layout: Layout) -> None:
    if not layout.depths:
        return
    has = f"{reader.folder} has {layout.depths} MTP depth(s)"
    if family.depths is None:
        remedy = "export it to a family with MTP (--family); for the trunk alone, drop-mtp writes a copy"
        raise ValueError(f"{has}, for which {family.title} folders have no place; {remedy}.")
    if family.depths.limit is not None and layout.depths > family.depths.limit:
        most = f"{family.title} holds at most {family.depths.limit}"
        raise ValueError(f"{has}, but {most}; choose another family (--family).")
    if not StoredDepths.of(reader.keys).sequential:
        raise ValueError(
            f"{reader.folder} has parallel heads (--mtp-architecture parallel), which no Hugging Face family stores; "
            "for the trunk alone, drop-mtp writes a copy."
        )


def _write_files(folder: Path, form: HFForm, keys: dict[str, Any]) -> None:
    for file in () if form.files is None else without_weights(form.files):
        if file.name not in (ORIGIN, CONFIG, RECORD, *SIDE_FILES):
            shutil.copyfile(file, folder / file.name)
    for name, text in {**form.texts, CONFIG: json.dumps(keys, indent=2) + "\n"}.items():
        (folder / name).write_text(text)
