"""The records of jobs (layout_jobs.py), run when a test first asks for one of them."""

from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from layouts import LAUNCHES

WORKER = Path(__file__).parent / "layout_worker.py"


class Records:
    """What the jobs of all launches wrote; every launch runs once, with all its jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._errors: dict[str, str] = {}

    def of(self, job: str) -> dict[str, Any]:
        """The record of a job; the test fails with the end of the output where there is none."""
        name = next(name for name, row in LAUNCHES.items() if job in row.jobs)
        self._run(name)
        file = self.folder / "records" / f"{job.replace('/', '-')}.pt"
        if not file.exists():
            pytest.fail(f"{job} left no record; {self._errors[name]}")
        return torch.load(file)

    def _run(self, name: str) -> None:
        if name in self._errors:
            return
        row = LAUNCHES[name]
        for needed in row.needs:
            self._run(needed)
        if row.world_size == 1:
            command = launch.python(WORKER, str(self.folder), *row.jobs)
        else:
            command = launch.torchrun(row.world_size, WORKER, str(self.folder), *row.jobs)
        self._errors[name] = ""
        try:
            launch.run(command, self.folder / f"{name}.log", timeout=max(launch.TIMEOUT, 15 * len(row.jobs)))
        except AssertionError as error:
            self._errors[name] = str(error)
