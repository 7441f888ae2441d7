"""The temporary folder of a conversion, `<target>.partial`: complete or absent, and resumable.

Each finished part leaves a record with checksums, which `--resume` verifies. A lock next to the target keeps out a
second process.
"""

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron_mtp.common.files import sync, written_beside
from megatron_mtp.common.outputs import check_outside, is_inside, one_writer

RECORDS = "progress"
PLAN = "progress.json"
"""Marks a folder as unfinished. Unlike a folder, a file can be removed atomically."""


class PartialFolder:
    """The temporary folder next to the target in which a conversion works. A link is resolved first.

    Args:
        target: folder to create; it must not exist, or be empty.
        source: folder that is converted.
        plan: everything that determines the output; a resumed conversion must have the same.
        resume: whether to continue an interrupted conversion.

    Raises:
        ValueError: the target is not empty, is a mount point or is inside the source; another process is writing it; or
            there is a temporary folder and `resume` is false.
    """

    def __init__(self, target: Path, source: Path, plan: Mapping[str, Any], resume: bool) -> None:
        target = resolved(target)
        check_place(target, source)
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
            target.rename(self.path)  # killed before it removed the records
        _check_empty(target)
        blank = {RECORDS, f"{PLAN}.partial"}  # left by a run that was killed before it wrote its plan
        self.resumed = self.path.exists() and not {path.name for path in self.path.rglob("*")} <= blank
        if self.resumed and not resume:
            raise ValueError(f"{self.path} is left from an interrupted conversion; add --resume, or remove it.")
        if self.resumed and _planned(self.path) != text:
            raise ValueError(
                f"{self.path} is left from a conversion of another source or with other options; remove it."
            )
        (self.path / RECORDS).mkdir(parents=True, exist_ok=True)
        _write_whole(self.path / PLAN, text)

    def record(self, part: int) -> Any:
        """Return the record of a part; None if the part is not finished."""
        try:
            return json.loads(self._record(part).read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    def keep(self, part: int, record: Any) -> None:
        """Write the record of a finished part."""
        _write_whole(self._record(part), json.dumps(record))

    def _record(self, part: int) -> Path:
        return self.path / RECORDS / f"{part}.json"

    def finish(self) -> None:
        """Rename the folder to the target after flushing all files to disk, and remove the records."""
        sync(self.path)
        if self.target.exists():
            self.target.rmdir()
        self.path.rename(self.target)
        shutil.rmtree(self.target / RECORDS)
        (self.target / PLAN).unlink()
        self.release()

    def release(self) -> None:
        """Release the lock of the target."""
        self._lock.close()


def check_free(target: Path, source: Path) -> None:
    """Raise ValueError if the target exists, or as in `check_place`."""
    target = resolved(target)
    check_place(target, source)
    _check_empty(target)


def _check_empty(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; name a new folder.")
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} is not empty; name a new folder, or remove it.")


def resolved(target: Path) -> Path:
    """Resolve a target's links. Raise ValueError for a link to itself."""
    try:
        return target.resolve()
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{target} is a link that leads to itself; name a new folder.") from error


def check_place(target: Path, source: Path) -> None:
    """Raise ValueError if a folder is a mount point, or if it and its source contain each other."""
    check_outside(target, source)
    if is_inside(source, target):
        raise ValueError(f"{target} holds {source}, which it would be made from; name a new folder.")
    if target.is_mount():
        raise ValueError(f"{target} is a mount point, which nothing can be renamed to; name a new folder in it.")


def _planned(folder: Path) -> str | None:
    path = folder / PLAN
    return path.read_text() if path.is_file() else None


def _write_whole(path: Path, text: str) -> None:
    with written_beside(path) as beside:
        beside.write_text(text)
