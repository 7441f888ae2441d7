"""The files of a run's folder: metrics.jsonl, run.json, and drafts.json if text was generated with `--record`."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
STARTED = "run.json"
DRAFTS = "drafts.json"

CONDITIONAL = " conditional acceptance"
FORMER_NAMES = {r"(mtp_\d+) acceptance": r"\1 conditional acceptance"}
"""Names of figures in rows of earlier versions, which had the conditional acceptance alone, and what they are now."""

SPLIT = re.compile("training|evaluation|(validation|test)(-.+)?")
"""The data of a row; each of several data sets has its name."""

MOST = 1e100
"""A larger value is not drawn, and one closer to 0 than the inverse is drawn as 0: their squares leave float64."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One folder.

    Attributes:
        name: the folder as it was given.
        rows: of metrics.jsonl, in its order; files of older runs call all data of evaluations 'evaluation'.
        started: the object of run.json; None where there is no such file, as for older runs.
        drafts: the object of drafts.json; None where there is no such file.
    """

    name: str
    rows: list[Row]
    started: dict[str, Any] | None
    drafts: dict[str, Any] | None

    def points(self, split: str, key: str) -> list[tuple[int, float]]:
        """Steps and values that can be drawn, from the rows that have the key; the last row of a step counts."""
        values = self._values(split, key)
        return [(step, value if abs(value) > 1 / MOST else 0.0) for step, value in values if abs(value) < MOST]

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
    return [
        Run(
            str(folder),
            _rows(folder),
            read_checked(folder / STARTED, check_started, "remove it to make the page without it"),
            read_checked(folder / DRAFTS, check_drafts, "remove it, or write it again with generate --record"),
        )
        for folder in dict.fromkeys(folders)
    ]


def _rows(folder: Path) -> list[Row]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give the folder of a run, as --mtp-metrics-dir named it.")
    file = folder / METRICS
    if not file.is_file():
        raise ValueError(f"{folder} has no {METRICS}; give a folder that --mtp-metrics-dir named.")
    lines = _text(file).splitlines()
    rows = [_row(file, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise ValueError(f"{file} is empty; wait for the run's first --log-interval.")
    return rows


def _row(file: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # also for a number with thousands of digits
        row = None
    if not isinstance(row, dict) or not _is_row(row):
        raise ValueError(f"{file} is damaged in line {number}; remove the line, or resume the run, which removes it.")
    return with_both_acceptances(row)


def _is_row(row: Row) -> bool:
    figures = [value for key, value in row.items() if key != "split"]
    step, numbers = row.get("iteration"), all(_is_number(value) for value in figures)
    return numbers and isinstance(step, int) and step >= 0 and SPLIT.fullmatch(str(row.get("split"))) is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_whole(value)


def _is_whole(value: Any) -> bool:
    """Whether it is an integer of at most 64 bits; JSON has numbers of any size."""
    return type(value) is int and -(2**63) <= value < 2**63


def with_both_acceptances(row: Row) -> Row:
    """The row under today's names; acceptance is the product of the conditional ones that a former row has."""
    if any(key.endswith(CONDITIONAL) for key in row):
        return row
    made = {_todays(key): value for key, value in row.items()}
    depth, rate = 1, 1.0
    while (given := made.get(f"mtp_{depth}{CONDITIONAL}")) is not None:
        rate *= given
        made[f"mtp_{depth} acceptance"] = rate
        depth += 1
    return made


def _todays(name: str) -> str:
    for former, today in FORMER_NAMES.items():
        if re.fullmatch(former, name):
            return re.sub(former, today, name)
    return name


def read_checked(file: Path, check: Callable[[dict[str, Any]], None], remedy: str) -> dict[str, Any] | None:
    """The object of a file; None if there is no file.

    Raises:
        ValueError: `check` finds damage; the sentence ends with `remedy`.
    """
    if not file.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(_text(file))
        check(found)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}); {remedy}.") from error
    return found


def check_started(started: dict[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError unless it has the form that a run writes."""
    if not started["starts"] or not isinstance(started["arguments"], dict):
        raise ValueError("it has no starts, or arguments that are no object")
    for start in started["starts"]:
        datetime.fromisoformat(start["date"])
        if not isinstance(start["iteration"], int) or not isinstance(start["versions"], dict):
            raise TypeError("a start has no iteration or no versions")
        shlex.join(start["command"])


def check_drafts(drafts: dict[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError unless it has the form that generate writes."""
    if not all(isinstance(drafts[key], dict) for key in ("figures", "pieces")):
        raise TypeError("figures and pieces are no objects")
    if not all(isinstance(piece, str) for piece in drafts["pieces"].values()):
        raise TypeError("pieces are no texts")
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
    if not all(_is_whole(token) for token in ids):
        raise TypeError("token ids are no whole numbers of a usual size")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read ({error}); give a run whose files are whole.") from error
