"""Studies: many trainings in turn. Every result is kept, and the same command continues after an interruption.

Run at 461eb56.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_mtp.files import written_beside

EQUAL = ("steps", "seconds")
"""What the runs of a study have in common."""

Result = dict[str, Any]


class Named(Protocol):
    """A run; hashable."""

    @property
    def name(self) -> str:
        """Of the file of its result."""
        ...


@dataclass(frozen=True)
class Study[R: Named]:
    """Runs with the same settings.

    Attributes:
        name: of the benchmark.
        folder: of the results.
        settings: what all runs share.
    """

    name: str
    folder: Path
    settings: Mapping[str, Any]

    def results(self, runs: Sequence[R], measured: Callable[[R, Mapping[R, Result]], Result]) -> dict[R, Result]:
        """Of every run; those that are not kept are measured, given the results of the runs before.

        Ends the process with one sentence where a kept result has other settings.
        """
        found: dict[R, Result] = {}
        todo = [run for run in runs if not self._kept(run).exists()]
        spent: list[float] = []
        for run in runs:
            if run in todo:
                self._announce(run, spent, len(todo))
                began = time.perf_counter()
                self._keep(run, measured(run, found))
                spent.append(time.perf_counter() - began)
            found[run] = self._read(run)
        return found

    def _kept(self, run: R) -> Path:
        return self.folder / f"{run.name}.json"

    def _announce(self, run: R, spent: Sequence[float], todo: int) -> None:
        """A line: how many there are, and how long the rest will take."""
        left = f", {statistics.mean(spent) * (todo - len(spent)) / 60:.0f} min left" if spent else ""
        print(f"{self.name}: {len(spent) + 1} of {todo}: {run.name}{left}", file=sys.stderr, flush=True)

    def _keep(self, run: R, result: Result) -> None:
        with written_beside(self._kept(run)) as beside:
            beside.write_text(json.dumps({**result, "settings": dict(self.settings)}) + "\n")

    def _read(self, run: R) -> Result:
        result: Result = json.loads(self._kept(run).read_text())
        if result["settings"] != self.settings:
            said = f"{self._kept(run)} was made with other settings ({result['settings']}); give another --out."
            raise SystemExit(said)
        return result


def step_seconds(folder: Path) -> float:
    """The median of the rows of a run's metrics."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["step seconds"] for row in rows if "step seconds" in row)


def steps_in_the_time(steps: int, of_seconds: float, own_seconds: float) -> int:
    """As many steps of one kind as fit into the time that `steps` of another take; both by seconds a step."""
    return max(1, round(steps * of_seconds / own_seconds))
