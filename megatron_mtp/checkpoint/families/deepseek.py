"""DeepSeek-V3, R1 and Kimi-K2: latent attention, experts, and depths as layers N, N+1, ... of the model."""

from megatron_mtp.checkpoint.families.blocks import (
    MLA,
    Frame,
    Place,
    depth_frame,
    depth_layer,
    mla_rules,
    mlp_rules,
    moe_rules,
    norm_rules,
    split_mlp_rules,
)
from megatron_mtp.checkpoint.families.family import Family, Layout
from megatron_mtp.checkpoint.families.flags import mla_flags
from megatron_mtp.checkpoint.families.trunk import (
    COPIES,
    PACKED,
    STORED_HEAD,
    frame,
    is_dense,
    layers,
    moe,
    trunk_places,
)
from megatron_mtp.checkpoint.hf_config import HFConfig
from megatron_mtp.checkpoint.rules import Rule

NESTED = {"nested": r"^language_model\.model\."}
"""Kimi-K2.5 keeps the text model beside a vision tower."""


def latent_attention(config: HFConfig) -> MLA:
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
    count, dense = layers(config), config.integer("first_k_dense_replace", default=0, least=0)
    outer = "language_model." if layout.has("nested") else ""
    prefix = f"{outer}model."
    rules = frame(
        config,
        layout,
        prefix,
        head=f"{outer}lm_head.weight",
        embedding_copies=lambda k: f"{prefix}layers.{count + k}.embed_tokens.weight",
        head_copies=lambda k: f"{prefix}layers.{count + k}.shared_head.head.weight",
    )
    for index, place in enumerate(trunk_places(count, prefix)):
        rules += _layer(config, layout, place, index >= dense)
    for depth in range(layout.depths):
        hf = f"{prefix}layers.{count + depth}."
        names = Frame.under(hf, "enorm", "hnorm", "eh_proj", "shared_head.norm")
        rules += depth_frame(depth, config.integer("hidden_size"), names)
        rules += _layer(config, layout, Place(hf, depth_layer(depth)), True)
    return rules


def _layer(config: HFConfig, layout: Layout, place: Place, has_experts: bool) -> list[Rule]:
    hidden = config.integer("hidden_size")
    one = has_experts and is_dense(config)
    rules = norm_rules(place, hidden, mla=True, moe=has_experts and not one)
    rules += mla_rules(place, latent_attention(config))
    if one:
        return rules + split_mlp_rules(place, hidden, config.integer("intermediate_size"))
    if has_experts:
        return rules + moe_rules(place, moe(config, layout))
    width = config.integer("intermediate_size")
    return rules + mlp_rules(f"{place.hf}mlp.", f"{place.mcore}mlp.", hidden, width)


def _flags(config: HFConfig, layout: Layout) -> list[str]:
    return mla_flags(config, latent_attention(config), layout.depths)


DEEPSEEK_V3 = Family(
    "DeepSeek-V3",
    _rules,
    depth_pattern=r"\.layers\.(\d+)\.eh_proj\.weight$",
    features={**STORED_HEAD, **COPIES, **PACKED, **NESTED},
    carried=(r"^(vision_tower|mm_projector)\.",),
    flags=_flags,
)
