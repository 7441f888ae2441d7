"""metrics.jsonl: one JSON object a line, whole lines alone, continued by a resumed run.

    {"iteration": 50, "split": "training", "lm loss": 2.5, "mtp_1 loss": 2.75, "learning rate": 0.001}

`split` is training, validation or test; each of several data sets adds its name, as in validation-code. What reads it
need not wait for torch.
"""

import json
import math
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_mtp.files import written_beside

FILE = "metrics.jsonl"
SPLIT = re.compile("training|(validation|test)(-.+)?")

Row = dict[str, Any]


def read_rows(folder: Path) -> list[Row]:
    """The rows of a run's folder, one or more, in the order of the file.

    Raises:
        ValueError: there is no such file, it has no row, or a line is damaged.
    """
    file = folder / FILE
    if not file.is_file():
        raise ValueError(f"{folder} has no {FILE}; give a folder that --mtp-metrics-dir named.")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read ({error}); give a run whose files are whole.") from error
    rows = [_row(file, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise ValueError(f"{file} is empty; wait for the run's first --log-interval.")
    return rows


def _row(file: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
        figures = [value for key, value in row.items() if key not in ("iteration", "split")]
        whole = all(_is_number(value) for value in figures) and SPLIT.fullmatch(row["split"]) is not None
        whole = whole and type(row["iteration"]) is int and 0 <= row["iteration"] < 2**63
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # also numbers with thousands of digits
        whole = False
    if not whole:
        raise ValueError(f"{file} is damaged in line {number}; remove the line, or resume the run, which removes it.")
    return dict(row)


def _is_number(value: Any) -> bool:
    """Return whether it is a float, or an integer of at most 64 bits; JSON has numbers of any size."""
    return isinstance(value, float) or (type(value) is int and -(2**63) <= value < 2**63)


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
