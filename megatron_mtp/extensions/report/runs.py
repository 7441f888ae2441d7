"""Files of run folders: metrics.jsonl, run.json, and drafts.json if `generate` ran with `--record`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from megatron_mtp.training.read_runs import read_rows, read_run_record
from megatron_mtp.training.run_files import Row

DRAFTS = "drafts.json"

Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


class MetricsRow(BaseModel):
    """A forward pass of the trunk: the draft tree, how many of its tokens were accepted, and what was emitted."""

    drafted: list[Count | None]
    parents: list[Count]
    accepted: Count
    emitted: list[Count]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.parents) != len(self.drafted) or any(parent > node for node, parent in enumerate(self.parents)):
            raise ValueError("a draft is not a tree")
        if self.accepted > len(self.emitted):
            raise ValueError("more tokens are accepted than emitted")
        return self

    def rejected(self) -> list[int]:
        """Draft tokens that are not on the accepted path; `parents` are rows, of which row 0 is the newest token."""
        row, path, nodes = 0, set(), list(zip(self.drafted, self.parents, strict=True))
        for token in self.emitted[: self.accepted]:
            row = next((n for n, node in enumerate(nodes, start=1) if node == (token, row)), row)
            path.add(row)
        return [token for n, (token, _) in enumerate(nodes, start=1) if token is not None and n not in path]


class DraftedText(BaseModel):
    """A generated output."""

    prompt: list[Count]
    steps: list[MetricsRow]


class DraftRecord(BaseModel):
    """Contents of drafts.json; `pieces` has the text of every token id."""

    config: dict[str, Any] | None
    figures: dict[str, Any]
    pieces: dict[str, str]
    texts: list[DraftedText]


@dataclass(frozen=True)
class RunFolder:
    """One folder, named as given; `started` and `drafts` are None if the files do not exist."""

    name: str
    rows: list[Row]
    started: dict[str, Any] | None
    drafts: DraftRecord | None

    def points(self, split: str, key: str) -> dict[int, float]:
        """Return values by step, in order; the last row of a step counts."""
        found = {row["iteration"]: row[key] for row in self.rows if row["split"] == split and key in row}
        return dict(sorted(found.items()))

    def evaluations(self) -> list[str]:
        """Return splits other than training: validation, or several such as validation-code, and test."""
        return list(dict.fromkeys(row["split"] for row in self.rows if row["split"] != "training"))


def read_runs(folders: list[Path]) -> list[RunFolder]:
    """Read every folder once, in the given order. Raise ValueError for one that is not a run, or has a damaged file."""
    return [
        RunFolder(str(folder), read_rows(folder), read_run_record(folder), _drafts(folder / DRAFTS))
        for folder in dict.fromkeys(folders)
    ]


def figures(runs: list[RunFolder]) -> list[str]:
    """Return the names of all metrics, in order of appearance."""
    return list(
        dict.fromkeys(key for run in runs for row in run.rows for key in row if key not in ("iteration", "split"))
    )


def _drafts(file: Path) -> DraftRecord | None:
    if not file.is_file():
        return None
    try:
        return DraftRecord.model_validate_json(file.read_bytes())
    except OSError as error:
        found = error.strerror
    except ValidationError as error:
        first = error.errors()[0]
        found = ".".join(map(str, (*first["loc"], first["msg"])))
    raise ValueError(f"{file} is damaged ({found}); remove it, or write it again with generate --record.")
