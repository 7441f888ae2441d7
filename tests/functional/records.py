"""The records of jobs (layout_jobs.py), run when a test first asks for one of them."""

from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from layouts import LAYOUTS, needs

WORKER = Path(__file__).parent / "layout_worker.py"


class Records:
    """What jobs wrote; every job runs once, after those that it needs, in as many processes as its layout has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._errors: dict[str, str] = {}

    def of(self, job: str) -> dict[str, Any]:
        """The record of a job; the test fails with the end of the output where there is none."""
        self.run(job)
        if self._errors[job]:
            pytest.fail(f"{job} left no record; {self._errors[job]}")
        return torch.load(self.folder / "records" / f"{job.replace('/', '-')}.pt")

    def run(self, job: str) -> None:
        """See that the job has run; one that fails is not tried again."""
        if job in self._errors:
            return
        for needed in needs(job):
            self.run(needed)
        command = launch.torchrun(processes(job), WORKER, str(self.folder), job)
        self._errors[job] = ""
        try:
            launch.run(command, self.folder / f"{job.replace('/', '-')}.log")
        except AssertionError as error:
            self._errors[job] = str(error)


def processes(job: str) -> int:
    """The last layout that a job names is the one that it runs in."""
    named = [LAYOUTS[word].world_size for word in job.split("/") if word in LAYOUTS]
    return named[-1] if named else 1
