"""gpt-to-hybrid and hybrid-to-gpt: the same model in Megatron's other class, with its depths and its optimizer.

In:  a distributed checkpoint. Out: one of the same iteration, whose tensors, optimizer's state, random states and
learning rate are those of the source, bit by bit, under the other keys, and whose arguments describe the other class.
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from megatron_mtp.checkpoint.convert.halves import Halves
from megatron_mtp.checkpoint.convert.options import Converted, Options
from megatron_mtp.checkpoint.convert.pattern import gpt_arguments, hybrid_arguments
from megatron_mtp.checkpoint.convert.streaming import PartialFolder
from megatron_mtp.checkpoint.convert.writing import UNTRAINED, Group, keep_files, write_checkpoint
from megatron_mtp.checkpoint.mcore.iterations import RELEASE
from megatron_mtp.checkpoint.mcore.model import check_trainable
from megatron_mtp.checkpoint.mcore.stored_depths import StoredDepths
from megatron_mtp.checkpoint.mcore.tensors import HEAD_STATE, Chunk, DistReader, Shape, write_chunk

FILE_BYTES = 2**30
"""Size of a file, unless a single tensor is larger: what is made again at most after an interruption."""
BY_PARAMETER = (None, "fully_reshardable", "fully_sharded_model_space")
"""Formats of the optimizer's state with a tensor for every parameter; None is that of a plain optimizer."""
BY_BUCKET = "dp_reshardable"
"""The distributed optimizer's usual format: flat buffers of the parameters, in the model's order."""
UNEVEN = (
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_model_parallel_layout "
    "virtual_pipeline_model_parallel_size account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split"
).split()
"""Arguments by which pipeline stages have other layers than an even cut gives them."""


@dataclass(frozen=True)
class Migration:
    """A checkpoint in its other form, before any of it is written.

    Attributes:
        reader: the source.
        pattern: the hybrid's layers.
        keys: the source's key of every tensor, and its keys in the other form.
        objects: new key of everything else, and the source's key.
        common: what the new checkpoint stores beside tensors.
        to_hybrid: whether the new one is the hybrid.
    """

    reader: DistReader
    pattern: str
    keys: dict[str, list[str]]
    objects: dict[str, str]
    common: dict[str, Any]
    to_hybrid: bool

    @property
    def depths(self) -> int:
        """Number of physical depths."""
        return StoredDepths.of(self.reader.keys).layers

    @property
    def size(self) -> int:
        """Size of all tensors that are written, bytes."""
        return sum(len(keys) * _size(self.reader, key, self.reader.shape(key)) for key, keys in self.keys.items())


def plan_migration(source: Path, to_hybrid: bool) -> Migration:
    """What `migrate` will write, from names and shapes alone.

    Args:
        source: the checkpoint.
        to_hybrid: whether a GPT becomes a hybrid, or a hybrid a GPT.

    Raises:
        ValueError: the model has no such form, the optimizer's state cannot be moved, or the checkpoint is damaged.
    """
    reader = DistReader(source)
    common = reader.common()
    old = common["args"]
    check_trainable(old, str(source))
    new = (hybrid_arguments if to_hybrid else gpt_arguments)(old, str(source))
    pattern = (new if to_hybrid else old).hybrid_layer_pattern
    _check_optimizer(common, pattern, str(source))
    halves = Halves.of(pattern)
    keys = _new_keys(halves, [*reader.keys, *reader.state_keys], to_hybrid)
    depths = 1 if old.mtp_num_layers and getattr(old, "mtp_use_repeated_layer", False) else old.mtp_num_layers or 0
    halves.check((key for names in keys.values() for key in names) if to_hybrid else keys, depths, str(source))
    objects = _objects(halves, reader, to_hybrid)
    return Migration(reader, pattern, keys, objects, _common(common, new, to_hybrid), to_hybrid)


def migrate(source: Path, target: Path, to_hybrid: bool, options: Options) -> Converted:
    """Write a GPT's checkpoint as that of a hybrid, or a hybrid's as that of a GPT.

    Args:
        source: the checkpoint.
        target: the checkpoint to make.
        to_hybrid: whether a GPT becomes a hybrid, or a hybrid a GPT.
        options: number of workers, and whether to resume.

    Raises:
        ValueError: as `plan_migration`, or the target is taken.
    """
    plan = plan_migration(source, to_hybrid)
    reader = plan.reader
    folder = PartialFolder(target, source, {"source": reader.fingerprint(), "hybrid": to_hybrid}, options.resume)
    objects = {key: reader.stored_bytes(old) for key, old in plan.objects.items()}
    name = RELEASE if reader.folder.name == RELEASE else str(plan.common["iteration"])
    chunks = write_checkpoint(folder, _files(plan), plan.common, options, name, objects)
    keep_files(reader.folder.parent, folder.path)
    folder.finish()
    title = f"hybrid of layers {plan.pattern}" if to_hybrid else "GPT"
    return Converted(title, plan.depths, len({chunk.key for chunk in chunks}), sum(chunk.length for chunk in chunks))


def sharding_type(common: dict[str, Any]) -> str | None:
    """The format of the distributed optimizer's state; None if the optimizer is another one or not stored."""
    metadata, optimizer = common.get("content_metadata") or {}, common.get("optimizer")
    own = optimizer.get("param_state_sharding_type") if isinstance(optimizer, dict) else None
    return metadata.get("distrib_optim_sharding_type", own)


def _check_optimizer(common: dict[str, Any], pattern: str, source: str) -> None:
    """Raises ValueError where the optimizer's state lies in another order in the other form."""
    form, args = sharding_type(common), common["args"]
    remedy = "save it again by megatron-mtp train with --dist-ckpt-optim-fully-reshardable, and convert that"
    if form not in (*BY_PARAMETER, BY_BUCKET):
        raise ValueError(f"{source} holds the optimizer's state in the format {form}, which cannot be moved; {remedy}.")
    stages = [len(stage) for stage in pattern.split("/")[0].split("|")]
    even = len(set(stages)) == 1 and len(stages) in (1, args.pipeline_model_parallel_size)
    if form == BY_BUCKET and (not even or any(getattr(args, name, None) for name in UNEVEN)):
        raise ValueError(
            f"{source} holds the optimizer's state in buffers for each pipeline stage (format {form}), and its stages "
            f"were not cut evenly; {remedy}."
        )


def _new_keys(halves: Halves, keys: Iterable[str], to_hybrid: bool) -> dict[str, list[str]]:
    """Every old key with its new ones; of two old keys for the same tensor the first stays."""
    found: dict[str, list[str]] = {}
    taken: set[str] = set()
    for key in keys:
        names = [halves.hybrid_key(key)] if to_hybrid else halves.gpt_keys(key)
        if taken.isdisjoint(names):
            found[key] = names
            taken.update(names)
    return found


def _objects(halves: Halves, reader: DistReader, to_hybrid: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, stored in reader.objects.items():
        if to_hybrid or key != HEAD_STATE:
            found |= dict.fromkeys([halves.hybrid_key(key)] if to_hybrid else halves.gpt_keys(key), stored)
    return found


def _common(old: dict[str, Any], args: Namespace, to_hybrid: bool) -> dict[str, Any]:
    """What the source stores beside tensors, with other arguments; every layer has tensors of its own."""
    metadata = {**UNTRAINED["content_metadata"], **(old.get("content_metadata") or {})}
    if (form := sharding_type(old)) is not None:
        metadata["distrib_optim_sharding_type"] = form
    if not to_hybrid:
        metadata["non_homogeneous_layers"] = True
    return {**old, "args": args, "content_metadata": metadata}


def _files(plan: Migration) -> dict[str, list[Group]]:
    """All pieces of all tensors, as many to a file as fit."""
    files: list[list[Group]] = [[]]
    room = FILE_BYTES
    for group in _groups(plan):
        if files[-1] and group.size > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(group)
        room -= group.size
    return {f"__{index}_0.distcp": groups for index, groups in enumerate(files)}


def _groups(plan: Migration) -> Iterator[Group]:
    reader = plan.reader
    for key, names in plan.keys.items():
        for offset, shape in reader.slabs(key):
            yield Group(_size(reader, key, shape), partial(_write, reader, key, names, offset, shape))


def _size(reader: DistReader, key: str, shape: Shape) -> int:
    return torch.Size(shape).numel() * reader.dtype(key).itemsize


def _write(
    reader: DistReader, key: str, names: list[str], offset: Shape, shape: Shape, stream: IO[bytes], file: str
) -> list[Chunk]:
    """Copy a piece of a tensor to its new keys."""
    piece = reader.read(key, offset, shape)
    return [write_chunk(stream, file, name, reader.shape(key), offset, piece) for name in names]
