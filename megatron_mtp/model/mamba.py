"""Mamba-2 without `mamba_ssm`, `causal_conv1d` and `einops`: Megatron's mixer with its scan in plain torch.

Per head with state h_t [P, N], decay a_t = exp(dt_t A) and dt_t = softplus(dt_t + dt_bias) (Dao and Gu,
arXiv:2405.21060, section 6):

    h_t = a_t h_{t-1} + dt_t x_t B_t^T        y_t = h_t C_t + D x_t

Parameters, their names, their initialization and their keys in checkpoints are those of Megatron's `MambaMixer`.

Letters in names: as in recurrence.py, and P channels of a head, N of its state, G groups of heads that share B and C.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

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


def scan(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    document_BL: Tensor,
    chunk: int = CHUNK,
) -> Tensor:
    """y [B, L, H, P] without its part D x.

    Args:
        dt_BLH: after softplus.
        A_H: below 0.
        B_BLGN, C_BLGN: of groups; consecutive heads belong to one group.
        document_BL: the document of every position, [B, L] or [1, L]; states end with it.
        chunk: positions of a chunk.
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
    """RMSNorm of x silu(z) by groups of channels; arguments and weight are those of `mamba_ssm`'s `RMSNorm`."""

    tp_group: torch.distributed.ProcessGroup

    def __init__(
        self, hidden_size: int, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Both [..., channels]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        gated = (x.to(wide) * silu(z.to(wide))).unflatten(-1, (-1, self.group_size))
        return (rms_norm(gated, (self.group_size,), eps=self.eps).flatten(-2) * self.weight).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """The weight is cut over tensor-parallel ranks."""
        weight = self.state_dict(prefix="", keep_vars=True)
        group = None if metadata is None else metadata["dp_cp_group"]
        return make_sharded_tensors_for_checkpoint(
            weight, prefix, {"weight": 0}, sharded_offsets, tp_group=self.tp_group, dp_cp_group=group
        )


class PortableMamba(MambaMixer):
    """Megatron's Mamba-2 mixer, trained: packed rows, tensor, sequence and context parallelism."""

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
        """The output [S, B, H] of this rank's positions, and a bias to add.

        Raises:
            ValueError: a cache was given: there is no decoding here.
        """
        if inference_context is not None or inference_params is not None:
            raise ValueError("Mamba layers without mamba_ssm do not decode with a cache; train and evaluate with them.")
        projected_SBC, _ = self.in_proj(hidden_states)
        inner, groups = self.d_inner_local_tp, self.ngroups_local_tp * self.d_state
        z_SBC, mixed_SBC = projected_SBC.split([inner, projected_SBC.size(-1) - inner], dim=-1)
        offsets = offsets_of(packed_seq_params)
        exchange = ContextParallelHeads(self.pg_collection.cp, mixed_SBC.size(0), offsets)
        *convolved, dt = columns_of_ranks(
            [inner, groups, groups, self.nheads_local_tp], exchange.ranks, (1, *[self._sharing_ranks] * 2)
        )
        columns_RC = torch.cat([*convolved, dt], dim=1).to(mixed_SBC.device)
        whole_BLC = exchange.to_heads(mixed_SBC, columns_RC).transpose(0, 1)
        y_BLC = self._mixed(whole_BLC, columns_RC[exchange.rank], documents_of(offsets, whole_BLC))
        y_SBC = exchange.to_positions(y_BLC.transpose(0, 1))
        y_SBC = self.norm(y_SBC, z_SBC) if self.rmsnorm else y_SBC * silu(z_SBC)
        output: tuple[Tensor, Tensor | None] = self.out_proj(y_SBC)
        return output

    @property
    def _sharing_ranks(self) -> int:
        """Context-parallel ranks among which the heads of one group are shared out."""
        return max(1, int(self.pg_collection.cp.size()) // int(self.ngroups_local_tp))

    def _mixed(self, xBCdt_BLC: Tensor, columns_C: Tensor, document_1L: Tensor) -> Tensor:
        """Convolution and scan of some heads; `columns_C` are theirs in this tensor-parallel rank's x, B, C and dt."""
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
    """At least float32: decays are exponentials."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
