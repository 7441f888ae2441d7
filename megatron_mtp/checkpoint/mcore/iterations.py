"""What a Megatron checkpoint folder holds: its newest whole iteration, and that one's MTP layers by its index alone."""

import json
import os
import re
from pathlib import Path

from megatron_mtp.patches.unpickling import CATALOGUE

TRACKER = "latest_checkpointed_iteration.txt"
FORMAT = "metadata.json"
"""Names the format of an iteration, and is its last file to be written."""
RELEASE = "release"
"""Megatron's name for weights that no run has saved: loaded without optimizer, counting from iteration 0."""
HF_FILES = "hf"
"""Folder of a converted checkpoint that keeps what Megatron has no use for: config, tokenizer, generation config."""
ORIGIN = "origin.json"
_ITERATION = re.compile(r"^iter_(\d{7})$")


def repair_tracker(folder: Path) -> int | None:
    """Name the newest whole iteration in a tracker that a killed run left empty; returns it, None if nothing was amiss.

    Raises:
        ValueError: as `unnamed_iteration`.
    """
    newest = unnamed_iteration(folder)
    if newest is not None:
        beside = folder / f"{TRACKER}.{os.getpid()}.partial"
        beside.write_text(str(newest))
        beside.replace(folder / TRACKER)
    return newest


def unnamed_iteration(folder: Path) -> int | None:
    """The newest whole iteration where a killed run left the tracker empty; None where it is not.

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


def iteration_folder(folder: Path) -> Path:
    """The folder of tensors inside a checkpoint folder, or the folder itself if it is one.

    Raises:
        ValueError: there is no distributed checkpoint, or it is not whole.
    """
    inner = folder if any((folder / name).is_file() for name in (CATALOGUE, FORMAT)) else named_iteration(folder)
    if any(inner.glob("mp_rank_*")):
        raise ValueError(
            f"{inner} has Megatron's older format, a file a rank; load it with megatron-mtp train, and save it with "
            "--ckpt-format torch_dist."
        )
    try:
        said = json.loads((inner / FORMAT).read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{inner / FORMAT} is missing, which is written last: the save was cut short, or is not of --ckpt-format "
            "torch_dist; give another checkpoint."
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{inner / FORMAT} cannot be read ({error}); give another checkpoint.") from None
    if not isinstance(said, dict) or said.get("sharded_backend") != "torch_dist":
        raise ValueError(f"{inner / FORMAT} does not name the format torch_dist; give another checkpoint.")
    return inner
