"""Tensors of a Megatron distributed checkpoint (torch_dist), read and written piece by piece, without a model.

The folder of an iteration holds `.metadata` (a catalogue of all tensors' chunks), `*.distcp` (the chunks, each as
`torch.save` writes it), and `metadata.json`, which names the format. The catalogue is a pickle: here only the classes
that a catalogue consists of are made from it.
"""

import io
import json
import pickle
import re
from argparse import Namespace
from collections.abc import Iterable
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

from megatron_mtp.checkpoint.mcore_store import TRACKER
from megatron_mtp.checkpoint.rules import Shape
from megatron_mtp.model.draft_vocabulary import DRAFT_VOCABULARY

CATALOGUE = ".metadata"
FORMAT = "metadata.json"
COMMON = "common_state/shard_0_1"
"""Megatron's key for everything that is no tensor."""
_KERNEL = re.compile(r"(.+\.)(linear_\w+|eh_proj)\.weight")
_STACKED = re.compile(r"decoder\.layers\.(?!\d)(.+)")
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\..+")
RELEASE = "release"
"""Megatron's name for weights that no run has saved: loaded without optimizer, counting from iteration 0."""
_CATALOGUE_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(str(dtype).removeprefix("torch.") for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2))},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}  # fmt: skip


def iteration_folder(folder: Path) -> Path:
    """The folder of tensors inside a checkpoint folder, or the folder itself if it is one.

    Raises:
        ValueError: there is no distributed checkpoint.
    """
    if (folder / CATALOGUE).is_file():
        return folder
    tracker = folder / TRACKER
    said = tracker.read_text().strip() if tracker.is_file() else ""
    inner = folder / (f"iter_{int(said):07d}" if said.isdigit() else RELEASE)
    if said and (inner / CATALOGUE).is_file():
        return inner
    raise ValueError(
        f"{folder} is no Megatron distributed checkpoint; give a folder with a {TRACKER} and an iteration that was "
        "saved with --ckpt-format torch_dist (Megatron's default)."
    )


def stored_draft_vocabulary(folder: Path) -> Tensor | None:
    """The tokens [N] that the depths of the checkpoint in an iteration's folder draft; None where they draft all, or
    the checkpoint is no distributed one."""
    if not (folder / CATALOGUE).is_file():
        return None
    reader = DistReader(folder)
    return reader.read(DRAFT_VOCABULARY) if reader.holds(DRAFT_VOCABULARY) else None


class _CatalogueReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CATALOGUE_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class DistReader:
    """A distributed checkpoint for reading.

    Raises:
        ValueError: it is damaged, or holds what no checkpoint of Megatron holds.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = iteration_folder(folder)
        try:
            with open(self.folder / CATALOGUE, "rb") as stream:
                catalogue = _CatalogueReader(stream).load()
            self._where: dict[MetadataIndex, _StorageInfo] = catalogue.storage_data
            self._tensors = {
                key: value
                for key, value in catalogue.state_dict_metadata.items()
                if isinstance(value, TensorStorageMetadata)
            }
            self._chunks = {(key, tuple(c.offsets)): c for key, entry in self._tensors.items() for c in entry.chunks}
        except Exception as error:
            raise ValueError(f"{self.folder / CATALOGUE} is no catalogue of a checkpoint: {error}.") from None
        self._layers = {layer: key for key in self._tensors for layer in self._layers_of(key)}

    @property
    def keys(self) -> list[str]:
        """Of the model's tensors, layer by layer; an optimizer's state is not among them."""
        stacked = set(self._layers.values())
        alone = [key for key in self._tensors if not key.startswith("optimizer.") and key not in stacked]
        return [*alone, *self._layers]

    def holds(self, key: str) -> bool:
        return key in self._tensors or key in self._layers

    def shape(self, key: str) -> Shape:
        if key in self._layers:
            return tuple(self._tensors[self._layers[key]].size)[1:]
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        return self._tensors[self._layers.get(key, key)].properties.dtype

    def read(self, key: str, offset: Shape | None = None, shape: Shape | None = None) -> Tensor:
        """A tensor, or the slab of it at `offset`.

        Raises:
            ValueError: a file is missing or damaged, or the chunks do not cover the slab.
        """
        whole = self.shape(key)
        offset, shape = offset or (0,) * len(whole), whole if shape is None else shape
        if key in self._layers:
            layer = int(_LAYER.fullmatch(key).group(2))  # type: ignore[union-attr]
            return self._slab(self._layers[key], (layer, *offset), (1, *shape)).squeeze(0)
        return self._slab(key, offset, shape)

    def _layers_of(self, key: str) -> list[str]:
        """Where all layers are alike, Megatron stacks them in one tensor, layers first: the keys of each by itself."""
        match = _STACKED.fullmatch(key)
        if match is None:
            return []
        return [f"decoder.layers.{layer}.{match.group(1)}" for layer in range(self._tensors[key].size[0])]

    def _slab(self, key: str, offset: Shape, shape: Shape) -> Tensor:
        whole = self._chunks.get((key, offset))
        if whole is not None and tuple(whole.sizes) == shape:  # one expert of many: no search through their chunks
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
        """What is stored beside tensors: Megatron's arguments above all.

        Raises:
            ValueError: there is nothing, or it is not what Megatron stores.
        """
        register_safe_globals()
        legacy = self.folder / "common.pt"
        try:
            if legacy.is_file():
                state = torch.load(legacy, map_location="cpu", weights_only=True)
            else:
                loaded = self._load(MetadataIndex(COMMON), COMMON)
                state = (torch.load(loaded, weights_only=True) if isinstance(loaded, io.BytesIO) else loaded)[0]
        except (ValueError, KeyError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ValueError(f"{self.folder} lacks Megatron's arguments: {str(error)[:200]}.") from None
        if not isinstance(state, dict) or not isinstance(state.get("args"), Namespace):
            raise ValueError(f"{self.folder} lacks Megatron's arguments; give a checkpoint that Megatron saved.")
        return state

    def _chunk(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        tensor = self._load(MetadataIndex(key, chunk.offsets), key)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != tuple(chunk.sizes):
            raise ValueError(f"{self.folder}: a chunk of '{key}' has not the shape that the catalogue says.")
        return tensor

    def _load(self, index: MetadataIndex, key: str) -> Any:
        info = self._where.get(index)
        if info is None:
            raise ValueError(f"{self.folder / CATALOGUE} does not say where '{key}' is; the checkpoint is damaged.")
        file = self.folder / Path(info.relative_path).name
        try:
            with open(file, "rb") as stream:
                part = _create_file_view(stream, info.offset, info.length)  # read in place: memory for one copy
                return torch.load(cast(IO[bytes], part), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise ValueError(f"{file} does not hold '{key}' whole ({str(error).splitlines()[0][:100]}).") from None


def _overlap(start: Shape, sizes: Shape, offset: Shape, shape: Shape) -> tuple[Shape, Shape] | None:
    """Start and sizes of what two boxes have in common; None for nothing."""
    low = tuple(max(a, b) for a, b in zip(start, offset, strict=True))
    high = tuple(min(a + m, b + n) for a, m, b, n in zip(start, sizes, offset, shape, strict=True))
    if any(h <= lo for lo, h in zip(low, high, strict=True)):
        return None
    return low, tuple(h - lo for lo, h in zip(low, high, strict=True))


@dataclass(frozen=True)
class Chunk:
    """One chunk that was written: JSON-able, so that an interrupted conversion can go on."""

    key: str
    whole: Shape
    offset: Shape
    shape: Shape
    dtype: str
    file: str
    start: int
    length: int


def write_chunk(stream: IO[bytes], file: str, key: str, whole: Shape, offset: Shape, tensor: Tensor) -> Chunk:
    """Append a tensor to a `.distcp` file.

    Raises:
        OSError: the file cannot grow.
    """
    start = stream.tell()
    own = tensor.contiguous()
    if own.untyped_storage().nbytes() != own.numel() * own.element_size():
        own = own.clone()  # torch.save would write the whole storage of a view
    try:
        torch.save(own, stream)
    except RuntimeError as error:  # torch closes its archive all the same, and complains of that alone
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    dtype = str(own.dtype).removeprefix("torch.")
    return Chunk(key, whole, offset, tuple(own.shape), dtype, file, start, stream.tell() - start)


def _kernel_states(tensors: dict[str, Any]) -> list[str]:
    """Keys of the state that Megatron looks for beside every linear layer and attention: only FP8 kernels have one."""
    keys = []
    for key, entry in tensors.items():
        match = _KERNEL.fullmatch(key)
        if match is None:
            continue
        module, name = match.groups()
        shards = entry.size[0] if module.endswith(".experts.experts.") else 1
        keys += [f"{module}{name}._extra_state/shard_{index}_{shards}" for index in range(shards)]
        if name == "linear_proj":
            keys.append(f"{module}core_attention._extra_state/shard_0_1")
    return keys


def write_catalogue(folder: Path, chunks: Iterable[Chunk], common: dict[str, Any]) -> None:
    """Complete a folder of chunks: the common state, the catalogue, and last the file that names the format."""
    tensors: dict[str, Any] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    for chunk in chunks:
        properties = TensorProperties(dtype=getattr(torch, chunk.dtype))
        entry = tensors.setdefault(chunk.key, TensorStorageMetadata(properties, torch.Size(chunk.whole), []))
        entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)))
        where[MetadataIndex(chunk.key, chunk.offset)] = _StorageInfo(chunk.file, chunk.start, chunk.length)
    file = "__common_0.distcp"
    with open(folder / file, "wb") as stream:
        torch.save([common], stream)
        end = stream.tell()
        torch.save([None], stream)  # once for all kernels
        places = {COMMON: _StorageInfo(file, 0, end)}
        places |= dict.fromkeys(_kernel_states(tensors), _StorageInfo(file, end, stream.tell() - end))
    for name, place in places.items():
        tensors[name], where[MetadataIndex(name)] = BytesStorageMetadata(), place
    with open(folder / CATALOGUE, "wb") as stream:
        pickle.dump(Metadata(tensors, storage_data=where, storage_meta=StorageMeta()), stream)
    (folder / FORMAT).write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
