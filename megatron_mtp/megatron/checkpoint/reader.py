"""Read tensors of a Megatron distributed checkpoint (torch_dist) piece by piece with torch's reader, without a model.

An iteration's folder has `.metadata` (the locations of all tensors' chunks), `*.distcp` (the chunks, each as written by
`torch.save`), and `metadata.json`, which names the format. Damaged files raise errors of one sentence. All code that
counts MTP layers in a checkpoint uses `StoredDepths`.
"""

import io
import re
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.safe_globals import register_safe_globals
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_mtp.megatron.checkpoint import COMMON, DRAFT_VOCABULARY, DRAFTER, STATE
from megatron_mtp.megatron.checkpoint.catalogue import CATALOGUE, FORMAT, checked_once, read_catalogue
from megatron_mtp.megatron.checkpoint.damage import read_errors
from megatron_mtp.megatron.checkpoint.iterations import another, iteration_folder

_QUERY_NORM = "self_attention.linear_q_proj.layer_norm_"
_STATE = re.compile(STATE)
_STACKED = re.compile(rf"((?:{STATE}state\.\w+\.)?decoder\.layers\.)(?!\d)(.+)")
_STACKED_OBJECT = re.compile(r"(decoder\.layers\.)(?!\d)(.+/shard)_(\d+)((?:\.\d+)*)_\d+((?:\.\d+)*)")


class DistReader:
    """A distributed checkpoint, open for reading.

    Args:
        folder: a folder that Megatron saves to, or one iteration.
        whole: whether to reject a checkpoint with missing or truncated files.

    Raises:
        ValueError: the checkpoint is damaged, or was not written by Megatron.
    """

    def __init__(self, folder: Path, whole: bool = True) -> None:
        self.folder = iteration_folder(folder)
        catalogue = read_catalogue(self.folder)
        if whole:
            check_files(self.folder, catalogue.storage_data)
        self._where: dict[MetadataIndex, _StorageInfo] = catalogue.storage_data
        self._storage = _Storage(self.folder, catalogue)
        self._index(catalogue.state_dict_metadata)

    def _index(self, catalogue: dict[str, Any]) -> None:
        """Index the tensors of a catalogue, and the layers within tensors that stack equal layers."""
        self._catalogue = catalogue
        self._tensors = {key: value for key, value in catalogue.items() if isinstance(value, TensorStorageMetadata)}
        self._chunks = {(key, tuple(c.offsets)): c for key, entry in self._tensors.items() for c in entry.chunks}
        stacked = {key: match for key in self._tensors if (match := _STACKED.fullmatch(key))}
        self._layers = {
            f"{match[1]}{layer}.{match[2]}": (key, layer)
            for key, match in stacked.items()
            for layer in range(self._tensors[key].size[0])
        }
        self._stacked = {key for key, _ in self._layers.values()}

    @property
    def home(self) -> Path:
        """The folder that holds all iterations and the files stored with them."""
        return self.folder.parent

    @property
    def keys(self) -> list[str]:
        """Keys of the model's tensors, in layer order, without the optimizer state."""
        alone = [key for key in self._tensors if key not in self._stacked]
        return [key for key in (*alone, *self._layers) if not _STATE.match(key)]

    @property
    def state_keys(self) -> list[str]:
        """Keys of the optimizer's tensors, in layer order."""
        return [key for key in (*self._tensors, *self._layers) if key not in self._stacked and _STATE.match(key)]

    def holds(self, key: str) -> bool:
        """Return whether the checkpoint has a tensor with this key."""
        return key in self._tensors or key in self._layers

    @property
    def has_drafter(self) -> bool:
        """Whether it has a drafter in addition to the trunk."""
        return self.holds(f"{DRAFTER}fc.weight")

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        if key in self._layers:
            return tuple(self._tensors[self._layers[key][0]].size)[1:]
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._tensors[self._layers.get(key, (key,))[0]].properties.dtype

    def fingerprint(self) -> dict[str, Any]:
        """Return a record that changes when the checkpoint changes: names, sizes and times of its files."""
        names = sorted({place.relative_path for place in self._where.values()})
        stats = [(name, (self.folder / name).stat()) for name in names]
        return {
            "folder": str(self.folder.resolve()),
            "catalogue": zlib.crc32((self.folder / CATALOGUE).read_bytes()),
            "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        }

    def read(self, key: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """Read a tensor, or the slab of `shape` at `offset`. Raise ValueError if chunks are damaged or missing."""
        whole = self.shape(key)
        offset, shape = offset or (0,) * len(whole), whole if shape is None else shape
        if key in self._layers:
            stacked, layer = self._layers[key]
            return self._slab(stacked, (layer, *offset), (1, *shape)).squeeze(0)
        return self._slab(key, offset, shape)

    def slabs(self, key: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return offset and shape of every stored piece of a tensor."""
        stacked, layer = self._layers.get(key, (key, None))
        chunks = [(tuple(c.offsets), tuple(c.sizes)) for c in self._tensors[stacked].chunks]
        if layer is None:
            return chunks
        return [(start[1:], sizes[1:]) for start, sizes in chunks if start[0] <= layer < start[0] + sizes[0]]

    @property
    def objects(self) -> dict[str, str]:
        """Entries other than tensors and arguments (kernel states, random number states): key to stored key.

        Stacked layers have separate keys here.
        """
        found: dict[str, str] = {}
        for stored, entry in self._catalogue.items():
            if isinstance(entry, BytesStorageMetadata) and stored != COMMON:
                key = stored
                if match := _STACKED_OBJECT.fullmatch(stored):
                    stack, name, layer, place, shape = match.groups()
                    key = f"{stack}{layer}.{name}_{place[1:] or 0}_{shape[1:] or 1}"
                found[key] = stored
        return found

    def stored_bytes(self, key: str) -> bytes:
        """Return an object as stored, by its stored key. Raise ValueError if it is damaged or not Megatron's."""
        register_safe_globals()
        held = self._bytes(key)
        with read_errors(f"{self.folder} does not hold '{key}' whole"):
            torch.load(io.BytesIO(held), map_location="cpu", weights_only=True)
        return held

    def _slab(self, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        out = torch.empty(shape, dtype=self.dtype(key))
        whole = self._chunks.get((key, offset))
        if whole is not None and tuple(whole.sizes) == shape:  # one expert of many: skip the search through all chunks
            start = torch.Size([0] * len(shape))
            index = MetadataIndex(key, whole.offsets)
            items = [ReadItem(LoadItemType.TENSOR, index, start, index, start, whole.sizes)]
        else:
            wanted = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
            items = create_read_items_for_chunk_list(key, self._tensors[key], [wanted])
        if sum(item.lengths.numel() for item in items) != out.numel():
            raise ValueError(f"{self.folder}: the chunks of '{key}' do not cover it; the checkpoint is damaged.")
        self._read_items(key, items, _Target(out))
        return out

    def _bytes(self, key: str) -> bytes:
        """Return a stored object's bytes."""
        index, none = MetadataIndex(key), torch.Size([0])
        target = _Target()
        self._read_items(key, [ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)], target)
        return target.held

    def _read_items(self, key: str, items: list[ReadItem], target: "_Target") -> None:
        places = [self._where.get(item.storage_index) for item in items]
        if None in places:
            raise ValueError(f"{self.folder / CATALOGUE} has no place for '{key}'; the checkpoint is damaged.")
        files = ", ".join(sorted({str(self.folder / place.relative_path) for place in places if place is not None}))
        with read_errors(f"{files} does not hold '{key}' whole"):
            self._storage.read_data(LoadPlan(items), target)  # type: ignore[arg-type]

    def common(self) -> dict[str, Any]:
        """The checkpoint's state other than tensors. Raise ValueError if its `args` are not Megatron's."""
        state = self.state()
        if not isinstance(state.get("args"), Namespace):
            raise ValueError(f"{self.folder} lacks Megatron's arguments; give a checkpoint that Megatron saved.")
        return state

    def state(self) -> dict[str, Any]:
        """The checkpoint's state other than tensors. Raise ValueError if it is not Megatron's."""
        register_safe_globals()
        legacy = self.folder / "common.pt"
        with read_errors(f"{self.folder} lacks Megatron's arguments"):
            held = legacy.read_bytes() if legacy.is_file() else self._bytes(COMMON)
            state = torch.load(io.BytesIO(held), map_location="cpu", weights_only=True)
            state = state if legacy.is_file() else state[0]
        if not isinstance(state, dict):
            raise ValueError(f"{self.folder} lacks Megatron's arguments; give a checkpoint that Megatron saved.")
        return state


class _Storage(FileSystemReader):
    """Reader of torch's files that checks every entry against its checksum once."""

    _slice_file = checked_once(FileSystemReader._slice_file)

    def __init__(self, folder: Path, catalogue: Metadata) -> None:
        super().__init__(folder)
        self.storage_data = catalogue.storage_data


@dataclass
class _Target:
    """Load planner, as far as torch's reader calls it: fills the tensor `out`, or keeps the object `held`."""

    out: Tensor = field(default_factory=lambda: torch.empty(0))
    held: bytes = b""

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        """Return the part of the tensor that an item fills."""
        return narrow_tensor_by_index(self.out, item.dest_offsets, item.lengths)

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the part is a view."""

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        """Keep an object."""
        self.held = value.getvalue()


def check_query_norms(reader: DistReader, name: str) -> None:
    """Raise ValueError for norms of uncompressed queries, which our layers do not have (latent_attention.py)."""
    if any(_QUERY_NORM in key for key in reader.keys):
        raise ValueError(
            f"{name} has norms in front of linear_q_proj, which Megatron-LM computes with Transformer Engine and no "
            "--q-lora-rank, and DeepSeek-V2-Lite, Moonlight and this package do not; train it here from the start, or "
            "with --q-lora-rank."
        )


BY_PARAMETER = (None, "fully_reshardable", "fully_sharded_model_space")
"""Formats of the optimizer's state with one tensor per parameter; None is the format of a plain optimizer."""


def sharding_type(common: dict[str, Any]) -> str | None:
    """Return the format of the distributed optimizer's state; None if it is another optimizer or not stored."""
    metadata, optimizer = common.get("content_metadata") or {}, common.get("optimizer")
    own = optimizer.get("param_state_sharding_type") if isinstance(optimizer, dict) else None
    return metadata.get("distrib_optim_sharding_type", own)


_MTP_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.(\w+)")


@dataclass(frozen=True)
class StoredDepths:
    """The MTP layers of a checkpoint.

    Attributes:
        layers: number of physical layers; one if a repeated layer serves all depths.
        sequential: whether the architecture is sequential; None without layers.
    """

    layers: int
    sequential: bool | None

    @classmethod
    def of(cls, keys: Iterable[str]) -> "StoredDepths":
        """Count the layers in the names of a checkpoint's tensors."""
        found = [match.groups() for key in keys if (match := _MTP_LAYER.match(key))]
        layers = len({index for index, _ in found})
        return cls(layers, any(name == "eh_proj" for _, name in found) if layers else None)


def depth_of(key: str) -> int | None:
    """Return the index, from 0, of the MTP layer that a tensor belongs to; None for other tensors."""
    match = _MTP_LAYER.match(key)
    return None if match is None else int(match.group(1))


def stored_depths(folder: Path) -> StoredDepths | None:
    """Return the MTP layers of the checkpoint in an iteration's folder; None if its format lists no tensors."""
    if (folder / FORMAT).is_file():
        return StoredDepths.of(read_catalogue(folder).state_dict_metadata)
    older = older_tensors(folder)
    return None if older is None else StoredDepths.of(older)


def older_tensors(folder: Path) -> dict[str, Tensor] | None:
    """Return all ranks' tensors of an iteration saved with `--ckpt-format torch`, by name; None for other formats."""
    found: dict[str, Tensor] = {}
    files = sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))
    for file in files:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        for part, tensors in state.items():
            if part.startswith("model"):
                found |= tensors
    return found if files else None


def absent_layers(
    folder: Path, layers: int, sequential: bool, init: str | None, drops: bool = False
) -> tuple[int, ...]:
    """Return the indices of the MTP layers that the checkpoint lacks and `--mtp-init` must create.

    Args:
        folder: folder of an iteration.
        layers: number of physical MTP layers of the model to build.
        sequential: whether the model's architecture is sequential.
        init: value of `--mtp-init`; None if not given.
        drops: whether the model may have fewer layers than the checkpoint.

    Raises:
        ValueError: the checkpoint has different MTP layers than the model, or lacks some and `init` is None.
    """
    stored = stored_depths(folder)
    if stored is None:
        return ()
    if stored.layers > layers and not drops:
        raise ValueError(
            f"the checkpoint {folder} (--load) has {stored.layers} MTP layers, and the model is to have {layers}; give "
            f"--mtp-num-layers {stored.layers} without --mtp-use-repeated-layer, or load a copy with "
            f"the first {layers}, which megatron-mtp convert drop-mtp --keep {layers} writes."
        )
    if stored.layers and stored.sequential != sequential:
        trained = "sequential" if stored.sequential else "parallel"
        raise ValueError(
            f"--mtp-architecture does not fit the checkpoint {folder} (--load), whose MTP layers are {trained}; give "
            f"--mtp-architecture {trained}."
        )
    absent = tuple(range(stored.layers, layers))
    if absent and init is None:
        has = f"has {stored.layers} MTP layer(s)" if stored.layers else "has no MTP weights"
        repeats = ""
        if stored.layers == 1 and sequential:
            repeats = ", or give --mtp-use-repeated-layer for one layer that drafts every token"
        raise ValueError(
            f"--mtp-num-layers asks for {layers} MTP layer(s), but the checkpoint {folder} (--load) {has}; give "
            f"--mtp-init random or --mtp-init last-layer to initialize the missing ones{repeats}."
        )
    return absent


def stored_draft_vocabulary(folder: Path, of_drafter: bool = False) -> Tensor | None:
    """Return the token ids [N] that a checkpoint's MTP layers or drafter may draft; None for all tokens."""
    if not (folder / FORMAT).is_file():
        return (older_tensors(folder) or {}).get(DRAFT_VOCABULARY)
    reader, key = DistReader(folder), f"{DRAFTER}draft_vocabulary" if of_drafter else DRAFT_VOCABULARY
    return reader.read(key) if reader.holds(key) else None


def check_files(folder: Path, places: Mapping[Any, Any]) -> None:
    """Raise ValueError if a file is missing, or shorter than a checkpoint's metadata (`places`) require."""
    ends: dict[str, int] = {}
    for place in places.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{file} is missing; {another(folder)}, or fetch the checkpoint again.")
        if (size := file.stat().st_size) < end:
            remedy = f"{another(folder)}, or fetch the file again"
            raise ValueError(f"{file} has {size} bytes, but the checkpoint put {end} into it; {remedy}.")
