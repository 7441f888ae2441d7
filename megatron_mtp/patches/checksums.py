"""Checksums (CRC-32) of what distributed checkpoints hold, made while they are written and compared when they are read.

The checksum of an entry of a `.distcp` file is in the catalogue, as one more attribute of the record of the entry's
place. So each rank checks what it reads, and loaders that do not know the attribute ignore it. The catalogue's own
checksum is in `checksums.json`, with the id of the save: another program may save a checkpoint again in the same
place, and that is no damage. Checkpoints without checksums load as before.
"""

import functools
import io
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from io import BufferedIOBase

CHECKSUMS = "checksums.json"
SWITCH = "MEGATRON_MTP_CHECKSUMS"
"""Environment variable: 0 loads without comparing checksums."""
PIECE = 2**22
"""Bytes that are read at a time."""


class DamagedError(ValueError):
    """A checkpoint that cannot be read; the message is one sentence."""


class Summed:
    """A stream that is written to, and the checksum of what was written."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.crc32 = stream, 0

    def write(self, data: Any) -> int:
        """Write the data and add it to the checksum; returns the bytes written."""
        self.crc32 = zlib.crc32(data, self.crc32)
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def crc32_of(stream: IO[bytes], offset: int, length: int) -> int | None:
    """The checksum of some bytes of a file that is open in binary mode; None where it ends before them."""
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


def are_wanted() -> bool:
    """Return whether loads compare checksums."""
    return os.environ.get(SWITCH) != "0"


def check_entry(stream: IO[bytes], place: Any, file: str) -> None:
    """Compare an entry with its checksum, if it has one.

    Args:
        place: torch's record of where it is.

    Raises:
        DamagedError: they differ.
    """
    stored = getattr(place, "crc32", None)
    if stored is not None and crc32_of(stream, place.offset, place.length) != stored:
        raise DamagedError(
            f"{file} is damaged: {place.length} bytes from {place.offset} on do not have the checksum that they were "
            f"saved with; load another iteration, or fetch the file again ({SWITCH}=0 loads it as it is)."
        )


def seal_catalogue(folder: Path, content: bytes, save_id: str | None) -> None:
    """Write the checksum of a catalogue, beside it."""
    (folder / CHECKSUMS).write_text(json.dumps({"save_id": save_id, "catalogue": zlib.crc32(content)}) + "\n")


def catalogue_differs(folder: Path, content: bytes, save_id: str | None) -> bool:
    """Return whether `checksums.json` belongs to this save and has another checksum than the catalogue."""
    try:
        record = json.loads((folder / CHECKSUMS).read_text())
        return bool(record["save_id"] == save_id and record["catalogue"] != zlib.crc32(content))
    except (OSError, ValueError, TypeError, KeyError):  # it is not there, or a kill or a full disk has cut it short
        return False


def with_checksum(write_item: Callable[..., Any]) -> Callable[..., Any]:
    """`_write_item`, which writes an entry; its place then has a checksum. Megatron looks at the signature."""

    @functools.wraps(write_item)
    def write(transforms: Any, stream: IO[bytes], *rest: Any, **settings: Any) -> Any:
        summed = Summed(stream)
        result = write_item(transforms, summed, *rest, **settings)
        result.storage_data.crc32 = summed.crc32
        return result

    return write


def checked_once(slice_file: Callable[..., Any]) -> Callable[..., Any]:
    """`FileSystemReader._slice_file`, which opens an entry; a reader checks every entry once."""

    @functools.wraps(slice_file)
    def opened(reader: Any, file: IO[bytes], place: Any) -> Any:
        seen = reader.__dict__.setdefault("megatron_mtp_checked", set())
        if are_wanted() and (place.relative_path, place.offset) not in seen:
            check_entry(file, place, str(getattr(file, "name", place.relative_path)))
            seen.add((place.relative_path, place.offset))
        return slice_file(reader, file, place)

    return opened


# --- probes: is the fault there? -------------------------------------------------------------------------------------


def writes_no_checksum(write_item: Callable[..., Any]) -> bool:
    """Return whether the record of an entry's place has no checksum."""
    from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageWriterTransforms
    from torch.distributed.checkpoint.planner import WriteItemType

    item = SimpleNamespace(type=WriteItemType.BYTE_IO, index=None)
    content = io.BytesIO(b"bytes")
    written = write_item(
        _StorageWriterTransforms(), io.BytesIO(), content, item, "file", SerializationFormat.TORCH_SAVE
    )
    return not any(part in name for name in vars(written.storage_data) for part in ("crc", "checksum", "hash", "sha"))


def reads_damaged_bytes(slice_file: Callable[..., Any]) -> bool:
    """Return whether an entry is opened although its checksum is not the one in its place."""
    place = SimpleNamespace(relative_path="file", offset=0, length=5, crc32=0, transform_descriptors=None)
    try:
        slice_file(SimpleNamespace(), io.BytesIO(b"bytes"), place)
    except ValueError:
        return False
    return True
