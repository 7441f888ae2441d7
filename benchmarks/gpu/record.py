"""JSON file of one part: written when the part begins, whenever it has new results, and when it ends.

    {"part", "status", "why", "command", "date", "seconds", "hardware", "versions",
     "results", "tables", "goals", "not run"}

`status` is running, ran, failed, killed or not run. A part that fails or is killed keeps its results so far.
Next to the records, `events` has a line for each event.
"""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import versions
from megatron_mtp.common.files import written_beside

EVENTS, SCRATCH = "events", ".scratch"
"""The events file, and the suffix of folders that are deleted with their part."""
ENDED_WELL = ("ran", "not run")
BLANK: dict[str, Any] = {
    "part": "",
    "status": "running",
    "why": None,
    "command": "",
    "date": "",
    "seconds": 0.0,
    "hardware": None,
    "versions": {},
    "results": {},
    "tables": [],
    "goals": [],
    "not run": {},
}


def begin(part: str, command: str) -> dict[str, Any]:
    """Return the record of a part that has just started; `hardware` is added once torch has found the device."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return BLANK | {"part": part, "command": command, "date": now, "versions": versions()}


def write(folder: Path, record: dict[str, Any]) -> None:
    """Write PART.json to a temporary file, and rename it."""
    with written_beside(folder / f"{record['part']}.json") as beside:
        beside.write_text(json.dumps(record, indent=1), encoding="utf-8")


def read(file: Path) -> dict[str, Any]:
    """Read a record. Raise ValueError if the file is not a record."""
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        absent = BLANK.keys() - record.keys()
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} is not a record of a part: {error}.") from None
    if absent:
        raise ValueError(f"{file} is not a record of a part: it lacks {', '.join(sorted(absent))}.")
    return record


def update(folder: Path, part: str, **changes: Any) -> None:
    """Write changes to a part's record."""
    write(folder, read(folder / f"{part}.json") | changes)


def end(folder: Path, record: dict[str, Any]) -> None:
    """Write the record of a finished part, and add an event."""
    write(folder, record)
    event(folder, "ended", **{key: record[key] for key in ("part", "status", "seconds", "why", "goals")})


def event(folder: Path, what: str, **more: Any) -> None:
    """Add a line to the run's events."""
    with open(folder / EVENTS, "a", encoding="utf-8") as file:
        file.write(json.dumps({"at": round(time.time(), 1), "what": what, **more}) + "\n")


def events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the run so far."""
    return [json.loads(line) for line in (folder / EVENTS).read_text(encoding="utf-8").splitlines()]


def parts_of(folder: Path, what: str) -> list[str]:
    """Return the parts that have such an event."""
    return [each["part"] for each in events(folder) if each["what"] == what and "part" in each]
