"""Gated DeltaNet without `fla`: Megatron's layer with the gated delta rule in plain torch.

Per head with state S_t [K, V], decay exp(g_t) and step beta_t (Yang et al., arXiv:2412.06464, section 3):

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T        o_t = S_t^T q_t / sqrt(K)

Within a chunk the corrections u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t) solve one triangular system. Parameters,
their names, their initialization and their keys in checkpoints are those of Megatron's `GatedDeltaNet`.

Letters in names: as in recurrence.py, and V channels of a value; a key's are K in [..., H, K].
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common
from torch import Tensor
from torch.nn.functional import softplus

from megatron_mtp.model.recurrence import (
    CHUNK,
    ContextParallelHeads,
    Decays,
    causal_convolution,
    chunked,
    columns_of_ranks,
    documents_of,
    having,
    joined,
    offsets_of,
)


def gated_delta_rule(
    query_BLHK: Tensor,
    key_BLHK: Tensor,
    value_BLHV: Tensor,
    g_BLH: Tensor,
    beta_BLH: Tensor,
    document_BL: Tensor,
    chunk: int = CHUNK,
) -> Tensor:
    """o [B, L, H, V].

    Args:
        query_BLHK, key_BLHK: of length 1.
        g_BLH: logarithm of the decay, 0 or less.
        beta_BLH: from 0 to 1.
        document_BL: the document of every position, [B, L] or [1, L]; states end with it.
        chunk: positions of a chunk.
    """
    length = query_BLHK.size(1)
    decays = Decays.of(g_BLH, document_BL, chunk)
    query, key, value, beta = (chunked(each, chunk) for each in (query_BLHK, key_BLHK, value_BLHV, beta_BLH))
    query = query * query.size(-1) ** -0.5
    overlap = (key @ key.mT * decays.within * beta.unsqueeze(-1)).tril(-1)
    wanted = torch.cat([value, key * decays.before.unsqueeze(-1)], dim=-1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(
        overlap + torch.eye(chunk).to(overlap), wanted, upper=False, unitriangular=True
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
    """Vectors of the last dimension, divided by their length as `fla` does it."""
    return values * (values.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class PortableGatedDeltaNet(GatedDeltaNet):
    """Megatron's Gated DeltaNet, trained: packed rows, tensor, sequence and context parallelism."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with having([common], HAVE_FLA=True):
            super().__init__(*args, **kwargs)
        if self.tp_size > 1 and not self.config.sequence_parallel:
            for weight in self.out_norm.parameters():  # each rank has the gradient of its own heads
                weight.register_hook(self._sum_of_ranks)

    def _sum_of_ranks(self, gradient: Tensor) -> Tensor:
        """With sequence parallelism Megatron takes this sum, and without it leaves the ranks' weights to differ."""
        torch.distributed.all_reduce(gradient := gradient.clone(), group=self.tp_group)
        return gradient

    def _setup_variant_attrs(self) -> None:
        """Megatron's, which also asks for a kernel."""
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
        """The output [S, B, H] of this rank's positions, and a bias to add; `attention_mask` is not read.

        Raises:
            ValueError: a cache was given: there is no decoding here.
        """
        if inference_context is not None or inference_params is not None:
            raise ValueError("Gated DeltaNet does not decode with a cache; train and evaluate with it.")
        projected_SBC, _ = self.in_proj(hidden_states)
        keys, values, heads = self.qk_dim_local_tp, self.v_dim_local_tp, self.num_v_heads_local_tp
        mixed_SBC, gate_SBC, steps_SBC = projected_SBC.split([2 * keys + values, values, 2 * heads], dim=-1)
        offsets = offsets_of(packed_seq_params)
        exchange = ContextParallelHeads(self.pg_collection.cp, mixed_SBC.size(0), offsets)
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
        """Convolution and delta rule of some heads; `columns_C` are theirs in this tensor-parallel rank's columns."""
        ranks = self.pg_collection.cp.size()
        keys, values, heads = (
            size // ranks for size in (self.qk_dim_local_tp, self.v_dim_local_tp, self.num_v_heads_local_tp)
        )
        own_C, own_H = columns_C[: 2 * keys + values], columns_C[-heads:] - columns_C.new_tensor(self._steps_start)
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

    @property
    def _steps_start(self) -> int:
        """The column of the first head's alpha, behind queries, keys, values and all betas."""
        return int(2 * self.qk_dim_local_tp + self.v_dim_local_tp + self.num_v_heads_local_tp)

    def _normed_keys(self, keys_BLC: Tensor, heads: int) -> Tensor:
        """Keys or queries for every value head; consecutive value heads share one."""
        keys_BLHK = keys_BLC.unflatten(-1, (-1, self.key_head_dim))
        if self.use_qk_l2norm:
            keys_BLHK = of_length_one(keys_BLHK)
        return keys_BLHK.repeat_interleave(heads // keys_BLHK.size(2), dim=2)
