"""A Megatron checkpoint as it was saved, by whatever program: Megatron-LM, Megatron-Bridge, ms-swift, this package.

The arguments of its model are in the checkpoint itself, or in Megatron-Bridge's `run_config.yaml`; without them its
tensors are described by their keys alone.
"""

import re
from argparse import Namespace
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_mtp.checkpoint.audit.finding import Finding, listed
from megatron_mtp.checkpoint.audit.side import NESTED, Entry, MegatronSide
from megatron_mtp.checkpoint.hf.config import CONFIG, HFConfig, read_json
from megatron_mtp.checkpoint.mcore.iterations import HF_FILES, RELEASE
from megatron_mtp.checkpoint.mcore.reader import DistReader, check_files
from megatron_mtp.patches.catalogue import read_catalogue

_STATE = re.compile(r"optimizer\.state\.(\w+)\.")
"""Keys of the optimizer's tensors that say what they are: exp_avg, exp_avg_sq, fp32_param."""
RUN_CONFIG = "run_config.yaml"
SIMPLE = (int, float, str, bool, list)


def open_saved(path: Path) -> MegatronSide:
    """Open a checkpoint."""
    side = MegatronSide(path)
    try:
        side.reader = reader = DistReader(path, whole=False)
    except ValueError as error:
        says = f"The checkpoint cannot be read: {error}"
        side.findings.append(Finding("damaged file", says, "give another iteration, or fetch it again"))
        return side
    _check_files(side, reader)
    _read_arguments(side, reader)
    side.iteration = _iteration(reader.folder)
    with suppress(ValueError):
        side.kept = HFConfig.from_keys(read_json(reader.folder.parent / HF_FILES / CONFIG)).keys
    for key in reader.keys:
        dtype = reader.dtype(key)
        size = torch.Size(reader.shape(key)).numel() * dtype.itemsize
        name, kind = key.removeprefix(NESTED), str(dtype).removeprefix("torch.")
        side.tensors[name] = Entry(tuple(reader.shape(key)), kind, size, partial(reader.read, key))
    side.optimizer = _optimizer(reader)
    return side


def _optimizer(reader: DistReader) -> dict[str, Any]:
    """What the optimizer has stored: how many tensors, their bytes, and how many of each kind and type."""
    keys = reader.state_keys
    if not keys:
        return {}
    named = (_STATE.search(key) for key in keys)
    types = Counter(str(reader.dtype(key)).removeprefix("torch.") for key in keys)
    size = sum(torch.Size(reader.shape(key)).numel() * reader.dtype(key).itemsize for key in keys)
    kinds = Counter("others" if match is None else match.group(1) for match in named)
    return {"tensors": len(keys), "bytes": size, "kinds": dict(kinds), "types": dict(types)}


def _check_files(side: MegatronSide, reader: DistReader) -> None:
    try:
        check_files(reader.folder, read_catalogue(reader.folder).storage_data)
    except ValueError as error:
        side.findings.append(Finding("file missing", f"{error}", "fetch that file again, or give another iteration"))


def _read_arguments(side: MegatronSide, reader: DistReader) -> None:
    try:
        side.args, side.args_from = reader.common()["args"], "the checkpoint"
        return
    except (ValueError, OSError) as error:
        reason = str(error)
    for folder in (reader.folder, reader.folder.parent):
        keys = _run_config(folder / RUN_CONFIG)
        if keys is not None:
            side.args, side.args_from = Namespace(**keys), RUN_CONFIG
            return
    says = f"The arguments of the model are not known, so tensors are described by their keys alone: {reason}"
    side.findings.append(Finding("damaged config", says, "audit a checkpoint that Megatron saved whole"))


def _run_config(file: Path) -> dict[str, Any] | None:
    """The plain settings of the model in Megatron-Bridge's file; None if there is none that can be read."""
    try:
        whole = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    model = whole.get("model") if isinstance(whole, dict) else None
    if not isinstance(model, dict):
        return None
    return {name: value for name, value in model.items() if isinstance(name, str) and isinstance(value, SIMPLE)}


def _iteration(folder: Path) -> int | None:
    number = folder.name.removeprefix("iter_")
    return 0 if folder.name == RELEASE else int(number) if number.isdecimal() else None


def older_format(path: Path) -> MegatronSide | None:
    """A checkpoint in Megatron's older format, a pickle a rank, which is not opened; None if it is none."""
    folders = [path, *sorted(path.glob("iter_*")), *sorted(path.glob("release"))]
    ranks = [rank.name for folder in folders for rank in sorted(folder.glob("mp_rank_*"))]
    if not ranks:
        return None
    says = f"It has Megatron's older format, a pickle a rank, which can run code and is never opened: {listed(ranks)}."
    advice = "load it with megatron-mtp train, and save it with --ckpt-format torch_dist"
    return MegatronSide(path, findings=[Finding("not compared", says, advice)])
