"""Keys and values of the rows that a stack of layers has run, in preallocated slots, and where a forward's rows stand.

A forward writes its rows' keys and values at their slots and attends to the slots that its mask allows. Rejected drafts
need no work: slots beyond a sequence's length are overwritten by the next forward. Only a tree needs `keep`, which
moves the rows of the accepted path together:

    slot      5    6    7    8                  t_m at slot 5, and three nodes; the third continues the second
    row       0    1    2    3
    path      0         2    3        ->        slots 5, 6, 7 are what slots 5, 7, 8 were

Letters in names: B batch, R rows of a forward, P rows of a path, G key heads, C channels, W slots that are looked at.
"""

from typing import Protocol

from torch import Tensor

from megatron_mtp.decoding.pages import Pages, Places, read_rows, write_rows
from megatron_mtp.decoding.rows import Rows

CHUNK = 512
"""Rows of a prompt that go through a model at once."""

BEYOND = 320
"""Slots and positions after the model's last one, which drafts may use; no token is emitted there."""


class States(Protocol):
    """What recurrent layers remember beside keys and values (recurrent_state.py)."""

    def forget(self, entry: int) -> None:
        """Let an entry be that of a text without rows."""


class KVCache:
    """Keys and values of `layers` layers for a batch; a layer's memory is taken when its first keys come.

    Args:
        pages: where the texts' slots are.
    """

    def __init__(self, layers: int, pages: Pages) -> None:
        self.pages = pages
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self._whole: KVCache | None = None
        self._recurrence: States | None = None
        self._placed: tuple[Rows | None, Places | None] = None, None

    def through(self, pages: Pages) -> "KVCache":
        """The same memory, for the texts of other pages."""
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
        """Forget all rows in some blocks, which then hold no number of an earlier text."""
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
