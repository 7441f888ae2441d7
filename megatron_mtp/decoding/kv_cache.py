"""Keys and values of a model's layers in blocks of memory, and all caches of an engine.

A forward pass writes its rows' keys and values to their slots and attends to the slots that its mask allows. Rejected
drafts need no work: the next forward pass overwrites the slots beyond a sequence's length. Only a tree needs
`KVCache.keep`, which moves the rows of the accepted path together:

    slot      5    6    7    8                  t_m at slot 5, and three nodes; the third continues the second
    row       0    1    2    3
    path      0         2    3        ->        slots 5, 6, 7 are what slots 5, 7, 8 were

Letters in names: B batch, R rows of a sequence, W slots of the window, N blocks of a memory, G key heads, S slots of a
block, C channels, H hidden.
"""

from typing import Any

from torch import Tensor

from megatron_mtp.decoding.block_tables import BlockTables, Places, read_rows, write_rows
from megatron_mtp.decoding.rows import Rows

FEW_BLOCKS = 4
"""Number of blocks that are zeroed one by one; a step gives a sequence at most one."""


class KVCache:
    """Keys and values of `layers` layers. A layer's memory is allocated when its first keys arrive.

    Args:
        tables: any block tables of the memory, for its sizes.

    Attributes:
        recurrence: states of recurrent layers (`recurrent_layers.Recurrence`); None before one has run.
        states_N1SH: for a trunk's cache, memory for the states of its rows; None if they are not kept.
    """

    def __init__(self, layers: int, tables: BlockTables) -> None:
        self.blocks, self.size, self.kept_entries = tables.blocks, tables.size, tables.kept_entries
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.recurrence: Any = None
        self.states_N1SH: Tensor | None = None

    def append(self, layer: int, key_BGRC: Tensor, value_BGRC: Tensor | None, rows: Rows) -> tuple[Tensor, Tensor]:
        """Write the rows' keys, and values if they differ. Return those of all slots in the window [B, G, W, C]."""
        key_BGWC = self._written(self.keys, layer, key_BGRC, rows)
        return key_BGWC, key_BGWC if value_BGRC is None else self._written(self.values, layer, value_BGRC, rows)

    def take(self, layer: int, heads: int, channels: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values in all blocks, [N, G, S, C] each, for code that writes them itself."""
        sizes = layer, heads, channels, like
        return self._memory(self.keys, *sizes), self._memory(self.values, *sizes)

    def keep(self, source: Places, target: Places) -> None:
        """Move rows from one place to another, in every layer that has run."""
        for cache in (*self.keys, *self.values):
            if cache is not None:
                write_rows(cache, read_rows(cache, source), target)

    def clear(self, blocks: list[int]) -> None:
        """Zero all rows in some blocks, so that no values of earlier sequences remain."""
        for cache in (*self.keys, *self.values):
            if cache is not None:
                _forget_blocks(cache, blocks)

    def _written(self, caches: list[Tensor | None], layer: int, new_BGRC: Tensor, rows: Rows) -> Tensor:
        memory_NGSC = self._memory(caches, layer, new_BGRC.size(1), new_BGRC.size(3), new_BGRC)
        write_rows(memory_NGSC, new_BGRC, rows.memory_places)
        return rows.window_of(memory_NGSC)

    def _memory(self, caches: list[Tensor | None], layer: int, heads: int, channels: int, like: Tensor) -> Tensor:
        if (memory := caches[layer]) is None:
            memory = caches[layer] = like.new_zeros(self.blocks, heads, self.size, channels)
        return memory


class Memory:
    """Caches of an engine, in the same blocks: for the trunk, each MTP layer, and a small model that drafts.

    Attributes:
        states_N1SH: the trunk's states, from which MTP layers draft.
        count_T: 0, 1, 2, ..., longer than any sequence.
        free_entries: unused entries of recurrent layers.
    """

    def __init__(
        self, cache: KVCache, depths: list[KVCache], drafter: KVCache | None, states_N1SH: Tensor, count_T: Tensor
    ) -> None:
        self.cache, self.depths, self.drafter = cache, depths, drafter
        self.states_N1SH, self.count_T = states_N1SH, count_T
        cache.states_N1SH = states_N1SH
        self.free_entries = list(range(cache.kept_entries))

    def take_entry(self) -> int:
        """Return a cleared entry for a new sequence."""
        entry = self.free_entries.pop()
        for cache in self.caches:
            if cache.recurrence is not None:
                cache.recurrence.forget(entry)
        return entry

    def clear(self, blocks: list[int]) -> None:
        """Zero all rows in some blocks."""
        _forget_blocks(self.states_N1SH, blocks)
        for cache in self.caches:
            cache.clear(blocks)

    @property
    def caches(self) -> list[KVCache]:
        """Caches of the trunk, the MTP layers and the small model."""
        return [self.cache, *self.depths, *([self.drafter] if self.drafter else [])]


def _forget_blocks(memory: Tensor, blocks: list[int]) -> None:
    """Zero these blocks: a few one by one, because an index wakes all threads, and many at once."""
    if len(blocks) > FEW_BLOCKS:
        memory[blocks] = 0
        return
    for block in blocks:
        memory[block].zero_()
