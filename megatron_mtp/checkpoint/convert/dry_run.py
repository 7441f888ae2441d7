"""`convert ... --dry-run`: what a conversion would do, from names and shapes; nothing is written.

Of the tensors only copies are read, which have to be equal: a plan is made if the conversion would begin.
"""

import shutil
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from megatron_mtp.checkpoint.convert.edit import Change
from megatron_mtp.checkpoint.convert.export_hf import Export, HFForm
from megatron_mtp.checkpoint.convert.graft import Graft
from megatron_mtp.checkpoint.convert.hybrid import Migration
from megatron_mtp.checkpoint.convert.import_hf import bytes_read, notes
from megatron_mtp.checkpoint.convert.plan import HFModel, times, unnumbered
from megatron_mtp.checkpoint.convert.stream import Options, check_free
from megatron_mtp.checkpoint.families import CARRIED
from megatron_mtp.checkpoint.families.rules import Rule, Shape
from megatron_mtp.checkpoint.hf.folder import HFFolder
from megatron_mtp.model.draft_vocabulary import DRAFT_VOCABULARY, DRAFTER


def plan_import(
    source: Path, target: Path, options: Options, arguments: Callable[[HFModel], Namespace]
) -> dict[str, Any]:
    """What `hf-to-mcore` would do, by name.

    Raises:
        ValueError: as `hf_to_mcore`, before it writes.
    """
    model = HFModel.read(source)
    model.check_numbers()
    args = arguments(model)
    written = sum(_written(rule, model.folder, options) for rule in model.rules)
    return {
        "family": model.family.title,
        "depths": model.layout.depths,
        "tensors": len(model.folder.tensors),
        "bytes read": bytes_read(model.rules, model.folder),
        **_disk(target, source, written),
        "carried as they are": _carried(model.rules),
        "names": _names(model.rules, to_mcore=True),
        **notes(model, args),
    }


def plan_export(source: Path, target: Path, options: Options, form: HFForm) -> dict[str, Any]:
    """What `mcore-to-hf` would do, by name.

    Raises:
        ValueError: as `mcore_to_hf`, before it writes.
    """
    export = Export.of(source, target, form)
    tensors = export.tensors(options, export.coded(options))
    dropped = [key for key in export.reader.keys if key == DRAFT_VOCABULARY or key.startswith(DRAFTER)]
    return {
        "family": export.family.title,
        "depths": export.depths,
        "tensors": len(tensors),
        "bytes read": export.bytes(),
        **_disk(target, source, sum(_elements(shape) * dtype.itemsize for _, shape, dtype in tensors)),
        "carried as they are": _carried(export.rules),
        "left out": dropped or "nothing",
        "names": _names(export.rules, to_mcore=False),
    }


def plan_change(change: Change, source: Path, target: Path) -> dict[str, Any]:
    """What `attach-mtp`, `drop-mtp` or `draft-vocab` would do, by name."""
    entries = [*change.trunk, *change.made]
    old = set(change.reader.keys)
    return {
        "depths before": change.before,
        "depths": change.depths,
        "tensors": len(entries),
        **_disk(target, source, sum(entry.size for entry in entries)),
        "new": _counted(entry.key for entry in change.made if entry.key not in old) or "nothing",
        "left out": _counted(change.left_out) or "nothing",
    }


def plan_graft(plan: Graft, target: Path, options: Options) -> dict[str, Any]:
    """What `graft` would do, by name."""
    groups = [group for part in plan.files(options).values() for group in part]
    return {
        "depths": plan.donor.depths,
        **_disk(target, plan.target.path, sum(group.size for group in groups)),
    }


def plan_forms(plan: Migration, source: Path, target: Path) -> dict[str, Any]:
    """What `gpt-to-hybrid` or `hybrid-to-gpt` would do, by name."""
    names = Counter((unnumbered([old]), unnumbered([new])) for old, all_new in plan.keys.items() for new in all_new)
    return {
        "layers": plan.pattern,
        "depths": plan.depths,
        "tensors": sum(map(len, plan.keys.values())),
        "of the optimizer's state": len(plan.reader.state_keys),
        **_disk(target, source, plan.size),
        "names": [times(f"{old} -> {new}", count) for (old, new), count in names.items() if old != new],
    }


def _written(rule: Rule, folder: HFFolder, options: Options) -> int:
    """Bytes of a rule's tensors in the checkpoint, under all of their keys."""
    name = rule.hf[0].name
    whole = sum(_elements(folder.shape(tensor.name)) for tensor in rule.hf)
    size = options.cast(name, folder.dtype(name)).itemsize
    return sum(
        (1 + len(piece.aliases))
        * (whole if piece.shape is None else _elements(piece.shape))
        * (torch.float32.itemsize if piece.wide else size)
        for piece in rule.mcore
    )


def _elements(shape: Shape) -> int:
    return torch.Size(shape).numel()


def _disk(target: Path, source: Path, size: int) -> dict[str, Any]:
    """Bytes that will be written, bytes that are free, and whether they fit.

    Raises:
        ValueError: the target is taken, or lies inside the source.
    """
    check_free(target, source)
    there = next(path for path in (target, *target.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    return {"target": str(target), "bytes written": size, "bytes free": free, "fits": size < free}


def _carried(rules: list[Rule]) -> list[str] | str:
    """Names of the carried tensors."""
    names = [piece.key.removeprefix(CARRIED) for rule in rules for piece in rule.mcore if piece.key.startswith(CARRIED)]
    return names or "nothing"


def _names(rules: list[Rule], to_mcore: bool) -> list[str]:
    """Names of both sides, one line for all layers and experts of the same kind."""
    counts: Counter[tuple[str, str]] = Counter()
    for rule in rules:
        hf, mcore = unnumbered(tensor.name for tensor in rule.hf), unnumbered(piece.key for piece in rule.mcore)
        counts[(hf, mcore) if to_mcore else (mcore, hf)] += 1
    return [times(f"{old or 'zeros'} -> {new}", count) for (old, new), count in counts.items()]


def _counted(keys: Iterable[str]) -> list[str]:
    """Keys, one line for all layers and experts of the same kind."""
    return [times(key, count) for key, count in Counter(unnumbered([key]) for key in keys).items()]
