"""A distributed checkpoint, written by several workers: one file per part, then the catalogue.

In:  files, each a list of groups of tensors; a group is made and written at once, so that few tensors are in memory.
Out: the folder of an iteration with all chunks, `release` if no training run saved it, and the tracker that names it.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch

from megatron_mtp.checkpoint.convert.options import Options
from megatron_mtp.checkpoint.convert.streaming import Budget, PartialFolder, Report, run_parts
from megatron_mtp.checkpoint.mcore.iterations import HF_FILES, RELEASE, TRACKER
from megatron_mtp.checkpoint.mcore.tensors import Chunk, chunks_are_in, read_chunk, write_catalogue
from megatron_mtp.checkpoint.mcore.tokenizer import KEPT_TOKENIZER
from megatron_mtp.files import synced

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
