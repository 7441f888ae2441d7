"""A dense transformer layer with little between its matrix products: the same modules' weights, fewer steps of Python.

A step of drafting has few rows, so that on a small model Megatron's bookkeeping around each product takes longer than
the product, and on a large one the product is bound by reading weights. `lean` returns a forward for the layers that it
knows (one tensor-parallel rank, no biases, rotary halves, no quantisation); the others run as Megatron's modules.

Letters in names: S rows of a forward, B batch, H hidden, G key heads, Q query heads of one key head, C channels.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.linalg import vector_norm

from megatron_mtp.drafting.cached_attention import CachedAttention, attend
from megatron_mtp.drafting.products import product
from megatron_mtp.model.portable import PortableNorm

Forward = Callable[[Tensor, "Angles | None"], Tensor]
Angles = tuple[Tensor, Tensor]
"""Cosine and signed sine of every row's rotary angles, each [S, B, 1, 1, C]; see `turns`."""


def short_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """RMSNorm as `PortableNorm` computes it, in half of torch's operations; other norms as they are."""
    if type(norm) is not PortableNorm or norm.bias is not None:
        return norm
    weight = norm.weight.detach() + (1 if norm.centred else 0)
    # x w / sqrt(|x|^2 / H + eps) = x (w sqrt(H)) / hypot(|x|, sqrt(eps H)), in float32 or better
    channels, dtype, exact = weight.numel(), weight.dtype, torch.promote_types(weight.dtype, torch.float32)
    scaled = weight.to(exact) * channels**0.5
    least = torch.tensor((norm.eps * channels) ** 0.5, dtype=exact, device=weight.device)

    def normalise(hidden: Tensor) -> Tensor:
        length = vector_norm(hidden, 2, -1, True, dtype=exact)
        return (hidden / torch.hypot(length, least) * scaled).to(dtype)

    return normalise


def turns(angles_L11C: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosine and signed sine of every position, [L, 2, 1, 1, C], where Megatron's modules make them in every layer.

    Turning (a, b) by an angle is (a, b) * cos + (b, a) * (-sin, sin), so that halves need only to change places.
    """
    sine = angles_L11C.sin()
    sine[..., : sine.size(-1) // 2].neg_()
    return torch.stack((angles_L11C.cos(), sine), dim=1).to(dtype)


def lean(layer: Any) -> Forward | None:
    """The layer's forward, hidden [S, B, H] to the same; None for a layer of another kind."""
    if not _is_plain(layer):
        return None
    attention, mlp = _attention(layer.self_attention), _mlp(layer.mlp)
    before_attention, before_mlp = short_norm(layer.input_layernorm), short_norm(layer.pre_mlp_layernorm)

    def forward(hidden_SBH: Tensor, angles: Angles | None) -> Tensor:
        hidden_SBH = hidden_SBH + attention(before_attention(hidden_SBH), angles)
        return hidden_SBH + mlp(before_mlp(hidden_SBH))

    return forward


def _is_plain(layer: Any) -> bool:
    """Whether what `lean` leaves out is indeed not there."""
    if type(layer) is not TransformerLayer or type(layer.self_attention) is not SelfAttention:
        return False
    config, attention, mlp = layer.config, layer.self_attention, layer.mlp
    if type(mlp) is not MLP or not isinstance(attention.core_attention, CachedAttention):
        return False
    products = (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)
    return bool(
        all(type(one) in (ColumnParallelLinear, RowParallelLinear) and one.bias is None for one in products)
        and config.tensor_model_parallel_size == 1
        and isinstance(layer.cross_attention, IdentityOp)
        and not any(
            getattr(config, name, None)
            for name in (
                "attention_output_gate",
                "no_rope_freq",
                "rotary_interleaved",
                "fp32_residual_connection",
                "apply_residual_connection_post_layernorm",
                "enable_hyper_connections",
                "use_te_activation_func",
                "activation_func_clamp_value",
                "glu_linear_offset",
                "fp8",
                "fp4",
            )
        )
        and attention._yarn_concentration_factor == 1.0
    )


def _attention(attention: SelfAttention) -> Callable[[Tensor, Angles | None], Tensor]:
    core = attention.core_attention
    to_qkv, to_hidden = product(attention.linear_qkv.weight), product(attention.linear_proj.weight)
    groups, channels = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
    heads = attention.num_attention_heads_per_partition
    norms = (attention.q_layernorm, attention.k_layernorm)

    def forward(hidden_SBH: Tensor, angles: Angles | None) -> Tensor:
        rows, batch, _ = hidden_SBH.shape
        mixed = to_qkv(hidden_SBH).view(rows, batch, groups, heads // groups + 2, channels)
        both, value = mixed[..., :-1, :], mixed[..., -1, :]
        if norms[0] is not None or norms[1] is not None:
            pair = zip(norms, (both[..., :-1, :], both[..., -1:, :]), strict=True)
            both = torch.cat([one if norm is None else norm(one) for norm, one in pair], dim=3)
        if angles is not None:
            both = _rotated(both, *angles)
        query_BNRC = both[..., :-1, :].permute(1, 2, 3, 0, 4).reshape(batch, heads, rows, channels)
        key_BGRC, value_BGRC = both[..., -1, :].permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)
        attended = attend(core.scope, core.layer, query_BNRC, key_BGRC, value_BGRC, core.scale)
        return to_hidden(attended.permute(2, 0, 1, 3).reshape(rows, batch, heads * channels))

    return forward


def _rotated(both: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    """Queries and keys [..., C] turned by their rows' angles, which may be of fewer channels."""
    turned = cosine.size(-1)
    front, rest = (both, None) if turned == both.size(-1) else (both[..., :turned], both[..., turned:])
    front = torch.addcmul(front * cosine, front.roll(turned // 2, -1), signed_sine)
    return front if rest is None else torch.cat((front, rest), dim=-1)


def _mlp(mlp: MLP) -> Callable[[Tensor], Tensor]:
    widen, narrow = product(mlp.linear_fc1.weight), product(mlp.linear_fc2.weight)
    activation, gated = mlp.config.activation_func, mlp.config.gated_linear_unit

    def forward(hidden_SBH: Tensor) -> Tensor:
        wide = widen(hidden_SBH)
        if gated:
            gate, up = wide.chunk(2, dim=-1)
            return narrow(activation(gate) * up)
        return narrow(activation(wide))

    return forward
