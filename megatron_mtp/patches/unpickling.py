"""Distributed checkpoints are read without running code: torch's own reader unpickles whatever a file names.

The catalogue of a checkpoint (`.metadata`) is a pickle, and so is every entry that is not a tensor. Here a catalogue
may name only the classes that catalogues consist of. Entries are read with `weights_only`, and Megatron registers the
classes that it stores there. torch already reads tensors in that way, and Megatron its older files.

torch's classes are imported where they are used: they take half a second, and `doctor` imports this file for the table.
"""

import io
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

import torch

from megatron_mtp.patches.checksums import CHECKSUMS, DamagedError, catalogue_differs, seal_catalogue

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

CATALOGUE = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {  # of --ckpt-assume-constant-structure
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    },
    "torch": {"Size", *(str(dtype).removeprefix("torch.") for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2))},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}  # fmt: skip


def read_catalogue(folder: Path) -> "Metadata":
    """The catalogue in an iteration's folder.

    Raises:
        ValueError: it is missing or damaged, or names what no catalogue consists of.
    """
    try:
        content = (folder / CATALOGUE).read_bytes()
        metadata = load_catalogue(io.BytesIO(content))
    except FileNotFoundError:
        raise ValueError(f"{folder / CATALOGUE} is missing; give another checkpoint.") from None
    except Exception as error:  # damaged bytes can make a pickle raise anything
        said = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ValueError(f"{folder / CATALOGUE} is no catalogue of a checkpoint: {said}.") from None
    if catalogue_differs(folder, content, _save_id(metadata)):
        raise ValueError(f"{folder / CATALOGUE} is damaged: it does not have the checksum that {CHECKSUMS} says.")
    return metadata


def seal(folder: Path) -> None:
    """Write the checksum of the catalogue that has just been written to an iteration's folder."""
    if not (folder / CATALOGUE).is_file():
        return  # the checkpoint is in a store that Megatron reaches over the network
    content = (folder / CATALOGUE).read_bytes()
    seal_catalogue(folder, content, _save_id(load_catalogue(io.BytesIO(content))))


def _save_id(metadata: "Metadata") -> str | None:
    return getattr(metadata.storage_meta, "save_id", None)


def load_catalogue(stream: IO[bytes]) -> "Metadata":
    """The catalogue in an open file; raises pickle.UnpicklingError and whatever damaged bytes cause."""
    from torch.distributed.checkpoint.metadata import Metadata

    metadata = _CatalogueReader(stream).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
    tensors, places = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(tensors, dict) or not all(map(_is_entry, tensors.values())):
        raise pickle.UnpicklingError("its list of tensors is damaged")
    if not isinstance(places, dict) or not all(map(_is_place, places.values())):
        raise pickle.UnpicklingError("its list of places is damaged")
    return metadata


def _is_entry(entry: Any) -> bool:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

    if isinstance(entry, BytesStorageMetadata):
        return True
    return isinstance(entry, TensorStorageMetadata) and all(
        isinstance(box, torch.Size) for chunk in entry.chunks for box in (entry.size, chunk.offsets, chunk.sizes)
    )


def _is_place(place: Any) -> bool:
    """Return whether it is a place in a file of this folder."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    numbers = isinstance(place, _StorageInfo) and isinstance(place.offset, int) and isinstance(place.length, int)
    return numbers and Path(place.relative_path).name == place.relative_path and place.offset >= 0 <= place.length


class _CatalogueReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def foreign(error: pickle.UnpicklingError) -> str:
    """The name that `weights_only` has refused; torch's own message suggests loading it nevertheless."""
    named = re.search(r"GLOBAL (\S+) was not an allowed", str(error))
    return f"{named.group(1) if named else 'something'}, which no checkpoint of Megatron's holds"


def read_metadata(reader: Any, *_: Any, **settings: Any) -> "Metadata":
    """In the place of `FileSystemReader.read_metadata`."""
    from torch.distributed.checkpoint.metadata import StorageMeta

    with reader.fs.create_stream(reader._get_metadata_path(settings.get("rank")), "rb") as stream:
        metadata = load_catalogue(stream)
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = reader.load_id
    return metadata


def load_bytes(planner: Any, read_item: Any, value: IO[bytes]) -> None:
    """In the place of `DefaultLoadPlanner.load_bytes`."""
    from torch.distributed.checkpoint._traverse import set_element

    name = read_item.dest_index.fqn
    try:
        loaded = torch.load(value, weights_only=True)
    except pickle.UnpicklingError as error:
        raise DamagedError(f"its entry '{name}' holds {foreign(error)}") from None
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], loaded)
    else:
        planner.state_dict[name] = loaded


# --- probes: is the fault there? -------------------------------------------------------------------------------------


class Planted:
    """A class that no checkpoint holds."""


def unpickles_catalogues(read_metadata: Callable[..., Any]) -> bool:
    """Return whether a catalogue may name any class."""

    @contextmanager
    def stream(*_: Any) -> Iterator[io.BytesIO]:
        yield io.BytesIO(pickle.dumps(Planted()))

    reader = SimpleNamespace(
        fs=SimpleNamespace(create_stream=stream), _get_metadata_path=lambda *_: "catalogue", load_id=None
    )
    try:
        read_metadata(reader)
    except pickle.UnpicklingError:
        return False
    return True


def unpickles_objects(load_bytes: Callable[..., Any]) -> bool:
    """Return whether an entry may name any class."""
    content = io.BytesIO()
    torch.save(Planted(), content)
    content.seek(0)
    planner = SimpleNamespace(flatten_state_dict=False, state_dict={})
    try:
        load_bytes(planner, SimpleNamespace(dest_index=SimpleNamespace(fqn="entry")), content)
    except (pickle.UnpicklingError, ValueError):
        return False
    return "entry" in planner.state_dict
