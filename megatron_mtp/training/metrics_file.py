"""metrics.jsonl: one JSON object a line, whole lines alone, continued by a resumed run."""

import json
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
    rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
    with written_beside(path) as beside:
        beside.write_text("".join(row for row in rows if _iteration(row) <= iteration), encoding="utf-8")


def _iteration(row: str) -> float:
    """The step of a line; a half-written one of a killed run counts as taken again."""
    try:
        return int(json.loads(row)["iteration"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")
