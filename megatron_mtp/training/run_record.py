"""run.json: how a run was started, in the folder of its metrics.jsonl.

    {"starts": [{"date": "2026-01-31T12:00:00+00:00", "iteration": 0, "command": ["train", ...], "versions": {...}}],
     "arguments": {"num_layers": 4, ...}}

A resumed run adds a start; `arguments` are Megatron's, ours among them, of the newest. What reads it need not
wait for torch.
"""

import json
import shlex
import sys
from argparse import Namespace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_mtp import __version__
from megatron_mtp.files import written_beside
from megatron_mtp.training.short_log import say

FILE = "run.json"


def write_run_record(folder: Path, args: Namespace) -> None:
    """Add this start to run.json. The run does not need it: where it cannot be written, one line says so."""
    import torch

    versions = {"megatron-mtp": __version__, "megatron-core": version("megatron-core"), "torch": torch.__version__}
    start = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "iteration": args.iteration,
        "command": list(sys.argv),
        "versions": versions,
    }
    starts = [*_earlier(folder / FILE), start] if args.iteration else [start]
    try:
        with written_beside(folder / FILE) as beside:
            beside.write_text(json.dumps({"starts": starts, "arguments": vars(args)}, default=str), encoding="utf-8")
    except OSError as error:
        say(f"> {folder / FILE} cannot be written ({error.strerror}); the run goes on without it")


def read_run_record(folder: Path) -> dict[str, Any] | None:
    """The object of a folder's run.json; None if there is no such file.

    Raises:
        ValueError: the file has not the form that a run writes.
    """
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for start in record["starts"]:
            datetime.fromisoformat(start["date"])
            shlex.join(start["command"])
            if not isinstance(start["iteration"], int) or not isinstance(start["versions"], dict):
                raise TypeError("a start has no iteration or no versions")
        if not record["starts"] or not isinstance(record["arguments"], dict):
            raise ValueError("it has no starts, or arguments that are no object")
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}); remove it to go on without it.") from error
    return record


def _earlier(file: Path) -> list[Any]:
    """Starts of the run that is resumed; none where the file is not there or damaged."""
    try:
        starts = json.loads(file.read_text(encoding="utf-8"))["starts"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return starts if isinstance(starts, list) else []
