"""Keys and values of the rows that a stack of layers has run, in preallocated slots, and where a forward's rows stand.

A forward writes its rows' keys and values at their slots and attends to the slots that its mask allows. Rejected drafts
need no work: slots beyond a sequence's length are overwritten by the next forward. Only a tree needs `keep`, which
moves the rows of the accepted path together:

    slot      5    6    7    8                  t_m at slot 5, and three nodes; the third continues the second
    row       0    1    2    3
    path      0         2    3        ->        slots 5, 6, 7 are what slots 5, 7, 8 were

Letters in names: B batch, R rows of a forward, P rows of a path, G key heads, C channels, W slots that are looked at.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from megatron_mtp.decoding.pages import Pages, Places, read_rows, write_rows
from megatron_mtp.model.causal import causal_mask

WINDOW_STEP, FEW_WINDOWS_STEP = 32, 128
"""Slots that a forward looks at are a multiple of this; see `rounded`."""

CHUNK = 512
"""Rows of a prompt that go through a model at once."""

BEYOND = 320
"""Slots and positions after the model's last one, which drafts may use; no token is emitted there."""

FORBIDDEN = torch.finfo(torch.float32).min / 2
"""Added to the score of a slot that a row must not look at; finite, so that a padding row has no NaN."""


@dataclass(frozen=True)
class Rows:
    """Where the rows of one forward stand.

    Attributes:
        positions_BR: for the rotary embedding.
        slots_BR: where keys and values go; the scratch slot for rows that must leave no trace.
        mask_B1RW: added to the scores.
    """

    positions_BR: Tensor
    slots_BR: Tensor
    mask_B1RW: Tensor

    @property
    def window(self) -> int:
        """Places of the cache that the rows may attend to."""
        return self.mask_B1RW.size(-1)


class Chain(Rows):
    """Consecutive rows. Their tensors are made when they are first read, since compiled code reads `first_B` alone.

    Attributes:
        first_B: where the first row of every text stands; before 0, rows are padding.
        live_BR: False for padding; None where no text has ended.
        packs: whether padding is to be left out where rows are many (packed.py).
    """

    def __init__(
        self, first_B: Tensor, rows: int, window: int, scratch: int, live_BR: Tensor | None, packs: bool = False
    ) -> None:
        # a frozen dataclass refuses assignment
        self.__dict__.update(first_B=first_B, live_BR=live_BR, packs=packs)
        self.__dict__.update(_rows=rows, _window=window, _scratch=scratch)

    first_B: Tensor
    live_BR: Tensor | None
    packs: bool
    _rows: int
    _window: int
    _scratch: int

    @cached_property
    def places_BR(self) -> Tensor:
        """Where the rows would stand; before 0 for padding."""
        return self.first_B.unsqueeze(1) + torch.arange(self._rows, device=self.first_B.device)

    @cached_property
    def positions_BR(self) -> Tensor:
        """Padding has position 0."""
        return self.places_BR.clamp(min=0)

    @cached_property
    def counts_BR(self) -> Tensor:
        """False for padding."""
        inside_BR = self.places_BR >= 0
        return inside_BR if self.live_BR is None else inside_BR & self.live_BR

    @cached_property
    def slots_BR(self) -> Tensor:
        """The scratch slot for padding."""
        return torch.where(self.counts_BR, self.places_BR, self._scratch)

    @cached_property
    def mask_B1RW(self) -> Tensor:
        """Each row looks at its own slot and at all before it."""
        return _scores(causal_mask(self.positions_BR, self.window))

    @property
    def window(self) -> int:
        """Places of the cache that the rows may attend to."""
        return self._window


def rounded(slots: int, few: bool) -> int:
    """The next multiple of 32; where few shapes are wanted, the next of 128, 256, 384, ... 1024, 1280, ...

    Their steps are 128 slots, or a quarter of a power of two. So the shapes of attention change once in 128 tokens or
    more, and at most a fifth of a long window is in vain.
    """
    step = max(FEW_WINDOWS_STEP, 1 << max(0, (slots - 1).bit_length() - 3)) if few else WINDOW_STEP
    return -(-slots // step) * step


def chain_rows(
    first_B: Tensor, rows: int, window: int, scratch: int, live_BR: Tensor | None = None, packs: bool = False
) -> Rows:
    """Consecutive rows from slot `first_B` on; each looks at its own slot and at all before it.

    Args:
        window: slots that are looked at; more than any sequence's last slot.
        scratch: the slot for rows that are not live, and for those before slot 0.
        live_BR: False for padding.
        packs: whether padding is to be left out where rows are many.
    """
    return Chain(first_B, rows, window, scratch, live_BR, packs)


def tree_rows(base_B: Tensor, depth_BR: Tensor, ancestors_BRA: Tensor, window: int, start: int = 0) -> Rows:
    """Rows of a tree whose slots begin at `base_B`: each looks at all slots before these, and at its own ancestors.

    Args:
        depth_BR: of each row; depth 0 has position `base_B`.
        ancestors_BRA: over the tree's slots: True where there is the row itself, or an ancestor of it.
        start: slots of the tree that earlier forwards have filled.
    """
    rows, tree = ancestors_BRA.shape[1:]
    slots_BR = base_B.unsqueeze(1) + start + torch.arange(rows, device=base_B.device)
    place_BW = torch.arange(window, device=base_B.device) - base_B.unsqueeze(1)
    index_BRW = place_BW.clamp(0, tree - 1).unsqueeze(1).expand(-1, rows, -1)
    among_B1W = ((place_BW >= 0) & (place_BW < tree)).unsqueeze(1)
    visible_BRW = (place_BW < 0).unsqueeze(1) | (ancestors_BRA.gather(2, index_BRW) & among_B1W)
    return Rows(base_B.unsqueeze(1) + depth_BR, slots_BR, _scores(~visible_BRW))


def ancestors_of(parents_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Ancestors [B, R, R] (each row its own) and depth [B, R] of the rows of a tree, the root first."""
    batch, nodes = parents_BN.shape
    eye_RR = torch.eye(nodes + 1, dtype=torch.bool, device=parents_BN.device)
    lines = [eye_RR[0].expand(batch, -1)]
    for node in range(nodes):
        above_BNR = torch.stack(lines, dim=1)
        index_B11 = parents_BN[:, node].view(-1, 1, 1).expand(-1, 1, nodes + 1)
        lines.append(above_BNR.gather(1, index_B11).squeeze(1) | eye_RR[node + 1])
    ancestors_BRR = torch.stack(lines, dim=1)
    return ancestors_BRR, ancestors_BRR.sum(dim=2) - 1


def _scores(forbidden_BRW: Tensor) -> Tensor:
    return torch.where(forbidden_BRW.unsqueeze(1), FORBIDDEN, 0.0)


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
