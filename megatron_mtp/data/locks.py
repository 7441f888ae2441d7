"""Locks, so that one process at a time writes an output. The system releases a lock when its process ends."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def one_writer(output: Path, name: str) -> Iterator[None]:
    """Hold the lock of an output, a file beside it; the same process may take it again.

    Args:
        output: path of the output.
        name: name of the output in messages.

    Raises:
        ValueError: another process holds the lock.
        OSError: no file can be written beside the output.
    """
    file = output.with_name(f"{output.name}.lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file, is_singleton=True)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(
            f"{name} is being written by {_holder(file)}; wait until it has ended, or name another output."
        ) from None
    try:
        file.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        if lock.lock_counter == 1:
            file.unlink(missing_ok=True)
        lock.release()


def _holder(file: Path) -> str:
    try:
        return file.read_text() or "another process"
    except OSError:  # the process has just ended
        return "another process"
