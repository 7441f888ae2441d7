"""Outputs of a command: one process at a time writes one, and never inside of its own source.

with one_writer(output, "the corpus"):      a second process exits with an error message
    ...

check_outside(output, source)               raises if the output is inside its own source
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def one_writer(output: Path, name: str) -> Iterator[None]:
    """Hold the lock of an output, the file `<output>.lock`. The process that holds it may enter again.

    The operating system releases the lock when the process ends, even if it is killed.

    Args:
        output: path to write.
        name: what messages call the output.

    Raises:
        ValueError: another process holds the lock, or the folder is not writable.
        OSError: nothing can be written next to the output.
    """
    file = output.with_name(f"{output.name}.lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file, is_singleton=True)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        try:  # does the lock fail because the folder is not writable?
            file.touch()
        except OSError:
            raise ValueError(f"{name} cannot be written: {file.parent} takes no files; name another output.") from None
        holder = ""
        with suppress(OSError):  # the other process may have just finished
            holder = file.read_text()
        raise ValueError(
            f"{name} is being written by {holder or 'another process'}; wait until it has ended, or name another "
            "output."
        ) from None
    try:
        file.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        if lock.lock_counter == 1:
            file.unlink(missing_ok=True)
        lock.release()


def check_outside(output: Path, *sources: Path) -> None:
    """Check that an output is not inside any of its source folders. Links are resolved.

    Raises:
        ValueError: the output is inside a source folder.
    """
    for source in sources:
        if is_inside(output, source):
            raise ValueError(f"{output} is inside {source}, which it is made from; name a place outside of it.")


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path is a folder or inside it. Links are resolved; the path does not need to exist."""
    return Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents
