"""Files in the folder of a run's metrics. What reads them need not wait for torch.

metrics.jsonl: a JSON object a line, whole lines alone, continued by a resumed run. `split` is training, validation or
test; each of several data sets adds its name, as in validation-code.

    {"iteration": 50, "split": "training", "lm loss": 2.5, "mtp_1 loss": 2.75, "learning rate": 0.001}

run.json: how the run was started. A resumed run adds a start; `arguments` are those of the newest, Megatron's and ours.

    {"starts": [{"date": "2026-01-31T12:00:00+00:00", "iteration": 0, "command": ["train", ...], "versions": {...}}],
     "arguments": {"num_layers": 4, ...}}

documents.json: the counts of acceptance of every document in an evaluation, by source and number; by depth, how often
drafts were offered, how often those before were accepted, and how often this one too.

    {"iteration": 50, "sources": {"code": {"12": [[64, 63], [64, 40], [40, 20]], ...}}}
"""

import json
import os
import re
import shlex
import sys
from argparse import Namespace
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_mtp import __version__
from megatron_mtp.common.acceptance import AcceptanceStats, BySource
from megatron_mtp.common.files import written_beside
from megatron_mtp.training.short_log import say

METRICS, RECORD, DOCUMENTS = "metrics.jsonl", "run.json", "documents.json"
SPLIT = re.compile("training|(validation|test)(-.+)?")

Row = dict[str, Any]


def read_rows(folder: Path) -> list[Row]:
    """The rows of a run's folder, one or more, in the order of the file.

    Raises:
        ValueError: there is no such file, it has no row, or a line is damaged.
    """
    file = folder / METRICS
    if not file.is_file():
        raise ValueError(f"{folder} has no {METRICS}; give a folder that --mtp-metrics-dir named.")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read ({error}); give a run whose files are whole.") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if (row := _row(line)) is not None:
            rows.append(row)
        elif line.strip():
            raise ValueError(
                f"{file} is damaged in line {number}; remove the line, or resume the run, which removes it."
            )
    if not rows:
        raise ValueError(f"{file} is empty; wait for the run's first --log-interval.")
    return rows


def _row(line: str | bytes) -> Row | None:
    """The row of a line; None of a line that a kill has cut short, or that is damaged."""
    try:
        row = json.loads(line)
        figures = [value for key, value in row.items() if key not in ("iteration", "split")]
        whole = type(row["iteration"]) is int and row["iteration"] >= 0 and SPLIT.fullmatch(row["split"]) is not None
        numbers = [row["iteration"], *(one for one in figures if not isinstance(one, float))]
        whole = whole and all(type(one) is int and -(2**63) <= one < 2**63 for one in numbers)  # JSON has any size
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # also numbers with thousands of digits
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


def read_documents(folder: Path) -> BySource:
    """The counts in a folder's documents.json; none without one.

    Raises:
        ValueError: it is damaged.
    """
    file = folder / DOCUMENTS
    if not file.is_file():
        return {}
    try:
        return {
            source: {
                int(number): AcceptanceStats(offered_at=offered, reached_at=reached, accepted_at=accepted)
                for number, (offered, reached, accepted) in documents.items()
            }
            for source, documents in json.loads(file.read_text())["sources"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({error}); remove it, and evaluate again.") from error


def append(file: Path, row: str) -> None:
    """Append the whole row or nothing, so that a full disk leaves no half of a line."""
    size = file.stat().st_size if file.exists() else 0
    try:
        with open(file, "a", encoding="utf-8") as output:
            output.write(row)
    except OSError:
        with suppress(OSError):
            os.truncate(file, size)
        raise


def drop_rows_after(path: Path, iteration: int, is_evaluated_again: bool = False) -> None:
    """Remove damaged rows, and those of steps that a resumed run takes again; a new run renames it *.old.jsonl.

    Args:
        is_evaluated_again: the resumed run takes no step, and evaluates: the evaluations of that step go too.
    """
    if not path.exists():
        return
    if iteration == 0:
        path.replace(path.with_suffix(".old.jsonl"))
        return
    lines = path.read_bytes().splitlines()
    with written_beside(path) as beside:
        rows = [(line, row) for line in lines if (row := _row(line)) is not None]
        last = iteration - 1 if is_evaluated_again else iteration
        kept = [line for line, row in rows if row["iteration"] <= (iteration if row["split"] == "training" else last)]
        beside.write_bytes(b"".join(line + b"\n" for line in kept))


# --- run.json --------------------------------------------------------------------------------------------------------


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
    earlier: list[Any] = []  # of a run that is resumed; none where the file is not there or damaged
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
        say(f"> {folder / RECORD} cannot be written ({error.strerror}); the run goes on without it")


def read_run_record(folder: Path) -> dict[str, Any] | None:
    """The object of a folder's run.json; None if there is no such file.

    Raises:
        ValueError: the file has not the form that a run writes.
    """
    file = folder / RECORD
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
            raise ValueError("it has no starts, or arguments that are not an object")
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}); remove it to go on without it.") from error
    return record
