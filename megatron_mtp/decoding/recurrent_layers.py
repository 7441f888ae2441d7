"""Mamba-2 and Gated DeltaNet row by row, in the places of the layers that a model was trained with.

The projections, convolutions and norms are the trained modules'; states are in recurrent_state.py.

Letters in names: as in recurrent_state.py, and S rows of a forward.
"""

from typing import Any, override

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from megatron_mtp.decoding.cached_attention import StandIn
from megatron_mtp.decoding.kv_cache import Scope
from megatron_mtp.decoding.recurrent_state import RecurrentMemory, RowPiece, Sizes, recurrence_of
from megatron_mtp.model.recurrent import of_length_one


class CachedRecurrence(StandIn):
    """A recurrent layer whose earlier rows are in a memory.

    Args:
        own: the trained layer.
        layer: its number in the stack.
    """

    def __init__(self, own: Any, scope: Scope, layer: int) -> None:
        super().__init__()
        self.own, self.scope, self.layer = own, scope, layer
        self.sizes = self.sizes_of_own()

    def sizes_of_own(self) -> Sizes:
        """Sizes of this rank's heads."""
        raise NotImplementedError

    def between(self, projected_SBC: Tensor) -> Tensor:
        """From the first projection to what the second one takes, [S, B, inner]."""
        raise NotImplementedError

    def forward(self, hidden_SBH: Tensor, attention_mask: None = None, **_: object) -> tuple[Tensor, Tensor | None]:
        """The output [S, B, H], and a bias to add; there is no mask to read."""
        projected_SBC, _bias = self.own.in_proj(hidden_SBH)
        output: tuple[Tensor, Tensor | None] = self.own.out_proj(self.between(projected_SBC))
        return output

    def run(self, memory: RecurrentMemory, piece: RowPiece, mixed_BRC: Tensor, steps_BRC: Tensor) -> Tensor:
        """A piece of the rows: [B, R, H * P] of what is convolved, and of what decays and step sizes come from."""
        raise NotImplementedError

    def run_all(self, mixed_SBC: Tensor, steps_SBC: Tensor) -> Tensor:
        """All rows of the forward, [S, B, H * P]."""
        rows = self.scope.rows
        if rows.padded is not None:  # a state must not go on from one sequence to the next
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
    """That of a `MambaMixer`: keys are B, queries C, and values dt x (see model/recurrent.py)."""

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
    """That of a `GatedDeltaNet`: values are the corrections u (see model/recurrent.py)."""

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
    """u of (1 + overlap) u = wanted, where row t's overlap is with earlier rows alone."""
    if overlap_BHRR.size(-1) == 1:
        return wanted_BHRP
    one_RR = torch.eye(overlap_BHRR.size(-1), dtype=overlap_BHRR.dtype, device=overlap_BHRR.device)
    return torch.linalg.solve_triangular(overlap_BHRR + one_RR, wanted_BHRP, upper=False, unitriangular=True)


def by_heads(values_BRC: Tensor, heads: int) -> Tensor:
    """[B, R, heads * channels] as [B, heads, R, channels]."""
    return values_BRC.unflatten(-1, (heads, -1)).transpose(1, 2)
