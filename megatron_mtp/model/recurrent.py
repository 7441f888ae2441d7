"""Recurrent layers in plain torch: Mamba-2 without `mamba_ssm`, Gated DeltaNet without `fla`.

A recurrent layer keeps one state per head and sequence. It is computed chunk by chunk: positions of a chunk see each
other through a matrix, and earlier chunks through the state before the chunk. A state ends with its document:

    position   0 1 2 | 3 4 5      document 0 0 0 0 1 1, chunks of three
    position 3 sees the state before its chunk, positions 4 and 5 do not; the state after it holds 4 and 5 alone

Mamba-2, per head with state h_t [P, N], decay a_t = exp(dt_t A) and dt_t = softplus(dt_t + dt_bias) (Dao and Gu,
arXiv:2405.21060, section 6):

    h_t = a_t h_{t-1} + dt_t x_t B_t^T        y_t = h_t C_t + D x_t

Gated DeltaNet, with state S_t [K, V], decay exp(g_t) and step beta_t (Yang et al., arXiv:2412.06464, section 3):

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T        o_t = S_t^T q_t / sqrt(K)

Within a chunk its corrections u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t) solve one triangular system. Parameters,
their names, their initialization and their keys in checkpoints are those of Megatron's `MambaMixer` and
`GatedDeltaNet`.

Letters in names: B batch, L positions of the whole sequence, S those of a context-parallel rank, R such ranks, C
channels, H heads, K chunks, Q positions of a chunk. Of Mamba-2, P channels of a head, N of its state, G groups of heads
that share B and C. Of Gated DeltaNet, V channels of a value; a key's are K in [..., H, K].
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common, tensor_a2a_cp2hp, tensor_a2a_hp2cp
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import pad, rms_norm, silu, softplus

from megatron_mtp.data.batch import positions_of_ranks
from megatron_mtp.model.packed_rows import bounds_of, offsets_of
from megatron_mtp.model.swapped import having

CHUNK = 64
"""Positions of a chunk: a larger one has larger matrices within chunks, and fewer steps between chunks."""


def documents_of(offsets: Tensor | None, like_BLC: Tensor) -> Tensor:
    """Return the document of every position, [1, L]; rows that are not packed are one document."""
    length, device = like_BLC.size(1), like_BLC.device
    if offsets is None:
        return torch.zeros(1, length, dtype=torch.long, device=device)
    position_L = torch.arange(length, device=device)
    return torch.searchsorted(offsets[1:].to(position_L).contiguous(), position_L, right=True)[None]


def causal_convolution(x_BLC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, document_BL: Tensor) -> Tensor:
    """Convolve every channel over its last W positions of the same document, [B, L, C].

    The last weight is for its own.
    """
    width, length = weight_CW.size(1), x_BLC.size(1)
    mixed_BLC = x_BLC * weight_CW[:, -1]
    for back in range(1, min(width, length)):
        same_BL1 = (document_BL[:, back:] == document_BL[:, :-back]).unsqueeze(-1)
        earlier = pad(x_BLC[:, :-back] * same_BL1, (0, 0, back, 0))
        mixed_BLC = mixed_BLC + earlier * weight_CW[:, -1 - back]
    return mixed_BLC if bias_C is None else mixed_BLC + bias_C


def chunked(values: Tensor, chunk: int) -> Tensor:
    """Reshape [B, L, H, ...] to [B, H, K, Q, ...], float32 or wider; the last chunk is padded with zeros."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    missing = -values.size(1) % chunk
    values = pad(values, (0, 0) * (values.dim() - 2) + (0, missing))
    return values.unflatten(1, (-1, chunk)).movedim(3, 1)


def joined(values: Tensor, length: int) -> Tensor:
    """Reshape [B, H, K, Q, ...] to [B, L, H, ...]: the inverse of `chunked`."""
    return values.movedim(1, 3).flatten(1, 2)[:, :length]


@dataclass(frozen=True)
class Decays:
    """Fraction of an input that remains after some positions; 0 across a document boundary.

    Attributes:
        within: at position i, of the input at position j of the same chunk, [B, H, K, Q, Q]; 0 if j is later.
        before: at each position, of the state before its chunk, [B, H, K, Q].
        after: at the end of the chunk, of the input at each position, [B, H, K, Q].
        across: at the end of the chunk, of the state before it, [B, H, K].
    """

    within: Tensor
    before: Tensor
    after: Tensor
    across: Tensor

    @classmethod
    def of(cls, logarithm_BLH: Tensor, document_BL: Tensor, chunk: int) -> "Decays":
        """Compute from the logarithm of every position's decay, 0 or less."""
        so_far = chunked(logarithm_BLH, chunk).cumsum(-1)
        document = pad(document_BL, (0, -document_BL.size(1) % chunk), value=-1).unflatten(1, (-1, chunk))[:, None]
        last = document[..., -1]
        previous = pad(last[..., :-1], (1, 0), value=-1)
        same = document.unsqueeze(-1) == document.unsqueeze(-2)
        between = (so_far.unsqueeze(-1) - so_far.unsqueeze(-2)).masked_fill(~same.tril(), float("-inf"))
        return cls(
            within=between.exp(),
            before=so_far.exp() * (document == previous.unsqueeze(-1)),
            after=(so_far[..., -1:] - so_far).exp() * (document == last.unsqueeze(-1)),
            across=so_far[..., -1].exp() * (last == previous),
        )


class ContextParallelHeads:
    """Exchanges a context-parallel rank's positions of all heads for all positions of its own heads."""

    def __init__(self, group: torch.distributed.ProcessGroup, positions: int, packed: PackedSeqParams | None) -> None:
        """`positions`: of this rank; `packed`: a row's documents, which are cut one by one."""
        self.group = group
        self.ranks, self.rank = group.size(), group.rank()
        if self.ranks > 1:
            bounds = torch.tensor([0, positions * self.ranks]) if packed is None else bounds_of(packed)
            self.order_L = positions_of_ranks(bounds, self.ranks).flatten()

    def to_heads(self, values_SBC: Tensor, columns_RC: Tensor) -> Tensor:
        """Exchange positions for heads: the whole sequence in order, with this rank's columns of `columns_RC`."""
        if self.ranks == 1:
            return values_SBC
        of_ranks = values_SBC.index_select(-1, columns_RC.flatten())
        whole_LBC = tensor_a2a_cp2hp(of_ranks, 0, -1, self.group, undo_attention_load_balancing=False)
        return whole_LBC.index_select(0, self.order_L.argsort().to(whole_LBC.device))

    def to_positions(self, values_LBC: Tensor) -> Tensor:
        """Exchange heads for positions: this rank's positions, with the columns of rank 0's heads first."""
        if self.ranks == 1:
            return values_LBC
        ordered_LBC = values_LBC.index_select(0, self.order_L.to(values_LBC.device))
        return tensor_a2a_hp2cp(ordered_LBC, 0, -1, self.group, redo_attention_load_balancing=False)


def columns_of_ranks(sizes: list[int], ranks: int, shared: tuple[int, ...] = ()) -> list[Tensor]:
    """Return the columns of each rank's heads, [R, C], from parts of consecutive columns.

    Args:
        sizes: sizes of the parts; each part is split evenly.
        shared: for each part, how many neighboring ranks share a slice; 1 if missing.
    """
    columns, start = [], 0
    for index, size in enumerate(sizes):
        copies = shared[index] if index < len(shared) else 1
        slices = torch.arange(start, start + size).view(ranks // copies, -1)
        columns.append(slices.repeat_interleave(copies, dim=0))
        start += size
    return columns


# --- Mamba-2 ---------------------------------------------------------------------------------------------------------


def scan(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    document_BL: Tensor,
    chunk: int = CHUNK,
) -> Tensor:
    """Compute y [B, L, H, P] without the term D x.

    Args:
        dt_BLH: time steps after softplus.
        A_H: negative.
        B_BLGN, C_BLGN: matrices of the groups; consecutive heads belong to one group.
        document_BL: document of every position, [B, L] or [1, L]; states are reset between documents.
        chunk: number of positions in a chunk.
    """
    length, shared = x_BLHP.size(1), x_BLHP.size(2) // B_BLGN.size(2)
    decays = Decays.of(dt_BLH * A_H, document_BL, chunk)
    inputs = chunked(x_BLHP * dt_BLH.unsqueeze(-1), chunk)
    keys, queries = (chunked(each, chunk).repeat_interleave(shared, dim=1) for each in (B_BLGN, C_BLGN))
    within = (queries @ keys.mT * decays.within) @ inputs
    added = (keys * decays.after.unsqueeze(-1)).mT @ inputs
    state, before = torch.zeros_like(added[:, :, 0]), []
    for index in range(added.size(2)):
        before.append(state)
        state = state * decays.across[:, :, index, None, None] + added[:, :, index]
    from_before = queries @ torch.stack(before, dim=2) * decays.before.unsqueeze(-1)
    return joined(within + from_before, length).to(x_BLHP.dtype)


class GatedNorm(torch.nn.Module):
    """RMSNorm of x silu(z) by groups of channels; arguments and weight match `mamba_ssm`'s `RMSNorm`."""

    tp_group: torch.distributed.ProcessGroup

    def __init__(
        self, hidden_size: int, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the normalized product of `x` and the gate `z`, all of [..., channels]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        gated = (x.to(wide) * silu(z.to(wide))).unflatten(-1, (-1, self.group_size))
        return (rms_norm(gated, (self.group_size,), eps=self.eps).flatten(-2) * self.weight).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return the weight, split over tensor-parallel ranks."""
        weight = self.state_dict(prefix="", keep_vars=True)
        group = None if metadata is None else metadata["dp_cp_group"]
        return make_sharded_tensors_for_checkpoint(
            weight, prefix, {"weight": 0}, sharded_offsets, tp_group=self.tp_group, dp_cp_group=group
        )


class PortableMamba(MambaMixer):
    """Megatron's Mamba-2 mixer for training: packed rows, tensor, sequence and context parallelism."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        needed = {"HAVE_MAMBA_SSM": True, "HAVE_EINOPS": True, "ExtendedRMSNorm": GatedNorm}
        with having([mamba_mixer, mamba_context_parallel], **needed):
            super().__init__(*args, **kwargs)

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [S, B, H] of this rank's positions, and the bias to add.

        Raises:
            ValueError: a cache was given; decoding is not supported here.
        """
        if inference_context is not None or inference_params is not None:
            raise ValueError("Mamba layers without mamba_ssm do not decode with a cache; train and evaluate with them.")
        projected_SBC, _ = self.in_proj(hidden_states)
        inner, groups = self.d_inner_local_tp, self.ngroups_local_tp * self.d_state
        z_SBC, mixed_SBC = projected_SBC.split([inner, projected_SBC.size(-1) - inner], dim=-1)
        offsets = None if packed_seq_params is None else offsets_of(packed_seq_params)
        exchange = ContextParallelHeads(self.pg_collection.cp, mixed_SBC.size(0), packed_seq_params)
        sharing = max(1, exchange.ranks // int(self.ngroups_local_tp))  # ranks that share one group's heads
        *convolved, dt = columns_of_ranks(
            [inner, groups, groups, self.nheads_local_tp], exchange.ranks, (1, sharing, sharing)
        )
        columns_RC = torch.cat([*convolved, dt], dim=1).to(mixed_SBC.device)
        whole_BLC = exchange.to_heads(mixed_SBC, columns_RC).transpose(0, 1)
        y_BLC = self._mixed(whole_BLC, columns_RC[exchange.rank], documents_of(offsets, whole_BLC))
        y_SBC = exchange.to_positions(y_BLC.transpose(0, 1))
        y_SBC = self.norm(y_SBC, z_SBC) if self.rmsnorm else y_SBC * silu(z_SBC)
        output: tuple[Tensor, Tensor | None] = self.out_proj(y_SBC)
        return output

    def _mixed(self, xBCdt_BLC: Tensor, columns_C: Tensor, document_1L: Tensor) -> Tensor:
        """Run convolution and scan of some heads.

        `columns_C` are their columns of this tensor-parallel rank's x, B, C and dt.
        """
        heads = self.nheads_local_tp // self.pg_collection.cp.size()
        own_C, own_H = columns_C[:-heads], columns_C[-heads:] - self.conv1d_bias.numel()
        xBC_BLC, dt_BLH = xBCdt_BLC.split([own_C.numel(), heads], dim=-1)
        weight_CW, bias_C = self.conv1d_weight.squeeze(1)[own_C], self.conv1d_bias[own_C]
        xBC_BLC = self.act(causal_convolution(xBC_BLC, weight_CW, bias_C, document_1L))
        inner, groups = heads * self.headdim, (own_C.numel() - heads * self.headdim) // 2
        x_BLC, B_BLC, C_BLC = xBC_BLC.split([inner, groups, groups], dim=-1)
        x_BLHP = x_BLC.unflatten(-1, (heads, -1))
        B_BLGN, C_BLGN = (each.unflatten(-1, (-1, self.d_state)) for each in (B_BLC, C_BLC))
        dt_BLH = softplus(_wide(dt_BLH) + _wide(self.dt_bias)[own_H])
        A_H = -_wide(self.A_log)[own_H].exp()
        y_BLHP = scan(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, document_1L)
        return (y_BLHP + self.D[own_H].unsqueeze(-1) * x_BLHP).to(x_BLHP.dtype).flatten(2)


def _wide(values: Tensor) -> Tensor:
    """Convert to at least float32: decays are exponentials."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


# --- Gated DeltaNet --------------------------------------------------------------------------------------------------


def gated_delta_rule(
    query_BLHK: Tensor,
    key_BLHK: Tensor,
    value_BLHV: Tensor,
    g_BLH: Tensor,
    beta_BLH: Tensor,
    document_BL: Tensor,
    chunk: int = CHUNK,
) -> Tensor:
    """Compute o [B, L, H, V].

    Args:
        query_BLHK, key_BLHK: vectors of length 1.
        g_BLH: logarithm of the decay, 0 or less.
        beta_BLH: step size, from 0 to 1.
        document_BL: document of every position, [B, L] or [1, L]; states are reset between documents.
        chunk: number of positions in a chunk.
    """
    length = query_BLHK.size(1)
    decays = Decays.of(g_BLH, document_BL, chunk)
    query, key, value, beta = (chunked(each, chunk) for each in (query_BLHK, key_BLHK, value_BLHV, beta_BLH))
    query = query * query.size(-1) ** -0.5
    overlap = (key @ key.mT * decays.within * beta.unsqueeze(-1)).tril(-1)
    wanted = torch.cat([value, key * decays.before.unsqueeze(-1)], dim=-1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(
        overlap + torch.eye(chunk, dtype=overlap.dtype, device=overlap.device), wanted, upper=False, unitriangular=True
    )
    of_values, of_state = solved.split([value.size(-1), key.size(-1)], dim=-1)
    seen, kept = query @ key.mT * decays.within, key * decays.after.unsqueeze(-1)
    query = query * decays.before.unsqueeze(-1)
    state, outputs = torch.zeros_like(kept[:, :, 0].mT @ of_values[:, :, 0]), []
    for index in range(of_values.size(2)):
        corrections = of_values[:, :, index] - of_state[:, :, index] @ state
        outputs.append(query[:, :, index] @ state + seen[:, :, index] @ corrections)
        state = state * decays.across[:, :, index, None, None] + kept[:, :, index].mT @ corrections
    return joined(torch.stack(outputs, dim=2), length).to(value_BLHV.dtype)


def of_length_one(values: Tensor) -> Tensor:
    """Normalize vectors of the last dimension to length 1 as `fla` does."""
    return values * (values.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class PortableGatedDeltaNet(GatedDeltaNet):
    """Megatron's Gated DeltaNet for training: packed rows, tensor, sequence and context parallelism."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with having([common], HAVE_FLA=True):
            super().__init__(*args, **kwargs)
        if self.tp_size > 1 and not self.config.sequence_parallel:
            for weight in self.out_norm.parameters():  # each rank computes only the gradient of its own heads
                weight.register_hook(self._sum_of_ranks)

    def _sum_of_ranks(self, gradient: Tensor) -> Tensor:
        """Sum over ranks also without sequence parallelism; Megatron does not, and the ranks' weights drift apart."""
        torch.distributed.all_reduce(gradient := gradient.clone(), group=self.tp_group)
        return gradient

    def _setup_variant_attrs(self) -> None:
        """Run Megatron's method, without its requirement of a kernel."""
        super()._setup_variant_attrs()
        self.gated_delta_rule = gated_delta_rule

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params: Any = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [S, B, H] of this rank's positions, and the bias to add; `attention_mask` is ignored.

        Raises:
            ValueError: a cache was given; decoding is not supported here.
        """
        if inference_context is not None or inference_params is not None:
            raise ValueError("Gated DeltaNet does not decode with a cache; train and evaluate with it.")
        projected_SBC, _ = self.in_proj(hidden_states)
        keys, values, heads = self.qk_dim_local_tp, self.v_dim_local_tp, self.num_v_heads_local_tp
        mixed_SBC, gate_SBC, steps_SBC = projected_SBC.split([2 * keys + values, values, 2 * heads], dim=-1)
        offsets = None if packed_seq_params is None else offsets_of(packed_seq_params)
        exchange = ContextParallelHeads(self.pg_collection.cp, mixed_SBC.size(0), packed_seq_params)
        columns_RC = torch.cat(columns_of_ranks([keys, keys, values, heads, heads], exchange.ranks), dim=1)
        columns_RC = columns_RC.to(mixed_SBC.device)
        whole_BLC = exchange.to_heads(torch.cat([mixed_SBC, steps_SBC], dim=-1), columns_RC).transpose(0, 1)
        out_BLC = self._mixed(whole_BLC, columns_RC[exchange.rank], documents_of(offsets, whole_BLC))
        out_SBC = exchange.to_positions(out_BLC.transpose(0, 1))
        heads_last = -1, self.value_head_dim
        gated = self._apply_gated_norm(out_SBC.unflatten(-1, heads_last), gate_SBC.unflatten(-1, heads_last))
        output: tuple[Tensor, Tensor | None] = self.out_proj(gated.view_as(out_SBC))
        return output

    def _mixed(self, whole_BLC: Tensor, columns_C: Tensor, document_1L: Tensor) -> Tensor:
        """Run convolution and delta rule of some heads; `columns_C` are their columns of this tensor-parallel rank."""
        ranks = self.pg_collection.cp.size()
        keys, values, heads = (
            size // ranks for size in (self.qk_dim_local_tp, self.v_dim_local_tp, self.num_v_heads_local_tp)
        )
        # column of the first head's alpha, after queries, keys, values and all betas
        first = int(2 * self.qk_dim_local_tp + self.v_dim_local_tp + self.num_v_heads_local_tp)
        own_C, own_H = columns_C[: 2 * keys + values], columns_C[-heads:] - first
        qkv_BLC, beta_BLH, alpha_BLH = whole_BLC.split([own_C.numel(), heads, heads], dim=-1)
        bias_C = None if self.conv1d.bias is None else self.conv1d.bias[own_C]
        qkv_BLC = self.act_fn(causal_convolution(qkv_BLC, self.conv1d.weight.squeeze(1)[own_C], bias_C, document_1L))
        query, key, value = qkv_BLC.split([keys, keys, values], dim=-1)
        value_BLHV = value.unflatten(-1, (heads, -1))
        query_BLHK, key_BLHK = (self._normed_keys(each, heads) for each in (query, key))
        wide = torch.promote_types(alpha_BLH.dtype, torch.float32)
        g_BLH = -self.A_log[own_H].to(wide).exp() * softplus(alpha_BLH.to(wide) + self.dt_bias[own_H])
        out_BLHV = self.gated_delta_rule(query_BLHK, key_BLHK, value_BLHV, g_BLH, beta_BLH.sigmoid(), document_1L)
        return out_BLHV.flatten(2)

    def _normed_keys(self, keys_BLC: Tensor, heads: int) -> Tensor:
        """Return keys or queries for every value head; consecutive value heads share one."""
        keys_BLHK = keys_BLC.unflatten(-1, (-1, self.key_head_dim))
        if self.use_qk_l2norm:
            keys_BLHK = of_length_one(keys_BLHK)
        return keys_BLHK.repeat_interleave(heads // keys_BLHK.size(2), dim=2)
