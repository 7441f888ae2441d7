"""Outputs that are whole or not there: written beside their place, put on the disk, renamed; one process at a time.

with written_beside(folder / "run.json") as beside:
    beside.write_text(...)                  a failed or killed block leaves what was there before

with one_writer(output, "the corpus"):      a second process ends with a sentence
    ...

check_outside(output, source)               an output inside of what it is made from is refused
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
"""Endings of a model's files that hold weights."""


@contextmanager
def written_beside(target: Path, shared: bool = False) -> Iterator[Path]:
    """A path to write a file or to make a folder at, `<target>.partial`; renamed to the target when the block ends.

    An older target is replaced; where the block fails, it stays.

    Args:
        target: the file or folder.
        shared: other processes may write it at the same moment without a lock: the name then has the process's number.

    Raises:
        OSError: nothing can be written beside the target, or there is no space.
    """
    if target.name in ("", ".."):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    beside = target.with_name(f"{target.name}.{os.getpid()}.partial" if shared else f"{target.name}.partial")
    try:
        remove(beside)  # of a killed run
        yield beside
        sync(beside)
        if beside.is_dir():
            remove(target)  # a folder that holds files cannot be replaced
        os.replace(beside, target)
    finally:
        remove(beside)


def write_page(target: Path, text: str, flag: str) -> None:
    """Write a page as a whole, which others may read; `flag` names its file.

    Raises:
        ValueError: it cannot be written there.
    """
    try:
        with written_beside(target, shared=True) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{target} cannot be written ({error.strerror}); name another file with {flag}.") from error


def remove(path: Path) -> None:
    """A file, a link or a folder with all that it holds, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Return when the file, or every file of the folder, is on the disk."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())


def synced(stream: IO[Any]) -> None:
    """Return when what was written to the stream is on the disk."""
    stream.flush()
    os.fsync(stream.fileno())


@contextmanager
def one_writer(output: Path, name: str) -> Iterator[None]:
    """Hold the lock of an output, the file `<output>.lock`; a process that holds it already may enter again.

    The system releases the lock when its holder ends, however that ends.

    Args:
        output: what is written.
        name: how messages call it.

    Raises:
        ValueError: another process holds the lock, or its folder takes no files.
        OSError: nothing can be written beside the output.
    """
    file = output.with_name(f"{output.name}.lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file, is_singleton=True)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        try:  # which also says so where its folder takes no files
            file.touch()
        except OSError:
            raise ValueError(f"{name} cannot be written: {file.parent} takes no files; name another output.") from None
        holder = ""
        with suppress(OSError):  # it has just ended
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
    """Check that an output lies in none of the folders that it is made from; links are followed.

    Raises:
        ValueError: it lies in one.
    """
    for source in sources:
        if is_inside(output, source):
            raise ValueError(f"{output} lies inside {source}, which it is made from; name a place outside of it.")


def is_inside(path: Path, folder: Path) -> bool:
    """True if a path lies in a folder, or in one below it; links are followed, and nothing has to be there."""
    return Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents


def without_weights(folder: Path) -> list[Path]:
    """The files of a model's folder, but for its weights: config, tokenizer and others, which stay with it."""
    return [file for file in sorted(folder.iterdir()) if file.is_file() and not file.name.endswith(WEIGHTS)]


def default_workers() -> int:
    """Threads that read and write: one a core, but few, since the disk is the limit."""
    return min(os.cpu_count() or 1, 4)
