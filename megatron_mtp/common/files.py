"""Atomic output: write to a temporary path, sync it to disk, then rename. A lock keeps out a second process.

with written_beside(folder / "run.json") as beside:
    beside.write_text(...)                  if the block fails or is killed, the old file stays

with one_writer(output, "the corpus"):      a second process exits with an error message
    ...

check_outside(output, source)               raises if the output is inside its own source
"""

import errno
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Suffixes of weight files."""


@contextmanager
def written_beside(target: Path, shared: bool = False) -> Iterator[Path]:
    """Yield a temporary path, `<target>.partial`, and rename it to the target when the block ends.

    An older target is replaced. If the block fails, it is kept.

    Args:
        target: file or folder to write.
        shared: other processes may write the target at the same time without a lock. The temporary name then includes
            the process id.

    Raises:
        OSError: the temporary path cannot be written, or the disk is full.
    """
    if target.name in ("", ".."):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    beside = target.with_name(f"{target.name}.{os.getpid()}.partial" if shared else f"{target.name}.partial")
    try:
        remove(beside)  # left by a killed process
        yield beside
        sync(beside)
        if beside.is_dir():
            remove(target)  # os.replace cannot replace a non-empty folder
        os.replace(beside, target)
    finally:
        remove(beside)


def write_page(target: Path, text: str, flag: str) -> None:
    """Write a page atomically and make it readable for others; `flag` names the file in messages.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        with written_beside(target, shared=True) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{target} cannot be written ({error.strerror}); name another file with {flag}.") from error


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file, or every file of a folder, to disk."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())


def synced(stream: IO[Any]) -> None:
    """Flush a stream to disk."""
    stream.flush()
    os.fsync(stream.fileno())


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


def without_weights(folder: Path) -> list[Path]:
    """List the files of a model folder other than its weights: config, tokenizer and so on."""
    return [file for file in sorted(folder.iterdir()) if file.is_file() and not file.name.endswith(WEIGHTS)]


def default_workers() -> int:
    """Number of threads for reading and writing: one per core, up to a small limit set by the disk."""
    return min(os.cpu_count() or 1, 4)
