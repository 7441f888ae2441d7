"""EXAONE-MoE: layers with sliding windows beside layers without positions; EXAONE 4 and 4.5: norms after attention.

Depths are named as Qwen's. Megatron runs those of EXAONE-MoE, and of EXAONE 4.5 the parts around the layer.
"""

from megatron_mtp.checkpoint.families.blocks import (
    Frame,
    Place,
    depth_frame,
    depth_layer,
    gqa_rules,
    mlp_rules,
    moe_rules,
    norm_rules,
)
from megatron_mtp.checkpoint.families.carried import AFTER
from megatron_mtp.checkpoint.families.depth_flags import framed_depths, gqa_depths, rotary, sigmoid_experts
from megatron_mtp.checkpoint.families.family import Depths, Family, Layout
from megatron_mtp.checkpoint.families.flags import UntrainableError
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.families.trunk import STORED_HEAD, frame, gqa, moe
from megatron_mtp.checkpoint.hf.config import HFConfig

NAMES = Frame.under("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")


def _framed_rules(config: HFConfig, layout: Layout) -> list[Rule]:
    rules = frame(config, layout)
    return rules + depth_frame(0, config.integer("hidden_size"), NAMES) if layout.depths else rules


def _rules(config: HFConfig, layout: Layout) -> list[Rule]:
    rules = _framed_rules(config, layout)
    if layout.depths:
        hidden, place = config.integer("hidden_size"), Place("mtp.layers.0.", depth_layer(0))
        experts = layout.has("depth of experts")
        rules += norm_rules(place, hidden, mla=False, moe=experts) + gqa_rules(place, gqa(config, norms=True))
        if experts:
            rules += moe_rules(place, moe(config, layout, bias="e_score_correction_bias"))
        else:
            rules += mlp_rules(f"{place.hf}mlp.", f"{place.mcore}mlp.", hidden, config.integer("intermediate_size"))
    return rules


def _depth_flags(config: HFConfig, layout: Layout) -> list[str]:
    """Full attention has no positions if other layers have windows."""
    kinds = config.words("mtp_layer_types", layout.depths) or ["full_attention"]
    if "sliding_attention" in kinds:
        raise UntrainableError("depths with sliding windows")
    flags = gqa_depths(config, layout, gqa(config, norms=True))
    flags += [] if config.has("sliding_window") else rotary(config)
    return flags + (sigmoid_experts(config) if layout.has("depth of experts") else [])


EXAONE_4 = Family(
    "EXAONE 4",
    "EXAONE 4.0, 4.5",
    ("exaone4",),
    _framed_rules,
    depths=Depths(
        r"^mtp\.(fc)\.weight$",
        default=None,
        limit=1,
        depth_of=lambda config, name: 0 if name.startswith("mtp.") else None,
        flags=framed_depths,
    ),
    features=STORED_HEAD,
    carried=(r"(model|lm_head)\.", r"mtp\.layers\.0\."),
    untrainable=AFTER,
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
)
EXAONE_MOE = Family(
    "EXAONE-MoE",
    "EXAONE-MoE",
    ("exaone_moe",),
    _rules,
    depths=Depths(r"^mtp\.(fc)\.weight$", default=None, limit=1, flags=_depth_flags),
    features={**STORED_HEAD, "depth of experts": r"^mtp\.layers\.0\.mlp\.experts\."},
    carried=(r"model\.layers\.",),
    untrainable="layers with sliding windows beside layers without positions",
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
)
