"""A distributed checkpoint, written by several workers: one file per part, then the catalogue.

In:  files, each a list of groups of tensors; a group is made and written at once, so that few tensors are in memory.
Out: `<folder>/release` with all chunks, and the tracker that names it.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from megatron_mtp.checkpoint.convert.options import Options
from megatron_mtp.checkpoint.convert.streaming import Budget, PartialFolder, Report, run_parts
from megatron_mtp.checkpoint.mcore.iterations import RELEASE, TRACKER
from megatron_mtp.checkpoint.mcore.tensors import Chunk, chunks_are_in, read_chunk, write_catalogue
from megatron_mtp.files import synced

UNTRAINED = {
    "iteration": 0,
    "content_metadata": {"non_homogeneous_layers": True, "singleton_local_shards": False},
}
"""What every such checkpoint stores beside tensors: no step was taken, and each layer has tensors of its own."""


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
    folder: PartialFolder, files: Mapping[str, list[Group]], common: dict[str, Any], options: Options
) -> list[Chunk]:
    """Write the tensors of a checkpoint, its catalogue and its tracker; parts that are already there are kept.

    Args:
        folder: the folder beside the target.
        files: name of each `.distcp` file to its groups.
        common: what Megatron stores beside tensors, except `UNTRAINED`.
        options: number of workers, and whether to show progress.

    Returns:
        The chunks of all tensors.

    Raises:
        OSError: a file cannot be written.
    """
    inside = folder.path / RELEASE
    inside.mkdir(exist_ok=True)
    torch.serialization.set_crc32_options(False)  # torch never checks these sums; making them takes half of the time
    budget = Budget()
    work = [
        (sum(group.size for group in groups), partial(_write_file, inside / name, groups, budget))
        for name, groups in files.items()
    ]
    records = run_parts(folder, work, options.workers, options.quiet, partial(chunks_are_in, inside))
    chunks = [read_chunk(record) for part in records for record in part]
    write_catalogue(inside, chunks, common | UNTRAINED)
    (folder.path / TRACKER).write_text(RELEASE)
    return chunks


def _write_file(file: Path, groups: list[Group], budget: Budget, report: Report) -> list[dict[str, Any]]:
    chunks: list[Chunk] = []
    with open(file, "wb") as stream:
        for group in groups:
            with budget.taking(group.size):
                chunks += group.write(stream, file.name)
            report(group.size)
        synced(stream)
    return [asdict(chunk) for chunk in chunks]
