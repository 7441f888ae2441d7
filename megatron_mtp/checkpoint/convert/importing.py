"""From a Hugging Face folder to a Megatron distributed checkpoint, a layer at a time."""

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from megatron_mtp.checkpoint.convert.options import Converted, Options
from megatron_mtp.checkpoint.convert.plan import HFModel, parts_of
from megatron_mtp.checkpoint.convert.streaming import PartialFolder
from megatron_mtp.checkpoint.convert.writing import Group, write_checkpoint
from megatron_mtp.checkpoint.families import Layout
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.hf.config import CONFIG, read_json
from megatron_mtp.checkpoint.hf.shards import NOT_KEPT, HFFolder
from megatron_mtp.checkpoint.mcore.iterations import HF_FILES, ORIGIN
from megatron_mtp.checkpoint.mcore.tensors import Chunk, write_chunk


def hf_to_mcore(source: Path, target: Path, options: Options, arguments: Callable[[HFModel], Namespace]) -> Converted:
    """Write the model of a Hugging Face folder as a distributed checkpoint that every parallel layout loads.

    Args:
        source: the folder.
        target: the checkpoint to make.
        options: how to convert.
        arguments: makes Megatron's arguments for the model, which the checkpoint keeps.

    Raises:
        ValueError: the folder is damaged or contradicts itself, or the target is taken.
        OSError: the target cannot be written.
    """
    model = HFModel.read(source)
    args = arguments(model)
    folder = PartialFolder(target, source, _fingerprint(model, options), options.resume)
    files = {
        f"__{index}_0.distcp": [_group(model.folder, rule, options) for rule in rules]
        for index, rules in enumerate(parts_of(model.rules).values())
    }
    write_checkpoint(folder, files, _common(model, args), options)
    keep_hf_files(source, folder.path / HF_FILES, origin(model))
    folder.finish()
    size = bytes_read(model.rules, model.folder)
    return Converted(model.family.title, model.layout.depths, len(model.folder.tensors), size)


def _group(folder: HFFolder, rule: Rule, options: Options) -> Group:
    return Group(bytes_read([rule], folder), partial(_write_rule, folder, rule, options))


def _write_rule(folder: HFFolder, rule: Rule, options: Options, stream: IO[bytes], file: str) -> list[Chunk]:
    chunks = []
    given = [folder.read(tensor.name) for tensor in rule.hf]
    given = [tensor.to(options.cast(hf.name, tensor.dtype)) for hf, tensor in zip(rule.hf, given, strict=True)]
    for piece, tensor in zip(rule.mcore, rule.to_mcore(given), strict=True):
        whole = piece.whole or tuple(tensor.shape)
        offset = piece.offset or (0,) * len(whole)
        chunks += [write_chunk(stream, file, key, whole, offset, tensor) for key in (piece.key, *piece.aliases)]
    return chunks


def bytes_read(rules: list[Rule], folder: HFFolder) -> int:
    """Size of the rules' tensors in memory, FP8 as bfloat16."""
    sizes = ((folder.shape(tensor.name), folder.dtype(tensor.name)) for rule in rules for tensor in rule.hf)
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in sizes)


def _fingerprint(model: HFModel, options: Options) -> dict[str, Any]:
    files = sorted({stored.file for stored in model.folder.tensors.values()})
    return {
        "source": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files],
        "config": read_json(model.folder.folder / CONFIG),
        "dtype": str(options.dtype),
        "layout": layout_record(model.layout),
    }


def _common(model: HFModel, args: Namespace) -> dict[str, Any]:
    """What the checkpoint stores beside tensors: Megatron's arguments, and where the model came from."""
    return {"args": args, "checkpoint_version": 3.0, "megatron_mtp": origin(model)}


def origin(model: HFModel) -> dict[str, Any]:
    """A record of the model's folder and of the conventions of its depths, which the checkpoint keeps."""
    depths = model.family.depths
    half = "embedding" if depths is None or depths.embedding_first else "hidden"
    side = "before" if depths is not None and depths.before_norm else "after"
    return {
        "model_type": model.config.model_type,
        "family": model.family.title,
        "layout": layout_record(model.layout),
        "quantised": model.folder.quantised,
        "eh_proj": "embedding half first",
        "eh_proj in the Hugging Face folder": f"{half} half first",
        "input of the first depth": f"trunk's hidden state {side} its final norm",
        "positions": "not shifted: position i keeps its rotary position at every depth",
    }


def layout_record(layout: Layout) -> dict[str, Any]:
    """A layout in JSON."""
    return {"depths": layout.depths, "features": sorted(layout.features), "carried": list(layout.carried)}


def keep_hf_files(source: Path, folder: Path, origin: dict[str, Any]) -> None:
    """Copy every file of a Hugging Face folder except the weights, and write the origin beside them."""
    folder.mkdir(exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(NOT_KEPT) and file.name != ORIGIN:
            shutil.copyfile(file, folder / file.name)
    assert (folder / CONFIG).is_file()
    (folder / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
