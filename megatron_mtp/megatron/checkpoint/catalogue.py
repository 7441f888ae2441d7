"""Metadata of a distributed checkpoint, with checksums (CRC-32), read without running code.

A checkpoint's metadata (`.metadata`) is a pickle, as is every entry that is not a tensor, and torch's reader unpickles
any class that they name. Here, only the classes that such metadata consist of are allowed. Entries are read with
`weights_only`, with the classes that Megatron registers for it. torch already reads tensors that way, as does Megatron
its older files.

The checksum of an entry in a `.distcp` file is stored in the metadata, as an additional attribute of the entry's
location. So each rank checks what it reads, and loaders that do not know the attribute ignore it. The metadata's own
checksum is in `checksums.json`, with the id of the save: another program may overwrite a checkpoint in place, which is
not damage. Checkpoints without checksums load as before.

torch's classes are imported where they are used, because that takes half a second and `doctor` imports this file for
the table.
"""

import functools
import io
import json
import os
import pickle
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from io import BufferedIOBase

    from torch.distributed.checkpoint.metadata import Metadata

CATALOGUE = ".metadata"
FORMAT = "metadata.json"
"""File that names the format. Megatron writes it last: an iteration with this file is complete."""
CHECKSUMS = "checksums.json"
SWITCH = "MEGATRON_MTP_CHECKSUMS"
"""Environment variable: 0 loads without comparing checksums."""
PIECE = 2**22
"""Bytes read at a time."""

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {  # written under --ckpt-assume-constant-structure
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
    """Read the metadata in an iteration's folder.

    Raises:
        ValueError: it is missing or damaged, or names a class that is not allowed.
    """
    try:
        content = (folder / CATALOGUE).read_bytes()
        metadata = load_catalogue(io.BytesIO(content))
    except FileNotFoundError:
        raise ValueError(f"{folder / CATALOGUE} is missing; give another checkpoint.") from None
    except Exception as error:  # unpickling damaged bytes can raise any type
        said = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ValueError(f"{folder / CATALOGUE} is not a catalogue of a checkpoint: {said}.") from None
    try:
        record = json.loads((folder / CHECKSUMS).read_text())
        differs = record["save_id"] == save_id_of(metadata) and record["catalogue"] != zlib.crc32(content)
    except (OSError, ValueError, TypeError, KeyError):  # missing, or truncated by a kill or a full disk
        differs = False
    if differs:
        raise ValueError(f"{folder / CATALOGUE} is damaged: it does not have the checksum in {CHECKSUMS}.")
    return metadata


def save_id_of(metadata: "Metadata") -> str | None:
    """Return the id of the save that wrote the metadata; None if it has none."""
    return getattr(metadata.storage_meta, "save_id", None)


def load_catalogue(stream: IO[bytes]) -> "Metadata":
    """Load the metadata of an open file. Raises pickle.UnpicklingError, and whatever damaged bytes cause."""
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
    """Return whether a value describes an offset in a file of this folder."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    numbers = isinstance(place, _StorageInfo) and isinstance(place.offset, int) and isinstance(place.length, int)
    return numbers and Path(place.relative_path).name == place.relative_path and place.offset >= 0 <= place.length


class _CatalogueReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def foreign(error: pickle.UnpicklingError) -> str:
    """Return the class name that `weights_only` has rejected. torch's own message suggests loading it anyway."""
    named = re.search(r"GLOBAL (\S+) was not an allowed", str(error))
    return f"{named.group(1) if named else 'something'}, which no checkpoint of Megatron's holds"


# --- checksums -------------------------------------------------------------------------------------------------------


class DamagedError(ValueError):
    """A checkpoint that cannot be read; the message is one sentence."""


def crc32_of(stream: IO[bytes], offset: int, length: int) -> int | None:
    """Return the checksum of a byte range of a file opened in binary mode; None if the file is too short."""
    file = cast("BufferedIOBase", stream)
    file.seek(offset)
    buffer, checksum = memoryview(bytearray(min(length, PIECE))), 0
    while length:
        count = file.readinto(buffer[: min(length, PIECE)])
        if not count:
            return None
        checksum = zlib.crc32(buffer[:count], checksum)
        length -= count
    return checksum


def check_entry(stream: IO[bytes], place: Any, file: str) -> None:
    """Compare an entry with its checksum, if it has one.

    Args:
        place: torch's record of its location.

    Raises:
        DamagedError: they differ.
    """
    stored = getattr(place, "crc32", None)
    if stored is not None and crc32_of(stream, place.offset, place.length) != stored:
        raise DamagedError(
            f"{file} is damaged: {place.length} bytes from {place.offset} on do not have the checksum that they were "
            f"saved with; load another iteration, or fetch the file again ({SWITCH}=0 loads it as it is)."
        )


def checked_once(slice_file: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `FileSystemReader._slice_file`, which opens an entry, so that a reader checks every entry once."""

    @functools.wraps(slice_file)
    def opened(reader: Any, file: IO[bytes], place: Any) -> Any:
        seen = reader.__dict__.setdefault("megatron_mtp_checked", set())
        if os.environ.get(SWITCH) != "0" and (place.relative_path, place.offset) not in seen:
            check_entry(file, place, str(getattr(file, "name", place.relative_path)))
            seen.add((place.relative_path, place.offset))
        return slice_file(reader, file, place)

    return opened
