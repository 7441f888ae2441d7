"""Block tables: slots of sequences in shared blocks of memory.

A sequence's slots 0, 1, 2, ... are in blocks of `size` slots, listed in its table. So it allocates memory as it grows,
and sequences with a common prefix may read the same blocks. Table entries without a block refer to block 0, which
belongs to no sequence. The last slot of a table is the scratch slot, for rows whose output is discarded.

    size 4, table of one sequence  5 2 0        slots 0 .. 3 are in block 5, slots 4 .. 7 in block 2, others nowhere
                                                yet; the scratch slot 11 is in block 0

Letters in names: B batch, R rows of a sequence, X rows without padding, L blocks of a sequence, N blocks of a memory, S
slots of a block, G key heads, C channels.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

SLOTS_BEYOND_POSITIONS = 320
"""Slots and positions after the model's last one that drafts may use; no token is emitted there."""

BLOCK = 32
"""Slots per block: the increment of a window, and a multiple of what compiled code sums at once."""

Places = tuple[Tensor, Tensor]
"""Block of each row's slot, [B, R] or [B, 1], and the offset in it, [B, R]."""


@dataclass(frozen=True)
class BlockTables:
    """The block tables of a batch.

    Attributes:
        table_BL: blocks of every sequence; 0 where there is none.
        blocks: number of blocks of the memory, including block 0.
        size: slots per block.
        entries: index of each sequence's states in recurrent layers, which have no slots to crop.
        kept_entries: number of sequences with such states.
        firsts: first block of every sequence, on the host.
        sequence_X: sequence of each row, for packed rows of all sequences, [1, X].
    """

    table_BL: Tensor
    blocks: int
    size: int = BLOCK
    entries: tuple[int, ...] = ()
    kept_entries: int = 0
    firsts: tuple[int, ...] = ()
    sequence_X: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Number of slots of a sequence; the next one is the scratch slot."""
        return self.table_BL.size(1) * self.size - 1

    @property
    def _is_whole(self) -> bool:
        """Return whether a sequence has one block."""
        return self.table_BL.size(1) == 1

    @cached_property
    def entry_B(self) -> Tensor:
        """`entries` on the device."""
        return torch.tensor(self.entries, device=self.table_BL.device)

    @cached_property
    def where(self) -> slice | Tensor:
        """`entries` as an index; a slice, which copies nothing, if they are consecutive."""
        return _run(self.entries) or self.entry_B

    @cached_property
    def run(self) -> slice | None:
        """Return the sequences' blocks as a range if each has one block and they are consecutive; otherwise None."""
        return _run(self.firsts) if self._is_whole else None

    def places(self, slots_BR: Tensor) -> Places:
        """Return the memory places of slots."""
        if self.sequence_X is not None:
            return self.table_BL[self.sequence_X, slots_BR[0] // self.size].unsqueeze(0), slots_BR % self.size
        if self._is_whole:
            return self.table_BL, slots_BR
        return self.table_BL.gather(1, slots_BR // self.size), slots_BR % self.size

    def first_blocks(self, window: int, heads: int) -> Tensor:
        """Return the places of every sequence's blocks of the window in a memory [N * G, S, C], [B, G, L]."""
        first_B1L = self.table_BL[:, None, : -(-window // self.size)]
        if heads == 1:
            return first_B1L
        return torch.arange(heads, device=first_B1L.device).unsqueeze(1).add(first_B1L, alpha=heads)


def _run(numbers: tuple[int, ...]) -> slice | None:
    """Return consecutive numbers as a slice."""
    if not numbers or numbers != tuple(range(numbers[0], numbers[0] + len(numbers))):
        return None
    return slice(numbers[0], numbers[0] + len(numbers))


def write_rows(memory_NGSC: Tensor, new_BGRC: Tensor, places: Places) -> None:
    """Write rows at their places."""
    block_Bx, slot_BR = places
    if memory_NGSC.size(1) == 1:  # such as states: copying whole rows is several times as fast
        rows_X = (block_Bx * memory_NGSC.size(2) + slot_BR).flatten()
        memory_NGSC.view(-1, memory_NGSC.size(3)).index_copy_(0, rows_X, new_BGRC.flatten(0, 2))
        return
    memory_NGSC[block_Bx, :, slot_BR] = new_BGRC.transpose(1, 2)


def read_rows(memory_NGSC: Tensor, places: Places) -> Tensor:
    """Read the rows at some places, [B, G, R, C]."""
    block_Bx, slot_BR = places
    if memory_NGSC.size(1) == 1:
        rows_X = (block_Bx * memory_NGSC.size(2) + slot_BR).flatten()
        rows_XC = memory_NGSC.view(-1, memory_NGSC.size(3)).index_select(0, rows_X)
        return rows_XC.view(slot_BR.size(0), 1, slot_BR.size(1), -1)
    return memory_NGSC[block_Bx, :, slot_BR].transpose(1, 2)
