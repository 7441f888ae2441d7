"""Qwen3-Next, Qwen3.5 and Qwen3.6, dense and MoE: linear attention in the trunk, one depth of gated full attention.

All norms except those inside linear attention are zero-centred (1 + w) on both sides, so they are copied unchanged.
"""

from dataclasses import replace

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
from megatron_mtp.checkpoint.families.depth_flags import CENTRED, gqa_depths, rotary, softmax_experts
from megatron_mtp.checkpoint.families.family import Depths, Family, Layout
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.families.trunk import STORED_HEAD, frame, gqa, moe
from megatron_mtp.checkpoint.hf.config import HFConfig


def _rules(config: HFConfig, layout: Layout) -> list[Rule]:
    rules = frame(config, layout, "model.language_model." if layout.has("nested") else "model.")
    if layout.depths:
        names = Frame.under("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        rules += depth_frame(0, config.integer("hidden_size"), names)
        rules += _layer(config, layout, Place("mtp.layers.0.", depth_layer(0)))
    return rules


def _attention(config: HFConfig) -> GQA:
    return gqa(config, bias=config.flag("attention_bias"), norms=True, gated=True)


def _layer(config: HFConfig, layout: Layout, place: Place) -> list[Rule]:
    hidden, experts, attention = config.integer("hidden_size"), layout.has("depth of experts"), _attention(config)
    rules = norm_rules(place, hidden, mla=False, moe=experts) + gqa_rules(place, attention)
    if not experts:
        width = config.integer("intermediate_size")
        return rules + mlp_rules(f"{place.hf}mlp.", f"{place.mcore}mlp.", hidden, width)
    shared = config.integer("shared_expert_intermediate_size")
    packed = layout.has("packed depth")
    return rules + moe_rules(
        place,
        moe(config, layout, shared=shared, shared_name="shared_expert", shared_gate=True, bias=None, packed=packed),
    )


def _depth_flags(config: HFConfig, layout: Layout) -> list[str]:
    flags = [*gqa_depths(config, layout, _attention(config)), *rotary(config), *CENTRED]
    flags.append("--attention-output-gate")
    return flags + (softmax_experts(config) if layout.has("depth of experts") else [])


QWEN3_NEXT = Family(
    "Qwen3-Next",
    "Qwen3-Next, Qwen3.5 and 3.6 with experts",
    ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
    _rules,
    depths=Depths(
        r"^mtp\.(fc)\.weight$",
        keys=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
        default=None,
        limit=1,
        flags=_depth_flags,
    ),
    features={
        **STORED_HEAD,
        "nested": r"^model\.language_model\.",
        "depth of experts": r"^mtp\.layers\.0\.mlp\.experts\.",
        "packed depth": r"^mtp\.layers\.0\.mlp\.experts\.gate_up_proj$",
    },
    carried=(r"model\.(language_model\.)?layers\.", r"model\.visual\."),
    untrainable="linear attention in the trunk, whose weights are not converted to those of a hybrid trunk",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
    },
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    title="Qwen3.5",
    published="Qwen3.5 and 3.6, dense",
    model_types=("qwen3_5", "qwen3_5_text"),
    defaults={**QWEN3_NEXT.defaults, "num_key_value_heads": 4},
)
