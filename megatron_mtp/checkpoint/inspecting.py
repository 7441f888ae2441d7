"""Contents of a Hugging Face folder or a Megatron checkpoint, from names and shapes; only copies are read."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from megatron_mtp.checkpoint.audit import NOTE
from megatron_mtp.checkpoint.audit.auditing import facts, open_side
from megatron_mtp.checkpoint.audit.contents import contents
from megatron_mtp.checkpoint.audit.side import HFSide
from megatron_mtp.checkpoint.convert.drafter_form import stored_form
from megatron_mtp.checkpoint.convert.export_hf import Export
from megatron_mtp.checkpoint.convert.hf_form import form_of, pattern_of
from megatron_mtp.checkpoint.convert.import_hf import flags_of, origin
from megatron_mtp.checkpoint.convert.plan import HFModel, name_lines, name_rows
from megatron_mtp.checkpoint.hf.config import CONFIG
from megatron_mtp.checkpoint.hf.folder import check_kind, drafter_kind
from megatron_mtp.common.files import default_workers
from megatron_mtp.megatron.checkpoint import DRAFT_VOCABULARY
from megatron_mtp.megatron.checkpoint.catalogue import check_entry, read_catalogue
from megatron_mtp.megatron.checkpoint.iterations import iteration_folder
from megatron_mtp.megatron.checkpoint.reader import DistReader, StoredDepths, check_files


def inspect(folder: Path, check: bool = False) -> dict[str, Any]:
    """Return facts about a folder or checkpoint, by name; what does not convert is described as far as it can be read.

    Returns:
        The facts; `ok` is false if it is damaged, or lacks what its config specifies.

    Raises:
        ValueError: nothing of a model can be read, or, with `check`, checksums of a checkpoint's entries differ.
    """
    try:
        if drafter_kind(folder) and not check:
            return _described(folder)
        check_kind(folder)
        if not (folder / CONFIG).is_file():
            return _megatron(folder) | (check_entries(iteration_folder(folder)) if check else {})
        if not check:
            return _hf(folder)
    except ValueError as error:
        if check:
            raise
        try:
            return {**_described(folder), "trainable here": False, "why not": str(error)}
        except ValueError:
            raise error from None
    raise ValueError(f"--check was given, but {folder} is a Hugging Face folder, whose files have no checksums.")


def _described(folder: Path) -> dict[str, Any]:
    """Return facts about a drafter, or why it does not convert. Raise ValueError if nothing can be read."""
    side = open_side(folder)
    if not side.tensors and not (isinstance(side, HFSide) and side.keys):
        raise ValueError(side.findings[0].says)
    wrong = [found.says for found in (*side.findings, *contents(side)) if found.severity != NOTE]
    return facts(side) | ({"findings": wrong, "ok": False} if wrong else {})


def names(folder: Path, rows: bool = False) -> list[Any]:
    """Return the name table of a folder, or of a checkpoint's export: a line per kind of rule, or `rows` per rule.

    Raises:
        ValueError: it is neither of the two, is damaged, or no family has a place for the checkpoint's model.
    """
    if (folder / CONFIG).is_file():
        model = HFModel.read(folder)
        found = name_rows(model.rules, lambda rule: model.folder.shape(rule.hf[0].name))
    else:
        export = Export.of(folder, folder, form_of(folder))
        found = name_rows(export.rules, lambda rule: export.reader.shape(rule.mcore[0].key))
    return found if rows else name_lines(found)


def _hf(folder: Path) -> dict[str, Any]:
    model = HFModel.read(folder)
    model.check_numbers()
    flags, reason = flags_of(model)
    stored = model.folder.tensors.values()
    return {
        "form": "Hugging Face",
        **{name: value for name, value in origin(model).items() if name != "layout"},
        "depths": model.layout.depths,
        "forms": sorted(model.layout.features),
        "tensors": len(stored),
        "bytes": sum(tensor.bytes for tensor in stored),
        "dtypes": _names({tensor.dtype for tensor in stored}),
        "trainable here": flags is not None,
        **({"why not": reason} if flags is None else {"Megatron's flags": " ".join(flags)}),
    }


def _megatron(folder: Path) -> dict[str, Any]:
    reader = DistReader(folder)
    common = reader.common()
    reason = getattr(common["args"], "megatron_mtp_untrainable", None)
    sizes = {key: torch.Size(reader.shape(key)).numel() for key in reader.keys}
    return {
        "form": "Megatron distributed checkpoint",
        "iteration": common.get("iteration", 0),
        **({} if (pattern := pattern_of(reader)) is None else {"hybrid layer pattern": pattern}),
        "depths": StoredDepths.of(reader.keys).layers,
        **({"drafter": stored_form(common["args"], reader).says} if reader.has_drafter else {}),
        **({"draft vocabulary": reader.shape(DRAFT_VOCABULARY)[0]} if reader.holds(DRAFT_VOCABULARY) else {}),
        "tensors": len(sizes),
        "parameters": sum(sizes.values()),
        "bytes": sum(count * reader.dtype(key).itemsize for key, count in sizes.items()),
        "dtypes": _names({reader.dtype(key) for key in sizes}),
        "trainable here": not reason,
        **({"why not": reason} if isinstance(reason, str) else {}),
        **{name: value for name, value in common.get("megatron_mtp", {}).items() if name != "layout"},
    }


def _names(dtypes: set[torch.dtype]) -> list[str]:
    return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_entries(folder: Path) -> dict[str, Any]:
    """Compare every entry of a checkpoint with its checksum. Return counts and seconds by name.

    Raises:
        ValueError: entries differ; the message names the first one and counts the others.
    """
    began = time.monotonic()
    places = {(place.relative_path, place.offset): place for place in read_catalogue(folder).storage_data.values()}
    check_files(folder, places)
    by_file: dict[str, list[Any]] = {}
    for name, offset in sorted(places):
        by_file.setdefault(name, []).append(places[name, offset])

    def differing(name: str) -> list[str]:
        errors = []
        with open(folder / name, "rb") as stream:
            for place in by_file[name]:
                try:
                    check_entry(stream, place, str(folder / name))
                except ValueError as error:
                    errors.append(str(error))
        return errors

    with ThreadPoolExecutor(default_workers()) as pool:
        found = [error for errors in pool.map(differing, by_file) for error in errors]
    if found:
        others = f" ({len(found) - 1} other entries are damaged, too)" if len(found) > 1 else ""
        raise ValueError(f"{found[0]}{others}")
    summed = [place for place in places.values() if hasattr(place, "crc32")]
    return {
        "entries": len(places),
        "entries with their checksum": len(summed),
        "bytes compared": sum(place.length for place in summed),
        "seconds": round(time.monotonic() - began, 2),
    }
