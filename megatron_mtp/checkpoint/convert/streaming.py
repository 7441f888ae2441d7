"""Parts of a conversion, run by several workers into a folder beside the target, which is renamed when all is done.

A part that is done leaves a record with checksums. An interrupted conversion leaves `<target>.partial`, which
`--resume` completes. A lock beside the target keeps a second process out.
"""

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_mtp.files import one_writer, synced

RECORDS = "progress"
PLAN = "progress.json"
"""Beside the records: a folder that has it is not done, and one file can be removed at once, which a folder cannot."""


class PartialFolder:
    """The folder beside the target, or beside the folder that the target is a link to.

    Args:
        target: must not exist, or be empty.
        plan: what decides about the output; a resumed conversion must have the same.
        resume: whether to go on with what an earlier run left.

    Raises:
        ValueError: the target holds something or is a mount point, or another process writes it, or there is a
            partial folder that is not to be resumed.
    """

    def __init__(self, target: Path, plan: Mapping[str, Any], resume: bool) -> None:
        target = target.resolve()
        _check_mount(target)
        self.target, self.path = target, target.with_name(f"{target.name}.partial")
        self._lock = ExitStack()
        self._lock.enter_context(one_writer(target, str(target)))
        try:
            self._begin(json.dumps(plan, sort_keys=True), resume)
        except BaseException:
            self.release()
            raise

    def _begin(self, text: str, resume: bool) -> None:
        target = self.target
        if resume and not self.path.exists() and _planned(target) == text:
            target.rename(self.path)  # killed when all was done but the removal of the records
        check_free(target)
        self.resumed = self.path.exists() and not self._blank()
        if self.resumed and not resume:
            raise ValueError(f"{self.path} is left from an interrupted conversion; add --resume, or remove it.")
        if self.resumed and _planned(self.path) != text:
            raise ValueError(
                f"{self.path} is left from a conversion of another source or with other options; remove it."
            )
        (self.path / RECORDS).mkdir(parents=True, exist_ok=True)
        _write_whole(self.path / PLAN, text)

    def _blank(self) -> bool:
        """Whether a killed run had not even written its plan, which comes before everything else."""
        return {path.name for path in self.path.rglob("*")} <= {RECORDS, f"{PLAN}.new"}

    def record(self, part: int) -> Any:
        """What a part that is done has left; None where it is not done."""
        try:
            return json.loads(self._record(part).read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    def keep(self, part: int, record: Any) -> None:
        _write_whole(self._record(part), json.dumps(record))

    def _record(self, part: int) -> Path:
        return self.path / RECORDS / f"{part}.json"

    def finish(self) -> None:
        """From here on the target is there, whole, and on the disk."""
        for file in self.path.rglob("*"):
            if file.is_file():
                with open(file, "rb") as stream:
                    os.fsync(stream.fileno())
        if self.target.exists():
            self.target.rmdir()
        self.path.rename(self.target)
        shutil.rmtree(self.target / RECORDS)
        (self.target / PLAN).unlink()
        self.release()

    def release(self) -> None:
        """Let another process write the target."""
        self._lock.close()


def check_free(target: Path) -> None:
    """Raises ValueError where a folder cannot be written there: something is, or it is a mount point."""
    _check_mount(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is not empty; name a new folder, or remove it.")


def _check_mount(target: Path) -> None:
    if target.is_mount():
        raise ValueError(f"{target} is a mount point, which nothing can be renamed to; name a new folder in it.")


def _planned(folder: Path) -> str | None:
    path = folder / PLAN
    return path.read_text() if path.is_file() else None


def _write_whole(path: Path, text: str) -> None:
    beside = path.with_name(f"{path.name}.new")
    with open(beside, "w") as stream:
        stream.write(text)
        synced(stream)
    beside.replace(path)


IN_FLIGHT = 2**28
"""Bytes of tensors that all workers together hold, unless one group of tensors alone is larger."""


class Budget:
    """Bounds memory whatever the number of workers: a group of tensors waits until the others leave room for it."""

    def __init__(self, room: int = IN_FLIGHT) -> None:
        self._room, self._taken, self._change = room, 0, threading.Condition()

    @contextmanager
    def taking(self, amount: int) -> Iterator[None]:
        with self._change:
            self._change.wait_for(lambda: self._taken == 0 or self._taken + amount <= self._room)
            self._taken += amount
        try:
            yield
        finally:
            with self._change:
                self._taken -= amount
                self._change.notify_all()


def run_parts(
    partial: PartialFolder,
    parts: list[tuple[int, Callable[[Callable[[int], None]], Any]]],
    workers: int,
    total: int,
    quiet: bool,
    is_there: Callable[[Any], bool],
) -> list[Any]:
    """The records of all parts, in order, once each is done.

    Args:
        parts: bytes of a part, and the function that does it; it is told how to report bytes, and returns its record.
        total: bytes of all.
        is_there: whether the files hold what a record of an interrupted run says; if not, the part is done again.
    """
    stop = threading.Event()
    with tqdm(total=total, unit="B", unit_scale=True, disable=quiet, desc=partial.target.name) as bar:

        def report(count: int) -> None:
            if stop.is_set():
                raise InterruptedError
            bar.update(count)

        def one(index: int) -> Any:
            size, work = parts[index]
            record = partial.record(index)
            if record is not None and is_there(record):
                report(size)
            else:
                if record is not None:
                    print(f"> part {index} of {partial.path} is damaged; making it again", file=sys.stderr)
                partial.keep(index, work(report))
            return partial.record(index)  # read also where it was just made: a pickle shows whether strings are shared

        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(one, index) for index in range(len(parts))]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)
        errors = [future.exception() for future in futures if not future.cancelled() and future.exception()]
        for error in sorted(errors, key=lambda error: isinstance(error, InterruptedError)):
            assert error is not None
            raise error
    return [future.result() for future in futures]
