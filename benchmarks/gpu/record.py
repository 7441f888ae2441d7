"""The JSON file of one part: written when the part begins, whenever it has new figures, and when it has ended.

    {"part", "status", "why", "command", "date", "seconds", "hardware", "versions",
     "results", "tables", "goals", "not run"}

`status` is running, ran, failed, killed or not run. A part that fails or is killed keeps the figures that it had.
"""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import Goal, versions

ENDED_WELL = ("ran", "not run")


def begin(part: str, command: str) -> dict[str, Any]:
    """The record of a part that has just started; `hardware` is added once torch has found the device."""
    return {
        "part": part,
        "status": "running",
        "why": None,
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": 0.0,
        "hardware": None,
        "versions": versions(),
        "results": {},
        "tables": [],
        "goals": [],
        "not run": {},
    }


def write(folder: Path, record: dict[str, Any]) -> None:
    """As PART.json, beside and renamed."""
    target = folder / f"{record['part']}.json"
    beside = target.with_name(f"{target.name}.partial")
    beside.write_text(json.dumps(record, indent=1), encoding="utf-8")
    beside.replace(target)


def read(file: Path) -> dict[str, Any]:
    """Raises ValueError where the file is no record."""
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        absent = begin("", "").keys() - record.keys()
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} is no record of a part: {error}.") from None
    if absent:
        raise ValueError(f"{file} is no record of a part: it lacks {', '.join(sorted(absent))}.")
    return record


def with_found(record: dict[str, Any], found: Any) -> dict[str, Any]:
    """The record with what a part has `Found` so far."""
    return record | {
        "results": found.results,
        "tables": [asdict(table) for table in found.tables],
        "goals": [goal.as_dict() for goal in found.goals],
        "not run": found.not_run,
    }


def goals_of(record: dict[str, Any]) -> list[Goal]:
    return [Goal(goal["what"], goal["value"], goal["goal"], goal["op"]) for goal in record["goals"]]
