"""`convert ... --dry-run`: what a conversion would do, from names and shapes; it reads no tensor and writes nothing."""

import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from megatron_mtp.checkpoint.convert.depths import Change
from megatron_mtp.checkpoint.convert.exporting import Export, HFForm
from megatron_mtp.checkpoint.convert.importing import Options, bytes_read
from megatron_mtp.checkpoint.convert.names import unnumbered
from megatron_mtp.checkpoint.convert.plan import HFModel
from megatron_mtp.checkpoint.convert.streaming import check_free
from megatron_mtp.checkpoint.families import CARRIED
from megatron_mtp.checkpoint.families.rules import Rule, Shape
from megatron_mtp.checkpoint.hf.shards import HFFolder
from megatron_mtp.model.draft_vocabulary import DRAFT_VOCABULARY


def plan_import(source: Path, target: Path, options: Options) -> dict[str, Any]:
    """Of `hf-to-mcore`; raises ValueError where that would, before it writes."""
    model = HFModel.read(source)
    written = sum(_written(rule, model.folder, options) for rule in model.rules)
    return {
        "family": model.family.title,
        "depths": model.layout.depths,
        "tensors": len(model.folder.tensors),
        "bytes read": bytes_read(model.rules, model.folder),
        **_disk(target, written),
        "carried as they are": _carried(model.rules),
        "names": _names(model.rules, to_mcore=True),
    }


def plan_export(source: Path, target: Path, options: Options, form: HFForm) -> dict[str, Any]:
    """Of `mcore-to-hf`; raises ValueError where that would, before it writes."""
    export = Export.of(source, target, form)
    tensors = export.tensors(options)
    dropped = [DRAFT_VOCABULARY] if export.reader.holds(DRAFT_VOCABULARY) else []
    return {
        "family": export.family.title,
        "depths": export.depths,
        "tensors": len(tensors),
        "bytes read": export.bytes(),
        **_disk(target, sum(_elements(shape) * dtype.itemsize for _, shape, dtype in tensors)),
        "carried as they are": _carried(export.rules),
        "left out": dropped or "nothing",
        "names": _names(export.rules, to_mcore=False),
    }


def plan_change(change: Change, target: Path) -> dict[str, Any]:
    """Of `attach-mtp` and `drop-mtp`."""
    entries = [*change.trunk, *change.made]
    old = set(change.reader.keys)
    return {
        "depths before": change.before,
        "depths": change.depths,
        "tensors": len(entries),
        **_disk(target, sum(entry.bytes for entry in entries)),
        "new": _counted(entry.key for entry in change.made if entry.key not in old) or "nothing",
        "left out": _counted(change.left_out) or "nothing",
    }


def _written(rule: Rule, folder: HFFolder, options: Options) -> int:
    """Bytes of a rule's tensors in the checkpoint, under each of their keys; what has no shape there is as it was."""
    name = rule.hf[0].name
    whole = sum(_elements(folder.shape(tensor.name)) for tensor in rule.hf)
    shapes = [(piece.shape, 1 + len(piece.aliases)) for piece in rule.mcore]
    elements = sum(keys * (whole if shape is None else _elements(shape)) for shape, keys in shapes)
    return elements * options.cast(name, folder.dtype(name)).itemsize


def _elements(shape: Shape) -> int:
    return torch.Size(shape).numel()


def _disk(target: Path, size: int) -> dict[str, Any]:
    """What the target needs, and what its disk has.

    Raises:
        ValueError: the target is taken.
    """
    check_free(target.resolve())
    there = next(path for path in (target, *target.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    return {"target": str(target), "bytes written": size, "bytes free": free, "fits": size < free}


def _carried(rules: list[Rule]) -> list[str] | str:
    """Tensors that Megatron has no module for."""
    names = [piece.key.removeprefix(CARRIED) for rule in rules for piece in rule.mcore if piece.key.startswith(CARRIED)]
    return names or "nothing"


def _names(rules: list[Rule], to_mcore: bool) -> list[str]:
    """The names of both sides, a line for all layers and experts that have the same."""
    counts: Counter[tuple[str, str]] = Counter()
    for rule in rules:
        hf, mcore = unnumbered(tensor.name for tensor in rule.hf), unnumbered(piece.key for piece in rule.mcore)
        counts[(hf, mcore) if to_mcore else (mcore, hf)] += 1
    return [_times(f"{old or 'zeros'} -> {new}", count) for (old, new), count in counts.items()]


def _counted(keys: Iterable[str]) -> list[str]:
    """The keys, a line for all layers and experts that have the same."""
    return [_times(key, count) for key, count in Counter(unnumbered([key]) for key in keys).items()]


def _times(line: str, count: int) -> str:
    return f"{line}  ({count} times)" if count > 1 else line
