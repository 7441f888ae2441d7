"""One streaming pass for every conversion: groups of tensors, with bounded memory, into a temporary folder.

    command  ->  Conversion (from names and shapes alone)  ->  described(): --dry-run
                                                           ->  write(): the folder, renamed to the target when complete

A conversion has parts, which are recorded and resumed as a unit; a part has groups, and a group creates its tensors
together. Several workers share the parts. The target is a Megatron checkpoint (`CheckpointFiles`) or a Hugging Face
folder (`export_hf.FolderFiles`).
"""

import math
import shutil
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_mtp.checkpoint.convert.partial_folder import PartialFolder, check_free, check_place, resolved
from megatron_mtp.checkpoint.convert.quantizing import Quantize
from megatron_mtp.checkpoint.hf import Shape
from megatron_mtp.common.files import default_workers, synced
from megatron_mtp.common.progress import progress_bar
from megatron_mtp.megatron.checkpoint import HF_FILES, KEPT_TOKENIZER, RELEASE, TRACKER
from megatron_mtp.megatron.checkpoint.bits import bounds
from megatron_mtp.megatron.checkpoint.writer import chunks_are_in, read_chunk, write_catalogue, write_chunk

STAYS_WIDE = ("e_score_correction_bias", "expert_bias", "A_log", "dt_bias")
"""Suffixes of tensors that models keep in float32 even with bfloat16 weights."""


@dataclass(frozen=True)
class Options:
    """Options of a conversion.

    Attributes:
        dtype: dtype of all floating-point tensors except those of `STAYS_WIDE`; None keeps each tensor's own.
        shard_bytes: maximum size of a safetensors file.
        workers: number of parts to convert at the same time.
        resume: whether to continue an interrupted conversion.
        quiet: whether to hide the progress bar.
        quantize: quantized forms of an export.
    """

    dtype: torch.dtype | None = None
    shard_bytes: int = 5 * 10**9
    workers: int = default_workers()
    resume: bool = False
    quiet: bool = False
    quantize: Quantize = field(default_factory=Quantize)

    def cast(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the tensor with this Hugging Face name and dtype is written."""
        if self.dtype is None or not dtype.is_floating_point or name.endswith(STAYS_WIDE):
            return dtype
        return self.dtype


@dataclass(frozen=True)
class Entry:
    """A tensor that is written, or the slab at `offset` of a tensor with shape `whole`.

    Attributes:
        keys: its names; several if Megatron's modules with and without Transformer Engine use different ones.
        shape, dtype: shape and dtype of the slab.
    """

    keys: Sequence[str]
    shape: Shape
    dtype: torch.dtype
    whole: Shape | None = None
    offset: Shape | None = None

    @property
    def bytes(self) -> int:
        """Size under all names."""
        return len(self.keys) * prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Group:
    """Tensors that are created together.

    Attributes:
        entries: what is written.
        size: bytes that are read for it.
        make: function that reads and creates the tensors of the entries.
    """

    entries: list[Entry]
    size: int
    make: Callable[[], Sequence[Tensor]]

    @classmethod
    def single(cls, key: str, shape: Shape, dtype: torch.dtype, make: Callable[[], Tensor]) -> "Group":
        """Create a group with one tensor."""
        entry = Entry([key], shape, dtype)
        return cls([entry], entry.bytes, lambda: [make()])


Made = Iterable[tuple[Entry, Tensor]]


class Files(Protocol):
    """Files of a new folder, written by several workers."""

    def write(self, part: int, made: Made) -> Any:
        """Write a part to disk, and return its record as JSON."""

    def holds(self, record: Any) -> bool:
        """Return whether the files contain what a record of an interrupted run describes."""

    def finish(self, records: list[Any]) -> None:
        """Complete the files, given the records of all parts."""


@dataclass(frozen=True)
class Conversion:
    """A planned conversion.

    Attributes:
        sources: folders that it reads.
        title: name of the family.
        depths: number of MTP layers in the result.
        parts: groups, by part; a part is resumed as a unit.
        record: everything that determines the output; a resumed conversion must have the same.
        files: creates the files in the temporary folder.
        keep: writes files other than the tensors: config, tokenizer.
        facts: additional output of `--dry-run`.
        notes: printed with and without `--dry-run`.
        tensors: number of tensors; None for the number that is written.
        begin: called once before the first part.
    """

    sources: tuple[Path, ...]
    title: str
    depths: int
    parts: list[list[Group]]
    record: Mapping[str, Any]
    files: Callable[[PartialFolder, Options], Files]
    keep: Callable[[Path], object]
    facts: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    tensors: int | None = None
    begin: Callable[[], object] | None = None

    @property
    def entries(self) -> list[Entry]:
        """Tensors to write."""
        return [entry for part in self.parts for group in part for entry in group.entries]

    @property
    def counts(self) -> dict[str, Any]:
        """Family, number of MTP layers and tensors, and bytes to read."""
        tensors = len({key for entry in self.entries for key in entry.keys}) if self.tensors is None else self.tensors
        size = sum(group.size for part in self.parts for group in part)
        return {"family": self.title, "depths": self.depths, "tensors": tensors, "bytes": size}

    def described(self, target: Path) -> dict[str, Any]:
        """Return the output of `--dry-run`: counts, names, free space. Raise ValueError if the target exists."""
        for source in self.sources:
            check_free(target, source)
        counts = {"bytes read" if name == "bytes" else name: count for name, count in self.counts.items()}
        size, free = self._room(target)
        disk = {"target": str(target), "bytes written": size, "bytes free": free, "fits": free is None or size < free}
        return counts | disk | self.facts | self.notes

    def _room(self, target: Path) -> tuple[int, int | None]:
        """Return the bytes to write and the bytes free on the disk; None if the free space is unknown."""
        there = next(path for path in (target, *target.absolute().parents) if path.exists())
        usage = shutil.disk_usage(there)
        return sum(entry.bytes for entry in self.entries), usage.free if usage.total else None

    def _check_room(self, target: Path) -> None:
        """Raise ValueError if the disk is too small; files of an interrupted run count as free space."""
        size, free = self._room(target)
        whole = resolved(target)
        begun = whole.with_name(f"{whole.name}.partial").rglob("*")
        done = sum(path.stat().st_blocks * 512 for path in begun if path.is_file())
        if free is not None and size >= free + done:
            raise ValueError(
                f"{target} takes {size:,} bytes, and its disk has {free + done:,} free; free some, or name a target on "
                "another disk."
            )

    def write(self, target: Path, options: Options) -> dict[str, Any]:
        """Write the target, skipping finished parts of an interrupted run.

        Raises:
            ValueError: the target exists, its disk is too small, or a source is damaged.
        """
        for source in self.sources[1:]:
            check_place(target, source)
        self._check_room(target)
        folder = PartialFolder(target, self.sources[0], self.record, options.resume)
        files, budget = self.files(folder, options), Budget()
        if self.begin is not None:
            self.begin()  # not in a worker, which Ctrl-C does not stop
        work = [
            (sum(group.size for group in part), partial(_write_part, files, number, part, budget))
            for number, part in enumerate(self.parts)
        ]
        records = run_parts(folder, work, options.workers, options.quiet, partial(_is_whole, files))
        files.finish([record["files"] for record in records])
        self.keep(folder.path)
        folder.finish()
        return self.counts | self.notes | _odd([name for record in records for name in record["not finite"]])


def _is_whole(files: Files, record: Any) -> bool:
    return isinstance(record, dict) and "files" in record and files.holds(record["files"])


def _odd(names: list[str]) -> dict[str, str]:
    """Return a message about tensors with NaN or infinite numbers; empty without one."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    says = f"as in the source, some numbers are NaN or infinite in '{names[0]}'{more}" if names else ""
    return {"not finite": f"{says}; megatron-mtp audit names all"} if names else {}


def _write_part(files: Files, number: int, groups: list[Group], budget: "Budget", report: "Report") -> Any:
    odd: list[str] = []

    def made() -> Generator[tuple[Entry, Tensor]]:
        for group in groups:
            with budget.taking(group.size):
                for entry, tensor in zip(group.entries, group.make(), strict=True):
                    if not all(math.isfinite(bound or 0) for bound in bounds(tensor)):
                        odd.append(entry.keys[0])
                    yield entry, tensor
            report(group.size)

    with closing(made()) as tensors:  # if writing fails, release the memory for other workers
        return {"files": files.write(number, tensors), "not finite": odd}


# --- files ------------------------------------------------------------------------------------------------------------

UNTRAINED: dict[str, Any] = {
    "iteration": 0,
    "content_metadata": {"non_homogeneous_layers": True, "singleton_local_shards": False},
}
"""What a converted checkpoint stores besides tensors: no step was taken, and layers are not stacked."""


class CheckpointFiles:
    """Files of a Megatron checkpoint, one for each part.

    Args:
        folder: folder of the checkpoint.
        common, objects: what is stored besides tensors (`write_catalogue`), merged over `UNTRAINED`.
        iteration: name in the tracker: a number, or `RELEASE`.
    """

    def __init__(
        self,
        folder: Path,
        common: dict[str, Any],
        iteration: str = RELEASE,
        objects: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        self._folder, self._iteration, self._common, self._objects = folder, iteration, common, objects
        self._inside = folder / (RELEASE if iteration == RELEASE else f"iter_{int(iteration):07d}")
        self._inside.mkdir(exist_ok=True)
        torch.serialization.set_crc32_options(False)  # torch never checks these CRCs, and they take half the time

    def write(self, part: int, made: Made) -> list[dict[str, Any]]:
        """Write a file; its record describes every chunk."""
        chunks, name = [], f"__{part}_0.distcp"
        with open(self._inside / name, "wb") as stream:
            for entry, tensor in made:
                whole = entry.whole or tuple(tensor.shape)
                offset = entry.offset or (0,) * len(whole)
                chunks += [write_chunk(stream, name, key, whole, offset, tensor) for key in entry.keys]
                del tensor
            synced(stream)
        return [asdict(chunk) for chunk in chunks]

    def holds(self, record: Any) -> bool:
        """Compare chunks with their checksums."""
        return chunks_are_in(self._inside, record)

    def finish(self, records: list[Any]) -> None:
        """Write the metadata and the tracker."""
        chunks = [read_chunk(record) for part in records for record in part]
        write_catalogue(self._inside, chunks, UNTRAINED | self._common, self._objects)
        (self._folder / TRACKER).write_text(self._iteration)


def keep_files(source: Path, target: Path) -> None:
    """Copy Hugging Face and tokenizer files to the folder of a checkpoint, if there are any."""
    for name in (HF_FILES, KEPT_TOKENIZER):
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, dirs_exist_ok=True)


# --- workers ----------------------------------------------------------------------------------------------------------

IN_FLIGHT = 2**28
"""Maximum number of bytes of tensors that all workers hold at a time, unless a single group is larger."""


class Budget:
    """Bounds memory for any number of workers: each group of tensors waits until there is room."""

    def __init__(self, room: int = IN_FLIGHT) -> None:
        self._room, self._taken, self._change = room, 0, threading.Condition()

    @contextmanager
    def taking(self, amount: int) -> Iterator[None]:
        """Reserve this many bytes, waiting until they are free."""
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
"""Called by a part with the number of bytes of every group of tensors that it has written."""


def run_parts(
    partial: PartialFolder,
    parts: Sequence[tuple[int, Callable[[Report], Any]]],
    workers: int,
    quiet: bool,
    is_there: Callable[[Any], bool],
) -> list[Any]:
    """Run all parts with several workers, and return their records in order; the first exception stops all.

    Args:
        partial: temporary folder to write to.
        parts: size of each part in bytes, and the function that writes it and returns its record as JSON.
        workers, quiet: as in `Options`.
        is_there: whether the files contain what a record of an interrupted run describes; otherwise the part runs
            again.
    """
    total, stop = sum(size for size, _ in parts), threading.Event()
    with progress_bar(total=total, unit="B", unit_scale=True, disable=quiet, desc=partial.target.name) as bar:

        def report(count: int) -> None:
            if stop.is_set():
                raise InterruptedError
            bar.update(count)

        def run(index: int, size: int, work: Callable[[Report], Any]) -> Any:
            record = partial.record(index)
            if record is not None and is_there(record):
                report(size)
                return record
            if record is not None:
                print(f"> part {index} of {partial.path} is damaged; making it again", file=sys.stderr)
            partial.keep(index, work(report))
            return partial.record(index)  # read back from the file: pickling depends on whether strings are shared

        with ThreadPoolExecutor(workers) as pool:
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
