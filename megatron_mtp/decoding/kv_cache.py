"""Keys and values of the rows that a stack of layers has run, in blocks of memory that many sequences share.

A sequence's slots 0, 1, 2, ... are divided into pages of `size` slots. A table names the block of every page, so that a
sequence takes memory as it grows, and sequences that begin alike may read the same blocks. Pages without a block point
to block 0, which belongs to no sequence then. The last slot of a table is the scratch slot, for rows that leave no
trace.

    size 4, table of one sequence  5 2 0        slots 0 .. 3 are in block 5, slots 4 .. 7 in block 2, others nowhere
                                                yet; the scratch slot 11 is in block 0

A forward writes its rows' keys and values at their slots and attends to the slots that its mask allows. Rejected drafts
need no work: slots beyond a sequence's length are overwritten by the next forward. Only a tree needs `keep`, which
moves the rows of the accepted path together:

    slot      5    6    7    8                  t_m at slot 5, and three nodes; the third continues the second
    row       0    1    2    3
    path      0         2    3        ->        slots 5, 6, 7 are what slots 5, 7, 8 were

Letters in names: B batch, R rows of a forward, P rows of a path, G key heads, C channels, L pages of a sequence, N
blocks, S slots of a block, X rows of all sequences, W slots that are looked at.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from megatron_mtp.decoding.rows import Rows

CHUNK = 512
"""Rows of a prompt that go through a model at once."""

BEYOND = 320
"""Slots and positions after the model's last one, which drafts may use; no token is emitted there."""

BLOCK = 32
"""Slots of a block: as many as a window grows by, and a multiple of what compiled code adds up at once."""


Places = tuple[Tensor, Tensor]
"""The block of each row's slot, [B, R] or [B, 1], and where in it the slot is, [B, R]."""


@dataclass(frozen=True)
class BlockTables:
    """The pages of a batch.

    Attributes:
        table_BL: the block of every page; 0 where there is none.
        blocks: N, block 0 included.
        size: S.
        entries: where the states of every sequence's recurrent layers are, which have no slots to be cropped to.
        kept_entries: how many sequences have such states.
        firsts: the first block of every sequence, as the host knows it.
        text_X: the sequence of each row, where rows of all sequences stand one behind the other, [1, X] (rows.py).
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
        """Slots of a sequence; the next one is the scratch slot."""
        return self.table_BL.size(1) * self.size - 1

    @property
    def _is_whole(self) -> bool:
        """Whether a sequence has one block."""
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
        """The sequences' blocks where each has one, behind that of the sequence before; else None."""
        return _run(self.firsts) if self._is_whole else None

    def places(self, slots_BR: Tensor) -> Places:
        """Where some slots are."""
        if self.text_X is not None:
            return self.table_BL[self.text_X, slots_BR[0] // self.size].unsqueeze(0), slots_BR % self.size
        if self._is_whole:
            return self.table_BL, slots_BR
        return self.table_BL.gather(1, slots_BR // self.size), slots_BR % self.size

    def first_slots(self, memory_NGSC: Tensor, window: int) -> Tensor:
        """Every sequence's first slots, [B, G, W, C]; a copy where they are in several blocks."""
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


class States(Protocol):
    """What recurrent layers remember beside keys and values (recurrent_state.py)."""

    def forget(self, entry: int) -> None:
        """Let an entry be that of a sequence without rows."""


class KVCache:
    """Keys and values of `layers` layers for a batch; a layer's memory is taken when its first keys come.

    Args:
        pages: where the sequences' slots are.
    """

    def __init__(self, layers: int, pages: BlockTables) -> None:
        self.pages = pages
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self._whole: KVCache | None = None
        self._recurrence: States | None = None
        self._placed: tuple[Rows | None, Places | None] = None, None

    def through(self, pages: BlockTables) -> "KVCache":
        """The same memory, for the sequences of other pages."""
        made = KVCache(len(self.keys), pages)
        made.keys, made.values, made._whole = self.keys, self.values, self._whole or self
        return made

    @property
    def recurrence(self) -> States | None:
        """What recurrent layers remember; None before one has run."""
        return (self._whole or self)._recurrence

    @recurrence.setter
    def recurrence(self, made: States | None) -> None:
        (self._whole or self)._recurrence = made

    def append(self, layer: int, key_BGRC: Tensor, value_BGRC: Tensor | None, rows: Rows) -> tuple[Tensor, Tensor]:
        """Write the rows' keys and values; returns those of all slots in the window, [B, G, W, C].

        Args:
            value_BGRC: None where the keys are the values as well.
        """
        if self._placed[0] is not rows:  # once for all layers
            self._placed = rows, self.pages.places(rows.slots_BR)
        key_BGWC = self._written(self.keys, layer, key_BGRC, rows)
        return key_BGWC, key_BGWC if value_BGRC is None else self._written(self.values, layer, value_BGRC, rows)

    def take(self, layer: int, heads: int, channels: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values in all blocks, [N, G, S, C] each, for code that writes them itself."""
        if self.keys[layer] is None:
            first_BGRC = like.new_empty(1, heads, 0, channels)
            self.keys[layer], self.values[layer] = self._new(first_BGRC), self._new(first_BGRC)
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None
        assert values is not None
        return keys, values

    def keep(self, source_BP: Tensor, target_BP: Tensor) -> None:
        """Move the rows at slots `source_BP` to slots `target_BP`, in every layer that has run."""
        source, target = self.pages.places(source_BP), self.pages.places(target_BP)
        for cache in (*self.keys, *self.values):
            if cache is not None:
                write_rows(cache, read_rows(cache, source), target)

    def clear(self, blocks: list[int]) -> None:
        """Forget all rows in some blocks, which then hold no number of an earlier sequence."""
        for cache in (*self.keys, *self.values):
            if cache is not None:
                cache[blocks] = 0

    def _written(self, caches: list[Tensor | None], layer: int, new_BGRC: Tensor, rows: Rows) -> Tensor:
        cache, places = caches[layer], self._placed[1]
        assert places is not None
        if cache is None:
            cache = caches[layer] = self._new(new_BGRC)
        write_rows(cache, new_BGRC, places)
        return self.pages.first_slots(cache, rows.window)

    def _new(self, like_BGRC: Tensor) -> Tensor:
        return like_BGRC.new_zeros(self.pages.blocks, like_BGRC.size(1), self.pages.size, like_BGRC.size(3))


class Scope:
    """The cache and the rows of the forward that is about to run."""

    def __init__(self) -> None:
        self._cache: KVCache | None = None
        self._rows: Rows | None = None
        self._masks: dict[tuple[torch.dtype, int], Tensor] = {}

    def enter(self, cache: KVCache, rows: Rows) -> None:
        """Attend over this cache, from these rows, until the next call."""
        if rows is not self._rows:
            self._masks = {}
        self._cache, self._rows = cache, rows

    def mask(self, dtype: torch.dtype, heads: int) -> Tensor:
        """The rows' mask, once for each of `heads` query heads of a key head, [B, 1, heads * R, W]."""
        if (dtype, heads) not in self._masks:
            self._masks[dtype, heads] = self.rows.mask_B1RW.to(dtype).repeat(1, 1, heads, 1)
        return self._masks[dtype, heads]

    @property
    def cache(self) -> KVCache:
        """The cache of the rows that are run."""
        assert self._cache is not None, "a forward outside of Runner"
        return self._cache

    @property
    def rows(self) -> Rows:
        """The rows that are run."""
        assert self._rows is not None, "a forward outside of Runner"
        return self._rows
