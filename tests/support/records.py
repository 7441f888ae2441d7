"""Results of jobs (layout_jobs.py), which run when a test first asks for one of them, or shortly before."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import Any

import launch
import pytest
import torch
from layouts import LAYOUTS, needs

WORKER = Path(__file__).parent / "layout_worker.py"
AT_ONCE = 2
"""Concurrent jobs: ranks of one job wait for each other half of the time."""


class Records:
    """Run every job once, after the jobs that it needs, in as many processes as its layout has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._turns, self._threads = Semaphore(AT_ONCE), ThreadPoolExecutor(64)
        self._errors: dict[str, Future[str]] = {}
        self._expected: list[str] = []

    def expect(self, jobs: Iterable[str]) -> None:
        """Announce which jobs tests will ask for, in this order."""
        self._expected = list(dict.fromkeys(jobs))

    def of(self, job: str) -> dict[str, Any]:
        """Return a job's record. If the job failed, fail the test with the end of its output."""
        error = self._started(job)
        for later in self._after(job):
            self._started(later)
        if error.result():
            pytest.fail(f"{job} left no record; {error.result()}")
        return torch.load(self.folder / "records" / f"{job.replace('/', '-')}.pt")

    def end(self) -> None:
        """Wait for running jobs, and start no more."""
        self._threads.shutdown(cancel_futures=True)

    def _after(self, job: str) -> list[str]:
        if job not in self._expected:
            return []
        place = self._expected.index(job) + 1
        return self._expected[place : place + AT_ONCE]

    def _started(self, job: str) -> "Future[str]":
        """Return the error of a job, "" if it succeeded; a failed job is not tried again."""
        if job not in self._errors:
            needed = [self._started(each) for each in needs(job)]
            self._errors[job] = self._threads.submit(self._run, job, needed)
        return self._errors[job]

    def _run(self, job: str, needed: "list[Future[str]]") -> str:
        for each in needed:
            each.result()
        command = launch.torchrun(processes(job), WORKER, str(self.folder), job)
        with self._turns:
            try:
                launch.run(command, self.folder / f"{job.replace('/', '-')}.log")
            except AssertionError as error:
                return str(error)
        return ""


def processes(job: str) -> int:
    """Return the number of processes of the layout that the job runs in, the last one in its name."""
    named = [LAYOUTS[word].world_size for word in job.split("/") if word in LAYOUTS]
    return named[-1] if named else 1
