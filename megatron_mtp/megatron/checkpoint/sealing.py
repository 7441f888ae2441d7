"""Checksums of what is being written to a checkpoint; catalogue.py compares them."""

import io
import json
import zlib
from pathlib import Path
from typing import IO, Any

from megatron_mtp.megatron.checkpoint.catalogue import CATALOGUE, CHECKSUMS, load_catalogue, save_id_of


def seal(folder: Path) -> None:
    """Write the checksum of the metadata that has just been written to an iteration's folder."""
    if not (folder / CATALOGUE).is_file():
        return  # the checkpoint is in a remote store
    content = (folder / CATALOGUE).read_bytes()
    save_id = save_id_of(load_catalogue(io.BytesIO(content)))
    (folder / CHECKSUMS).write_text(json.dumps({"save_id": save_id, "catalogue": zlib.crc32(content)}) + "\n")


class Summed:
    """An output stream that computes the checksum of what is written."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.crc32 = stream, 0

    def write(self, data: Any) -> int:
        """Write data and update the checksum. Return the number of bytes written."""
        self.crc32 = zlib.crc32(data, self.crc32)
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
