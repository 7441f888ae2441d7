"""Multi-latent attention over cached latents, of which all heads' keys and values are made (arXiv:2405.04434, 2.1).

A key is W_K c beside the rotary part r that all heads share, and a value is W_V c, with c the latents of a row. Instead
of keys and values the cache holds c and r, and the projections move to the other side of the sums:

    (q, p) (W_K c, r) = (W_K^T q, p) (c, r)        sum_w a_w W_V c_w = W_V sum_w a_w c_w

So all heads attend to one key head of L + C channels. The modules around it are those of training.

Letters in names: S rows of a forward, B batch, N or G heads, L latents, K channels of a key without its rotary part,
C of all of it or of its rotary part, D of a value.
"""

from collections.abc import Iterable
from typing import override

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor

from megatron_mtp.decoding.cached_attention import CachedAttention, StandIn, attend


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
