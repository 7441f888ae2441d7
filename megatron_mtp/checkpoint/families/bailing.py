"""Ling and Ring (Bailing-MoE V2): fused queries, keys and values, DeepSeek's router; depths as layers N, N+1, ..."""

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
)
from megatron_mtp.checkpoint.families.family import Family, Layout
from megatron_mtp.checkpoint.families.flags import moe_flags
from megatron_mtp.checkpoint.families.trunk import STORED_HEAD, frame, gqa, layers, moe, trunk_places
from megatron_mtp.checkpoint.hf_config import HFConfig
from megatron_mtp.checkpoint.rules import Rule


def _attention(config: HFConfig) -> GQA:
    return gqa(
        config,
        bias=config.flag("use_qkv_bias"),
        out_bias=config.flag("use_bias"),
        norms=config.flag("use_qk_norm"),
        fused=True,
        attention="attention",
        output="dense",
        query_norm="query_layernorm",
        key_norm="key_layernorm",
    )


def _rules(config: HFConfig, layout: Layout) -> list[Rule]:
    count, dense = layers(config), config.integer("first_k_dense_replace", default=0, least=0)
    rules = frame(config, layout, embedding="word_embeddings.weight")
    for index, place in enumerate(trunk_places(count)):
        rules += _layer(config, layout, place, index >= dense)
    for depth in range(layout.depths):
        hf = f"model.layers.{count + depth}."
        names = Frame.under(hf, "enorm", "hnorm", "eh_proj", "final_layernorm")
        rules += depth_frame(depth, config.integer("hidden_size"), names)
        rules += _layer(config, layout, Place(hf, depth_layer(depth)), True)
    return rules


def _layer(config: HFConfig, layout: Layout, place: Place, has_experts: bool) -> list[Rule]:
    attention = _attention(config)
    rules = norm_rules(place, attention.hidden, mla=False, moe=has_experts) + gqa_rules(place, attention)
    if has_experts:
        return rules + moe_rules(place, moe(config, layout, bias="gate.expert_bias"))
    width = config.integer("intermediate_size")
    return rules + mlp_rules(f"{place.hf}mlp.", f"{place.mcore}mlp.", attention.hidden, width)


def _flags(config: HFConfig, layout: Layout) -> list[str]:
    return moe_flags(config, _attention(config), layout.depths)


BAILING = Family(
    "Ling/Bailing-MoE V2",
    _rules,
    depth_pattern=r"^model\.layers\.(\d+)\.eh_proj\.weight$",
    features=STORED_HEAD,
    flags=_flags,
)
