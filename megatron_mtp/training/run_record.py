"""run.json: how a run was started, in the folder of its metrics.jsonl, for `megatron-mtp report`.

    {"starts": [{"date": "2026-01-31T12:00:00+00:00", "iteration": 0, "command": ["train", ...], "versions": {...}}],
     "arguments": {"num_layers": 4, ...}}

A resumed run adds a start; `arguments` are Megatron's, ours among them, of the newest.
"""

import json
import sys
from argparse import Namespace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from megatron_mtp import __version__
from megatron_mtp.files import written_beside
from megatron_mtp.training.console import say

FILE = "run.json"
VERSIONS = {"megatron-mtp": __version__, "megatron-core": version("megatron-core"), "torch": torch.__version__}


def write_run_record(folder: Path, args: Namespace) -> None:
    """Add this start to run.json. The run does not need it: where it cannot be written, one line says so."""
    start = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "iteration": args.iteration,
        "command": list(sys.argv),
        "versions": VERSIONS,
    }
    starts = [*_earlier(folder / FILE), start] if args.iteration else [start]
    try:
        with written_beside(folder / FILE) as beside:
            beside.write_text(json.dumps({"starts": starts, "arguments": vars(args)}, default=str), encoding="utf-8")
    except OSError as error:
        say(f"> {folder / FILE} cannot be written ({error.strerror}); the run goes on without it")


def _earlier(file: Path) -> list[Any]:
    """Starts of the run that is resumed; none where the file is not there or damaged."""
    try:
        starts = json.loads(file.read_text(encoding="utf-8"))["starts"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return starts if isinstance(starts, list) else []
