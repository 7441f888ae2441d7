"""What a run's folder holds: rows of metrics.jsonl, and drafts.json if text was generated with `--record`."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
DRAFTS = "drafts.json"

SPLIT = re.compile("training|evaluation|(validation|test)(-.+)?")
"""What a row is of; of several sets of data each has its name."""

LARGEST = 2**63
"""Of whole numbers in a file: steps, bytes, token ids."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One folder.

    Attributes:
        name: the folder as it was given.
        rows: of metrics.jsonl, in its order; files of older runs call all data of evaluations 'evaluation'.
        drafts: the object of drafts.json; None where there is no such file.
    """

    name: str
    rows: list[Row]
    drafts: dict[str, Any] | None

    def points(self, split: str, key: str) -> list[tuple[int, float]]:
        """Steps and finite values, of the rows that have the key; of rows of one step, the last."""
        return [(step, value) for step, value in self._values(split, key) if math.isfinite(value)]

    def last(self, split: str, key: str) -> float | None:
        """The newest value."""
        values = self._values(split, key)
        return values[-1][1] if values else None

    def evaluations(self) -> list[str]:
        """Splits other than training: validation, or several such as validation-code, and test."""
        return list(dict.fromkeys(row["split"] for row in self.rows if row["split"] != "training"))

    def figures(self) -> list[str]:
        """Names of all figures, in the order in which they first appear."""
        return list(dict.fromkeys(key for row in self.rows for key in row if key not in ("iteration", "split")))

    def _values(self, split: str, key: str) -> list[tuple[int, float]]:
        found = {row["iteration"]: row[key] for row in self.rows if row["split"] == split and key in row}
        return sorted(found.items())


def read_runs(folders: list[Path]) -> list[Run]:
    """Every folder once, in the order given.

    Raises:
        ValueError: a folder or its metrics.jsonl is missing, cannot be read, or has a line that is damaged.
    """
    return [Run(str(folder), _rows(folder), _drafts(folder / DRAFTS)) for folder in dict.fromkeys(folders)]


def _rows(folder: Path) -> list[Row]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give the folder of a run, as --mtp-metrics-dir named it.")
    file = folder / METRICS
    if not file.is_file():
        raise ValueError(f"{folder} has no {METRICS}; give a folder that --mtp-metrics-dir named.")
    lines = _text(file).splitlines()
    rows = [_row(file, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise ValueError(f"{file} is empty; let the run come to its first --log-interval.")
    return rows


def _row(file: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # also of a number with thousands of digits
        row = None
    if not isinstance(row, dict) or not _is_row(row):
        raise ValueError(f"{file} is damaged in line {number}; take the line out, or let the run go on, which does.")
    return row


def _is_row(row: Row) -> bool:
    figures = [value for key, value in row.items() if key != "split"]
    return (
        all(map(_is_number, figures))
        and isinstance(row.get("iteration"), int)
        and SPLIT.fullmatch(str(row.get("split"))) is not None
    )


def _is_number(value: object) -> bool:
    """Of a size that a chart can show; JSON can spell whole numbers of any size."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= LARGEST


def _drafts(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        drafts = json.loads(_text(file))
        check_drafts(drafts)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{file} is damaged ({error}); take it away, or write it again with generate --record."
        ) from error
    return drafts


def check_drafts(drafts: dict[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError where it is not what generate writes."""
    if not all(isinstance(drafts[key], dict) for key in ("figures", "pieces")):
        raise TypeError("figures and pieces are no objects")
    if drafts["config"] is not None:
        str(drafts["config"]["method"])
    for text in drafts["texts"]:
        _check_ids(text["prompt"])
        for step in text["steps"]:
            _check_ids([*step["emitted"], step["accepted"]])
            _check_ids([token for token in step["drafted"] if token is not None])
            _check_tree(step["parents"], len(step["drafted"]))
            if not 0 <= step["accepted"] <= len(step["emitted"]):
                raise ValueError("a step has more tokens accepted than emitted")


def _check_tree(parents: list[int], nodes: int) -> None:
    _check_ids(parents)
    if len(parents) != nodes or not all(0 <= parent <= node for node, parent in enumerate(parents)):
        raise ValueError("a draft is no tree")


def _check_ids(ids: list[int]) -> None:
    if not all(isinstance(token, int) and abs(token) <= LARGEST for token in ids):
        raise TypeError("token ids are no whole numbers of a usual size")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read ({error}); give a run whose files are whole.") from error
