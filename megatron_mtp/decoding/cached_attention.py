"""Attention over a cache, and modules that replace a trained model's attention with it.

`attach` puts a `CachedAttention` into every attention module of a loaded model. They share a `Scope`, which holds the
cache and the rows of the current forward pass. The surrounding modules and weights are unchanged.

Multi-latent attention caches latents, from which the keys and values of all heads are computed (arXiv:2405.04434, 2.1).
With c the latents of a row, a key is W_K c followed by the rotary part r that all heads share, and a value is W_V c.
Instead of keys and values, the cache holds c and r, and the projections move to the other side of the sums:

    (q, p) (W_K c, r) = (W_K^T q, p) (c, r)        sum_w a_w W_V c_w = W_V sum_w a_w c_w

So all heads attend to a single key head with L + C channels.

Letters in names: S or R rows of a forward pass (Megatron's sequence), W slots of the window, B batch, N or G heads, L
latents, K channels of a key without its rotary part, C of all of it or of its rotary part, D of a value.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, override

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp
from torch.nn.functional import pad, scaled_dot_product_attention

from megatron_mtp.decoding.kv_cache import KVCache
from megatron_mtp.decoding.rows import Rows, Window
from megatron_mtp.model.attention import with_sink


class Scope:
    """The cache and the rows of the next forward pass."""

    cache: KVCache
    rows: Rows

    def enter(self, cache: KVCache, rows: Rows) -> None:
        """Set the cache and rows to attend with, until the next call."""
        if rows is not getattr(self, "rows", None):
            self._masks: dict[tuple[torch.dtype, int, Window | None], Tensor] = {}
        self.cache, self.rows = cache, rows

    def mask(self, dtype: torch.dtype, heads: int, window: Window | None = None) -> Tensor:
        """Return the rows' mask, repeated for each of `heads` query heads per key head, [B, 1, heads * R, W]."""
        key = dtype, heads, window
        if key not in self._masks:
            self._masks[key] = self.rows.mask_within(window).to(dtype).repeat(1, 1, heads, 1)
        return self._masks[key]


def attend(
    scope: Scope,
    layer: int,
    query_BNRC: Tensor,
    key_BGRC: Tensor,
    value_BGRC: Tensor | None,
    scale: float,
    sink_N: Tensor | None = None,
    window: Window | None = None,
) -> Tensor:
    """Write the rows' keys and values to the cache and return the attention output, [B, N, R, C of the values].

    Args:
        value_BGRC: values; None if they are the keys.
        sink_N: sink scores of the heads; None without sinks.
        window: number of positions that a row attends to; None for all before it.
    """
    key_BGWC, value_BGWC = scope.cache.append(layer, key_BGRC, value_BGRC, scope.rows)
    return attended(scope, query_BNRC, key_BGWC, value_BGWC, scale, sink_N, window)


def attended(
    scope: Scope,
    query_BNRC: Tensor,
    key_BGWC: Tensor,
    value_BGWC: Tensor,
    scale: float,
    sink_N: Tensor | None = None,
    window: Window | None = None,
) -> Tensor:
    """Return the attention output over keys and values of the window [B, G, W, C] that are already cached.

    See `attend`.
    """
    packed = scope.rows
    if packed.padded is not None:
        query_BNRC = packed.unpacked(query_BNRC, rows=2)
    mask_B1RW = scope.mask(query_BNRC.dtype, query_BNRC.size(1) // key_BGWC.size(1), window)
    if sink_N is not None:
        query_BNRC, key_BGWC, value_BGWC = with_sink(query_BNRC, key_BGWC, value_BGWC, sink_N, scale)
        mask_B1RW = pad(mask_B1RW, (0, 1))
    batch, heads, rows, channels = query_BNRC.shape
    groups, value_channels = key_BGWC.size(1), value_BGWC.size(3)
    if heads != groups:  # grouped queries: treat the query heads of a group as additional rows of one head
        query_BNRC = query_BNRC.reshape(batch, groups, heads // groups * rows, channels)
    if value_channels != channels:  # torch's fast kernels need equal widths
        value_BGWC = pad(value_BGWC, (0, channels - value_channels))
    with _own_kernels(query_BNRC):
        made = scaled_dot_product_attention(query_BNRC, key_BGWC, value_BGWC, attn_mask=mask_B1RW, scale=scale)
    made_BNRC = made.reshape(batch, heads, rows, channels)[..., :value_channels]
    return made_BNRC if packed.padded is None else packed.packed(made_BNRC, rows=2)


@contextmanager
def _own_kernels(query_BNRC: Tensor) -> Iterator[None]:
    """Disable cuDNN in attention: torch prefers it on some GPUs, and it makes a plan for every new shape."""
    if not query_BNRC.is_cuda:
        yield
        return
    before = cudnn_sdp_enabled()
    enable_cudnn_sdp(False)
    try:
        yield
    finally:
        enable_cudnn_sdp(before)


class StandIn(torch.nn.Module):
    """Module that replaces a trained one, `own`, and keeps the names of its tensors in checkpoints."""

    own: Any

    def sharded_state_dict(self, prefix: str = "", *rest: Any, **named: Any) -> Any:
        """Return Megatron's entries, as if the trained module were in its old place."""
        return self.own.sharded_state_dict(prefix, *rest, **named)


class CachedAttention(torch.nn.Module):
    """Megatron's core attention for a forward pass whose earlier rows are cached."""

    def __init__(
        self, scope: Scope, layer: int, scale: float, sink_N: Tensor | None = None, window: Window | None = None
    ) -> None:
        super().__init__()
        self.scope, self.layer, self.scale, self.sink_N, self.window = scope, layer, scale, sink_N, window

    def forward(
        self, query_SBNC: Tensor, key_SBGC: Tensor, value_SBGC: Tensor, attention_mask: None = None, **_: object
    ) -> Tensor:
        """Return [S, B, N * C]; the mask is the scope's."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query_SBNC, key_SBGC, value_SBGC))
        attended_BNSC = attend(self.scope, self.layer, query, key, value, self.scale, self.sink_N, self.window)
        return attended_BNSC.permute(2, 0, 1, 3).flatten(2)


class PositionedRotary(torch.nn.Module):
    """Replaces MLA's rotary embedding: each row has the position set by the scope."""

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
        """Return angles [S, B, 1, C] and, if the embedding has one, its scale."""
        angles_SB1C = self.angles_L11C[self.scope.rows.positions_BR.transpose(0, 1), 0]
        return angles_SB1C if self.mscale is None else (angles_SB1C, self.mscale)


def attach(layers: Iterable[Any], scope: Scope, positions: int) -> None:
    """Give every transformer layer attention over its own part of the cache.

    Raises:
        ValueError: a layer's attention does not support a cache.
    """
    for index, layer in enumerate(layers):
        attention, config = layer.self_attention, layer.config
        if not isinstance(attention, Attention):
            raise ValueError(
                f"drafting needs attention layers, and layer {index + 1} has {type(attention).__name__}; draft with "
                "another model."
            )
        if config.softmax_type != "vanilla" and isinstance(attention, MultiLatentAttention):
            raise ValueError(
                f"the model's latent attention has sinks ({config.softmax_type}), which drafting does not support; "
                "draft with another model."
            )
        sink_N = getattr(attention.core_attention, "softmax_offset", None)
        # read from the configuration, because TE's core attention does not store its scale
        is_latent = isinstance(attention, MultiLatentAttention)
        scale = attention.softmax_scale if is_latent else config.softmax_scale
        scale = config.kv_channels**-0.5 if scale is None else scale
        is_windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer.layer_number)
        window = config.window_size if is_windowed else None
        attention.core_attention = CachedAttention(scope, index, scale, sink_N, window)
        if is_latent:
            attention.rotary_pos_emb = PositionedRotary(attention.rotary_pos_emb, scope, positions)


class Latents(StandIn):
    """Replaces the projection from latents to keys and values: stores the latents and computes nothing.

    Attributes:
        latents_SBL: latents of the current forward pass.
    """

    latents_SBL: Tensor

    def __init__(self, own: ColumnParallelLinear) -> None:
        super().__init__()
        self.own = own

    def forward(self, latents_SBL: Tensor) -> tuple[Tensor, None]:
        """Return zeros in the shape of keys and values, which take no memory."""
        self.latents_SBL = latents_SBL
        return latents_SBL.new_zeros(1).expand(*latents_SBL.shape[:-1], self.own.weight.size(0)), None


class LatentAttention(CachedAttention):
    """Cached attention over latents; its module's up-projection is `Latents`."""

    def __init__(self, core: CachedAttention, up: Latents, heads: int, key_channels: int) -> None:
        super().__init__(core.scope, core.layer, core.scale, window=core.window)
        self._up = (up,)  # in a tuple, so that torch does not register it as a submodule
        self.heads, self.key_channels = heads, key_channels

    @property
    def up(self) -> Latents:
        """The up-projection."""
        return self._up[0]

    @override
    def forward(
        self, query_SBNC: Tensor, key_SBGC: Tensor, value_SBGC: Tensor, attention_mask: None = None, **_: object
    ) -> Tensor:
        """Return [S, B, N * D]. Of the keys, only the rotary part is used, which is the same in every head."""
        weight_NXL = self.up.own.weight.unflatten(0, (self.heads, -1))
        to_key_NKL, to_value_NDL = weight_NXL[:, : self.key_channels], weight_NXL[:, self.key_channels :]
        query_SBNK, turned_SBNC = query_SBNC.tensor_split([self.key_channels], dim=-1)
        latents_SB1L, rotary_SB1C = self.up.latents_SBL.unsqueeze(2), key_SBGC[:, :, :1, self.key_channels :]
        query = torch.cat((torch.einsum("sbnk,nkl->bnsl", query_SBNK, to_key_NKL), turned_SBNC.permute(1, 2, 0, 3)), -1)
        key = torch.cat((latents_SB1L, rotary_SB1C), dim=-1).permute(1, 2, 0, 3)
        attended_BNSL = attend(self.scope, self.layer, query, key, None, self.scale, window=self.window)[
            ..., : latents_SB1L.size(-1)
        ]
        return torch.einsum("bnsl,ndl->sbnd", attended_BNSL, to_value_NDL).flatten(2)


def cache_latents(layers: Iterable[torch.nn.Module]) -> None:
    """Cache latents instead of keys and values, in layers with cached multi-latent attention.

    An up-projection of another kind, such as Transformer Engine's with a fused norm, is left unchanged.
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
