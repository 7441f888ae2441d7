"""One process at a time writes an output. The system drops the lock when its holder ends, however that ends."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def one_writer(output: Path, name: str) -> Iterator[None]:
    """Hold the lock of an output, a file beside it; a process that has it already is let in again.

    Args:
        output: what is written.
        name: how messages call it.

    Raises:
        ValueError: another process has the lock.
        OSError: there is no writing beside the output.
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
    except OSError:  # it has just ended
        return "another process"
