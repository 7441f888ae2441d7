"""Modules in the places of a trained model's attention, which attend over a cache.

`attach` puts a `CachedAttention` into every attention module of a loaded model. They share a `Scope`, which holds the
cache and the rows of the current forward. The modules around them, and their weights, are those of training.

Multi-latent attention caches latents, of which all heads' keys and values are made (arXiv:2405.04434, 2.1). A key is
W_K c beside the rotary part r that all heads share, and a value is W_V c, with c the latents of a row. Instead of keys
and values the cache holds c and r, and the projections move to the other side of the sums:

    (q, p) (W_K c, r) = (W_K^T q, p) (c, r)        sum_w a_w W_V c_w = W_V sum_w a_w c_w

So all heads attend to one key head of L + C channels.

Letters in names: S rows of a forward (Megatron's sequence), B batch, N or G heads, L latents, K channels of a key
without its rotary part, C of all of it or of its rotary part, D of a value.
"""

from collections.abc import Iterable
from typing import Any, override

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_mtp.decoding.kv_cache import Scope, attend


class StandIn(torch.nn.Module):
    """A module in the place of a trained one, `own`, whose names in checkpoints its tensors keep."""

    own: Any

    def sharded_state_dict(self, prefix: str = "", *rest: Any, **named: Any) -> Any:
        """Megatron's, of the trained module in its old place."""
        return self.own.sharded_state_dict(prefix, *rest, **named)


class CachedAttention(torch.nn.Module):
    """Megatron's core attention for a forward whose earlier rows are in a cache."""

    def __init__(self, scope: Scope, layer: int, scale: float, sink_N: Tensor | None = None) -> None:
        super().__init__()
        self.scope, self.layer, self.scale, self.sink_N = scope, layer, scale, sink_N

    def forward(
        self, query_SBNC: Tensor, key_SBGC: Tensor, value_SBGC: Tensor, attention_mask: None = None, **_: object
    ) -> Tensor:
        """[S, B, N * C]; the mask is the scope's."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query_SBNC, key_SBGC, value_SBGC))
        attended_BNSC = attend(self.scope, self.layer, query, key, value, self.scale, self.sink_N)
        return attended_BNSC.permute(2, 0, 1, 3).flatten(2)


class PositionedRotary(torch.nn.Module):
    """In the place of MLA's rotary embedding: every row has the position that the scope gives it."""

    def __init__(self, own: torch.nn.Module, scope: Scope, positions: int) -> None:
        super().__init__()
        made = own(positions)
        self.mscale = made[1] if isinstance(made, tuple) else None
        self.angles_L11C = made[0] if isinstance(made, tuple) else made
        self.scope = scope

    def get_rotary_seq_len(self, *_: object) -> int:
        """Megatron's modules call this; `forward` ignores the result."""
        return 0

    def forward(self, _: int, packed_seq: bool = False) -> Tensor | tuple[Tensor, float]:
        """Angles [S, B, 1, C] and, where the kind of embedding has one, its scale."""
        angles_SB1C = self.angles_L11C[self.scope.rows.positions_BR.transpose(0, 1), 0]
        return angles_SB1C if self.mscale is None else (angles_SB1C, self.mscale)


def attach(layers: Iterable[torch.nn.Module], scope: Scope, config: TransformerConfig, positions: int) -> None:
    """Give every transformer layer an attention over its own part of the cache.

    Raises:
        ValueError: a layer's attention cannot run over a cache of all keys.
    """
    for index, layer in enumerate(layers):
        attention = layer.self_attention
        if not isinstance(attention, Attention):
            raise ValueError(
                f"drafting needs attention layers, and layer {index + 1} has {type(attention).__name__}; draft with "
                "another model."
            )
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, index + 1):
            raise ValueError(
                "the model attends to a sliding window (--window-size), which drafting does not support; draft with "
                "another model."
            )
        if config.softmax_type != "vanilla" and isinstance(attention, MultiLatentAttention):
            raise ValueError(
                f"the model's latent attention has sinks ({config.softmax_type}), which drafting does not support; "
                "draft with another model."
            )
        sink_N = getattr(attention.core_attention, "softmax_offset", None)
        # from the configuration: TE's core attention does not keep the factor of its scores
        is_latent = isinstance(attention, MultiLatentAttention)
        scale = attention.softmax_scale if is_latent else config.softmax_scale
        scale = config.kv_channels**-0.5 if scale is None else scale
        attention.core_attention = CachedAttention(scope, index, scale, sink_N)
        if is_latent:
            attention.rotary_pos_emb = PositionedRotary(attention.rotary_pos_emb, scope, positions)


class Latents(StandIn):
    """In the place of the projection of latents to keys and values: remembers the latents, and makes nothing of them.

    Attributes:
        latents_SBL: of the forward that runs.
    """

    latents_SBL: Tensor

    def __init__(self, own: ColumnParallelLinear) -> None:
        super().__init__()
        self.own = own

    def forward(self, latents_SBL: Tensor) -> tuple[Tensor, None]:
        """Zeros in the shape of keys and values, which take no memory."""
        self.latents_SBL = latents_SBL
        return latents_SBL.new_zeros(1).expand(*latents_SBL.shape[:-1], self.own.weight.size(0)), None


class LatentAttention(CachedAttention):
    """That of an attention whose up-projection is `Latents`."""

    def __init__(self, core: CachedAttention, up: Latents, heads: int, key_channels: int) -> None:
        super().__init__(core.scope, core.layer, core.scale)
        self._up = (up,)  # a module of the attention, and none of its core
        self.heads, self.key_channels = heads, key_channels

    @property
    def up(self) -> Latents:
        """The up-projection."""
        return self._up[0]

    @override
    def forward(
        self, query_SBNC: Tensor, key_SBGC: Tensor, value_SBGC: Tensor, attention_mask: None = None, **_: object
    ) -> Tensor:
        """[S, B, N * D]; of the keys only the rotary part is used, which is the same in every head."""
        weight_NXL = self.up.own.weight.unflatten(0, (self.heads, -1))
        to_key_NKL, to_value_NDL = weight_NXL[:, : self.key_channels], weight_NXL[:, self.key_channels :]
        query_SBNK, turned_SBNC = query_SBNC.tensor_split([self.key_channels], dim=-1)
        latents_SB1L, rotary_SB1C = self.up.latents_SBL.unsqueeze(2), key_SBGC[:, :, :1, self.key_channels :]
        query = torch.cat((torch.einsum("sbnk,nkl->bnsl", query_SBNK, to_key_NKL), turned_SBNC.permute(1, 2, 0, 3)), -1)
        key = torch.cat((latents_SB1L, rotary_SB1C), dim=-1).permute(1, 2, 0, 3)
        attended_BNSL = attend(self.scope, self.layer, query, key, None, self.scale)[..., : latents_SB1L.size(-1)]
        return torch.einsum("bnsl,ndl->sbnd", attended_BNSL, to_value_NDL).flatten(2)


def cache_latents(layers: Iterable[torch.nn.Module]) -> None:
    """Cache latents instead of keys and values, in layers with cached multi-latent attention.

    An up-projection of another kind, such as Transformer Engine's with a norm in it, stays as it is.
    """
    for layer in layers:
        attention = layer.self_attention
        if isinstance(attention, MultiLatentAttention) and type(attention.linear_kv_up_proj) is ColumnParallelLinear:
            if attention.linear_kv_up_proj.bias is not None:
                continue
            up = Latents(attention.linear_kv_up_proj)
            heads, channels = attention.num_attention_heads_per_partition, attention.config.qk_head_dim
            attention.core_attention = LatentAttention(attention.core_attention, up, heads, channels)
            attention.linear_kv_up_proj = up
