"""Hunyuan 3: grouped-query attention and experts; depths are layers N, N+1, ..., with DeepSeek's frame."""

from megatron_mtp.checkpoint.families.blocks import MoE, Place, gqa_rules
from megatron_mtp.checkpoint.families.family import Depths, Family, Layout
from megatron_mtp.checkpoint.families.flags import UntrainableError, moe_flags
from megatron_mtp.checkpoint.families.llama import qwen3_attention
from megatron_mtp.checkpoint.families.numbered import layer_around, numbered_layers
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.families.trunk import PACKED, STORED_HEAD, frame, moe
from megatron_mtp.checkpoint.hf.config import HFConfig


def _experts(config: HFConfig, layout: Layout) -> MoE:
    return moe(config, layout, shared_name="shared_mlp", bias="expert_bias", router="router.gate")


def _layer(config: HFConfig, layout: Layout, place: Place, has_experts: bool) -> list[Rule]:
    attention = gqa_rules(place, qwen3_attention(config))
    return layer_around(attention, config, layout, place, has_experts, mla=False, experts=_experts)


def _rules(config: HFConfig, layout: Layout) -> list[Rule]:
    return frame(config, layout) + numbered_layers(config, layout, _layer, final="final_layernorm")


def _flags(config: HFConfig, layout: Layout) -> list[str]:
    attention = qwen3_attention(config)
    if attention.out_bias or config.flag("mlp_bias"):
        raise UntrainableError(
            "biases of the output projection or the MLP, which Megatron has only together with all others"
        )
    router = {"routed_scaling_factor": config.number("router_scaling_factor"), "norm_topk_prob": True}
    return moe_flags(config.with_defaults(router), attention, layout.depths)


HUNYUAN = Family(
    "Hunyuan 3",
    "Hy3",
    ("hy_v3",),
    _rules,
    depths=Depths(r"\.layers\.(\d+)\.eh_proj\.weight$"),
    features={**STORED_HEAD, **PACKED},
    flags=_flags,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11158840.0,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "router_scaling_factor": 2.826,
        "first_k_dense_replace": 1,
    },
)
