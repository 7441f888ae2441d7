"""Latent attention without depths: DeepSeek-V2 with a softmax router, and Youtu's dense layers."""

from megatron_mtp.checkpoint.families.blocks import MoE, Place, mla_rules
from megatron_mtp.checkpoint.families.deepseek import latent_attention
from megatron_mtp.checkpoint.families.family import Family, Layout
from megatron_mtp.checkpoint.families.flags import (
    UntrainableError,
    by_layer,
    common_flags,
    latent_flags,
    pairs,
    shared_flags,
    softmax_router_flags,
)
from megatron_mtp.checkpoint.families.numbered import layer_around, numbered_layers
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.families.trunk import PACKED, STORED_HEAD, frame, layers, moe, sparse_layers
from megatron_mtp.checkpoint.hf.config import HFConfig


def _experts(config: HFConfig, layout: Layout) -> MoE:
    return moe(config, layout, bias=None)


def _layer(config: HFConfig, layout: Layout, place: Place, has_experts: bool) -> list[Rule]:
    attention = mla_rules(place, latent_attention(config))
    return layer_around(attention, config, layout, place, has_experts, mla=True, experts=_experts)


def _rules(config: HFConfig, layout: Layout) -> list[Rule]:
    return frame(config, layout) + numbered_layers(config, layout, _layer)


def _dense_flags(config: HFConfig, layout: Layout) -> list[str]:
    width = config.integer("intermediate_size")
    sizes = common_flags(config, layout.depths, layers(config), width)
    return [*sizes, *latent_flags(config, latent_attention(config))]


def _flags(config: HFConfig, layout: Layout) -> list[str]:
    scaling = {"moe-router-topk-scaling-factor": config.number("routed_scaling_factor")}
    return [
        *_dense_flags(config, layout), *softmax_router_flags(config, normed=False), *pairs(scaling),
        *_group_flags(config), *shared_flags(config), *by_layer("moe-layer-freq", sparse_layers(config)),
    ]  # fmt: skip


def _group_flags(config: HFConfig) -> list[str]:
    """Flags of a choice among groups of experts, scored by their best one; Megatron takes `chosen // some` of them.

    Raises:
        UntrainableError: Megatron scores groups by more, or the config has a router that transformers ignores.
    """
    if config.flag("norm_topk_prob"):
        raise UntrainableError("a 'norm_topk_prob', which transformers ignores in this family and vLLM does not")
    method = config.keys.get("topk_method", "greedy")
    if method == "greedy":
        return []
    if method != "group_limited_greedy":
        raise UntrainableError(f"a router with 'topk_method' {method!r:.40}")
    groups, some = config.integer("n_group"), config.integer("topk_group")
    chosen = config.integer("num_experts_per_tok")
    if chosen // some != 1:
        raise UntrainableError(
            f"groups of experts that Megatron would score by their {chosen // some} best ('num_experts_per_tok' "
            f"{chosen} // 'topk_group' {some}) instead of 1"
        )
    return pairs({"moe-router-num-groups": groups, "moe-router-group-topk": some})


DEEPSEEK_V2 = Family(
    "DeepSeek-V2",
    "DeepSeek-V2, V2-Lite, Coder-V2",
    ("deepseek_v2",),
    _rules,
    features={**STORED_HEAD, **PACKED},
    flags=_flags,
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_interleave": True,
        "q_lora_rank": 1536,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.0,
    },
)
YOUTU = Family(
    "Youtu-LLM",
    "Youtu-LLM",
    ("youtu",),
    _rules,
    features=STORED_HEAD,
    flags=_dense_flags,
    defaults={
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_interleave": True,
        "q_lora_rank": 1536,
        "tie_word_embeddings": True,
    },
)
