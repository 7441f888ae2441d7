"""What a Megatron checkpoint folder holds: its newest whole iteration, and that one's MTP layers by its index alone."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_mtp.platform.unpickling import read_catalogue

TRACKER = "latest_checkpointed_iteration.txt"
FORMAT = "metadata.json"
"""Names the format of an iteration, and is its last file to be written."""
RELEASE = "release"
"""Megatron's name for weights that no run has saved: loaded without optimizer, counting from iteration 0."""
_ITERATION = re.compile(r"^iter_(\d{7})$")
_MTP_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.(\w+)")


@dataclass(frozen=True)
class StoredDepths:
    """The MTP layers of a checkpoint.

    Attributes:
        layers: physical layers; one where a repeated layer serves all depths.
        chained: whether they merge embeddings (the sequential architecture); None without layers.
    """

    layers: int
    chained: bool | None


def repair_tracker(folder: Path) -> int | None:
    """Name the newest whole iteration in a tracker that a killed run left empty; returns it, None if nothing was amiss.

    Megatron writes the tracker in place, and ends (with status 0) over an empty one.

    Raises:
        ValueError: the tracker is empty, and there is no whole iteration to name.
    """
    tracker = folder / TRACKER
    if not tracker.is_file() or tracker.read_bytes().strip():
        return None
    whole = _whole_iterations(folder)
    if not whole:
        raise ValueError(
            f"--load is {folder}, whose {TRACKER} is empty and which has no whole iteration; give another checkpoint, "
            "or remove the folder to start anew."
        )
    beside = tracker.with_name(f"{TRACKER}.{os.getpid()}.partial")
    beside.write_text(str(max(whole)))
    beside.replace(tracker)
    return max(whole)


def named_iteration(folder: Path, step: int | None = None) -> Path:
    """The folder of the iteration that a checkpoint's tracker names, or of another.

    Args:
        step: of --ckpt-step, which needs no tracker.

    Raises:
        ValueError: it is not there, or nothing that can be read names one.
    """
    if not folder.is_dir():
        raise ValueError(f"{_what(folder)}; {_GIVE}.")
    tracker = folder / TRACKER
    if step is not None:
        said, source = str(step), f"--ckpt-step is {step}"
    elif tracker.is_file():
        said = tracker.read_bytes().decode(errors="replace").strip()
        source = f"{tracker} says {said[:40]!a}"
    else:
        raise ValueError(f"{folder} is no Megatron distributed checkpoint, for it has no file {TRACKER}; {_GIVE}.")
    there = ", ".join(map(str, _whole_iterations(folder))) or "there is none"
    if said != RELEASE and not said.isdecimal():
        raise ValueError(f"{source}, which is no iteration; write the number of one into it ({there}).")
    inner = folder / (RELEASE if said == RELEASE else f"iter_{int(said):07d}")
    if not inner.is_dir():
        raise ValueError(f"{source}, but {_what(inner)}; name an iteration that is there ({there}).")
    return inner


_GIVE = "give a folder that a run with --save or megatron-mtp convert has made"


def _what(path: Path) -> str:
    """What stands where there should be a folder."""
    if path.is_symlink() and not path.exists():
        return f"{path} is a link to {os.readlink(path)}, which does not exist"
    return f"{path} is a file" if path.exists() else f"{path} does not exist"


def _whole_iterations(folder: Path) -> list[int]:
    numbers = [int(match.group(1)) for path in folder.iterdir() if (match := _ITERATION.match(path.name))]
    return sorted(number for number in numbers if (folder / f"iter_{number:07d}" / FORMAT).exists())


def stored_depths(folder: Path) -> StoredDepths | None:
    """The MTP layers of the checkpoint in an iteration's folder; None where it is not a distributed checkpoint."""
    if not (folder / FORMAT).is_file():
        return None
    found = [match.groups() for key in read_catalogue(folder).state_dict_metadata if (match := _MTP_LAYER.match(key))]
    layers = len({index for index, _ in found})
    return StoredDepths(layers, any(name == "eh_proj" for _, name in found) if layers else None)


def absent_layers(folder: Path, layers: int, chained: bool, init: str | None) -> tuple[int, ...]:
    """Indices of the MTP layers that the checkpoint lacks, and that `--mtp-init` must make.

    Args:
        folder: of one iteration.
        layers: physical MTP layers of the model to be built.
        chained: whether its architecture is the sequential one.
        init: what `--mtp-init` says.

    Raises:
        ValueError: the checkpoint has other depths than the model, and nothing says how to make the missing ones.
    """
    stored = stored_depths(folder)
    if stored is None:
        return ()
    if stored.layers > layers:
        raise ValueError(
            f"--mtp-num-layers asks for {layers} MTP layer(s), but the checkpoint {folder} (--load) has "
            f"{stored.layers}; give --mtp-num-layers {stored.layers}, or --mtp-use-repeated-layer if it was trained so."
        )
    if stored.layers and stored.chained != chained:
        trained = "sequential" if stored.chained else "parallel"
        raise ValueError(
            f"--mtp-architecture does not fit the checkpoint {folder} (--load), whose depths are {trained}; give "
            f"--mtp-architecture {trained}."
        )
    absent = tuple(range(stored.layers, layers))
    if absent and init is None:
        has = f"has {stored.layers} MTP layer(s)" if stored.layers else "has no MTP weights"
        raise ValueError(
            f"--mtp-num-layers asks for {layers} MTP layer(s), but the checkpoint {folder} (--load) {has}; say with "
            "--mtp-init random or --mtp-init last-layer how to initialise the missing ones."
        )
    return absent
