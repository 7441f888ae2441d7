"""What runs have written in their metrics folders (run_files.py), read for reports and comparisons, without torch."""

import json
import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_mtp.common.acceptance import AcceptanceStats, BySource
from megatron_mtp.training.run_files import DOCUMENTS, METRICS, RECORD, Row, row_of


def read_rows(folder: Path) -> list[Row]:
    """Read the rows of a run's metrics.jsonl, at least one, in file order.

    Raises:
        ValueError: the file is missing, empty, or has a damaged line.
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
        if (row := row_of(line)) is not None:
            rows.append(row)
        elif line.strip():
            raise ValueError(
                f"{file} is damaged in line {number}; remove the line, or resume the run, which removes it."
            )
    if not rows:
        raise ValueError(f"{file} is empty; wait for the run's first --log-interval.")
    return rows


def read_documents(folder: Path) -> BySource:
    """Read the counts of a folder's documents.json; empty if there is no file.

    Raises:
        ValueError: the file is damaged.
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


def read_run_record(folder: Path) -> dict[str, Any] | None:
    """Read run.json of a folder; None if there is no such file.

    Raises:
        ValueError: the file does not have the expected form.
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
