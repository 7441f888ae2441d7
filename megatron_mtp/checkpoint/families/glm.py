"""GLM-4.5, 4.6 and 4.7: grouped-query attention and experts, with DeepSeek's names for the depths."""

from megatron_mtp.checkpoint.families.blocks import (
    GQA,
    Frame,
    Place,
    depth_frame,
    depth_layer,
    gqa_rules,
    mlp_rules,
    moe_rules,
    norm_rules,
    split_mlp_rules,
)
from megatron_mtp.checkpoint.families.family import Family, Layout
from megatron_mtp.checkpoint.families.flags import moe_flags
from megatron_mtp.checkpoint.families.trunk import (
    COPIES,
    PACKED,
    STORED_HEAD,
    frame,
    gqa,
    is_dense,
    layers,
    moe,
    trunk_places,
)
from megatron_mtp.checkpoint.hf_config import HFConfig
from megatron_mtp.checkpoint.rules import Rule


def _attention(config: HFConfig) -> GQA:
    return gqa(config, bias=config.flag("attention_bias"), norms=config.flag("use_qk_norm"))


def _rules(config: HFConfig, layout: Layout) -> list[Rule]:
    count, dense = layers(config), config.integer("first_k_dense_replace", default=0, least=0)
    rules = frame(
        config,
        layout,
        embedding_copies=lambda k: f"model.layers.{count + k}.embed_tokens.weight",
        head_copies=lambda k: f"model.layers.{count + k}.shared_head.head.weight",
    )
    for index, place in enumerate(trunk_places(count)):
        rules += _layer(config, layout, place, index >= dense)
    for depth in range(layout.depths):
        hf = f"model.layers.{count + depth}."
        names = Frame.under(hf, "enorm", "hnorm", "eh_proj", "shared_head.norm")
        rules += depth_frame(depth, config.integer("hidden_size"), names)
        rules += _layer(config, layout, Place(hf, depth_layer(depth)), True)
    return rules


def _layer(config: HFConfig, layout: Layout, place: Place, has_experts: bool) -> list[Rule]:
    attention = _attention(config)
    one = has_experts and is_dense(config)
    rules = norm_rules(place, attention.hidden, mla=False, moe=has_experts and not one) + gqa_rules(place, attention)
    if one:
        return rules + split_mlp_rules(place, attention.hidden, config.integer("intermediate_size"))
    if has_experts:
        return rules + moe_rules(place, moe(config, layout))
    return rules + mlp_rules(
        f"{place.hf}mlp.", f"{place.mcore}mlp.", attention.hidden, config.integer("intermediate_size")
    )


def _flags(config: HFConfig, layout: Layout) -> list[str]:
    return moe_flags(config, _attention(config), layout.depths)


GLM4_MOE = Family(
    "GLM-4 MoE",
    _rules,
    depth_pattern=r"\.layers\.(\d+)\.eh_proj\.weight$",
    features={**STORED_HEAD, **COPIES, **PACKED},
    flags=_flags,
)
