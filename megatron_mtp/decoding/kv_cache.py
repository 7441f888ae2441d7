"""Rows of a forward, the slots where they stand, and keys and values in blocks of memory that sequences share.

A sequence's slots 0, 1, 2, ... are in blocks of `size` slots, which its table names in turn. So it takes memory as it
grows, and sequences that begin alike may read the same blocks. Places of a table without a block name block 0, which
belongs to no sequence then. The last slot of a table is the scratch slot, for rows that leave no trace.

    size 4, table of one sequence  5 2 0        slots 0 .. 3 are in block 5, slots 4 .. 7 in block 2, others nowhere
                                                yet; the scratch slot 11 is in block 0

A forward has as many rows of each sequence as the longest needs. Products do not depend on sequences, so where rows are
many they run those that count as if these were one sequence's; attention and recurrent layers put them back into their
places:

    rows of three sequences    -  -  A0        packed    A0 B0 B1 B2 C0 C1
                               B0 B1 B2
                               -  C0 C1

A forward writes its rows' keys and values at their slots and attends to the slots that its mask allows. Rejected drafts
need no work: slots beyond a sequence's length are overwritten by the next forward. Only a tree needs `KVCache.keep`,
which moves the rows of the accepted path together:

    slot      5    6    7    8                  t_m at slot 5, and three nodes; the third continues the second
    row       0    1    2    3
    path      0         2    3        ->        slots 5, 6, 7 are what slots 5, 7, 8 were

Letters in names: B batch, R rows of a sequence, A rows of a tree, X rows that count, W slots that are looked at, L
blocks of a sequence, S rows as Megatron has them (of a memory: slots of a block), H hidden, N heads (of a memory:
blocks), G key heads, C channels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp
from torch.nn.functional import pad, scaled_dot_product_attention

from megatron_mtp.model.attention import causal_mask, with_sink

CHUNK = 512
"""Rows of a prompt that go through a model at once."""

BEYOND = 320
"""Slots and positions after the model's last one, which drafts may use; no token is emitted there."""

ROLLED_BACK = 32
"""How far behind the rows of one forward the next may begin where layers are recurrent: 15 drafts are rejected, and as
many rows that another sequence of the batch has gained are run anew."""

WINDOW_STEP, FEW_WINDOWS_STEP = 32, 128
"""Slots that a forward looks at are a multiple of this; see `rounded`."""

FORBIDDEN = torch.finfo(torch.float32).min / 2
"""Added to the score of a slot that a row must not look at; finite, so that a padding row has no NaN."""

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
        """The same as an index; a slice where they follow one another, which copies nothing."""
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


@dataclass(eq=False)
class Rows:
    """Tensors are made when they are first read, since compiled code reads `first_B` alone.

    Attributes:
        first_B: where the first row of every sequence stands; before 0, rows are padding.
        count: R.
        window: slots that the rows may attend to.
        tables: where the sequences' slots are.
        live_BR: False for padding; None where there is none but that before slot 0.
        packs: whether padding is to be left out where rows are many.
        depth_BR: in a tree, of each row; depth 0 has the position `first_B`.
        ancestors_BRA: over the tree's slots: True where there is the row itself, or an ancestor of it.
        start: slots of the tree that earlier forwards have filled.
        inside: whether no row stands before slot 0.
        padded: the rows with their padding, where it is left out of these.
        place_X: where those that count stand among the B * R rows.
        first_blocks: the table's of this name, by the number of heads.
        states: what `states_in` has read.
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
    padded: "Rows | None" = None
    place_X: Tensor | None = None
    first_blocks: dict[int, Tensor] = field(default_factory=dict)
    states: Tensor | None = None

    @property
    def is_chain(self) -> bool:
        """True if they are consecutive."""
        return self.depth_BR is None

    @cached_property
    def places_BR(self) -> Tensor:
        """Places of the rows; before 0 for padding."""
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
        """For the rotary embedding; padding has position 0."""
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
        if self.inside and self.live_BR is None:
            return self.places_BR
        return torch.where(self.counts_BR, self.places_BR, self.tables.capacity)

    @cached_property
    def memory_places(self) -> Places:
        """The same as blocks and slots in them."""
        return self.tables.places(self.slots_BR)

    def window_of(self, memory_NGSC: Tensor) -> Tensor:
        """The slots that the rows may attend to, [B, G, W, C]; a copy where they are in several blocks."""
        if self.tables.run is not None:
            return memory_NGSC[self.tables.run, :, : self.window]
        heads = memory_NGSC.size(1)
        if heads not in self.first_blocks:
            self.first_blocks[heads] = self.tables.first_blocks(self.window, heads)
        return memory_NGSC.flatten(0, 1)[self.first_blocks[heads]].flatten(2, 3)[:, :, : self.window]

    def states_in(self, memory_N1SH: Tensor) -> Tensor:
        """The trunk's states of the rows, [S, B, H], from their only memory; read once."""
        if self.states is None:
            self.states = read_rows(memory_N1SH, self.memory_places)[:, 0].transpose(0, 1)
        return self.states

    @cached_property
    def mask_B1RW(self) -> Tensor:
        """Added to the scores: a row looks at its own slot and at all before it, in a tree at its ancestors."""
        if self.padded is not None:
            return self.padded.mask_B1RW
        if self.ancestors_BRA is None:
            forbidden_BRW = causal_mask(self.positions_BR, self.window)
        else:
            tree = self.ancestors_BRA.size(2)
            place_BW = torch.arange(self.window, device=self.first_B.device) - self.first_B.unsqueeze(1)
            index_BRW = place_BW.clamp(0, tree - 1).unsqueeze(1).expand(-1, self.count, -1)
            among_B1W = ((place_BW >= 0) & (place_BW < tree)).unsqueeze(1)
            forbidden_BRW = ~((place_BW < 0).unsqueeze(1) | (self.ancestors_BRA.gather(2, index_BRW) & among_B1W))
        return torch.where(forbidden_BRW.unsqueeze(1), FORBIDDEN, 0.0)

    def without_padding(self) -> "Rows | None":
        """The rows that count, [1, X]; None where padding may run as well, or there is none."""
        if not self.packs:
            return None
        place_X = self.counts_BR.flatten().nonzero()[:, 0]
        if place_X.numel() == self.counts_BR.numel():
            return None
        tables = replace(self.tables, sequence_X=place_X // self.count)
        return Rows(self.first_B, self.count, self.window, tables, padded=self, place_X=place_X)

    def packed(self, values: Tensor, batch: int = 0, rows: int = 1) -> Tensor:
        """The rows that count as those of one sequence, of values with these dimensions of sequences and rows."""
        values_BR = values.movedim((batch, rows), (0, 1))
        return values_BR.flatten(0, 1)[self.place_X].unsqueeze(0).movedim((0, 1), (batch, rows))

    def unpacked(self, values: Tensor, batch: int = 0, rows: int = 1) -> Tensor:
        """All rows, with zeros for padding; back from `packed`."""
        assert self.padded is not None
        assert self.place_X is not None
        counts_BR, values_1X = self.padded.counts_BR, values.movedim((batch, rows), (0, 1))
        made = values_1X.new_zeros(counts_BR.numel(), *values_1X.shape[2:])
        made_BR = made.index_copy_(0, self.place_X, values_1X[0]).unflatten(0, counts_BR.shape)
        return made_BR.movedim((0, 1), (batch, rows))


def rounded(slots: int, few: bool) -> int:
    """The next multiple of 32; where few shapes are wanted, the next of 128, 256, 384, ... 1024, 1280, ...

    Their steps are 128 slots, or a quarter of a power of two. So the shapes of attention change once in 128 tokens or
    more, and at most a fifth of a long window is in vain.
    """
    step = max(FEW_WINDOWS_STEP, 1 << max(0, (slots - 1).bit_length() - 3)) if few else WINDOW_STEP
    return -(-slots // step) * step


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
        recurrence: what recurrent layers remember (`recurrent_layers.Recurrence`); None before one has run.
        states_N1SH: of a trunk's cache, memory where its forwards keep their rows' states; None where none is kept.
    """

    def __init__(self, layers: int, tables: BlockTables) -> None:
        self.blocks, self.size, self.kept_entries = tables.blocks, tables.size, tables.kept_entries
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.recurrence: Any = None
        self.states_N1SH: Tensor | None = None

    def append(self, layer: int, key_BGRC: Tensor, value_BGRC: Tensor | None, rows: Rows) -> tuple[Tensor, Tensor]:
        """Write the rows' keys, and values where they differ; returns those of all slots in the window [B, G, W, C]."""
        key_BGWC = self._written(self.keys, layer, key_BGRC, rows)
        return key_BGWC, key_BGWC if value_BGRC is None else self._written(self.values, layer, value_BGRC, rows)

    def take(self, layer: int, heads: int, channels: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values in all blocks, [N, G, S, C] each, for code that writes them itself."""
        sizes = layer, heads, channels, like
        return self._memory(self.keys, *sizes), self._memory(self.values, *sizes)

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
        memory_NGSC = self._memory(caches, layer, new_BGRC.size(1), new_BGRC.size(3), new_BGRC)
        write_rows(memory_NGSC, new_BGRC, rows.memory_places)
        return rows.window_of(memory_NGSC)

    def _memory(self, caches: list[Tensor | None], layer: int, heads: int, channels: int, like: Tensor) -> Tensor:
        if (memory := caches[layer]) is None:
            memory = caches[layer] = like.new_zeros(self.blocks, heads, self.size, channels)
        return memory


class Memory:
    """All caches of an engine, in the same blocks: the trunk's, each depth's, and those of a small model that drafts.

    Attributes:
        states_N1SH: the trunk's states, from which depths draft.
        count_T: 0, 1, 2, ...: more than a sequence has tokens.
        free_entries: of recurrent layers, which no sequence has.
    """

    def __init__(
        self, cache: KVCache, depths: list[KVCache], drafter: KVCache | None, states_N1SH: Tensor, count_T: Tensor
    ) -> None:
        self.cache, self.depths, self.drafter = cache, depths, drafter
        self.states_N1SH, self.count_T = states_N1SH, count_T
        cache.states_N1SH = states_N1SH
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

    cache: KVCache
    rows: Rows

    def enter(self, cache: KVCache, rows: Rows) -> None:
        """Attend over this cache, from these rows, until the next call."""
        if rows is not getattr(self, "rows", None):
            self._masks: dict[tuple[torch.dtype, int], Tensor] = {}
        self.cache, self.rows = cache, rows

    def mask(self, dtype: torch.dtype, heads: int) -> Tensor:
        """The rows' mask, once for each of `heads` query heads of a key head, [B, 1, heads * R, W]."""
        if (dtype, heads) not in self._masks:
            self._masks[dtype, heads] = self.rows.mask_B1RW.to(dtype).repeat(1, 1, heads, 1)
        return self._masks[dtype, heads]


def attend(
    scope: Scope,
    layer: int,
    query_BNRC: Tensor,
    key_BGRC: Tensor,
    value_BGRC: Tensor | None,
    scale: float,
    sink_N: Tensor | None = None,
) -> Tensor:
    """The attention output, [B, N, R, C of the values]; adds the rows' keys and values to the cache.

    Args:
        value_BGRC: None where the keys are the values as well.
        sink_N: scores of the heads' sinks; None without sinks.
    """
    key_BGWC, value_BGWC = scope.cache.append(layer, key_BGRC, value_BGRC, scope.rows)
    return attended(scope, query_BNRC, key_BGWC, value_BGWC, scale, sink_N)


def attended(
    scope: Scope, query_BNRC: Tensor, key_BGWC: Tensor, value_BGWC: Tensor, scale: float, sink_N: Tensor | None = None
) -> Tensor:
    """The same over keys and values of the window, which the cache has."""
    packed = scope.rows
    if packed.padded is not None:
        query_BNRC = packed.unpacked(query_BNRC, rows=2)
    mask_B1RW = scope.mask(query_BNRC.dtype, query_BNRC.size(1) // key_BGWC.size(1))
    if sink_N is not None:
        query_BNRC, key_BGWC, value_BGWC = with_sink(query_BNRC, key_BGWC, value_BGWC, sink_N, scale)
        mask_B1RW = pad(mask_B1RW, (0, 1))
    batch, heads, rows, channels = query_BNRC.shape
    groups, value_channels = key_BGWC.size(1), value_BGWC.size(3)
    if heads != groups:  # the query heads of a group become further rows of one head
        query_BNRC = query_BNRC.reshape(batch, groups, heads // groups * rows, channels)
    if value_channels != channels:  # unequal channels would keep torch from its fast kernels
        value_BGWC = pad(value_BGWC, (0, channels - value_channels))
    with _own_kernels(query_BNRC):
        made = scaled_dot_product_attention(query_BNRC, key_BGWC, value_BGWC, attn_mask=mask_B1RW, scale=scale)
    made_BNRC = made.reshape(batch, heads, rows, channels)[..., :value_channels]
    return made_BNRC if packed.padded is None else packed.packed(made_BNRC, rows=2)


@contextmanager
def _own_kernels(query_BNRC: Tensor) -> Iterator[None]:
    """Keep cuDNN out of attention: torch prefers it on some GPUs, and it makes a plan for every new shape."""
    if not query_BNRC.is_cuda:
        yield
        return
    before = cudnn_sdp_enabled()
    enable_cudnn_sdp(False)
    try:
        yield
    finally:
        enable_cudnn_sdp(before)
