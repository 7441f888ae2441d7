"""Mamba-2 and Gated DeltaNet row by row, replacing the layers of a trained model, and their memory.

Projections, convolutions and norms are the trained modules'.

A recurrent state cannot be cropped as keys can: once it has absorbed a row, that is final. So the state lags behind.
The inputs of the newest rows are kept, each in a slot by its position, and a forward pass computes what these add to
the state. Rejected drafts need no work: the next forward pass overwrites their slots, as in `KVCache`. The state
absorbs rows only when the slots are full, and never the last `MAX_ROWS_BACK` rows, to which a later forward pass may go
back:

    place     0 .. 95 | 96 .. 127 | 128 129 130         the state has absorbed rows 0 .. 95, slots hold 96 .. 130
                start ^             ^ t_m and two drafts; if both are rejected, the next forward begins at 129

Mamba-2 and Gated DeltaNet are treated alike. Row t has a key k_t, a value u_t and a decay exp(g_t):

    S_t = exp(g_t) S_{t-1} + k_t u_t^T          seen by a query q:  q^T S_t

Padding rows change nothing, and a row that is rerun uses its own slot.

There is an entry for every sequence that may run at once, and a forward pass reads and writes those of its sequences
(`BlockTables.entries`).

Letters in names: B batch, E entries, R rows of a piece, T slots, W slots of the window, H heads, G groups of heads that
share keys, N channels of a key, P of a value, C of the convolution, S rows of a forward pass.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, override

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from megatron_mtp.decoding.block_tables import BlockTables, Places, read_rows, write_rows
from megatron_mtp.decoding.cached_attention import Scope, StandIn
from megatron_mtp.decoding.kv_cache import KVCache
from megatron_mtp.decoding.rows import MAX_ROWS_BACK, Rows
from megatron_mtp.model.recurrent import of_length_one

PIECE = 64
"""Number of rows that run at once; a longer forward pass, such as a prompt, is split."""

KEPT = 128
"""Number of slots. With more of them, a state absorbs rows less often, and every row reads more of them."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer's state and of its causal convolution over `width` positions."""

    heads: int
    groups: int
    key_channels: int
    value_channels: int
    convolved: int
    width: int

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one sequence's entry in a layer's memory."""
        return sum(part.nbytes for part in RecurrentMemory(self, 1, torch.empty(0, dtype=dtype, device="meta")).parts)


@dataclass(frozen=True)
class RowPiece:
    """Places of some rows of a forward pass, for every layer of a stack.

    Attributes:
        rows: which rows of the forward pass.
        dropped_B: number of rows that the state absorbs before these run; None for none.
        first_B, lead_B: slot of the first row, arbitrary for padding, and slot of the first real row.
        live_BR: whether a row is real; False for padding.
        before: maximum number of slots before `lead_B`.
    """

    rows: slice
    tables: BlockTables
    dropped_B: Tensor | None
    first_B: Tensor
    lead_B: Tensor
    live_BR: Tensor
    before: int

    @cached_property
    def places_BR(self) -> Tensor:
        """Slots of the rows, including those that are not kept."""
        return self.first_B.unsqueeze(1) + torch.arange(self.live_BR.size(1), device=self.first_B.device)

    @cached_property
    def slots_BR(self) -> Tensor:
        """Slots of the rows; the scratch slot for padding."""
        return torch.where(self.live_BR, self.places_BR, KEPT)

    @cached_property
    def forbidden_B11W(self) -> Tensor:
        """Slots that are empty or hold rows that are rerun."""
        slot_W = torch.arange(self.before, device=self.lead_B.device)
        return (slot_W >= self.lead_B.unsqueeze(1))[:, None, None]


class Recurrence:
    """Recurrent layers of a `KVCache`. A layer's memory is allocated when it first runs.

    Attributes:
        start_E, end_E: position of the first slot, and the one after the last row that has run.
        held: upper bound on the slots in use of any entry, so that the host does not have to read them.
    """

    def __init__(self, entries: int, device: torch.device) -> None:
        self.start_E = torch.zeros(entries, dtype=torch.long, device=device)
        self.end_E = torch.zeros_like(self.start_E)
        self.held = [0] * entries
        self.layers: dict[int, RecurrentMemory] = {}
        self._cut: tuple[Rows, list[RowPiece]] | None = None

    def pieces(self, rows: Rows) -> list[RowPiece]:
        """Split the rows of the current forward pass into pieces. Every layer must run each once.

        Raises:
            ValueError: the rows are not a chain.
        """
        if self._cut is None or self._cut[0] is not rows:
            chain = _chain(rows)
            count = chain.counts_BR.size(1)
            slices = [slice(at, min(at + PIECE, count)) for at in range(0, count, PIECE)]
            self._cut = rows, [self._piece(chain, part) for part in slices]
        return self._cut[1]

    def make_room(self, rows: Rows, count: int) -> None:
        """Make states absorb rows where slots would run out, before compiled code runs `count` of these rows.

        Raises:
            ValueError: the rows are not a chain.
        """
        chain = _chain(rows)
        tables = chain.tables
        if self._most_held(tables) + count > KEPT:
            dropped_B = self._dropped(self._lead(chain.counts_BR, chain.places_BR, tables), tables)
            for memory in self.layers.values():
                memory.drop(dropped_B, tables)

    def hold(self, count: int, tables: BlockTables) -> int:
        """Record that this many rows will run, and return an upper bound on the slots in use before them."""
        before = self._most_held(tables)
        for entry in tables.entries:
            self.held[entry] = before + count
        return before

    def memory(self, layer: int, sizes: Sizes, like: Tensor) -> "RecurrentMemory":
        """Return the memory of a layer; allocate it if there is none."""
        if layer not in self.layers:
            self.layers[layer] = RecurrentMemory(sizes, len(self.held), like)
        return self.layers[layer]

    def forget(self, entry: int) -> None:
        """Reset an entry to a sequence without rows."""
        self.start_E[entry] = self.end_E[entry] = self.held[entry] = 0
        for part in (part for memory in self.layers.values() for part in memory.parts):
            part[entry] = 0

    def _piece(self, rows: Rows, part: slice) -> RowPiece:
        tables, live_BR, place_BR = rows.tables, rows.counts_BR[:, part], rows.places_BR[:, part]
        lead_B = self._lead(live_BR, place_BR, tables)
        self.end_E[tables.where] = lead_B + live_BR.sum(dim=1)
        count = part.stop - part.start
        dropped_B = self._dropped(lead_B, tables) if self._most_held(tables) + count > KEPT else None
        before, start_B = self.hold(count, tables), self.start_E[tables.where]
        return RowPiece(part, tables, dropped_B, place_BR[:, 0] - start_B, lead_B - start_B, live_BR, before)

    def _lead(self, live_BR: Tensor, place_BR: Tensor, tables: BlockTables) -> Tensor:
        """Return the position of every sequence's first real row, or the next position if it has none."""
        first_B = place_BR[:, 0] + live_BR.int().argmax(dim=1)
        return torch.where(live_BR.any(dim=1), first_B, self.end_E[tables.where])

    def _dropped(self, lead_B: Tensor, tables: BlockTables) -> Tensor:
        """Return how many rows the states take in before the row at `lead_B` runs; the slots start after them."""
        start_B = self.start_E[tables.where]
        dropped_B = (lead_B - MAX_ROWS_BACK - start_B).clamp(min=0)
        self.start_E[tables.where] = start_B + dropped_B
        for entry in tables.entries:
            self.held[entry] = MAX_ROWS_BACK
        return dropped_B

    def _most_held(self, tables: BlockTables) -> int:
        return max(self.held[entry] for entry in tables.entries)


def _places(slots_BR: Tensor, tables: BlockTables) -> Places:
    """Return the entry of each sequence, which is the one block of its slots, and the slots."""
    return tables.entry_B.unsqueeze(1), slots_BR


def _chain(rows: Rows) -> Rows:
    if rows.padded is not None:
        return rows.padded
    if not rows.is_chain:
        raise ValueError("recurrent layers run chains alone, since a state has no branches; draft chains.")
    return rows


def recurrence_of(cache: KVCache, device: torch.device) -> Recurrence:
    """Return the recurrence of a cache, created when the first recurrent layer runs."""
    if cache.recurrence is None:
        cache.recurrence = Recurrence(cache.kept_entries, device)
    made: Recurrence = cache.recurrence
    return made


class RecurrentMemory:
    """A layer's state, and the inputs of the rows in its slots.

    Attributes:
        state_EHNP: state before the first slot, in float32 or wider, like everything but `mixed_E1TC`.
        keys_EGTN, values_EHTP: k and u.
        sums_EHT1: g, summed from the first slot to this one.
        mixed_E1TC: inputs of the convolution, starting `width` - 1 rows before the first slot.
    """

    def __init__(self, sizes: Sizes, entries: int, like: Tensor) -> None:
        wide = torch.promote_types(like.dtype, torch.float32)

        def zeros(*shape: int, dtype: torch.dtype = wide) -> Tensor:
            return torch.zeros(entries, *shape, dtype=dtype, device=like.device)

        self.sizes = sizes
        self.state_EHNP = zeros(sizes.heads, sizes.key_channels, sizes.value_channels)
        self.keys_EGTN = zeros(sizes.groups, KEPT + 1, sizes.key_channels)
        self.values_EHTP = zeros(sizes.heads, KEPT + 1, sizes.value_channels)
        self.sums_EHT1 = zeros(sizes.heads, KEPT + 1, 1)
        self.mixed_E1TC = zeros(1, KEPT + sizes.width, sizes.convolved, dtype=like.dtype)

    @property
    def kept(self) -> int:
        """Number of slots."""
        return self.keys_EGTN.size(2) - 1

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All tensors that are kept."""
        return self.state_EHNP, self.keys_EGTN, self.values_EHTP, self.sums_EHT1, self.mixed_E1TC

    def drop(self, dropped_B: Tensor, tables: BlockTables) -> None:
        """Absorb rows from the first slots into the state, and move the others to the front."""
        total_BH11 = self._sum_before(dropped_B, tables)
        self.state_EHNP[tables.where] = self.state_after(dropped_B, tables)
        for slots in (self.keys_EGTN, self.values_EHTP):
            _move(slots, tables, dropped_B, MAX_ROWS_BACK)
        _move(self.sums_EHT1, tables, dropped_B, MAX_ROWS_BACK, less=total_BH11)
        _move(self.mixed_E1TC, tables, dropped_B, MAX_ROWS_BACK + self.sizes.width - 1)

    def state_after(self, count_B: Tensor, tables: BlockTables) -> Tensor:
        """Return S after this many slots of every sequence, [B, H, N, P]."""
        total_BH11 = self._sum_before(count_B, tables)
        later_BT = torch.arange(KEPT + 1, device=count_B.device) >= count_B.unsqueeze(1)
        left_BHT1 = (total_BH11 - self.sums_EHT1[tables.where]).masked_fill(later_BT[:, None, :, None], -torch.inf)
        key_BHTN, value_BHTP = self._for_heads(self.keys_EGTN[tables.where]), self.values_EHTP[tables.where]
        added_BHNP = key_BHTN.mT @ (value_BHTP * left_BHT1.exp())
        return self.state_EHNP[tables.where] * total_BH11.exp() + added_BHNP

    def convolved(self, mixed_BRC: Tensor, piece: RowPiece, weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
        """Return the rows' convolution with the rows before them, [B, R, C], and store its inputs."""
        before = self.sizes.width - 1
        slots_BR = torch.where(piece.live_BR, piece.places_BR, KEPT) + before
        rows = mixed_BRC.size(1)
        write_rows(self.mixed_E1TC, mixed_BRC.unsqueeze(1), _places(slots_BR, piece.tables))
        place_BQ = piece.first_B.unsqueeze(1) + torch.arange(rows + before, device=mixed_BRC.device)
        read_BQC = read_rows(self.mixed_E1TC, _places(place_BQ.clamp(0, KEPT + before), piece.tables))[:, 0]
        made_BRC = read_BQC[:, before:] * weight_CW[:, -1]
        for back in range(1, self.sizes.width):
            made_BRC = made_BRC + read_BQC[:, before - back : before - back + rows] * weight_CW[:, -1 - back]
        return made_BRC if bias_C is None else made_BRC + bias_C

    def sums(self, decay_BHR: Tensor, piece: RowPiece) -> Tensor:
        """Return g summed from the first slot to every row, [B, H, R, 1]; 0 for padding."""
        own_BHR = (decay_BHR * piece.live_BR.unsqueeze(1)).cumsum(dim=2)
        return self._sum_before(piece.lead_B, piece.tables) + own_BHR.unsqueeze(3)

    def seen(self, query_BGRN: Tensor, sums_BHR1: Tensor, piece: RowPiece) -> Tensor:
        """Return the values that queries read from the state and from earlier rows, [B, H, R, P]."""
        seen_BHRP = self._for_heads(query_BGRN) @ self.state_EHNP[piece.tables.where] * sums_BHR1.exp()
        if piece.before == 0:
            return seen_BHRP
        key_BGWN, value_BHWP, sums_BHW1 = (
            one[piece.tables.where, :, : piece.before] for one in (self.keys_EGTN, self.values_EHTP, self.sums_EHT1)
        )
        left_BHRW = (sums_BHR1 - sums_BHW1.mT).masked_fill(piece.forbidden_B11W, -torch.inf).exp()
        return seen_BHRP + (self._for_heads(query_BGRN @ key_BGWN.mT) * left_BHRW) @ value_BHWP

    def among(self, query_BGRN: Tensor, key_BGRN: Tensor, sums_BHR1: Tensor) -> Tensor:
        """Return the weight with which each row of a piece (dim -2) reads each row up to itself (dim -1)."""
        left_BHRR = (sums_BHR1 - sums_BHR1.mT).tril().exp().tril()
        return self._for_heads(query_BGRN @ key_BGRN.mT) * left_BHRR

    def put(self, key_BGRN: Tensor, value_BHRP: Tensor, sums_BHR1: Tensor, piece: RowPiece) -> None:
        """Store the rows' inputs."""
        kept = (self.keys_EGTN, key_BGRN), (self.values_EHTP, value_BHRP), (self.sums_EHT1, sums_BHR1)
        for slots, new in kept:
            write_rows(slots, new, _places(piece.slots_BR, piece.tables))

    def _sum_before(self, slot_B: Tensor, tables: BlockTables) -> Tensor:
        """Return g summed over all slots before one, [B, H, 1, 1]."""
        slot_B1 = slot_B.unsqueeze(1)
        sum_BH11 = read_rows(self.sums_EHT1, _places((slot_B1 - 1).clamp(min=0), tables))
        return sum_BH11.masked_fill((slot_B1 == 0)[:, None, :, None], 0)

    def _for_heads(self, values_BGxx: Tensor) -> Tensor:
        """Repeat values of a group for each of its heads."""
        return values_BGxx.repeat_interleave(self.sizes.heads // self.sizes.groups, dim=1)


def _move(slots_ExTx: Tensor, tables: BlockTables, dropped_B: Tensor, count: int, less: Tensor | float = 0.0) -> None:
    """Move `count` slots from slot `dropped_B` on to the front, and subtract `less` from them."""
    first_BQ = torch.arange(count, device=dropped_B.device).expand(dropped_B.size(0), -1)
    moved_BxQx = read_rows(slots_ExTx, _places(first_BQ + dropped_B.unsqueeze(1), tables)) - less
    write_rows(slots_ExTx, moved_BxQx, _places(first_BQ, tables))


class CachedRecurrence(StandIn):
    """A recurrent layer whose earlier rows are in a memory.

    Args:
        own: the trained layer.
        layer: its index in the stack.
    """

    def __init__(self, own: Any, scope: Scope, layer: int) -> None:
        super().__init__()
        self.own, self.scope, self.layer = own, scope, layer
        self.sizes = self.sizes_of_own()

    def sizes_of_own(self) -> Sizes:
        """Return the sizes of this rank's heads."""
        raise NotImplementedError

    def between(self, projected_SBC: Tensor) -> Tensor:
        """Compute the input of the second projection from the output of the first, [S, B, inner]."""
        raise NotImplementedError

    def forward(self, hidden_SBH: Tensor, attention_mask: None = None, **_: object) -> tuple[Tensor, Tensor | None]:
        """Return the output [S, B, H] and the bias to add; there is no mask."""
        projected_SBC, _bias = self.own.in_proj(hidden_SBH)
        output: tuple[Tensor, Tensor | None] = self.own.out_proj(self.between(projected_SBC))
        return output

    def run(self, memory: RecurrentMemory, piece: RowPiece, mixed_BRC: Tensor, steps_BRC: Tensor) -> Tensor:
        """Run a piece of the rows, [B, R, H * P], from the convolved values and the inputs of decays and step sizes."""
        raise NotImplementedError

    def run_all(self, mixed_SBC: Tensor, steps_SBC: Tensor) -> Tensor:
        """Run the rows of the forward pass, [S, B, H * P]."""
        rows = self.scope.rows
        if rows.padded is not None:  # each sequence of a packed batch starts from its own state
            mixed_SBC, steps_SBC = rows.unpacked(mixed_SBC, 1, 0), rows.unpacked(steps_SBC, 1, 0)
        mixed_BSC, steps_BSC = mixed_SBC.transpose(0, 1), steps_SBC.transpose(0, 1)
        recurrence = recurrence_of(self.scope.cache, mixed_SBC.device)
        memory = recurrence.memory(self.layer, self.sizes, mixed_BSC)
        made = []
        for piece in recurrence.pieces(rows):
            if piece.dropped_B is not None:
                memory.drop(piece.dropped_B, piece.tables)
            made.append(self.run(memory, piece, mixed_BSC[:, piece.rows], steps_BSC[:, piece.rows]))
        made_SBC = (made[0] if len(made) == 1 else torch.cat(made, dim=1)).transpose(0, 1)
        return made_SBC if rows.padded is None else rows.packed(made_SBC, 1, 0)


class CachedMamba(CachedRecurrence):
    """Recurrence of a `MambaMixer`: keys are B, queries C, and values dt x (see model/recurrent.py)."""

    @override
    def sizes_of_own(self) -> Sizes:
        own = self.own
        convolved, _, width = own.conv1d_weight.shape
        return Sizes(own.nheads_local_tp, own.ngroups_local_tp, own.d_state, own.headdim, convolved, width)

    @override
    def between(self, projected_SBC: Tensor) -> Tensor:
        own, sizes = self.own, self.sizes
        z_SBC, mixed_SBC, steps_SBH = projected_SBC.split([own.d_inner_local_tp, sizes.convolved, sizes.heads], dim=-1)
        y_SBC = self.run_all(mixed_SBC, steps_SBH)
        return own.norm(y_SBC, z_SBC) if own.rmsnorm else y_SBC * silu(z_SBC)

    @override
    def run(self, memory: RecurrentMemory, piece: RowPiece, mixed_BRC: Tensor, steps_BRC: Tensor) -> Tensor:
        own, sizes = self.own, self.sizes
        wide = memory.state_EHNP.dtype
        mixed_BRC = own.act(memory.convolved(mixed_BRC, piece, own.conv1d_weight.squeeze(1), own.conv1d_bias))
        shared = sizes.groups * sizes.key_channels
        x_BRC, key_BRC, query_BRC = mixed_BRC.split([own.d_inner_local_tp, shared, shared], dim=-1)
        x_BHRP = by_heads(x_BRC, sizes.heads)
        key_BGRN, query_BGRN = (by_heads(each, sizes.groups).to(wide) for each in (key_BRC, query_BRC))
        dt_BHR = softplus(steps_BRC.to(wide) + own.dt_bias.to(wide)).transpose(1, 2)
        sums_BHR1 = memory.sums(-dt_BHR * own.A_log.to(wide).exp().unsqueeze(-1), piece)
        value_BHRP = x_BHRP * (dt_BHR * piece.live_BR.unsqueeze(1)).unsqueeze(-1)
        y_BHRP = memory.seen(query_BGRN, sums_BHR1, piece)
        y_BHRP = y_BHRP + memory.among(query_BGRN, key_BGRN, sums_BHR1) @ value_BHRP
        memory.put(key_BGRN, value_BHRP, sums_BHR1, piece)
        y_BHRP = y_BHRP.to(x_BHRP.dtype) + own.D.view(-1, 1, 1) * x_BHRP
        return y_BHRP.to(x_BHRP.dtype).transpose(1, 2).flatten(2)


class CachedDelta(CachedRecurrence):
    """Recurrence of a `GatedDeltaNet`: values are the corrections u (see model/recurrent.py)."""

    @override
    def sizes_of_own(self) -> Sizes:
        own = self.own
        convolved, _, width = own.conv1d.weight.shape
        groups = own.qk_dim_local_tp // own.key_head_dim
        return Sizes(own.num_v_heads_local_tp, groups, own.key_head_dim, own.value_head_dim, convolved, width)

    @override
    def between(self, projected_SBC: Tensor) -> Tensor:
        own, sizes = self.own, self.sizes
        parts = [sizes.convolved, own.v_dim_local_tp, 2 * sizes.heads]
        mixed_SBC, gate_SBC, steps_SBC = projected_SBC.split(parts, dim=-1)
        out_SBC = self.run_all(mixed_SBC, steps_SBC)
        heads_last = -1, sizes.value_channels
        gated = own._apply_gated_norm(out_SBC.unflatten(-1, heads_last), gate_SBC.unflatten(-1, heads_last))
        return gated.view_as(gate_SBC)

    @override
    def run(self, memory: RecurrentMemory, piece: RowPiece, mixed_BRC: Tensor, steps_BRC: Tensor) -> Tensor:
        own, sizes = self.own, self.sizes
        wide, dtype = memory.state_EHNP.dtype, mixed_BRC.dtype
        mixed_BRC = own.act_fn(memory.convolved(mixed_BRC, piece, own.conv1d.weight.squeeze(1), own.conv1d.bias))
        keys, values = own.qk_dim_local_tp, own.v_dim_local_tp
        query_BRC, key_BRC, value_BRC = mixed_BRC.split([keys, keys, values], dim=-1)
        query_BGRN, key_BGRN = (self._normed(by_heads(each, sizes.groups)).to(wide) for each in (query_BRC, key_BRC))
        query_BGRN = query_BGRN * sizes.key_channels**-0.5
        beta_BHR, alpha_BHR = steps_BRC.transpose(1, 2).chunk(2, dim=1)
        decay_BHR = -own.A_log.to(wide).exp().unsqueeze(-1) * softplus(alpha_BHR.to(wide) + own.dt_bias.unsqueeze(-1))
        sums_BHR1 = memory.sums(decay_BHR, piece)
        beta_BHR1 = (beta_BHR.sigmoid().to(wide) * piece.live_BR.unsqueeze(1)).unsqueeze(-1)
        both = torch.cat([key_BGRN, query_BGRN], dim=2), torch.cat([sums_BHR1, sums_BHR1], dim=2)
        by_key_BHRP, by_query_BHRP = memory.seen(*both, piece).chunk(2, dim=2)
        overlap_BHRR = (memory.among(key_BGRN, key_BGRN, sums_BHR1) * beta_BHR1).tril(-1)
        wanted_BHRP = (by_heads(value_BRC, sizes.heads).to(wide) - by_key_BHRP) * beta_BHR1
        correction_BHRP = solved(overlap_BHRR, wanted_BHRP)
        memory.put(key_BGRN, correction_BHRP, sums_BHR1, piece)
        out_BHRP = by_query_BHRP + memory.among(query_BGRN, key_BGRN, sums_BHR1) @ correction_BHRP
        return out_BHRP.to(dtype).transpose(1, 2).flatten(2)

    def _normed(self, keys_BGRN: Tensor) -> Tensor:
        return of_length_one(keys_BGRN) if self.own.use_qk_l2norm else keys_BGRN


def solved(overlap_BHRR: Tensor, wanted_BHRP: Tensor) -> Tensor:
    """Solve (1 + overlap) u = wanted for u, where row t overlaps only with earlier rows."""
    if overlap_BHRR.size(-1) == 1:
        return wanted_BHRP
    one_RR = torch.eye(overlap_BHRR.size(-1), dtype=overlap_BHRR.dtype, device=overlap_BHRR.device)
    return torch.linalg.solve_triangular(overlap_BHRR + one_RR, wanted_BHRP, upper=False, unitriangular=True)


def by_heads(values_BRC: Tensor, heads: int) -> Tensor:
    """Reshape [B, R, heads * channels] to [B, heads, R, channels]."""
    return values_BRC.unflatten(-1, (heads, -1)).transpose(1, 2)
