"""Identity of the rows in a microbatch: a digest of everything that the trunk's states depend on.

Letters in names: S sequence, R context-parallel ranks.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from torch import Tensor

OF_DIGEST = ("tokens", "position_ids", "cu_seqlens", "cu_seqlens_padded")
"""Entries of a batch that determine a trunk's states."""


@dataclass(frozen=True)
class Rows:
    """Rows of a microbatch.

    Attributes:
        keys: digest of every row.
        is_joined: whether the model gets them as one row.
        positions_RS: positions of every context-parallel rank; None without context parallelism.
    """

    keys: list[bytes]
    is_joined: bool
    positions_RS: Tensor | None = None


def rows_of(batch: dict[str, Any], resets_attention: bool) -> Rows:
    """Identify a batch's whole rows, before they are joined or sliced."""
    values = [batch[name].cpu().contiguous().numpy() for name in OF_DIGEST if batch.get(name) is not None]
    keys = []
    for row in zip(*values, strict=True):
        made = blake2b(b"reset" if resets_attention else b"", digest_size=16)
        for value in row:
            made.update(f"{value.dtype}{value.shape}".encode())
            made.update(value.tobytes())
        keys.append(made.digest())
    return Rows(keys, batch["cu_seqlens"] is not None)
