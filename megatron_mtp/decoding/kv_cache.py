"""Keys and values of the rows that a stack of layers has run, in blocks of memory that many sequences share (rows.py).

A forward writes its rows' keys and values at their slots and attends to the slots that its mask allows. Rejected drafts
need no work: slots beyond a sequence's length are overwritten by the next forward. Only a tree needs `keep`, which
moves the rows of the accepted path together:

    slot      5    6    7    8                  t_m at slot 5, and three nodes; the third continues the second
    row       0    1    2    3
    path      0         2    3        ->        slots 5, 6, 7 are what slots 5, 7, 8 were

Letters in names: B batch, R rows of a forward, P rows of a path, G key heads, C channels, N blocks, S slots of a block,
X rows of all sequences, W slots that are looked at.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_mtp.decoding.rows import BlockTables, Places, Rows

CHUNK = 512
"""Rows of a prompt that go through a model at once."""

BEYOND = 320
"""Slots and positions after the model's last one, which drafts may use; no token is emitted there."""


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


class KVCache:
    """Keys and values of `layers` layers; a layer's memory is taken when its first keys come.

    Args:
        tables: any of the memory's, for its sizes.

    Attributes:
        recurrence: what recurrent layers remember (`recurrent_state.Recurrence`); None before one has run.
    """

    def __init__(self, layers: int, tables: BlockTables) -> None:
        self.blocks, self.size, self.kept_entries = tables.blocks, tables.size, tables.kept_entries
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.recurrence: Any = None

    def append(self, layer: int, key_BGRC: Tensor, value_BGRC: Tensor | None, rows: Rows) -> tuple[Tensor, Tensor]:
        """Write the rows' keys, and values where they differ; returns those of all slots in the window [B, G, W, C]."""
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

    def keep(self, source: Places, target: Places) -> None:
        """Move rows from one place to another, in every layer that has run."""
        for cache in (*self.keys, *self.values):
            if cache is not None:
                write_rows(cache, read_rows(cache, source), target)

    def clear(self, blocks: list[int]) -> None:
        """Forget all rows in some blocks, which then hold no number of an earlier sequence."""
        for cache in (*self.keys, *self.values):
            if cache is not None:
                cache[blocks] = 0

    def _written(self, caches: list[Tensor | None], layer: int, new_BGRC: Tensor, rows: Rows) -> Tensor:
        cache = caches[layer]
        if cache is None:
            cache = caches[layer] = self._new(new_BGRC)
        write_rows(cache, new_BGRC, rows.memory_places)
        return rows.window_of(cache)

    def _new(self, like_BGRC: Tensor) -> Tensor:
        return like_BGRC.new_zeros(self.blocks, like_BGRC.size(1), self.size, like_BGRC.size(3))


class Memory:
    """All caches of an engine, in the same blocks: the trunk's, each depth's, and those of a small model that drafts.

    Attributes:
        states_N1SH: the trunk's states, from which depths draft.
        free_entries: of recurrent layers, which no sequence has.
    """

    def __init__(self, cache: KVCache, depths: list[KVCache], drafter: KVCache | None, states_N1SH: Tensor) -> None:
        self.cache, self.depths, self.drafter, self.states_N1SH = cache, depths, drafter, states_N1SH
        self.free_entries = list(range(cache.kept_entries))

    def take_entry(self) -> int:
        """An entry for a sequence without rows; nothing is left there of a sequence that had it."""
        entry = self.free_entries.pop()
        for cache in self.caches:
            if cache.recurrence is not None:
                cache.recurrence.forget(entry)
        return entry

    def clear(self, blocks: list[int]) -> None:
        """Make all rows in some blocks zero, as those of a new memory are."""
        self.states_N1SH[blocks] = 0
        for cache in self.caches:
            cache.clear(blocks)

    @property
    def caches(self) -> list[KVCache]:
        """All of them."""
        return [self.cache, *self.depths, *([self.drafter] if self.drafter else [])]


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
