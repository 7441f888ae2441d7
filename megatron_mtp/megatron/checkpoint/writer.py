"""Write Megatron distributed checkpoints (torch_dist) without a model: chunks first, the metadata last.

Every chunk has a checksum, so an interrupted conversion continues after the chunks that are complete.
"""

import io
import json
import pickle
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_mtp.common.files import synced
from megatron_mtp.megatron.checkpoint import COMMON, HEAD_STATE, HYBRID_NORM, STATE
from megatron_mtp.megatron.checkpoint.catalogue import CATALOGUE, FORMAT, crc32_of
from megatron_mtp.megatron.checkpoint.sealing import Summed, seal

_KERNEL = re.compile(r"(.+\.)(linear_\w+|eh_proj|in_proj|out_proj|fc\d_latent_proj|fc|\w*norm)\.weight(?:\.\w+)?")


@dataclass(frozen=True)
class StoredChunk:
    """A chunk that was written; `asdict` converts it to JSON for the records of a conversion."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    file: str
    start: int
    length: int
    crc32: int


def write_chunk(
    stream: IO[bytes], file: str, key: str, whole: tuple[int, ...], offset: tuple[int, ...], tensor: Tensor
) -> StoredChunk:
    """Append a tensor to a `.distcp` file, or the slab at `offset` of a tensor of shape `whole`."""
    start, summed = stream.tell(), Summed(stream)
    own = tensor.contiguous()
    if own.untyped_storage().nbytes() != own.numel() * own.element_size():
        own = own.clone()  # torch.save writes the whole storage of a view
    try:
        torch.save(own, cast(IO[bytes], summed))
    except RuntimeError as error:  # torch hides the OSError behind a RuntimeError from closing the archive
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    dtype = str(own.dtype).removeprefix("torch.")
    return StoredChunk(key, whole, offset, tuple(own.shape), dtype, file, start, stream.tell() - start, summed.crc32)


def read_chunk(record: dict[str, Any]) -> StoredChunk:
    """Create a chunk from the JSON of `asdict`."""
    return StoredChunk(**{**record, **{name: tuple(record[name]) for name in ("whole", "offset", "shape")}})


def chunks_are_in(folder: Path, records: list[dict[str, Any]]) -> bool:
    """Return whether the files contain the recorded chunks of an interrupted conversion, by checksum."""
    try:
        for chunk in map(read_chunk, records):
            with open(folder / chunk.file, "rb") as stream:
                if crc32_of(stream, chunk.start, chunk.length) != chunk.crc32:
                    return False
    except (OSError, TypeError, KeyError):
        return False
    return True


def _kernel_states(tensors: dict[str, Any]) -> list[str]:
    """Return keys of kernel states for FP8: Transformer Engine has one in every linear layer, norm and attention."""
    keys = [HEAD_STATE] if HYBRID_NORM in tensors else []
    for key, entry in tensors.items():
        match = _KERNEL.fullmatch(key)
        if match is None or re.match(STATE, key):
            continue
        module, name = match.groups()
        shards = entry.size[0] if module.endswith(".experts.experts.") else 1
        keys += [f"{module}{name}._extra_state/shard_{index}_{shards}" for index in range(shards)]
        if name == "linear_proj":
            keys.append(f"{module}core_attention._extra_state/shard_0_1")
    return keys


def write_catalogue(
    folder: Path, chunks: Iterable[StoredChunk], common: dict[str, Any], objects: Mapping[str, bytes]
) -> None:
    """Complete an iteration's folder after its chunks: the common state, the metadata, and last the format's name.

    `common` is what Megatron stores besides tensors; `objects` are others by key (`DistReader.stored_bytes`).
    """
    tensors: dict[str, Any] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    for chunk in chunks:
        properties = TensorProperties(dtype=getattr(torch, chunk.dtype))
        entry = tensors.setdefault(chunk.key, TensorStorageMetadata(properties, torch.Size(chunk.whole), []))
        entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)))
        where[MetadataIndex(chunk.key, chunk.offset)] = _place(chunk.file, chunk.start, chunk.length, chunk.crc32)
    file = "__common_0.distcp"
    with open(folder / file, "wb") as stream:
        places = {COMMON: _append(stream, file, _pickled([common]))}
        places |= dict.fromkeys(_kernel_states(tensors), _append(stream, file, _pickled([None])))  # all share one entry
        places |= {key: _append(stream, file, held) for key, held in objects.items()}
        synced(stream)
    for name, place in places.items():
        tensors[name], where[MetadataIndex(name)] = BytesStorageMetadata(), place
    with open(folder / CATALOGUE, "wb") as stream:
        pickle.dump(Metadata(tensors, storage_data=where, storage_meta=StorageMeta()), stream)
        synced(stream)
    seal(folder)
    (folder / FORMAT).write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


def _pickled(held: list[Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(held, buffer)
    return buffer.getvalue()


def _append(stream: IO[bytes], file: str, held: bytes) -> _StorageInfo:
    start = stream.tell()
    stream.write(held)
    return _place(file, start, len(held), zlib.crc32(held))


def _place(file: str, start: int, length: int, crc32: int) -> _StorageInfo:
    place = _StorageInfo(file, start, length)
    place.crc32 = crc32  # type: ignore[attr-defined]
    return place
