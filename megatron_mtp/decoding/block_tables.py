"""Slots of sequences in blocks of memory, which sequences share.

A sequence's slots 0, 1, 2, ... are in blocks of `size` slots, which its table names in turn. So it takes memory as it
grows, and sequences that begin alike may read the same blocks. Places of a table without a block name block 0, which
belongs to no sequence then. The last slot of a table is the scratch slot, for rows that leave no trace.

    size 4, table of one sequence  5 2 0        slots 0 .. 3 are in block 5, slots 4 .. 7 in block 2, others nowhere
                                                yet; the scratch slot 11 is in block 0

Letters in names: B batch, R rows of a sequence, X rows that count, L blocks of a sequence, N blocks of a memory, S
slots of a block, G key heads, C channels.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

SLOTS_BEYOND_POSITIONS = 320
"""Slots and positions after the model's last one, which drafts may use; no token is emitted there."""

BLOCK = 32
"""Slots of a block: as many as a window grows by, and a multiple of what compiled code adds up at once."""

Places = tuple[Tensor, Tensor]
"""The block of each row's slot, [B, R] or [B, 1], and where in it the slot is, [B, R]."""


@dataclass(frozen=True)
class BlockTables:
    """The block tables of a batch.

    Attributes:
        table_BL: the blocks of every sequence; 0 where there is none.
        blocks: of the memory, block 0 included.
        size: slots of a block.
        entries: where the states of every sequence's recurrent layers are, which have no slots to be cropped to.
        kept_entries: how many sequences have such states.
        firsts: the first block of every sequence, as the host knows it.
        sequence_X: the sequence of each row, where rows of all sequences stand one behind the other, [1, X].
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
        """Slots of a sequence; the next one is the scratch slot."""
        return self.table_BL.size(1) * self.size - 1

    @property
    def _is_whole(self) -> bool:
        """True if a sequence has one block."""
        return self.table_BL.size(1) == 1

    @cached_property
    def entry_B(self) -> Tensor:
        """`entries` on the device."""
        return torch.tensor(self.entries, device=self.table_BL.device)

    @cached_property
    def where(self) -> slice | Tensor:
        """`entries` as an index; a slice where they follow one another, which copies nothing."""
        return _run(self.entries) or self.entry_B

    @cached_property
    def run(self) -> slice | None:
        """The sequences' blocks where each has one, behind that of the sequence before; else None."""
        return _run(self.firsts) if self._is_whole else None

    def places(self, slots_BR: Tensor) -> Places:
        """Places of some slots."""
        if self.sequence_X is not None:
            return self.table_BL[self.sequence_X, slots_BR[0] // self.size].unsqueeze(0), slots_BR % self.size
        if self._is_whole:
            return self.table_BL, slots_BR
        return self.table_BL.gather(1, slots_BR // self.size), slots_BR % self.size

    def first_blocks(self, window: int, heads: int) -> Tensor:
        """Places of every sequence's blocks of the window in a memory [N * G, S, C], [B, G, L]."""
        first_B1L = self.table_BL[:, None, : -(-window // self.size)]
        if heads == 1:
            return first_B1L
        return torch.arange(heads, device=first_B1L.device).unsqueeze(1).add(first_B1L, alpha=heads)


def _run(numbers: tuple[int, ...]) -> slice | None:
    """Numbers that follow one another, as a slice."""
    if not numbers or numbers != tuple(range(numbers[0], numbers[0] + len(numbers))):
        return None
    return slice(numbers[0], numbers[0] + len(numbers))


def write_rows(memory_NGSC: Tensor, new_BGRC: Tensor, places: Places) -> None:
    """Put rows at their places."""
    block_Bx, slot_BR = places
    if memory_NGSC.size(1) == 1:  # as of states: whole rows, which are copied several times as fast
        rows_X = (block_Bx * memory_NGSC.size(2) + slot_BR).flatten()
        memory_NGSC.view(-1, memory_NGSC.size(3)).index_copy_(0, rows_X, new_BGRC.flatten(0, 2))
        return
    memory_NGSC[block_Bx, :, slot_BR] = new_BGRC.transpose(1, 2)


def read_rows(memory_NGSC: Tensor, places: Places) -> Tensor:
    """The rows at some places, [B, G, R, C]."""
    block_Bx, slot_BR = places
    if memory_NGSC.size(1) == 1:
        rows_X = (block_Bx * memory_NGSC.size(2) + slot_BR).flatten()
        rows_XC = memory_NGSC.view(-1, memory_NGSC.size(3)).index_select(0, rows_X)
        return rows_XC.view(slot_BR.size(0), 1, slot_BR.size(1), -1)
    return memory_NGSC[block_Bx, :, slot_BR].transpose(1, 2)
