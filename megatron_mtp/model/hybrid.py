"""Hybrid models: a trunk on Megatron's `HybridModel` whose layers follow a pattern, and MTP layers that are stacks too.

    M*-/*-/*-    a trunk of Mamba-2, attention and MLP; two MTP layers of attention and MLP each

`arguments.py` explains the symbols. Without TE, the layers are portable ones with TE's names in checkpoints. Without a
GPU or the kernel libraries, `M` and `G` are the layers of recurrent.py.
"""

import copy
from dataclasses import replace
from typing import Any, override

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid import hybrid_layer_specs
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, parse_hybrid_pattern
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.training.models import hybrid as megatron_hybrid
from torch import Tensor

from megatron_mtp.megatron import machine
from megatron_mtp.megatron.patterns import SHARDED_STACK
from megatron_mtp.model.build import AttachingBuilder, Specs
from megatron_mtp.model.latent_attention import PLAIN_QUERIES
from megatron_mtp.model.mtp import MultiTokenPredictionLayerSubmodules, mtp_layer_submodules
from megatron_mtp.model.norms import PortableNorm
from megatron_mtp.model.recurrent import PortableGatedDeltaNet, PortableMamba
from megatron_mtp.model.specs import with_portable_modules
from megatron_mtp.model.swapped import with_modules


class PortableStack(HybridStack):
    """Megatron's stack of layers with a portable final norm; Megatron's needs TE."""

    def __init__(
        self, config: TransformerConfig, *args: Any, post_layer_norm: bool = True, post_process: bool = True, **kw: Any
    ) -> None:
        super().__init__(config, *args, post_layer_norm=False, post_process=post_process, **kw)
        self.post_layer_norm = post_layer_norm
        if post_process and post_layer_norm:
            self.final_norm = PortableNorm(config, config.hidden_size, config.layernorm_epsilon)


class DepthStack(HybridStack):
    """A stack with the interface of a transformer layer and without a final norm, which the MTP layer has."""

    def __init__(self, config: TransformerConfig, layer_number: int, vp_stage: int | None = None, **kw: Any) -> None:
        super().__init__(config, post_layer_norm=False, **kw)
        self.layer_number = layer_number
        self.config = copy.copy(config)
        self.config.recompute_granularity = None  # the MTP layer recomputes its whole forward itself
        for module in self.modules():
            if isinstance(module, TopKRouter):  # Megatron does not mark routers inside an MTP layer
                module.is_mtp_layer, module.layer_number = True, layer_number

    def forward(
        self, *, rotary_pos_cos: Tensor | None, rotary_pos_sin: Tensor | None, **inputs: Any
    ) -> tuple[Tensor, None]:
        """Return the hidden state [S, B, H] and no context; only inference passes tables of cosines and sines."""
        return super().forward(**inputs), None


def stack_spec(config: TransformerConfig) -> ModuleSpec:
    """Return the specs of the trunk's layers of every kind."""
    use_te = config.transformer_impl == "transformer_engine"
    submodules = _te_submodules(config) if use_te else _local_submodules(config)
    swaps: dict[Any, Any] = {}
    if not machine.mamba_works():
        swaps[MambaMixer] = PortableMamba
    if not machine.delta_rule_works():
        swaps[GatedDeltaNet] = PortableGatedDeltaNet
    submodules = with_modules(submodules, swaps)
    if use_te:
        return ModuleSpec(HybridStack, submodules=with_modules(submodules, PLAIN_QUERIES))
    return ModuleSpec(PortableStack, submodules=with_portable_modules(submodules, config))


def depth_submodules(
    trunk: ModuleSpec, pattern: str, config: TransformerConfig, architecture: str
) -> MultiTokenPredictionLayerSubmodules:
    """Return the spec of one MTP layer: a stack by the pattern, with the trunk's kinds of layers."""
    use_te = config.transformer_impl == "transformer_engine"
    stack = ModuleSpec(DepthStack, params={"layer_type_list": list(pattern)}, submodules=trunk.submodules)
    submodules = mtp_layer_submodules(stack, architecture, use_te, SHARDED_STACK)
    return submodules if use_te else with_portable_modules(submodules, config)


def _te_submodules(config: TransformerConfig) -> HybridStackSubmodules:
    """Return Megatron's TE layers, with the norms of queries and keys that its GPTs have and its hybrids lack."""
    submodules: HybridStackSubmodules = hybrid_layer_specs.hybrid_stack_spec.submodules
    if not config.qk_layernorm:
        return submodules
    norm, product = hybrid_layer_specs.TENorm, hybrid_layer_specs.TELayerNormColumnParallelLinear
    return replace(
        submodules,
        attention_layer=_with_parts(submodules.attention_layer, q_layernorm=norm, k_layernorm=norm),
        mla_layer=_with_parts(submodules.mla_layer, linear_q_up_proj=product, linear_kv_up_proj=product),
    )


def _with_parts(layer: ModuleSpec, **parts: Any) -> ModuleSpec:
    """Replace parts of the layer's attention."""
    attention = layer.submodules.self_attention
    attention = replace(attention, submodules=replace(attention.submodules, **parts))
    return replace(layer, submodules=replace(layer.submodules, self_attention=attention))


def _local_submodules(config: TransformerConfig) -> HybridStackSubmodules:
    """Return Megatron's layers without TE; norms have the checkpoint keys of TE's, which are part of projections."""
    backend = LocalSpecProvider()
    column, row = backend.column_parallel_linear(), backend.row_parallel_linear()
    parts = _gpt_parts(config, experts=False)
    norm, bias_dropout = parts.input_layernorm, get_bias_dropout_add
    mamba = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(in_proj=column, out_proj=row))
    delta = GatedDeltaNetSubmodules(in_proj=column, out_norm=norm, out_proj=row)
    return HybridStackSubmodules(
        mamba_layer=ModuleSpec(
            MambaLayer,
            submodules=MambaLayerSubmodules(
                norm, mamba, bias_dropout, sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"}
            ),
        ),
        gdn_layer=_mixing_layer(norm, ModuleSpec(GatedDeltaNet, submodules=delta), "in_proj"),
        attention_layer=_mixing_layer(norm, parts.self_attention, "linear_qkv"),
        mla_layer=_mixing_layer(norm, _gpt_parts(config, latent=True).self_attention),
        mlp_layer=ModuleSpec(
            MLPLayer, submodules=_channel_layer(parts, {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"})
        ),
        moe_layer=ModuleSpec(MoETransformerLayer, submodules=_channel_layer(_gpt_parts(config), {})),
    )


def _gpt_parts(config: TransformerConfig, experts: bool = True, latent: bool = False) -> TransformerLayerSubmodules:
    """Return the parts of a transformer layer in a GPT of this configuration."""
    return get_gpt_layer_local_submodules(
        num_experts=config.num_moe_experts if experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=latent,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm and not latent,
    )


def _mixing_layer(norm: Any, mixer: ModuleSpec, projection: str | None = None) -> ModuleSpec:
    """Return a layer that mixes positions; TE fuses the norm into `projection`."""
    keys = {} if projection is None else {"input_layernorm.": f"self_attention.{projection}.layer_norm_"}
    parts = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=mixer,
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=keys,
    )
    return ModuleSpec(TransformerLayer, submodules=parts)


def _channel_layer(parts: TransformerLayerSubmodules, keys: dict[str, str]) -> TransformerLayerSubmodules:
    """Return the second half of a transformer layer: MLP or MoE."""
    return TransformerLayerSubmodules(
        pre_mlp_layernorm=parts.pre_mlp_layernorm,
        mlp=parts.mlp,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=keys,
    )


class MTPHybridModelBuilder(AttachingBuilder, megatron_hybrid.HybridModelBuilder):
    """Builds a hybrid model with MTP layers and drafters."""

    kind = HybridModel

    @override
    def specs(self, vp_stage: int | None) -> Specs:
        config = self._model_config
        trunk = config.hybrid_stack_spec or stack_spec(config.transformer)
        pattern = parse_hybrid_pattern(config.hybrid_layer_pattern)
        is_missing = getattr(trunk.submodules, "dsa_layer", None) is IdentityOp
        if is_missing and Symbols.DS_ATTENTION in (config.hybrid_layer_pattern or ""):
            raise ValueError(
                f"--hybrid-layer-pattern has {Symbols.DS_ATTENTION} (sparse attention), which Megatron makes of "
                "Transformer Engine's modules; give --transformer-impl transformer_engine, on a CUDA device."
            )
        layers = {"hybrid_stack_spec": trunk, "hybrid_layer_pattern": pattern.main_pattern}
        if pattern.mtp_pattern is None:
            return layers, None
        own = config.mtp.mtp_architecture
        return layers, depth_submodules(trunk, pattern.mtp_pattern, config.transformer, own)
