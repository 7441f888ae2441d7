"""Where the slots of texts are in blocks of memory that many texts share.

A text's slots 0, 1, 2, ... are divided into pages of `size` slots. A table names the block of every page, so that a
text takes memory as it grows, and texts that begin alike may read the same blocks. Pages without a block point to
block 0, which belongs to no text then. The last slot of a table is the scratch slot, for rows that leave no trace.

    size 4, table of one text  5 2 0        slots 0 .. 3 are in block 5, slots 4 .. 7 in block 2, no further ones yet;
                                            the scratch slot 11 is in block 0

Letters in names: B batch, L pages of a text, N blocks, G key heads, S slots of a block, C channels, R rows, X
rows of all texts, W slots that are looked at.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

BLOCK = 32
"""Slots of a block: as many as a window grows by, and a multiple of what compiled code adds up at once."""


Places = tuple[Tensor, Tensor]
"""The block of each row's slot, [B, R] or [B, 1], and where in it the slot is, [B, R]."""


@dataclass(frozen=True)
class Pages:
    """The pages of a batch.

    Attributes:
        table_BL: the block of every page; 0 where there is none.
        blocks: N, block 0 included.
        size: S.
        entries: where the states of every text's recurrent layers are, which have no slots to be cropped to.
        kept_entries: how many texts have such states.
        firsts: the first block of every text, as the host knows it.
        text_X: the text of each row, where rows of all texts stand one behind the other, [1, X] (rows.py).
    """

    table_BL: Tensor
    blocks: int
    size: int = BLOCK
    entries: tuple[int, ...] = ()
    kept_entries: int = 0
    firsts: tuple[int, ...] = ()
    text_X: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Slots of a text; the next one is the scratch slot."""
        return self.table_BL.size(1) * self.size - 1

    @property
    def _is_whole(self) -> bool:
        """Whether a text has one block."""
        return self.table_BL.size(1) == 1

    @cached_property
    def entry_B(self) -> Tensor:
        """`entries` on the device."""
        return torch.tensor(self.entries, device=self.table_BL.device)

    @cached_property
    def where(self) -> slice | Tensor:
        """The same as an index; a slice where they follow one another, which copies nothing."""
        return _run(self.entries) or self.entry_B

    @cached_property
    def run(self) -> slice | None:
        """The texts' blocks where each has one, behind that of the text before; else None."""
        return _run(self.firsts) if self._is_whole else None

    def places(self, slots_BR: Tensor) -> Places:
        """Where some slots are."""
        if self.text_X is not None:
            return self.table_BL[self.text_X, slots_BR[0] // self.size].unsqueeze(0), slots_BR % self.size
        if self._is_whole:
            return self.table_BL, slots_BR
        return self.table_BL.gather(1, slots_BR // self.size), slots_BR % self.size

    def first_slots(self, memory_NGSC: Tensor, window: int) -> Tensor:
        """Every text's first slots, [B, G, W, C]; a copy where they are in several blocks."""
        if self.run is not None:
            return memory_NGSC[self.run, :, :window]
        memory_BLGSC = memory_NGSC[self.table_BL[:, : -(-window // self.size)]]
        return memory_BLGSC.transpose(1, 2).flatten(2, 3)[:, :, :window]


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
