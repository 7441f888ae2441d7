"""A process that forks for every job, so that shared imports happen once; and its client in a test.

    for_each_job(work)                                      in the process: `work` returns a record for each job
    with worker(command, environment, log) as record_of:    in the test: `record_of` runs a job

Jobs and records are lines of JSON. A failed job returns {}; its traceback is in the log.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

Record = dict[str, Any]


def for_each_job(work: Callable[..., Record]) -> None:
    """Run each job from standard input in a fork, and print its record; all other output goes to the log."""
    for line in sys.stdin:
        fork = get_context("fork").Process(target=_print_record, args=(work, json.loads(line)))
        fork.start()
        fork.join()
        if fork.exitcode:
            print("{}", flush=True)


def _print_record(work: Callable[..., Record], job: Sequence[Any]) -> None:
    printed = os.dup(1)
    os.dup2(2, 1)
    os.write(printed, f"{json.dumps(work(*job))}\n".encode())


@contextmanager
def worker(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[Callable[..., Record]]:
    """Yield a function that returns a job's record. A failed job fails the test, with the end of the log."""
    with (
        open(log, "w") as errors,
        Popen(command, env=environment, stdin=PIPE, stdout=PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        given, printed = process.stdin, process.stdout

        def record_of(*job: Any) -> Record:
            assert process.poll() is None, log.read_text()[-3000:]
            print(json.dumps(job), file=given, flush=True)
            record: Record = json.loads(printed.readline() or "{}")
            assert record, log.read_text()[-3000:]
            return record

        yield record_of
