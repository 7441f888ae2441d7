"""Attention over a cache, in the place of the core attention that a model was trained with.

`attach` puts a `CachedAttention` into every attention module of a loaded model. They share a `Scope`, which holds the
cache and the rows of the current forward. The modules around them, and their weights, are those of training.

Letters in names: S rows of a forward (Megatron's sequence), B batch, N query heads, G key heads, C channels, W slots.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp
from torch.nn.functional import pad, scaled_dot_product_attention

from megatron_mtp.decoding.kv_cache import Scope
from megatron_mtp.model.portable import with_sink


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
    packed = scope.rows
    key_BGWC, value_BGWC = scope.cache.append(layer, key_BGRC, value_BGRC, packed)
    if packed.padded is not None:
        query_BNRC = packed.unpacked_heads(query_BNRC)
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
        attended = scaled_dot_product_attention(query_BNRC, key_BGWC, value_BGWC, attn_mask=mask_B1RW, scale=scale)
    attended = attended.reshape(batch, heads, rows, channels)[..., :value_channels]
    return attended if packed.padded is None else packed.packed_heads(attended)


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
