"""DeepSeek-V3, R1, Kimi-K2, GLM-4.7-Flash: latent attention, experts, and depths as layers N, N+1, ... of the model."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

from megatron_mtp.checkpoint.families.blocks import MLA, Place, mla_rules
from megatron_mtp.checkpoint.families.family import Depths, Family, Layout
from megatron_mtp.checkpoint.families.flags import mla_flags
from megatron_mtp.checkpoint.families.numbered import frame_with_copies, layer_around, numbered_layers
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.families.trained import TrainedForm, expert_keys
from megatron_mtp.checkpoint.families.trunk import COPIES, PACKED, STORED_HEAD
from megatron_mtp.checkpoint.hf.config import HFConfig

NESTED = {"nested": r"^language_model\.model\."}
"""Kimi-K2.5 keeps the text model beside a vision tower."""


def latent_attention(config: HFConfig) -> MLA:
    """Sizes of multi-head latent attention (arXiv:2405.04434), from the config."""
    return MLA(
        hidden=config.integer("hidden_size"),
        heads=config.integer("num_attention_heads"),
        query_rank=config.integer("q_lora_rank") if config.has("q_lora_rank") else None,
        key_rank=config.integer("kv_lora_rank"),
        content=config.integer("qk_nope_head_dim"),
        position=config.integer("qk_rope_head_dim"),
        value=config.integer("v_head_dim"),
    )


def _rules(config: HFConfig, layout: Layout) -> list[Rule]:
    outer = "language_model." if layout.has("nested") else ""
    prefix = f"{outer}model."
    rules = frame_with_copies(config, layout, prefix, f"{outer}lm_head.weight")
    return rules + numbered_layers(config, layout, _layer, prefix)


def _layer(config: HFConfig, layout: Layout, place: Place, has_experts: bool) -> list[Rule]:
    return layer_around(mla_rules(place, latent_attention(config)), config, layout, place, has_experts, mla=True)


def _flags(config: HFConfig, layout: Layout) -> list[str]:
    return mla_flags(config, latent_attention(config), layout.depths)


def _trained_keys(args: Namespace) -> dict[str, Any]:
    if not args.multi_latent_attention or not args.qk_layernorm:
        raise ValueError("--family deepseek_v3 needs a model of --multi-latent-attention with --qk-layernorm.")
    return {
        "num_key_value_heads": args.num_attention_heads,
        "q_lora_rank": args.q_lora_rank,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_nope_head_dim": args.qk_head_dim,
        "qk_rope_head_dim": args.qk_pos_emb_head_dim,
        "qk_head_dim": args.qk_head_dim + args.qk_pos_emb_head_dim,
        "head_dim": args.qk_pos_emb_head_dim,
        "v_head_dim": args.v_head_dim,
        "rope_interleave": True,
        **expert_keys(args),
    }


DEEPSEEK_V3 = Family(
    "DeepSeek-V3",
    "DeepSeek-V3, R1, Kimi-K2, Kimi-K2.5",
    ("deepseek_v3", "kimi_k2", "kimi_k25"),
    _rules,
    depths=Depths(r"\.layers\.(\d+)\.eh_proj\.weight$"),
    features={**STORED_HEAD, **COPIES, **PACKED, **NESTED},
    carried=(r"^(vision_tower|mm_projector)\.",),
    flags=_flags,
    trained=TrainedForm(
        models="latent attention",
        engines=("transformers", "vLLM", "SGLang"),
        architecture="DeepseekV3ForCausalLM",
        keys=_trained_keys,
        fits=lambda args, depths: bool(args.multi_latent_attention),
    ),
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_interleave": True,
        "q_lora_rank": 1536,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    title="GLM-4 MoE Lite",
    published="GLM-4.7-Flash",
    model_types=("glm4_moe_lite",),
    features={**STORED_HEAD, **COPIES, **PACKED},
    carried=(),
    trained=None,
    defaults={
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_interleave": True,
        "q_lora_rank": 768,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    },
)
