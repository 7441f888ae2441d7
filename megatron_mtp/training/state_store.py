"""States of a frozen trunk on a disk: rows by the digest of their tokens, in shards that are read by mmap.

DIR/states.json         what all rows are of: trunk, tokenizer, corpus, sequence length, dtype; each by its digest
DIR/NAME.safetensors    some rows: "keys" [N, 16], and of each column that they have a tensor [N, S, H]

A column is `HIDDEN`, the trunk's output, or what a layer of it returns (`column_of`). The trunk's loss of a microbatch,
`LOSS`, stands there as a row of its own, of one number. A shard is written beside its
place, put on the disk and renamed, so a process that ends at any moment leaves whole shards alone. Shards have names of
their own: several processes write at once.

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
"""What an entry of the manifest that differs is called."""


def column_of(layer: int) -> str:
    """The column of a layer of the trunk, by its number from 1."""
    return f"layer {layer}"


class StateStore:
    """The rows of a folder.

    Args:
        folder: it is made where there is none.
        identity: what its rows are of, by the keys of `CALLED`.

    Raises:
        ValueError: its rows are of something else, or a file of it is damaged.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self._places: dict[str, dict[bytes, tuple[Path, int]]] = {}  # column, key: shard and row
        self._new: dict[str, dict[bytes, Tensor]] = {}  # column, key: not written yet
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
        """Rows of states."""
        return len({key for of in (self._places, self._new) for key in of.get(HIDDEN, ())})

    def refresh(self) -> None:
        """Take in shards that were written since, by other processes too. Raises ValueError where one is damaged."""
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
        """The states of a row, [S, H]."""
        if key in self._new.get(column, ()):
            return self._new[column][key]
        file, row = self._places[column][key]
        states_SH: Tensor = self._files[file].get_slice(column)[row]
        return states_SH

    def add(self, key: bytes, columns: Mapping[str, Tensor]) -> None:
        """Keep columns [S, H] that a row lacks; they are written when there are enough."""
        for column, states_SH in columns.items():
            if not self.has(key, column):
                self._new.setdefault(column, {})[key] = states_SH
                self._size += states_SH.nbytes
        if self._size >= SHARD:
            self.write()

    def write(self) -> None:
        """Write what is kept, a shard for rows with the same columns, and take in those of others."""
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
        """The bytes that so many rows need beside those that are there.

        Raises:
            ValueError: the disk does not have them.
        """
        needed, free = max(rows - len(self), 0) * row_bytes, shutil.disk_usage(self.folder).free
        if needed > free:
            raise ValueError(
                f"--mtp-state-cache is {self.folder}, which needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are "
                "free; free some, name a folder on another disk, or train on fewer samples."
            )
        return needed

    def missing(self, keys: Sequence[bytes], columns: Sequence[str]) -> bool:
        """Return whether some row lacks some column."""
        return not all(self.has(key, column) for key in keys for column in columns)
