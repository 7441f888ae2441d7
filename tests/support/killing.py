"""Kill commands with SIGKILL at random moments, in forks of a process that has imported everything.

A process that imports Megatron takes seconds to start, and then lives for a tenth of one; a fork starts at once. Every
other moment is a point in time; the rest are calls that change files. A command makes few of these, and they take
almost no time, so random times would rarely fall between them.
"""

import faulthandler
import io
import itertools
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

LIMIT = 300
"""Seconds after which a command counts as hanging."""

CHANGES = {"open", "write", "writelines", "flush", "close", "__exit__", "truncate", "fsync"}
CHANGES |= {"mkdir", "rmdir", "unlink", "remove", "rename", "replace", "link", "symlink", "copy_file_range", "sendfile"}

Command = Callable[[], int]
"""A function that runs to its end and returns its exit status."""


@dataclass
class Killer:
    """Run commands one at a time, each in its own process.

    Args:
        kills: number of kills wanted.
        random: draws the moments.
        log: receives the commands' output.
    """

    kills: int
    random: Random
    log: Path

    def __post_init__(self) -> None:
        self.done = 0
        self._tries = 0

    @property
    def enough(self) -> bool:
        return self.done >= self.kills

    def measure(self, command: Command) -> None:
        """Run a command to its end, to measure its seconds and its calls that change files."""
        read, write = os.pipe()
        calls = Calls()

        def counted() -> int:
            calls.watch()
            status = command()
            os.write(write, str(calls.seen()).encode())
            return status

        began = time.monotonic()
        self.end(counted)
        self._seconds = time.monotonic() - began
        self._calls = int(os.read(read, 32))
        os.close(read)
        os.close(write)

    def end(self, command: Command) -> None:
        """Run a command to its end; it must succeed."""
        assert self._status(self._start(command)) == 0, self._log_end()

    def end_or_kill(self, command: Command) -> bool:
        """Kill a command at a random moment. Return whether it was killed rather than finished."""
        self._tries += 1
        status = self._at_a_time(command) if self._tries % 2 else self._at_a_call(command)
        assert status in (0, -signal.SIGKILL), f"exit status {status}: {self._log_end()}"
        self.done += status != 0
        return status != 0

    def _at_a_time(self, command: Command) -> int:
        """Kill at a random time. If the command finishes sooner than measured on a busier machine, measure again."""
        began = time.monotonic()
        child = self._start(command)
        handle = os.pidfd_open(child)
        through = select.select([handle], [], [], self.random.uniform(0, self._seconds))[0]
        os.close(handle)
        if through:
            self._seconds = time.monotonic() - began
        else:
            os.kill(child, signal.SIGKILL)
        return self._status(child)

    def _at_a_call(self, command: Command) -> int:
        calls = Calls(self.random.randrange(self._calls))

        def watched() -> int:
            calls.watch()
            return command()

        return self._status(self._start(watched))

    def _start(self, command: Command) -> int:
        threads = len(os.listdir("/proc/self/task"))
        assert threads == 1, f"a fork would lack {threads - 1} threads of this process"
        child = os.fork()
        if child:
            return child
        status = 1
        try:
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            status = command()
        except BaseException:  # otherwise the fork would continue as its parent
            traceback.print_exc()
        finally:
            sys.setprofile(None)
            sys.stdout.flush()
            os._exit(status)

    def _status(self, child: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _log_end(self) -> str:
        return f"the end of {self.log}:\n{self.log.read_text(errors='replace')[-3000:]}"


class Calls:
    """Count a process's calls that change files, and kill it before call number `last`."""

    def __init__(self, last: int = -1) -> None:
        self._last, self._number = last, itertools.count()

    def watch(self) -> None:
        """Start counting, in this thread and the threads it starts, but not in child processes."""
        self._process = os.getpid()
        threading.setprofile(self._look)
        sys.setprofile(self._look)

    def seen(self) -> int:
        sys.setprofile(None)
        return next(self._number)

    def _look(self, _: object, event: str, function: Any) -> None:
        if event != "c_call" or function.__name__ not in CHANGES or not _of_files(function):
            return
        if os.getpid() == self._process and next(self._number) == self._last:
            os.kill(self._process, signal.SIGKILL)


def _of_files(function: Any) -> bool:
    if function.__module__ in ("posix", "_io", "io"):
        return True
    owner = getattr(function, "__self__", None)
    return isinstance(owner, io.IOBase) and owner not in (sys.stdout, sys.stderr)


def files(folder: Path) -> dict[str, bytes]:
    """Return file contents by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
