"""Families with MTP layers whose trunk Megatron cannot run: all of their layers are carried.

Embedding, final norm, output layer and the parts around the MTP layers' own layers have rules, which are needed to
count MTP layers and to identify copies of embedding and output layer. Everything else is stored unchanged, because it
cannot be trained here.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_mtp.checkpoint.families.family import COPIES, EITHER_COUNT, ONE_DEPTH, STORED_HEAD, Depths, Family, Layout
from megatron_mtp.checkpoint.families.hybrid import NEMOTRON_DEPTHS, puzzle_rules
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.families.trunk import depth_frames, depth_places, frame
from megatron_mtp.checkpoint.hf.config import HFConfig

AFTER = "norms after attention and MLP"
SPARSE = "a sparse indexer of keys"
WHOLE = (r"(model|lm_head)\.",)
WITH_COPIES = {**STORED_HEAD, **COPIES}
NUMBERED = r"model\.(?:language_model\.)?layers\.(\d+)\."


def _rules(depths: Depths, config: HFConfig, layout: Layout) -> list[Rule]:
    """Return rules outside the layers of the trunk and of the MTP layers."""
    places = depth_places(depths, config, layout)
    around = (rule for rules in depth_frames(depths, config, places) for rule in rules)
    return [*frame(config, layout, copies=places), *around]


def _family(
    title: str,
    published: str,
    model_types: tuple[str, ...],
    reason: str,
    depths: Depths,
    carried: Sequence[str] = WHOLE,
    **others: Any,
) -> Family:
    """Create a family whose layers are carried; `carried` are patterns without a rule, `others` as in `Family`."""
    rules = partial(_rules, depths)
    return Family(
        title, published, model_types, rules, depths=depths, carried=tuple(carried), untrainable=reason, **others
    )


_UNDER_MTP = replace(ONE_DEPTH, carried=r"mtp\.()")
_LAYER = "model.layers.{n}."
_LONGCAT_IN_VLLM = {
    "eh_proj": "eh_proj",
    **dict.fromkeys(("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"), f"{_LAYER}self_attn.fused_qkv_a_proj"),
    **dict.fromkeys(("transformer_layer.mlp.gate_proj", "transformer_layer.mlp.up_proj"), f"{_LAYER}mlp.gate_up_proj"),
    "transformer_layer.": _LAYER,
    "": _LAYER,
}
"""As `LongCatFlashMTP` builds them: it has no table of fused projections, so their own names are compared."""

DEPTHS_ONLY: tuple[Family, ...] = (
    _family(
        "EXAONE-MoE",
        "EXAONE-MoE",
        ("exaone_moe",),
        "layers with sliding windows and layers without positions",
        _UNDER_MTP,
        [r"model\.layers\.", r"mtp\.layers\.0\."],
    ),
    _family(
        "ERNIE-4.5 MoE",
        "ERNIE-4.5 with experts",
        ("ernie4_5_moe",),
        "a router of softmax scores with a correction bias, and MTP layers without a norm before the head",
        Depths(
            r"^model\.mtp_linear_proj\.(\d+)\.weight$",
            "model.mtp_block.{k}.",
            (".model.mtp_emb_norm.{k}", ".model.mtp_hidden_norm.{k}", ".model.mtp_linear_proj.{k}", None),
            carried=r"model\.mtp_(?:linear_proj|block)\.(\d+)\.",
            served={"": "model.layers.{n}."},
        ),
        [r"model\.layers\.", r"model\.mtp_linear_proj\.\d+\.bias$", r"model\.mtp_block\."],
    ),
    _family(
        "MiMo-V2",
        "MiMo-V2",
        ("mimo_v2_flash", "mimo_v2"),
        "sliding windows with sinks, and values of another width than keys",
        Depths(
            r"^model\.mtp\.layers\.(\d+)\.eh_proj\.weight$",
            "model.mtp.layers.{k}.",
            names=("enorm", "hnorm", "eh_proj", "final_layernorm"),
            default=None,
            published=3,
            carried=r"model\.mtp\.layers\.(\d+)\.",
            inner={
                "self_attn.": "self_attn.",
                "mlp.": "mlp.",
                "input_layernorm.": "input_layernorm.",
                "pre_mlp_layernorm.": "post_attention_layernorm.",
            },
            # vLLM: models/mimo_v2.py; SGLang: models/mimo_v2_nextn.py
            never_quantized=r"model\.mtp\.layers\.\d+\.self_attn\.o_proj",
        ),
        [r"model\.layers\.", r"model\.mtp\.layers\."],
    ),
    _family(
        "LongCat-Flash",
        "LongCat-Flash",
        ("longcat_flash",),
        "two attentions a layer around experts, some of which do nothing",
        Depths(
            r"^model\.mtp\.layers\.(\d+)\.eh_proj\.weight$",
            "model.mtp.layers.0.",
            names=("enorm.m", "hnorm.m", "eh_proj", ".model.mtp.norm"),
            default=None,
            published=1,
            limit=1,
            carried=r"model\.mtp\.()",
            inner={
                "self_attn.": "self_attn.0.",
                "transformer_layer.mlp.": "mlps.0.",
                "input_layernorm.": "input_layernorm.0.",
                "post_attention_layernorm.": "post_attention_layernorm.0.",
            },
            served=_LONGCAT_IN_VLLM,
        ),
        [r"model\.(layers|mtp)\."],
    ),
    _family(
        "Step-3.5",
        "Step-3.5, Step-3.7",
        ("step3p5", "step3p7"),
        "sliding windows with gates by head, and MTP layers fed from before the final norm",
        Depths(
            r"^model\.layers\.(\d+)\.eh_proj\.weight$",
            names=("enorm", "hnorm", "eh_proj", "transformer.shared_head.norm"),
            carried=r"model\.layers\.(\d+)\.",
            before_norm=True,
            served={"": "model.layers.{n}.mtp_block."},
        ),
        [r"model\.layers\.", r"(vision_model|vit_large_projector|model\.vision)"],
    ),
    _family("EXAONE 4", "EXAONE 4.0, 4.5", ("exaone4",), AFTER, _UNDER_MTP, [*WHOLE, r"mtp\.layers\.0\."]),
    _family("GLM-OCR, text", "GLM-OCR, text", ("glm_ocr_text",), AFTER, Depths(carried=NUMBERED), features=WITH_COPIES),
    *(
        _family(
            title,
            title,
            (model_type,),
            SPARSE,
            Depths(r"^model\.layers\.(\d+)\.eh_proj\.weight$", carried=r"model\.layers\.(\d+)\."),
            features=WITH_COPIES,
        )
        for title, model_type in (("DeepSeek-V3.2", "deepseek_v32"), ("GLM-5", "glm_moe_dsa"))
    ),
    Family(
        "Nemotron-H, Puzzle",
        "Nemotron 3 of NVIDIA's Puzzle",
        ("nemotron_h_puzzle",),
        puzzle_rules,
        depths=replace(NEMOTRON_DEPTHS, carried=r"mtp\.()"),
        carried=(r"(backbone|mtp)\.",),
        untrainable="layers whose experts differ from block to block",
    ),
    _family(
        "Mellum",
        "Mellum 2",
        ("mellum",),
        "rotary positions that differ by layer",
        replace(_UNDER_MTP, keys=EITHER_COUNT),
        [*WHOLE, r"mtp\.layers\.0\."],
    ),
)
"""Only equal bits and equal names prove the layers."""
