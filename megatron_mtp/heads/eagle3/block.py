"""EAGLE-3 (Li et al., arXiv:2503.01840): a drafter with one layer that reads the trunk's states after three layers.

    f    = fc([state after layer a; after layer b; after layer c])       the feature of a position, [3 H -> H]
    x_1  = layer(embedding(t_{i+1}), f)                                   step 1 at position i
    x_k  = layer(embedding(t_{i+k}), x_{k-1})                             step k = 2 .. K
    the drafts' logits are output(norm(x_k))

The layer is Llama's, but computes queries, keys and values from [norm(embedding); norm(feature)], 2 H wide. Or its
attention is DeepSeek's, with latents computed from these 2 H. The residual is the feature itself, or its norm
(`norm_before_residual`, as in speculators). In training, step k reads the layer's own output of step k - 1, as in
decoding (the paper's training-time test), and attends to the same rows as an engine's k-th draft (`SharingAttention` of
shared_keys.py).

It is an MTP block with K passes of one layer. Letters in names: S sequence, B batch, H hidden.
"""

from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, override

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megatron_mtp.heads.eagle3.row import READS
from megatron_mtp.megatron.layer_config import layer_config
from megatron_mtp.model.drafter import layer_spec
from megatron_mtp.model.mtp import MultiTokenPredictionLayerSubmodules, whole_states
from megatron_mtp.model.norms import PortableNorm
from megatron_mtp.model.one_layer import OneLayer, OneLayerBlock
from megatron_mtp.model.shared_keys import WITH_CHAIN, ChainedLatentAttention
from megatron_mtp.spec.head import HeadSpec


class InputNorms(torch.nn.Module):
    """Norms of embedding and feature that replace a layer's input norm: feature [.., H] to [.., 2 H].

    Attributes:
        embedded_SBH: embeddings for the layer's next call.
        before_residual: whether the feature is already normalized, because it is the residual.
    """

    embedded_SBH: Tensor

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, before_residual: bool = False
    ) -> None:
        super().__init__()
        self.before_residual = before_residual
        self.enorm = PortableNorm(config, hidden_size, eps)
        self.hnorm = PortableNorm(config, hidden_size, eps)

    def forward(self, feature_SBH: Tensor) -> Tensor:
        """Return [norm(embedding); norm(feature)]."""
        normed_SBH = feature_SBH if self.before_residual else self.hnorm(feature_SBH)
        return torch.cat((self.enorm(self.embedded_SBH), normed_SBH), dim=-1)

    def begin(self, embedded_SBH: Tensor, feature_SBH: Tensor) -> Tensor:
        """Return the input of the layer's next call, which is its residual, and store the embeddings for that call."""
        self.embedded_SBH = embedded_SBH
        normed_SBH: Tensor = self.hnorm(feature_SBH) if self.before_residual else feature_SBH
        return normed_SBH


def _from_both(input_size: int, output_size: int, **others: Any) -> ColumnParallelLinear:
    """Build the projection to queries, keys and values from inputs of twice the width."""
    return ColumnParallelLinear(2 * input_size, output_size, **others)


def _to_half(input_size: int, output_size: int, **others: Any) -> RowParallelLinear:
    """Build the projection of the attention output to half the width."""
    return RowParallelLinear(input_size, output_size // 2, **others)


class LatentFromBoth(ChainedLatentAttention):
    """Latent attention with inputs of twice the width; Megatron sets the classes of its projections by name."""

    def __init__(
        self, config: MLATransformerConfig, submodules: MLASelfAttentionSubmodules, *args: Any, **others: Any
    ) -> None:
        wide = copy(config)
        wide.hidden_size = 2 * config.hidden_size
        super().__init__(wide, replace(submodules, linear_proj=_to_half), *args, **others)
        self.config = config


def of_both(layer: ModuleSpec, trunk: TransformerConfig) -> ModuleSpec:
    """Return the spec of a layer whose attention, latent or not, reads inputs of twice the width."""
    attention = layer.submodules.self_attention
    if attention.module is ChainedLatentAttention:
        wide = replace(attention, module=LatentFromBoth, params={**attention.params, "is_summed": trunk.qk_layernorm})
    else:
        wide = replace(attention, submodules=replace(attention.submodules, linear_qkv=_from_both))
    return ModuleSpec(layer.module, submodules=replace(layer.submodules, self_attention=wide))


class Eagle3Layer(OneLayer):
    """All weights of the drafter."""

    states_read = READS

    @override
    def feature(self, states_SBX: Tensor) -> Tensor:
        part, _ = self.fc(states_SBX)
        return whole_states(part, self.config, self.tp_group)

    @override
    def merge(self, embedded_SBH: Tensor, given_SBH: Tensor) -> Tensor:
        made: Tensor = self.tf_layer.input_layernorm.begin(embedded_SBH, given_SBH)
        return made


class Eagle3Block(OneLayerBlock):
    """K steps of the drafter."""

    @classmethod
    @override
    def submodules(cls, drafter: HeadSpec, config: TransformerConfig) -> MultiTokenPredictionLayerSubmodules:
        own = layer_config(config, drafter)
        norms = partial(InputNorms, before_residual=bool(drafter.own["drafter_norm_before_residual"]))
        spec = layer_spec(own, WITH_CHAIN, input_layernorm=norms)
        return MultiTokenPredictionLayerSubmodules(of_both(spec, config), PortableNorm, shares_kv=True)

    @override
    def make_layer(self, *args: Any) -> Eagle3Layer:
        return Eagle3Layer(self.config, self.drafted, *args)
