"""Is the checkpoint in an iteration's folder whole? If not, each fault is an error of one sentence."""

import pickle
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_mtp.files import default_workers
from megatron_mtp.patches.checksums import DamagedError, check_entry
from megatron_mtp.patches.unpickling import foreign, read_catalogue

READ_ERRORS = (
    ValueError, KeyError, TypeError, IndexError, AttributeError, AssertionError, OSError, RuntimeError, EOFError,
    MemoryError, pickle.UnpicklingError, struct.error, CheckpointingException, CheckpointException,
)  # fmt: skip
"""What torch and Megatron raise for files that are damaged, missing or of another model."""


@contextmanager
def read_errors(where: str) -> Iterator[None]:
    """Turn errors of torch and Megatron while they read a checkpoint into a `DamagedError` of one sentence.

    Args:
        where: the beginning of the sentence.
    """
    try:
        yield
    except DamagedError:
        raise
    except READ_ERRORS as error:
        raise DamagedError(f"{where}: {reason(error)}.") from None


def reason(error: BaseException) -> str:
    """The first line of the original error, without its full stop."""
    error = root_of(error)
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, pickle.UnpicklingError) and "weights" in text.lower():
        return f"it holds {foreign(error)}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0].removesuffix(".") if lines else ""
    return first[:400] if " " in first else f"{type(error).__name__} {first}".strip()


def root_of(error: BaseException) -> BaseException:
    """The first rank's error if torch has collected the errors of all ranks, else the error itself."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return next((of_rank for of_rank, _ in failures), error)


def check_files(folder: Path, places: Mapping[Any, Any]) -> None:
    """Check that the files of a checkpoint exist, and are as long as its catalogue requires.

    Args:
        folder: folder of an iteration.
        places: torch's records of where the entries are.

    Raises:
        ValueError: a file is missing or too short.
    """
    ends: dict[str, int] = {}
    for place in places.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{file} is missing; give another iteration, or fetch the checkpoint again.")
        if (size := file.stat().st_size) < end:
            raise ValueError(
                f"{file} has {size} bytes, but the checkpoint put {end} into it; give another iteration, or fetch the "
                "file again."
            )


def check_entries(folder: Path) -> dict[str, Any]:
    """Compare every entry of a checkpoint with its checksum.

    Returns:
        Numbers of entries, of entries with a checksum, of bytes, and of seconds, by name.

    Raises:
        ValueError: entries differ; the message names the first and counts the others.
    """
    began = time.monotonic()
    places = {(place.relative_path, place.offset): place for place in read_catalogue(folder).storage_data.values()}
    check_files(folder, places)
    by_file: dict[str, list[Any]] = {}
    for place in places.values():
        by_file.setdefault(place.relative_path, []).append(place)
    with ThreadPoolExecutor(default_workers()) as pool:
        found = [error for errors in pool.map(_differing(folder), by_file.items()) for error in errors]
    if found:
        others = f" ({len(found) - 1} other entries are damaged, too)" if len(found) > 1 else ""
        raise ValueError(f"{found[0]}{others}")
    summed = [place for place in places.values() if hasattr(place, "crc32")]
    return {
        "entries": len(places),
        "entries with their checksum": len(summed),
        "bytes compared": sum(place.length for place in summed),
        "seconds": round(time.monotonic() - began, 2),
    }


def _differing(folder: Path) -> Callable[[tuple[str, list[Any]]], list[str]]:
    def check(of_file: tuple[str, list[Any]]) -> list[str]:
        name, places = of_file
        errors = []
        with open(folder / name, "rb") as stream:
            for place in sorted(places, key=lambda place: place.offset):
                try:
                    check_entry(stream, place, str(folder / name))
                except ValueError as error:
                    errors.append(str(error))
        return errors

    return check
