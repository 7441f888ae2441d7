"""GLM-4.5, 4.6 and 4.7: grouped-query attention and experts, with DeepSeek's names for the depths.

GLM-OCR's text model has the same names for its depths, and norms after attention and MLP: Megatron runs the parts
around the layer of such a depth.
"""

from argparse import Namespace
from typing import Any

from megatron_mtp.checkpoint.families.blocks import GQA, Frame, Place, depth_frame, gqa_rules
from megatron_mtp.checkpoint.families.carried import AFTER
from megatron_mtp.checkpoint.families.depth_flags import framed_depths
from megatron_mtp.checkpoint.families.family import Depths, Family, Layout
from megatron_mtp.checkpoint.families.flags import moe_flags
from megatron_mtp.checkpoint.families.numbered import depth_after, frame_with_copies, layer_around, numbered_layers
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.families.trained import TrainedForm, expert_keys, rotary_keys
from megatron_mtp.checkpoint.families.trunk import COPIES, PACKED, STORED_HEAD, gqa, layers
from megatron_mtp.checkpoint.hf.config import HFConfig


def _attention(config: HFConfig) -> GQA:
    return gqa(config, bias=config.flag("attention_bias"), norms=config.flag("use_qk_norm"))


def _rules(config: HFConfig, layout: Layout) -> list[Rule]:
    return frame_with_copies(config, layout) + numbered_layers(config, layout, _layer)


def _layer(config: HFConfig, layout: Layout, place: Place, has_experts: bool) -> list[Rule]:
    return layer_around(gqa_rules(place, _attention(config)), config, layout, place, has_experts, mla=False)


def _flags(config: HFConfig, layout: Layout) -> list[str]:
    return moe_flags(config, _attention(config), layout.depths)


def _trained_keys(args: Namespace) -> dict[str, Any]:
    return {
        "use_qk_norm": bool(args.qk_layernorm),
        "partial_rotary_factor": args.rotary_percent,
        **rotary_keys(args, partial_rotary_factor=args.rotary_percent),
        **expert_keys(args),
    }


def _framed_rules(config: HFConfig, layout: Layout) -> list[Rule]:
    rules, count = frame_with_copies(config, layout), layers(config)
    for depth in range(layout.depths):
        names = Frame.under(f"model.layers.{count + depth}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
        rules += depth_frame(depth, config.integer("hidden_size"), names)
    return rules


GLM_OCR = Family(
    "GLM-OCR, text",
    "GLM-OCR, text",
    ("glm_ocr_text",),
    _framed_rules,
    depths=Depths(
        r"\.layers\.(\d+)\.eh_proj\.weight$",
        depth_of=depth_after(r"model\.(?:language_model\.)?layers\.(\d+)\."),
        flags=framed_depths,
    ),
    features={**STORED_HEAD, **COPIES},
    carried=(r"(model|lm_head)\.",),
    untrainable=AFTER,
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
)
GLM4_MOE = Family(
    "GLM-4 MoE",
    "GLM-4.5, 4.6 and 4.7",
    ("glm4_moe",),
    _rules,
    depths=Depths(r"\.layers\.(\d+)\.eh_proj\.weight$"),
    features={**STORED_HEAD, **COPIES, **PACKED},
    flags=_flags,
    trained=TrainedForm(
        models="experts, or depths",
        engines=("transformers", "vLLM", "SGLang"),
        architecture="Glm4MoeForCausalLM",
        keys=_trained_keys,
        fits=lambda args, depths: not args.multi_latent_attention and bool(args.num_experts or depths),
    ),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
)
