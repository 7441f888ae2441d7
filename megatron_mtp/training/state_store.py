"""States of a frozen trunk on disk: rows keyed by a digest of their tokens, in shards that are read by mmap.

DIR/states.json         what the rows belong to: trunk, tokenizer, corpus, sequence length, dtype; each by its digest
DIR/NAME.safetensors    some rows: "keys" [N, 16], and for each stored column a tensor [N, S, H]

A column is `HIDDEN`, the trunk's output, or the output of one of its layers (`column_of`). The trunk's loss of a
microbatch, `LOSS`, is a row of one number. A shard is written to a temporary path, flushed to disk and renamed, so a
killed process leaves only whole shards. Shard names are unique, so several processes can write at once.

Letters in names: N rows, S sequence, H hidden.
"""

import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_mtp.common.files import written_beside

MANIFEST, KEYS, HIDDEN, LOSS = "states.json", "keys", "hidden", "loss"
SHARD = 256 * 2**20
"""Bytes of states that are kept in memory before they are written."""

CALLED = {
    "sequence": "another --seq-length",
    "dtype": "another precision",
    "tokenizer": "another tokenizer",
    "corpus": "another corpus",
    "trunk": "another trunk, or a trunk in another tensor- or expert-parallel layout",
}
"""Descriptions of manifest entries that differ."""


def column_of(layer: int) -> str:
    """Return the column of a trunk layer, by its number from 1."""
    return f"layer {layer}"


class StateStore:
    """The rows of a cache folder.

    Args:
        folder: created if it does not exist.
        identity: what the rows belong to, by the keys of `CALLED`.

    Raises:
        ValueError: the folder's rows belong to something else, or a file is damaged.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self._places: dict[str, dict[bytes, tuple[Path, int]]] = {}  # by column and key: shard and row
        self._new: dict[str, dict[bytes, Tensor]] = {}  # by column and key: not written yet
        self._size, self._files = 0, dict[Path, Any]()
        file = folder / MANIFEST
        if not file.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with written_beside(file, shared=True) as beside:
                beside.write_text(json.dumps(dict(identity), indent=1))
        known = json.loads(file.read_text())
        for name, called in CALLED.items():
            if known.get(name) != identity[name]:
                raise ValueError(
                    f"--mtp-state-cache is {folder}, whose states are of {called} ({known.get(name)}, here "
                    f"{identity[name]}); name another folder, or remove this one."
                )
        self.refresh()

    def __len__(self) -> int:
        """Number of rows with states."""
        return len({key for of in (self._places, self._new) for key in of.get(HIDDEN, ())})

    def refresh(self) -> None:
        """Load shards written since the last call, including other processes'. Raise ValueError if one is damaged."""
        for file in sorted(self.folder.glob("*.safetensors")):
            if file in self._files:
                continue
            try:
                opened: Any = safe_open(file, "pt")
                keys = [row.numpy().tobytes() for row in opened.get_tensor(KEYS)]
            except (SafetensorError, OSError) as error:
                raise ValueError(f"--mtp-state-cache: '{file}' is damaged ({error}); remove it.") from error
            self._files[file] = opened
            for column in {*opened.keys()} - {KEYS}:
                self._places.setdefault(column, {}).update({key: (file, row) for row, key in enumerate(keys)})

    def has(self, key: bytes, column: str) -> bool:
        """Return whether a row has this column."""
        return key in self._places.get(column, ()) or key in self._new.get(column, ())

    def read(self, key: bytes, column: str) -> Tensor:
        """Return the states of a row, [S, H]."""
        if key in self._new.get(column, ()):
            return self._new[column][key]
        file, row = self._places[column][key]
        states_SH: Tensor = self._files[file].get_slice(column)[row]
        return states_SH

    def add(self, key: bytes, columns: Mapping[str, Tensor]) -> None:
        """Buffer missing columns [S, H] of a row; they are written when there are enough."""
        for column, states_SH in columns.items():
            if not self.has(key, column):
                self._new.setdefault(column, {})[key] = states_SH
                self._size += states_SH.nbytes
        if self._size >= SHARD:
            self.write()

    def write(self) -> None:
        """Write buffered rows, one shard for rows with the same columns, and load other processes' shards."""
        keys = dict.fromkeys(key for of in self._new.values() for key in of)
        alike: dict[tuple[str, ...], list[bytes]] = {}
        for key in keys:
            alike.setdefault(tuple(column for column, of in self._new.items() if key in of), []).append(key)
        for columns, rows in alike.items():
            tensors = {column: torch.stack([self._new[column][key] for key in rows]) for column in columns}
            tensors[KEYS] = torch.tensor([list(key) for key in rows], dtype=torch.uint8)
            with written_beside(self.folder / f"{uuid.uuid4().hex}.safetensors") as beside:
                save_file(tensors, beside)
        self._new, self._size = {}, 0
        self.refresh()

    def check_room(self, rows: int, row_bytes: int) -> int:
        """Return the bytes that this many rows need in addition to the stored ones.

        Raises:
            ValueError: the disk does not have the space.
        """
        needed, free = max(rows - len(self), 0) * row_bytes, shutil.disk_usage(self.folder).free
        if needed > free:
            raise ValueError(
                f"--mtp-state-cache is {self.folder}, which needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are "
                "free; free some, name a folder on another disk, or train on fewer samples."
            )
        return needed

    def missing(self, keys: Sequence[bytes], columns: Sequence[str]) -> bool:
        """Return whether any row lacks any column."""
        return not all(self.has(key, column) for key in keys for column in columns)
