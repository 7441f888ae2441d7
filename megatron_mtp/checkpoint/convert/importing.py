"""From a Hugging Face folder to a Megatron distributed checkpoint, a layer at a time."""

import functools
import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch

from megatron_mtp.checkpoint.convert.plan import HFModel, parts_of
from megatron_mtp.checkpoint.convert.streaming import Budget, PartialFolder, run_parts
from megatron_mtp.checkpoint.families import Layout
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.hf.config import CONFIG, read_json
from megatron_mtp.checkpoint.hf.shards import NOT_KEPT, HFFolder
from megatron_mtp.checkpoint.mcore.iterations import HF_FILES, ORIGIN, RELEASE, TRACKER
from megatron_mtp.checkpoint.mcore.tensors import Chunk, chunks_are_in, read_chunk, write_catalogue, write_chunk
from megatron_mtp.files import default_workers, synced


@dataclass(frozen=True)
class Options:
    """How to convert.

    Attributes:
        dtype: of all floating-point tensors, but those of `STAYS_WIDE`; None keeps each as it is.
        shard_bytes: largest safetensors file.
        workers: layers at a time.
        resume: go on with what an interrupted conversion left.
        quiet: no progress bar.
    """

    dtype: torch.dtype | None = None
    shard_bytes: int = 5 * 10**9
    workers: int = default_workers()
    resume: bool = False
    quiet: bool = False

    def cast(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The type in which a tensor is written."""
        if self.dtype is None or not dtype.is_floating_point or name.endswith(STAYS_WIDE):
            return dtype
        return self.dtype


STAYS_WIDE = ("e_score_correction_bias", "expert_bias", "A_log", "dt_bias")
"""Tensors that models keep in float32 beside bfloat16 weights."""


@dataclass(frozen=True)
class Converted:
    """What a conversion did."""

    family: str
    depths: int
    tensors: int
    bytes: int


def hf_to_mcore(source: Path, target: Path, options: Options, arguments: Callable[[HFModel], Namespace]) -> Converted:
    """Write the model of an HF folder as a distributed checkpoint that every parallel layout loads.

    Args:
        arguments: Megatron's arguments for the model, as the checkpoint keeps them.

    Raises:
        ValueError: the folder is damaged or contradicts itself, or the target is taken.
        OSError: the target cannot be written.
    """
    model = HFModel.read(source)
    args = arguments(model)
    parts = parts_of(model.rules)
    partial = PartialFolder(target, _fingerprint(model, options), options.resume)
    inside = partial.path / RELEASE
    inside.mkdir(exist_ok=True)
    sizes = [bytes_read(rules, model.folder) for rules in parts.values()]
    budget = Budget()
    torch.serialization.set_crc32_options(
        False
    )  # torch never checks these sums, and making them takes half of the time
    work = [
        (size, _part_writer(model.folder, rules, inside / f"__{index}_0.distcp", options, budget))
        for index, (size, rules) in enumerate(zip(sizes, parts.values(), strict=True))
    ]
    is_there = functools.partial(chunks_are_in, inside)
    records = run_parts(partial, work, options.workers, sum(sizes), options.quiet, is_there)
    chunks = [read_chunk(record) for part in records for record in part]
    write_catalogue(inside, chunks, _common(model, args))
    keep_hf_files(source, partial.path / HF_FILES, origin(model))
    (partial.path / TRACKER).write_text(RELEASE)
    partial.finish()
    return Converted(model.family.title, model.layout.depths, len(model.folder.tensors), sum(sizes))


def _part_writer(
    folder: HFFolder, rules: list[Rule], file: Path, options: Options, budget: Budget
) -> Callable[[Callable[[int], None]], list[dict[str, Any]]]:
    def write(report: Callable[[int], None]) -> list[dict[str, Any]]:
        chunks: list[Chunk] = []
        with open(file, "wb") as stream:
            for rule in rules:
                size = bytes_read([rule], folder)
                with budget.taking(size):
                    chunks += _write_rule(folder, rule, stream, file.name, options)
                report(size)
            synced(stream)
        return [asdict(chunk) for chunk in chunks]

    return write


def _write_rule(folder: HFFolder, rule: Rule, stream: IO[bytes], file: str, options: Options) -> list[Chunk]:
    chunks = []
    made = rule.to_mcore([folder.read(tensor.name) for tensor in rule.hf])
    for piece, tensor in zip(rule.mcore, made, strict=True):
        tensor = tensor.to(options.cast(rule.hf[0].name, tensor.dtype))
        whole = piece.whole or tuple(tensor.shape)
        offset = piece.offset or (0,) * len(whole)
        chunks += [write_chunk(stream, file, key, whole, offset, tensor) for key in (piece.key, *piece.aliases)]
    return chunks


def bytes_read(rules: list[Rule], folder: HFFolder) -> int:
    """Of the tensors as they are read."""
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
    """What Megatron keeps beside tensors, and what the conversion did."""
    by_layer = {"non_homogeneous_layers": True, "singleton_local_shards": False}
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": by_layer,
        "megatron_mtp": origin(model),
    }


def origin(model: HFModel) -> dict[str, Any]:
    """What a checkpoint tells of where it came from, and the conventions of its depths."""
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
        "positions": "slot i keeps position i at every depth",
    }


def layout_record(layout: Layout) -> dict[str, Any]:
    """A layout as an entry of a record."""
    return {"depths": layout.depths, "features": sorted(layout.features), "carried": list(layout.carried)}


def keep_hf_files(source: Path, folder: Path, origin: dict[str, Any]) -> None:
    """Copy every file of an HF folder but the weights, and note the origin."""
    folder.mkdir(exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(NOT_KEPT) and file.name != ORIGIN:
            shutil.copyfile(file, folder / file.name)
    assert (folder / CONFIG).is_file()
    (folder / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
