"""Fast forward of a dense layer: the same weights with little Python overhead between the matrix products.

A decoding step has few rows. On a small model, Megatron's bookkeeping around each product then takes longer than the
product; on a large one, the product takes as long as reading its weight. `lean` returns a forward for a transformer
layer, and for a hybrid model's attention, MLP, Mamba-2 or Gated DeltaNet layer: without biases, with rotary halves,
without quantization or sequence parallelism. All others run as Megatron's modules, as do experts within their layer.

On a GPU, each operation between the products is a kernel that takes longer to launch than to run. There, torch's
compiler fuses a sum with the norm after it, a gated activation, and, in two kernels, the rotation of queries and keys
with the cache write (`fused`).

The settings that this file supports are listed. If any other differs from Megatron's default, the layer runs as
Megatron's module, and a warning names the setting. So a new option of Megatron can make drafting slower, but never
wrong.

Letters in names: S rows of a forward pass, B batch, H hidden, G key heads, Q query heads per key head, C channels.
"""

import logging
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.distributed import all_reduce
from torch.linalg import vector_norm

from megatron_mtp.decoding.block_tables import Places, write_rows
from megatron_mtp.decoding.cached_attention import CachedAttention, StandIn, attended
from megatron_mtp.megatron.layer_settings import OTHER_PARTS, WITHOUT_EFFECT
from megatron_mtp.megatron.machine import why_no_launcher, why_not
from megatron_mtp.model.norms import PortableNorm
from megatron_mtp.model.shared_keys import RepeatedAttention

Forward = Callable[[Tensor, "Angles | None"], Tensor]
Multiply = Callable[[Tensor], Tensor]
Product = Callable[[Tensor], Multiply]
"""A weight to its product: x [..., in] to x @ weight.T [..., out]."""

Angles = tuple[Tensor, Tensor]
"""Cosine and signed sine of every row's rotary angles, each [S, B, 1, 1, C]; see `turns`."""

READ = frozenset(
    "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels softmax_scale "
    "gated_linear_unit activation_func normalization layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm "
    "add_bias_linear add_qkv_bias window_size window_attn_skip_freq tensor_model_parallel_size".split()
)
"""Settings whose values are in the modules that `lean` reads: sizes, norms, activation, scale; it refuses biases."""

_logger = logging.getLogger(__name__)


def short_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """Return an RMSNorm like `PortableNorm` with half as many operations.

    Other norms, and all on CUDA, are unchanged.
    """
    if type(norm) is not PortableNorm or norm.bias is not None or norm.weight.is_cuda:
        return norm
    weight = norm.weight.detach() + (1 if norm.centered else 0)
    # x w / sqrt(|x|^2 / H + eps) = x (w sqrt(H)) / hypot(|x|, sqrt(eps H)), in float32 or better
    channels, dtype, exact = weight.numel(), weight.dtype, torch.promote_types(weight.dtype, torch.float32)
    scaled = weight.to(exact) * channels**0.5
    least = torch.tensor((norm.eps * channels) ** 0.5, dtype=exact, device=weight.device)

    def normalize(hidden: Tensor) -> Tensor:
        length = vector_norm(hidden, 2, -1, True, dtype=exact)
        return (hidden / torch.hypot(length, least) * scaled).to(dtype)

    return normalize


def turns(angles_L11C: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Return cosine and signed sine of every position, [L, 2, 1, 1, C]; Megatron's modules compute them in every layer.

    Rotating (a, b) by an angle is (a, b) * cos + (b, a) * (-sin, sin), so the halves are only swapped.

    Args:
        scale: YaRN's factor of both.
    """
    sine = angles_L11C.sin()
    sine[..., : sine.size(-1) // 2].neg_()
    return (torch.stack((angles_L11C.cos(), sine), dim=1) * scale).to(dtype)


def lean(layer: Any, product: Product) -> Forward | None:
    """Return the layer's fast forward with these products, hidden [S, B, H] to the same; None if not supported."""
    if not _is_plain(layer) or not _is_known(layer.config):
        return None
    norms: list[Any] = []
    parts: list[Forward] = []
    if (mixer := mixer_of(layer)) is not None:
        norms, parts = [norm_before(layer)], [_mixed(mixer, product)]
    elif attention_of(layer) is not None:
        norms, parts = [layer.input_layernorm], [_attention(layer.self_attention, product)]
    if not isinstance(getattr(layer, "mlp", None), IdentityOp | None):
        make = _mlp if mlp_of(layer) is not None else _experts
        norms, parts = [*norms, layer.pre_mlp_layernorm], [*parts, make(layer.mlp, product)]
    (normalize, *later), (first, *others) = map(short_norm, norms), parts
    sum_and_norm = fused(_sum_and_norm, next(layer.parameters()))

    def forward(hidden_SBH: Tensor, angles: Angles | None) -> Tensor:
        made_SBH = first(normalize(hidden_SBH), angles)
        for norm, part in zip(later, others, strict=True):
            hidden_SBH, normed_SBH = sum_and_norm(hidden_SBH, made_SBH, norm)
            made_SBH = part(normed_SBH, angles)
        return hidden_SBH + made_SBH

    return forward


def fused(function: Callable[..., Any], weight: Tensor) -> Callable[..., Any]:
    """Compile a function between products into few kernels on a GPU, for any number of rows."""
    can_launch = weight.is_cuda and why_not("triton") is None and why_no_launcher() is None
    return _compiled(function) if can_launch else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile the function with torch; if that fails, return the function itself after one warning."""
    way = torch.compile(function, dynamic=True)

    def call(*given: Any) -> Any:
        nonlocal way
        try:
            return way(*given)
        except Exception as error:  # inductor, Triton and drivers raise any type
            if way is function:
                raise
            _logger.warning("torch.compile fails, so decoding is slower: %s", f"{error}"[:300])
            way = function
            return function(*given)

    return call


def _sum_and_norm(hidden: Tensor, made: Tensor, normalize: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    hidden = hidden + made
    return hidden, normalize(hidden)


def mixer_of(layer: Any) -> Any:
    """Return the replacement of a layer's recurrence (recurrent_layers.py); None for other layers."""
    mixer = layer.mixer if isinstance(layer, MambaLayer) else layer.self_attention
    return mixer if isinstance(mixer, StandIn) else None


def norm_before(layer: Any) -> Any:
    """Return the norm before a layer's recurrence or attention."""
    return layer.norm if isinstance(layer, MambaLayer) else layer.input_layernorm


def attention_of(layer: Any) -> Any:
    """Return the attention of a layer; None if it has none."""
    found = getattr(layer, "self_attention", None)
    return found if isinstance(found, Attention) else None


def mlp_of(layer: Any) -> Any:
    """Return the MLP of a layer; None if it has none."""
    found = getattr(layer, "mlp", None)
    return found if isinstance(found, MLP) else None


def _is_plain(layer: Any) -> bool:
    """Return whether the layer has only the modules that `lean` supports."""
    if type(layer) is MambaLayer:
        return _is_plain_part(layer.mixer)
    known = type(layer) in (TransformerLayer, MLPLayer) and isinstance(layer.cross_attention, IdentityOp)
    return known and _is_plain_part(layer.self_attention) and _is_plain_part(layer.mlp)


def _is_plain_part(part: Any) -> bool:
    """Return whether its attention, recurrence, MLP or experts are plain."""
    if type(part) in (SelfAttention, RepeatedAttention):
        return isinstance(part.core_attention, CachedAttention) and _are_plain(part.linear_qkv, part.linear_proj)
    if type(part) is MLP:
        return _are_plain(part.linear_fc1, part.linear_fc2)
    if isinstance(part, StandIn) and hasattr(part.own, "in_proj"):
        return _are_plain(part.own.in_proj, part.own.out_proj)
    return type(part) is IdentityOp or _are_experts(part)


def _are_experts(mlp: Any) -> bool:
    """Return whether it is a layer of experts or its replacement; with biases it has its own sum."""
    own = getattr(mlp, "own", mlp)
    return isinstance(own, MoELayer) and not own.config.add_bias_linear


def _are_plain(*products: Any) -> bool:
    return all(type(one) in (ColumnParallelLinear, RowParallelLinear) and one.bias is None for one in products)


def _is_known(config: TransformerConfig) -> bool:
    unknown = unknown_settings(config)
    if unknown:
        _warn(tuple(unknown))
    return not unknown


def unknown_settings(config: TransformerConfig) -> list[str]:
    """Return the names of settings that differ from Megatron's defaults and that `lean` does not support."""
    defaults = default_settings(config)
    return [
        name
        for name, value in vars(config).items()
        if name not in READ | WITHOUT_EFFECT
        and not name.startswith(OTHER_PARTS)
        and (name not in defaults or value != defaults[name])
    ]


def default_settings(config: TransformerConfig) -> dict[str, Any]:
    """Return Megatron's defaults of a configuration's fields."""
    return {
        one.name: one.default if one.default_factory is MISSING else one.default_factory() for one in fields(config)
    }


@cache
def _warn(unknown: tuple[str, ...]) -> None:
    """Warn once for the same settings."""
    _logger.warning(
        "drafting runs Megatron's own layers, which are slower: the model sets %s, which the short ones do not know",
        ", ".join(unknown),
    )


def _summed(linear: RowParallelLinear, product: Product) -> Multiply:
    """Sum a product whose terms are divided over tensor-parallel ranks."""
    multiply, group = product(linear.weight), linear.tp_group
    if group.size() == 1:
        return multiply

    def multiply_and_sum(hidden: Tensor) -> Tensor:
        made = multiply(hidden)
        all_reduce(made, group=group)
        return made

    return multiply_and_sum


def _attention(attention: SelfAttention, product: Product) -> Forward:
    core, norms = attention.core_attention, (attention.q_layernorm, attention.k_layernorm)
    to_qkv, to_hidden = product(attention.linear_qkv.weight), _summed(attention.linear_proj, product)
    groups, channels = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
    heads = attention.num_attention_heads_per_partition
    keep = fused(_kept_heads, attention.linear_qkv.weight)

    def forward(hidden_SBH: Tensor, angles: Angles | None) -> Tensor:
        rows, batch, _ = hidden_SBH.shape
        mixed_SBGQC = to_qkv(hidden_SBH).view(rows, batch, groups, heads // groups + 2, channels)
        caches = core.scope.cache.take(core.layer, groups, channels, mixed_SBGQC)
        query_BNRC = keep(mixed_SBGQC, norms, angles, caches, core.scope.rows.memory_places)
        key_BGWC, value_BGWC = map(core.scope.rows.window_of, caches)
        attended_BNRC = attended(core.scope, query_BNRC, key_BGWC, value_BGWC, core.scale, window=core.window)
        return to_hidden(attended_BNRC.permute(2, 0, 1, 3).reshape(rows, batch, heads * channels))

    return forward


def _kept_heads(
    mixed_SBGQC: Tensor,
    norms: tuple[Any, Any],
    angles: Angles | None,
    caches: tuple[Tensor, Tensor],
    places: Places,
) -> Tensor:
    """Return queries [B, N, R, C] of a product with queries, keys and values; store keys and values in the caches."""
    both, value = mixed_SBGQC[..., :-1, :], mixed_SBGQC[..., -1, :]
    if norms[0] is not None or norms[1] is not None:
        pair = zip(norms, (both[..., :-1, :], both[..., -1:, :]), strict=True)
        both = torch.cat([one if norm is None else norm(one) for norm, one in pair], dim=3)
    if angles is not None:
        both = rotated(both, *angles)
    for cache_NGSC, new_SBGC in zip(caches, (both[..., -1, :], value), strict=True):
        write_rows(cache_NGSC, new_SBGC.permute(1, 2, 0, 3), places)
    return both[..., :-1, :].permute(1, 2, 3, 0, 4).flatten(1, 2)


def rotated(both: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    """Rotate queries and keys [..., C] by their rows' angles, which may cover only some channels."""
    turned = cosine.size(-1)
    front, rest = (both, None) if turned == both.size(-1) else (both[..., :turned], both[..., turned:])
    front = torch.addcmul(front * cosine, front.roll(turned // 2, -1), signed_sine)
    return front if rest is None else torch.cat((front, rest), dim=-1)


def _mixed(mixer: Any, product: Product) -> Forward:
    widen, narrow = product(mixer.own.in_proj.weight), _summed(mixer.own.out_proj, product)
    return lambda hidden_SBH, _: narrow(mixer.between(widen(hidden_SBH)))


def _mlp(mlp: MLP, product: Product) -> Forward:
    widen, narrow = product(mlp.linear_fc1.weight), _summed(mlp.linear_fc2, product)
    activate = activation(mlp.config, mlp.linear_fc1.weight)
    return lambda hidden_SBH, _: narrow(activate(widen(hidden_SBH)))


def _experts(experts: Any, _: Product) -> Forward:
    """Return Megatron's module, or its replacement."""
    return lambda hidden_SBH, _: experts(hidden_SBH)[0]


def activation(config: TransformerConfig, weight: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return the activation of an MLP: [..., F], or [..., 2 F] for a gated unit, to [..., F].

    Args:
        weight: weight of either product; its device decides whether a gated unit is compiled. None for no compilation.
    """
    activate = config.activation_func
    if not config.gated_linear_unit:
        return activate

    gated = _gated if weight is None else fused(_gated, weight)
    return lambda wide: gated(wide, activate)


def _gated(wide: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = wide.chunk(2, dim=-1)
    return activate(gate) * up
