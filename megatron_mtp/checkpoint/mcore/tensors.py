"""Tensors of a Megatron distributed checkpoint (torch_dist), read and written piece by piece, without a model.

The folder of an iteration holds `.metadata` (a catalogue of all tensors' chunks), `*.distcp` (the chunks, each as
`torch.save` writes it), and `metadata.json`, which names the format.
"""

import io
import json
import pickle
import re
import zlib
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from megatron.core.safe_globals import register_safe_globals
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
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_mtp.checkpoint.mcore.integrity import check_files, read_errors
from megatron_mtp.checkpoint.mcore.iterations import iteration_folder
from megatron_mtp.files import synced
from megatron_mtp.patches.checksums import Summed, are_wanted, check_entry, crc32_of
from megatron_mtp.patches.saving import FORMAT
from megatron_mtp.patches.unpickling import CATALOGUE, read_catalogue, seal

Shape = tuple[int, ...]

COMMON = "common_state/shard_0_1"
"""Megatron's key for everything beside tensors."""
_KERNEL = re.compile(r"(.+\.)(linear_\w+|eh_proj|in_proj|out_proj|fc\d_latent_proj)\.weight(?:\.\w+)?")
HYBRID_NORM = "decoder.final_norm.weight"
"""A key that checkpoints of hybrids have, and those of GPTs have not."""
HEAD_STATE = "output_layer._extra_state/shard_0_1"
"""State of a kernel that Megatron's hybrid expects, and its GPT does not."""
STATE = r"(?:chained_\d+\.)?optimizer\."
"""How the keys of the optimizer's tensors begin."""
_STATE = re.compile(STATE)
_STACKED = re.compile(rf"((?:{STATE}state\.\w+\.)?decoder\.layers\.)(?!\d)(.+)")
_LAYER = re.compile(rf"(?:{STATE}state\.\w+\.)?decoder\.layers\.(\d+)\..+")
_STACKED_OBJECT = re.compile(r"(decoder\.layers\.)(?!\d)(.+/shard)_(\d+)((?:\.\d+)*)_\d+((?:\.\d+)*)")


class DistReader:
    """A distributed checkpoint, open for reading.

    Args:
        folder: a folder that Megatron saves to, or of one iteration.
        whole: whether to refuse a checkpoint whose files are missing or cut short.

    Raises:
        ValueError: the checkpoint is damaged, or is none of Megatron's.
    """

    def __init__(self, folder: Path, whole: bool = True) -> None:
        self.folder = iteration_folder(folder)
        catalogue = read_catalogue(self.folder)
        if whole:
            check_files(self.folder, catalogue.storage_data)
        self._where: dict[MetadataIndex, _StorageInfo] = catalogue.storage_data
        self._catalogue: dict[str, Any] = catalogue.state_dict_metadata
        self._checked: set[tuple[str, int]] = set()  # entries whose checksums were compared
        self._tensors = {
            key: value for key, value in self._catalogue.items() if isinstance(value, TensorStorageMetadata)
        }
        self._chunks = {(key, tuple(c.offsets)): c for key, entry in self._tensors.items() for c in entry.chunks}
        self._layers = {layer: key for key in self._tensors for layer in self._layers_of(key)}

    @property
    def keys(self) -> list[str]:
        """Keys of the model's tensors, layer by layer, without the optimizer's state."""
        stacked = set(self._layers.values())
        alone = [key for key in self._tensors if key not in stacked]
        return [key for key in (*alone, *self._layers) if not _STATE.match(key)]

    @property
    def state_keys(self) -> list[str]:
        """Keys of the optimizer's tensors, layer by layer."""
        stacked = set(self._layers.values())
        return [key for key in (*self._tensors, *self._layers) if key not in stacked and _STATE.match(key)]

    def holds(self, key: str) -> bool:
        """Whether the checkpoint has a tensor of this key."""
        return key in self._tensors or key in self._layers

    def shape(self, key: str) -> Shape:
        """Shape of a whole tensor."""
        if key in self._layers:
            return tuple(self._tensors[self._layers[key]].size)[1:]
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """Type of a tensor."""
        return self._tensors[self._layers.get(key, key)].properties.dtype

    def fingerprint(self) -> dict[str, Any]:
        """A record that differs when the checkpoint differs: names, sizes and times of its files."""
        files = [self.folder / name for name in sorted({place.relative_path for place in self._where.values()})]
        catalogue = zlib.crc32((self.folder / CATALOGUE).read_bytes())
        stats = [(file.name, file.stat()) for file in files]
        return {
            "folder": str(self.folder.resolve()),
            "catalogue": catalogue,
            "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        }

    def read(self, key: str, offset: Shape | None = None, shape: Shape | None = None) -> Tensor:
        """Read a tensor, or the slab of `shape` at `offset`.

        Raises:
            ValueError: a file is missing or damaged, or the chunks do not cover the slab.
        """
        whole = self.shape(key)
        offset, shape = offset or (0,) * len(whole), whole if shape is None else shape
        if key in self._layers:
            layer = int(_LAYER.fullmatch(key).group(1))  # type: ignore[union-attr]
            return self._slab(self._layers[key], (layer, *offset), (1, *shape)).squeeze(0)
        return self._slab(key, offset, shape)

    def _layers_of(self, key: str) -> list[str]:
        """The keys of the layers in a tensor that stacks them: Megatron does so if all layers have the same form."""
        match = _STACKED.fullmatch(key)
        if match is None:
            return []
        return [f"{match.group(1)}{layer}.{match.group(2)}" for layer in range(self._tensors[key].size[0])]

    def slabs(self, key: str) -> list[tuple[Shape, Shape]]:
        """Offset and shape of every stored piece of a tensor."""
        chunks = [(tuple(c.offsets), tuple(c.sizes)) for c in self._tensors[self._layers.get(key, key)].chunks]
        if key not in self._layers:
            return chunks
        layer = int(_LAYER.fullmatch(key).group(1))  # type: ignore[union-attr]
        return [(start[1:], sizes[1:]) for start, sizes in chunks if start[0] <= layer < start[0] + sizes[0]]

    @property
    def objects(self) -> dict[str, str]:
        """What is stored beside the tensors and arguments (states of kernels, random numbers): key to stored key.

        Layers that are stacked have keys of their own here.
        """
        stored = [key for key, entry in self._catalogue.items() if isinstance(entry, BytesStorageMetadata)]
        return {_unstacked(key): key for key in stored if key != COMMON}

    def stored_bytes(self, key: str) -> bytes:
        """An object as it is stored, by its stored key.

        Raises:
            ValueError: it is damaged, or holds what no checkpoint of Megatron's holds.
        """
        register_safe_globals()
        self._load(MetadataIndex(key), key)
        info = self._where[MetadataIndex(key)]
        with open(self.folder / info.relative_path, "rb") as stream:
            stream.seek(info.offset)
            return stream.read(info.length)

    def _slab(self, key: str, offset: Shape, shape: Shape) -> Tensor:
        whole = self._chunks.get((key, offset))
        if whole is not None and tuple(whole.sizes) == shape:  # one expert of many: do not search all their chunks
            return self._chunk(key, whole)
        overlaps = []
        for chunk in self._tensors[key].chunks:
            overlap = _overlap(tuple(chunk.offsets), tuple(chunk.sizes), offset, shape)
            if overlap is not None:
                overlaps.append((chunk, overlap))
        out = torch.empty(shape, dtype=self.dtype(key))
        covered = 0
        for chunk, (start, sizes) in overlaps:
            source = tuple(slice(s - o, s - o + n) for s, o, n in zip(start, chunk.offsets, sizes, strict=True))
            target = tuple(slice(s - o, s - o + n) for s, o, n in zip(start, offset, sizes, strict=True))
            out[target] = self._chunk(key, chunk)[source]
            covered += torch.Size(sizes).numel()
        if covered != out.numel():
            raise ValueError(f"{self.folder}: the chunks of '{key}' do not cover it; the checkpoint is damaged.")
        return out

    def common(self) -> dict[str, Any]:
        """What the checkpoint stores beside tensors, with Megatron's arguments under `args`.

        Raises:
            ValueError: there are no arguments, or the state is none of Megatron's.
        """
        state = self.state()
        if not isinstance(state.get("args"), Namespace):
            raise ValueError(f"{self.folder} lacks Megatron's arguments; give a checkpoint that Megatron saved.")
        return state

    def state(self) -> dict[str, Any]:
        """What the checkpoint stores beside tensors.

        Raises:
            ValueError: the state is none of Megatron's.
        """
        register_safe_globals()
        legacy = self.folder / "common.pt"
        with read_errors(f"{self.folder} lacks Megatron's arguments"):
            if legacy.is_file():
                state = torch.load(legacy, map_location="cpu", weights_only=True)
            else:
                loaded = self._load(MetadataIndex(COMMON), COMMON)
                state = (torch.load(loaded, weights_only=True) if isinstance(loaded, io.BytesIO) else loaded)[0]
        if not isinstance(state, dict):
            raise ValueError(f"{self.folder} lacks Megatron's arguments; give a checkpoint that Megatron saved.")
        return state

    def _chunk(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        tensor = self._load(MetadataIndex(key, chunk.offsets), key)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != tuple(chunk.sizes):
            raise ValueError(f"{self.folder}: a chunk of '{key}' has another shape than in the catalogue.")
        return tensor

    def _load(self, index: MetadataIndex, key: str) -> Any:
        info = self._where.get(index)
        if info is None:
            raise ValueError(f"{self.folder / CATALOGUE} has no place for '{key}'; the checkpoint is damaged.")
        file = self.folder / info.relative_path
        with read_errors(f"{file} does not hold '{key}' whole"), open(file, "rb") as stream:
            self._check(stream, info)
            # A view: the file is not copied into memory first.
            part = _create_file_view(stream, info.offset, info.length)
            return torch.load(cast(IO[bytes], part), map_location="cpu", weights_only=True)

    def _check(self, stream: IO[bytes], info: _StorageInfo) -> None:
        if are_wanted() and (info.relative_path, info.offset) not in self._checked:
            check_entry(stream, info, str(self.folder / info.relative_path))
            self._checked.add((info.relative_path, info.offset))


def _unstacked(key: str) -> str:
    """The key of an object in a checkpoint whose layers have keys of their own."""
    match = _STACKED_OBJECT.fullmatch(key)
    if match is None:
        return key
    stack, name, layer, place, shape = match.groups()
    return f"{stack}{layer}.{name}_{place[1:] or 0}_{shape[1:] or 1}"


def _overlap(start: Shape, sizes: Shape, offset: Shape, shape: Shape) -> tuple[Shape, Shape] | None:
    """Start and sizes of the intersection of two boxes; None if it is empty."""
    low = tuple(max(a, b) for a, b in zip(start, offset, strict=True))
    high = tuple(min(a + m, b + n) for a, m, b, n in zip(start, sizes, offset, shape, strict=True))
    if any(h <= lo for lo, h in zip(low, high, strict=True)):
        return None
    return low, tuple(h - lo for lo, h in zip(low, high, strict=True))


@dataclass(frozen=True)
class Chunk:
    """A chunk that was written; `asdict` makes JSON of it for the records of a conversion."""

    key: str
    whole: Shape
    offset: Shape
    shape: Shape
    dtype: str
    file: str
    start: int
    length: int
    crc32: int


def write_chunk(stream: IO[bytes], file: str, key: str, whole: Shape, offset: Shape, tensor: Tensor) -> Chunk:
    """Append a tensor to a `.distcp` file.

    Args:
        stream: the open file.
        file: its name.
        key: key of the tensor.
        whole: shape of the whole tensor.
        offset: start of the slab in it.
        tensor: the slab.

    Raises:
        OSError: the file cannot grow.
    """
    start, summed = stream.tell(), Summed(stream)
    own = tensor.contiguous()
    if own.untyped_storage().nbytes() != own.numel() * own.element_size():
        own = own.clone()  # torch.save would write the whole storage of a view
    try:
        torch.save(own, cast(IO[bytes], summed))
    except RuntimeError as error:  # torch hides the OSError behind a failure to close the archive
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    dtype = str(own.dtype).removeprefix("torch.")
    return Chunk(key, whole, offset, tuple(own.shape), dtype, file, start, stream.tell() - start, summed.crc32)


def read_chunk(record: dict[str, Any]) -> Chunk:
    """A chunk from the JSON of `asdict`."""
    return Chunk(**{**record, **{name: tuple(record[name]) for name in ("whole", "offset", "shape")}})


def chunks_are_in(folder: Path, records: list[dict[str, Any]]) -> bool:
    """Whether the files hold the recorded chunks of an interrupted conversion, by their checksums."""
    try:
        for chunk in map(read_chunk, records):
            with open(folder / chunk.file, "rb") as stream:
                if crc32_of(stream, chunk.start, chunk.length) != chunk.crc32:
                    return False
    except (OSError, TypeError, KeyError):
        return False
    return True


def _kernel_states(tensors: dict[str, Any]) -> list[str]:
    """Keys of kernel states: Megatron expects one for every linear layer and attention, though only FP8 uses it."""
    keys = [HEAD_STATE] if HYBRID_NORM in tensors else []
    for key, entry in tensors.items():
        match = _KERNEL.fullmatch(key)
        if match is None or _STATE.match(key):
            continue
        module, name = match.groups()
        shards = entry.size[0] if module.endswith(".experts.experts.") else 1
        keys += [f"{module}{name}._extra_state/shard_{index}_{shards}" for index in range(shards)]
        if name == "linear_proj":
            keys.append(f"{module}core_attention._extra_state/shard_0_1")
    return keys


def write_catalogue(
    folder: Path, chunks: Iterable[Chunk], common: dict[str, Any], objects: Mapping[str, bytes]
) -> None:
    """Complete a folder of chunks: the common state, the catalogue, and last the file that names the format.

    Args:
        folder: folder of the iteration.
        chunks: all chunks in its files.
        common: what Megatron stores beside tensors.
        objects: other objects by key, as `DistReader.stored_bytes` gives them.
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
        places = {COMMON: _write_object(stream, file, [common])}
        empty = _write_object(stream, file, [None])  # one entry for all kernels
        places |= dict.fromkeys(_kernel_states(tensors), empty)
        places |= {key: _write_bytes(stream, file, held) for key, held in objects.items()}
        synced(stream)
    for name, place in places.items():
        tensors[name], where[MetadataIndex(name)] = BytesStorageMetadata(), place
    with open(folder / CATALOGUE, "wb") as stream:
        pickle.dump(Metadata(tensors, storage_data=where, storage_meta=StorageMeta()), stream)
        synced(stream)
    seal(folder)
    (folder / FORMAT).write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


def _write_object(stream: IO[bytes], file: str, held: list[Any]) -> _StorageInfo:
    start, summed = stream.tell(), Summed(stream)
    torch.save(held, cast(IO[bytes], summed))
    return _place(file, start, stream.tell() - start, summed.crc32)


def _write_bytes(stream: IO[bytes], file: str, held: bytes) -> _StorageInfo:
    start = stream.tell()
    stream.write(held)
    return _place(file, start, len(held), zlib.crc32(held))


def _place(file: str, start: int, length: int, crc32: int) -> _StorageInfo:
    place = _StorageInfo(file, start, length)
    place.crc32 = crc32  # type: ignore[attr-defined]
    return place
