"""Atomic output: write to a temporary path, sync it to disk, then rename.

with written_beside(folder / "run.json") as beside:
    beside.write_text(...)                  if the block fails or is killed, the old file stays
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

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


def without_weights(folder: Path) -> list[Path]:
    """List the files of a model folder other than its weights: config, tokenizer and so on."""
    return [file for file in sorted(folder.iterdir()) if file.is_file() and not file.name.endswith(WEIGHTS)]


def default_workers() -> int:
    """Number of threads for reading and writing: one per core, up to a small limit set by the disk."""
    return min(os.cpu_count() or 1, 4)
