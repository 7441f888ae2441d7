"""Groups of tensors through bounded memory into a folder beside the target, which is renamed when all are written.

In:  files, each a list of groups of tensors; a group is made and written at once, and several workers share the files.
Out: the folder; for a Megatron checkpoint with its catalogue and tracker.

Each finished part leaves a record with checksums. An interrupted conversion leaves `<target>.partial`, which `--resume`
completes. A lock beside the target keeps a second process out.
"""

import functools
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
from tqdm import tqdm

from megatron_mtp.checkpoint.convert.quantizing import Quantize
from megatron_mtp.checkpoint.mcore.iterations import HF_FILES, RELEASE, TRACKER
from megatron_mtp.checkpoint.mcore.tokenizer import KEPT_TOKENIZER
from megatron_mtp.checkpoint.mcore.writer import Chunk, chunks_are_in, read_chunk, write_catalogue
from megatron_mtp.files import check_outside, default_workers, is_inside, one_writer, sync, synced, written_beside

STAYS_WIDE = ("e_score_correction_bias", "expert_bias", "A_log", "dt_bias")
"""Endings of the tensors that models keep in float32 beside bfloat16 weights."""


@dataclass(frozen=True)
class Options:
    """How to convert.

    Attributes:
        dtype: type of all floating-point tensors except those of `STAYS_WIDE`; None keeps each tensor's own.
        shard_bytes: size of the largest safetensors file.
        workers: number of layers that are converted at a time.
        resume: whether to continue an interrupted conversion.
        quiet: whether to show no progress bar.
        quantize: the forms of an export.
    """

    dtype: torch.dtype | None = None
    shard_bytes: int = 5 * 10**9
    workers: int = default_workers()
    resume: bool = False
    quiet: bool = False
    quantize: Quantize = field(default_factory=Quantize)

    def cast(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The type in which the tensor of this Hugging Face name and type is written."""
        if self.dtype is None or not dtype.is_floating_point or name.endswith(STAYS_WIDE):
            return dtype
        return self.dtype


@dataclass(frozen=True)
class Converted:
    """What a conversion did: the family's title, and the numbers of depths, tensors and bytes."""

    family: str
    depths: int
    tensors: int
    bytes: int


RECORDS = "progress"
PLAN = "progress.json"
"""Marks a folder as unfinished. A single file, unlike a folder, can be removed in one step."""


class PartialFolder:
    """The folder beside the target, in which a conversion works; a link is followed first.

    Args:
        target: the folder to make; it must not exist, or be empty.
        source: the folder that is converted.
        plan: everything that determines the output; a resumed conversion must have the same.
        resume: whether to continue an interrupted conversion.

    Raises:
        ValueError: the target holds something, is a mount point or lies inside the source, or another process writes
            it, or there is a partial folder that is not to be resumed.
    """

    def __init__(self, target: Path, source: Path, plan: Mapping[str, Any], resume: bool) -> None:
        target = _resolved(target)
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
            target.rename(self.path)  # killed before the records were removed
        _check_empty(target)
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
        """Whether a killed run had not yet written its plan, which it does first."""
        return {path.name for path in self.path.rglob("*")} <= {RECORDS, f"{PLAN}.partial"}

    def record(self, part: int) -> Any:
        """The record of a part; None if the part is not finished."""
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
        """Rename the folder to the target, once all files are on the disk, and remove the records."""
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
    """Check that a folder can be made at this path from a source.

    Raises:
        ValueError: something is there already, or it is a mount point, or one of both lies inside the other.
    """
    target = _resolved(target)
    check_place(target, source)
    _check_empty(target)


def _check_empty(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; name a new folder.")
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} is not empty; name a new folder, or remove it.")


def _resolved(target: Path) -> Path:
    try:
        return target.resolve()
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{target} is a link that leads to itself; name a new folder.") from error


def check_place(target: Path, source: Path) -> None:
    """Raises ValueError where a folder is a mount point, or it and its source lie inside one another."""
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


IN_FLIGHT = 2**28
"""Largest number of bytes of tensors that all workers hold at a time, unless a single group is larger."""


class Budget:
    """Bounds memory for any number of workers: each group of tensors waits until there is room for it."""

    def __init__(self, room: int = IN_FLIGHT) -> None:
        self._room, self._taken, self._change = room, 0, threading.Condition()

    @contextmanager
    def taking(self, amount: int) -> Iterator[None]:
        """Hold so many bytes of the room, waiting until they are free."""
        with self._change:
            self._change.wait_for(lambda: self._taken == 0 or self._taken + amount <= self._room)
            self._taken += amount
        try:
            yield
        finally:
            with self._change:
                self._taken -= amount
                self._change.notify_all()


Report = Callable[[int], None]
"""Called by a part for every group of tensors that it has written, with the number of bytes."""


def run_parts(
    partial: PartialFolder,
    parts: Sequence[tuple[int, Callable[[Report], Any]]],
    workers: int,
    quiet: bool,
    is_there: Callable[[Any], bool],
) -> list[Any]:
    """Run all parts, several at a time, and return their records in order.

    Args:
        partial: the folder that they write to.
        parts: the size of each part in bytes, and the function that writes it and returns its record in JSON.
        workers: number of parts that run at a time.
        quiet: whether to show no progress bar.
        is_there: whether the files hold what a record of an interrupted run describes; otherwise the part runs again.

    Raises:
        Exception: the first that a part raised; the others are stopped.
    """
    total, stop = sum(size for size, _ in parts), threading.Event()
    with tqdm(total=total, unit="B", unit_scale=True, disable=quiet, desc=partial.target.name) as bar:

        def report(count: int) -> None:
            if stop.is_set():
                raise InterruptedError
            bar.update(count)

        with ThreadPoolExecutor(workers) as pool:
            run = functools.partial(_run_part, partial, is_there, report)
            futures = [pool.submit(run, index, *part) for index, part in enumerate(parts)]
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


def _run_part(
    partial: PartialFolder,
    is_there: Callable[[Any], bool],
    report: Report,
    index: int,
    size: int,
    work: Callable[[Report], Any],
) -> Any:
    """The record of a part, which is run unless an interrupted run has done so."""
    record = partial.record(index)
    if record is not None and is_there(record):
        report(size)
        return record
    if record is not None:
        print(f"> part {index} of {partial.path} is damaged; making it again", file=sys.stderr)
    partial.keep(index, work(report))
    return partial.record(index)  # as read from the file: a pickle shows whether strings are shared


UNTRAINED: dict[str, Any] = {
    "iteration": 0,
    "content_metadata": {"non_homogeneous_layers": True, "singleton_local_shards": False},
}
"""What a converted checkpoint stores beside tensors: no step was taken, and each layer has tensors of its own."""


@dataclass(frozen=True)
class Group:
    """Tensors that are made together.

    Attributes:
        size: in memory, bytes.
        write: appends the tensors to an open file of the given name, and returns their chunks.
    """

    size: int
    write: Callable[[IO[bytes], str], list[Chunk]]


def write_checkpoint(
    folder: PartialFolder,
    files: Mapping[str, list[Group]],
    common: dict[str, Any],
    options: Options,
    iteration: str = RELEASE,
    objects: Mapping[str, bytes] = MappingProxyType({}),
) -> list[Chunk]:
    """Write the tensors of a checkpoint, its catalogue and its tracker; parts that are already there are kept.

    Args:
        folder: the folder beside the target.
        files: name of each `.distcp` file to its groups.
        common: what Megatron stores beside tensors; `UNTRAINED` where it does not say otherwise.
        options: number of workers, and whether to show progress.
        iteration: name of the iteration in the tracker: its number, or `RELEASE`.
        objects: further objects by key (`write_catalogue`).

    Returns:
        The chunks of all tensors.

    Raises:
        OSError: a file cannot be written.
    """
    inside = folder.path / (RELEASE if iteration == RELEASE else f"iter_{int(iteration):07d}")
    inside.mkdir(exist_ok=True)
    torch.serialization.set_crc32_options(False)  # torch never checks these sums; making them takes half of the time
    budget = Budget()
    work = [
        (sum(group.size for group in groups), partial(_write_file, inside / name, groups, budget))
        for name, groups in files.items()
    ]
    records = run_parts(folder, work, options.workers, options.quiet, partial(chunks_are_in, inside))
    chunks = [read_chunk(record) for part in records for record in part]
    write_catalogue(inside, chunks, UNTRAINED | common, objects)
    (folder.path / TRACKER).write_text(iteration)
    return chunks


def keep_files(source: Path, target: Path) -> None:
    """Copy the files of Hugging Face and of the tokenizer beside the iterations of a checkpoint, where it has some."""
    for name in (HF_FILES, KEPT_TOKENIZER):
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, dirs_exist_ok=True)


def _write_file(file: Path, groups: list[Group], budget: Budget, report: Report) -> list[dict[str, Any]]:
    chunks: list[Chunk] = []
    with open(file, "wb") as stream:
        for group in groups:
            with budget.taking(group.size):
                chunks += group.write(stream, file.name)
            report(group.size)
        synced(stream)
    return [asdict(chunk) for chunk in chunks]
