"""Where the slots of texts are in blocks of memory that many texts share.

A text's slots 0, 1, 2, ... are divided into pages of `size` slots. A table names the block of every page, so that a
text takes memory as it grows, and texts that begin alike may read the same blocks. Block 0 belongs to no text: pages
without a block point to it, and so does the scratch slot.

    size 4, table of one text  5 2 0        slots 0 .. 3 are in block 5, slots 4 .. 7 in block 2, no further ones yet

Letters in names: B batch, L pages of a text, N blocks, G key heads, S slots of a block, C channels, R rows, X
rows of all texts, W slots that are looked at.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import override

import torch
from torch import Tensor

BLOCK = 32
"""Slots of a block: as many as a window grows by, and a multiple of what compiled code adds up at once."""


@dataclass(frozen=True)
class Pages:
    """The pages of a batch.

    Attributes:
        table_BL: the block of every page; 0 where there is none.
        blocks: N, block 0 included.
        size: S.
        entries: where the states of every text's recurrent layers are, which have no slots to be cropped to.
        kept_entries: how many texts have such states.
    """

    table_BL: Tensor
    blocks: int
    size: int = BLOCK
    entries: tuple[int, ...] = ()
    kept_entries: int = 0

    @cached_property
    def entry_B(self) -> Tensor:
        """`entries` on the device."""
        return torch.tensor(self.entries, device=self.table_BL.device)

    def write(self, memory_NGSC: Tensor, new_BGRC: Tensor, slots_BR: Tensor) -> None:
        """Put rows at their slots, in place."""
        if memory_NGSC.size(1) == 1:  # as of states: whole rows, which are copied several times as fast
            memory_NGSC.view(-1, memory_NGSC.size(3)).index_copy_(0, self._row(slots_BR), new_BGRC.flatten(0, 2))
            return
        memory_NGSC[self._block(slots_BR), :, slots_BR % self.size] = new_BGRC.transpose(1, 2)

    def read(self, memory_NGSC: Tensor, slots_BR: Tensor) -> Tensor:
        """The rows at some slots, [B, G, R, C]."""
        if memory_NGSC.size(1) == 1:
            rows_XC = memory_NGSC.view(-1, memory_NGSC.size(3)).index_select(0, self._row(slots_BR))
            return rows_XC.view(slots_BR.size(0), 1, slots_BR.size(1), -1)
        return memory_NGSC[self._block(slots_BR), :, slots_BR % self.size].transpose(1, 2)

    def first_slots(self, memory_NGSC: Tensor, window: int) -> Tensor:
        """A copy of every text's first slots, [B, G, W, C]."""
        memory_BLGSC = memory_NGSC[self.table_BL[:, : -(-window // self.size)]]
        return memory_BLGSC.transpose(1, 2).flatten(2, 3)[:, :, :window]

    def _row(self, slots_BR: Tensor) -> Tensor:
        """Where the slots are among all slots of all blocks, [X]."""
        return (self._block(slots_BR) * self.size + slots_BR % self.size).flatten()

    def _block(self, slots_BR: Tensor) -> Tensor:
        return self.table_BL.gather(1, slots_BR // self.size)


@dataclass(frozen=True)
class PackedPages(Pages):
    """The same for rows of all texts one behind the other, [1, X]; see packed.py.

    Attributes:
        text_X: the text of each row.
    """

    text_X: Tensor = field(kw_only=True)

    @override
    def _block(self, slots_BR: Tensor) -> Tensor:
        return self.table_BL[self.text_X, slots_BR[0] // self.size].unsqueeze(0)
