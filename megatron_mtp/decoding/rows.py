"""Rows of a forward pass: their slots, positions and attention masks.

A forward pass has as many rows per sequence as the longest needs. Matrix products do not depend on sequences, so if
there are many rows, the products run only the real rows, packed as if they belonged to one sequence; attention and
recurrent layers put them back in place:

    rows of three sequences    -  -  A0        packed    A0 B0 B1 B2 C0 C1
                               B0 B1 B2
                               -  C0 C1

Letters in names: B batch, R rows of a sequence, A rows of a tree, X real rows, W slots of the window, L blocks of a
sequence, S rows in Megatron's order (of a memory: slots of a block), H hidden, N blocks of a memory, G key heads, C
channels.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from megatron_mtp.decoding.block_tables import BlockTables, Places, read_rows
from megatron_mtp.model.masks import causal_mask, in_window

CHUNK = 512
"""Rows of a prompt that run through a model at once."""

MAX_ROWS_BACK = 32
"""How far behind the rows of one forward pass the next may begin with recurrent layers: 15 rejected drafts, and as many
rows that are rerun because another sequence of the batch has gained them.
"""

WINDOW_STEP, FEW_WINDOWS_STEP = 32, 128
"""The number of slots in a window is a multiple of this; see `rounded`."""

FORBIDDEN = torch.finfo(torch.float32).min / 2
"""Added to the score of a slot that a row must not attend to; finite, so that a padding row has no NaN."""


Window = tuple[int, int]
"""Positions before and after its own that a row may attend to, as in Megatron's `window_size`; -1 for no limit."""


@dataclass(eq=False)
class Rows:
    """Rows of a forward pass. Other tensors are created on first use, because compiled code reads only `first_B`.

    Attributes:
        first_B: position of the first row of every sequence; rows at negative positions are padding.
        count: R.
        window: number of slots that the rows may attend to.
        tables: block tables of the sequences.
        live_BR: False for padding; None if the only padding is before slot 0.
        packs: whether to leave out padding if there are many rows.
        depth_BR: for a tree, depth of each row; depth 0 is at position `first_B`.
        ancestors_BRA: over the tree's slots: True for the row itself and its ancestors.
        start: number of tree slots filled by earlier forward passes.
        inside: whether no row is before slot 0.
        end_B: if set, the rows attend only to the slots before this one, and their keys and values are not kept; None
            if they attend to all up to their own.
        padded: the rows with padding, if these have none.
        place_X: indices of the real rows among the B * R rows.
        first_blocks: cached `BlockTables.first_blocks`, by number of heads.
        states: cached result of `states_in`.
    """

    first_B: Tensor
    count: int
    window: int
    tables: BlockTables
    live_BR: Tensor | None = None
    packs: bool = False
    depth_BR: Tensor | None = None
    ancestors_BRA: Tensor | None = None
    start: int = 0
    inside: bool = False
    end_B: Tensor | None = None
    padded: "Rows | None" = None
    place_X: Tensor | None = None
    first_blocks: dict[int, Tensor] = field(default_factory=dict)
    states: Tensor | None = None

    @property
    def is_chain(self) -> bool:
        """Whether they are consecutive."""
        return self.depth_BR is None

    @cached_property
    def places_BR(self) -> Tensor:
        """Positions of the rows; negative for padding."""
        if self.count == 1 and not self.start:
            return self.first_B.unsqueeze(1)
        own_R = torch.arange(self.start, self.start + self.count, device=self.first_B.device)
        return self.first_B.unsqueeze(1) + own_R

    @cached_property
    def counts_BR(self) -> Tensor:
        """False for padding."""
        inside_BR = self.places_BR >= 0
        return inside_BR if self.live_BR is None else inside_BR & self.live_BR

    @cached_property
    def positions_BR(self) -> Tensor:
        """Positions for the rotary embedding; 0 for padding."""
        if self.padded is not None:
            return self.packed(self.padded.positions_BR)
        if self.depth_BR is not None:
            return self.first_B.unsqueeze(1) + self.depth_BR
        return self.places_BR if self.inside else self.places_BR.clamp(min=0)

    @cached_property
    def slots_BR(self) -> Tensor:
        """Slots of keys and values."""
        if self.padded is not None:
            return self.packed(self.padded.slots_BR)
        if self.end_B is not None:
            return torch.full_like(self.places_BR, self.tables.capacity)
        if self.inside and self.live_BR is None:
            return self.places_BR
        return torch.where(self.counts_BR, self.places_BR, self.tables.capacity)

    @cached_property
    def memory_places(self) -> Places:
        """The slots as blocks and offsets in them."""
        return self.tables.places(self.slots_BR)

    def window_of(self, memory_NGSC: Tensor) -> Tensor:
        """Return the slots that the rows may attend to, [B, G, W, C]; a copy if they are in several blocks."""
        if self.tables.run is not None:
            return memory_NGSC[self.tables.run, :, : self.window]
        heads = memory_NGSC.size(1)
        if heads not in self.first_blocks:
            self.first_blocks[heads] = self.tables.first_blocks(self.window, heads)
        return memory_NGSC.flatten(0, 1)[self.first_blocks[heads]].flatten(2, 3)[:, :, : self.window]

    def states_in(self, memory_N1SH: Tensor) -> Tensor:
        """Return the trunk's states of the rows, [S, B, H], from the memory; read once."""
        if self.states is None:
            self.states = read_rows(memory_N1SH, self.memory_places)[:, 0].transpose(0, 1)
        return self.states

    @cached_property
    def mask_B1RW(self) -> Tensor:
        """Mask added to the scores: a row attends to its own slot and all before it; in a tree, to its ancestors."""
        if self.padded is not None:
            return self.padded.mask_B1RW
        if self.end_B is not None:
            last_BR = (self.end_B - 1).unsqueeze(1).expand(-1, self.count)
            forbidden_BRW = causal_mask(last_BR, self.window)
        elif self.ancestors_BRA is None:
            forbidden_BRW = causal_mask(self.positions_BR, self.window)
        else:
            tree = self.ancestors_BRA.size(2)
            place_BW = torch.arange(self.window, device=self.first_B.device) - self.first_B.unsqueeze(1)
            index_BRW = place_BW.clamp(0, tree - 1).unsqueeze(1).expand(-1, self.count, -1)
            among_B1W = ((place_BW >= 0) & (place_BW < tree)).unsqueeze(1)
            forbidden_BRW = ~((place_BW < 0).unsqueeze(1) | (self.ancestors_BRA.gather(2, index_BRW) & among_B1W))
        return torch.where(forbidden_BRW.unsqueeze(1), FORBIDDEN, 0.0)

    def mask_within(self, window: Window | None) -> Tensor:
        """Return the mask of layers with a window of positions, whatever slots these have in a tree."""
        if window is None:
            return self.mask_B1RW
        if self.padded is not None:
            return self.padded.mask_within(window)
        forbidden_BRW = ~in_window(-self.ago_BRW, window)
        return self.mask_B1RW.masked_fill(forbidden_BRW.unsqueeze(1), FORBIDDEN)

    @cached_property
    def ago_BRW(self) -> Tensor:
        """How many positions a slot's row is before each row, for slots that `mask_B1RW` allows.

        Before the tree, slots equal positions. In the tree, a row and its ancestors are a path, so the distance is the
        number of ancestors after the slot. In a block, whose rows attend to each other, it is the difference of depths.
        """
        slot_W = torch.arange(self.window, device=self.first_B.device)
        before_BRW = self.positions_BR.unsqueeze(2) - slot_W
        if self.ancestors_BRA is None or self.depth_BR is None:
            return before_BRW
        tree = self.ancestors_BRA.size(2)
        if self.start == 0 and tree == self.count:
            ago_BRA = self.depth_BR.unsqueeze(2) - self.depth_BR.unsqueeze(1)
        else:
            ago_BRA = self.ancestors_BRA.long().flip(2).cumsum(2).flip(2) - 1
        place_B1W = (slot_W - self.first_B.unsqueeze(1)).unsqueeze(1)
        index_BRW = place_B1W.clamp(0, tree - 1).expand(-1, self.count, -1)
        return torch.where(place_B1W < 0, before_BRW, ago_BRA.gather(2, index_BRW))

    def without_padding(self) -> "Rows | None":
        """Return the real rows, [1, X]; None if padding may run too, or there is none."""
        if not self.packs:
            return None
        place_X = self.counts_BR.flatten().nonzero()[:, 0]
        if place_X.numel() == self.counts_BR.numel():
            return None
        tables = replace(self.tables, sequence_X=place_X // self.count)
        return Rows(self.first_B, self.count, self.window, tables, padded=self, place_X=place_X)

    def packed(self, values: Tensor, batch: int = 0, rows: int = 1) -> Tensor:
        """Pack the real rows as those of one sequence, for values with these dimensions of sequences and rows."""
        values_BR = values.movedim((batch, rows), (0, 1))
        return values_BR.flatten(0, 1)[self.place_X].unsqueeze(0).movedim((0, 1), (batch, rows))

    def unpacked(self, values: Tensor, batch: int = 0, rows: int = 1) -> Tensor:
        """Put packed rows back in place; padding is zeros."""
        assert self.padded is not None
        assert self.place_X is not None
        counts_BR, values_1X = self.padded.counts_BR, values.movedim((batch, rows), (0, 1))
        made = values_1X.new_zeros(counts_BR.numel(), *values_1X.shape[2:])
        made_BR = made.index_copy_(0, self.place_X, values_1X[0]).unflatten(0, counts_BR.shape)
        return made_BR.movedim((0, 1), (batch, rows))


def rounded(slots: int, few: bool) -> int:
    """Round up to a multiple of 32; where few shapes are preferred, to 128, 256, 384, ... 1024, 1280, ...

    These steps are 128 slots or a quarter of a power of two. So attention changes its shape at most once in 128 tokens,
    and at most a fifth of a long window is wasted.
    """
    step = max(FEW_WINDOWS_STEP, 1 << max(0, (slots - 1).bit_length() - 3)) if few else WINDOW_STEP
    return -(-slots // step) * step


def ancestors_of(parents_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Return ancestors [B, R, R] (including the row itself) and depth [B, R] of the rows of a tree, root first."""
    batch, nodes = parents_BN.shape
    eye_RR = torch.eye(nodes + 1, dtype=torch.bool, device=parents_BN.device)
    lines = [eye_RR[0].expand(batch, -1)]
    for node in range(nodes):
        above_BNR = torch.stack(lines, dim=1)
        index_B11 = parents_BN[:, node].view(-1, 1, 1).expand(-1, 1, nodes + 1)
        lines.append(above_BNR.gather(1, index_B11).squeeze(1) | eye_RR[node + 1])
    ancestors_BRR = torch.stack(lines, dim=1)
    return ancestors_BRR, ancestors_BRR.sum(dim=2) - 1
