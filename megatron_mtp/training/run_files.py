"""Files that a run writes in its metrics folder; read_runs.py reads them.

metrics.jsonl: one JSON object per line; a resumed run appends to it. `split` is training, validation or test; with
several data sets, their name is appended, as in validation-code.

    {"iteration": 50, "split": "training", "lm loss": 2.5, "mtp_1 loss": 2.75, "learning rate": 0.001}

run.json: how the run was started. A resumed run adds a start; `arguments` are the newest ones, Megatron's and ours.

    {"starts": [{"date": "2026-01-31T12:00:00+00:00", "iteration": 0, "command": ["train", ...], "versions": {...}}],
     "arguments": {"num_layers": 4, ...}}

documents.json: acceptance counts of every document of an evaluation, by source and number. For each depth: how often a
draft was offered, how often all previous ones were accepted, and how often this one was accepted too.

    {"iteration": 50, "sources": {"code": {"12": [[64, 63], [64, 40], [40, 20]], ...}}}
"""

import json
import os
import re
import sys
from argparse import Namespace
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_mtp import __version__
from megatron_mtp.common.acceptance import BySource
from megatron_mtp.common.files import written_beside
from megatron_mtp.training.short_log import say

METRICS, RECORD, DOCUMENTS = "metrics.jsonl", "run.json", "documents.json"
SPLIT = re.compile("training|(validation|test)(-.+)?")

Row = dict[str, Any]


def row_of(line: str | bytes) -> Row | None:
    """Parse the row of a line; None for a line that is damaged or was cut short by a kill."""
    try:
        row = json.loads(line)
        figures = [value for key, value in row.items() if key not in ("iteration", "split")]
        whole = type(row["iteration"]) is int and row["iteration"] >= 0 and SPLIT.fullmatch(row["split"]) is not None
        numbers = [row["iteration"], *(one for one in figures if not isinstance(one, float))]
        whole = whole and all(type(one) is int and -(2**63) <= one < 2**63 for one in numbers)  # JSON has no limit
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # also for thousands of digits
        return None
    return dict(row) if whole else None


def write_documents(folder: Path, iteration: int, sources: BySource) -> None:
    """Write documents.json."""
    counts = {
        source: {number: [stats.offered_at, stats.reached_at, stats.accepted_at] for number, stats in documents.items()}
        for source, documents in sources.items()
    }
    with written_beside(folder / DOCUMENTS) as beside:
        beside.write_text(json.dumps({"iteration": iteration, "sources": counts}))


def append(file: Path, row: str) -> None:
    """Append a whole row or nothing, so that a full disk leaves no partial line."""
    size = file.stat().st_size if file.exists() else 0
    try:
        with open(file, "a", encoding="utf-8") as output:
            output.write(row)
    except OSError:
        with suppress(OSError):
            os.truncate(file, size)
        raise


def drop_rows_after(path: Path, iteration: int, is_evaluated_again: bool = False) -> None:
    """Remove damaged rows and rows of steps that a resumed run repeats. A new run renames the file to *.old.jsonl.

    Args:
        is_evaluated_again: whether the resumed run only evaluates; the evaluations of that step are then removed too.
    """
    if not path.exists():
        return
    if iteration == 0:
        path.replace(path.with_suffix(".old.jsonl"))
        return
    lines = path.read_bytes().splitlines()
    with written_beside(path) as beside:
        rows = [(line, row) for line in lines if (row := row_of(line)) is not None]
        last = iteration - 1 if is_evaluated_again else iteration
        kept = [line for line, row in rows if row["iteration"] <= (iteration if row["split"] == "training" else last)]
        beside.write_bytes(b"".join(line + b"\n" for line in kept))


# --- run.json --------------------------------------------------------------------------------------------------------


def write_run_record(folder: Path, args: Namespace) -> None:
    """Add this start to run.json. If that fails, print one line; the run does not need the file."""
    import torch

    versions = {"megatron-mtp": __version__, "megatron-core": version("megatron-core"), "torch": torch.__version__}
    start = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "iteration": args.iteration,
        "command": list(sys.argv),
        "versions": versions,
    }
    earlier: list[Any] = []  # of the resumed run; empty if the file is missing or damaged
    if args.iteration:
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            found = json.loads((folder / RECORD).read_text(encoding="utf-8"))["starts"]
            earlier = found if isinstance(found, list) else []
    try:
        with written_beside(folder / RECORD) as beside:
            beside.write_text(
                json.dumps({"starts": [*earlier, start], "arguments": vars(args)}, default=str), encoding="utf-8"
            )
    except OSError as error:
        say(f"> {folder / RECORD} cannot be written ({error.strerror}); the run continues without it")
