"""metrics.jsonl: one JSON object a line, whole lines alone, continued by a resumed run."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path

from megatron_mtp.files import written_beside


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


def drop_rows_after(path: Path, iteration: int) -> None:
    """Remove the rows of steps that a resumed run takes again; a new run renames the older file to *.old.jsonl."""
    if not path.exists():
        return
    if iteration == 0:
        path.replace(path.with_suffix(".old.jsonl"))
        return
    rows = path.read_bytes().splitlines()
    with written_beside(path) as beside:
        beside.write_bytes(b"".join(row + b"\n" for row in rows if _iteration(row) <= iteration))


def _iteration(line: bytes) -> float:
    """The step of a row; a line that a kill has cut short, or that is damaged, counts as taken again."""
    try:
        row = json.loads(line)
        figures = [value for name, value in row.items() if name not in ("iteration", "split")]
    except (ValueError, AttributeError, RecursionError):
        return math.inf
    is_row = isinstance(row.get("split"), str) and all(type(value) in (int, float) for value in figures)
    return row["iteration"] if is_row and type(row.get("iteration")) is int else math.inf
