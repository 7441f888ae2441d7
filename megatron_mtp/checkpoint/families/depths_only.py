"""Families whose trunk Megatron cannot run: embedding, final norm and head have rules, all else is carried.

Where Megatron runs the depths, or the parts around their layers, these have rules too, and flags for a model with one
layer and these depths. `verify` builds it and gives the depths the trunk's hidden states, and the output of modules
that Megatron lacks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_mtp.checkpoint.families.blocks import (
    Place,
    mla_rules,
    mlp_norm,
    mlp_rules,
    norm_rules,
)
from megatron_mtp.checkpoint.families.decoder import Decoder
from megatron_mtp.checkpoint.families.family import COPIES, ONE_DEPTH, STORED_HEAD, Depths, Family, Layout
from megatron_mtp.checkpoint.families.flags import (
    ALL_LAYERS,
    CENTRED,
    UntrainableError,
    depth_flags,
    expert_flags,
    framed_depths,
    gqa_depths,
    latent_flags,
    rope_flags,
)
from megatron_mtp.checkpoint.families.rules import Rule, rename
from megatron_mtp.checkpoint.families.trunk import biased, depth_frames, depth_places, frame, gqa, latent_attention, moe
from megatron_mtp.checkpoint.hf.config import HFConfig

AFTER = "norms after attention and MLP"
WHOLE = "norms of whole queries and keys, not of each head"
BESIDE = "attention and MLP side by side"
TURNED = "norms of queries and keys after their rotation"
SPARSE = "a sparse indexer of keys"


Layer = Callable[[HFConfig, Layout, Place, int], list[Rule]]
"""Rules of a depth's layer at a place, and the index of the depth."""


def _no_layer(config: HFConfig, layout: Layout, place: Place, depth: int) -> list[Rule]:
    return []


def _rules(depths: Depths, layer: Layer, config: HFConfig, layout: Layout) -> list[Rule]:
    """Rules around the trunk's layers and the depths', and of the depths' layers."""
    places = depth_places(depths, config, layout)
    rules = frame(config, layout, copies=places)
    for depth, (place, around) in enumerate(zip(places, depth_frames(depths, config, places), strict=True)):
        rules += [*around, *layer(config, layout, place, depth)]
    return rules


def _with_depths(
    title: str,
    published: str,
    model_types: tuple[str, ...],
    reason: str,
    depths: Depths,
    carried: Sequence[str],
    layer: Layer = _no_layer,
    **others: Any,
) -> Family:
    """A family whose depths have rules; `carried` are patterns of what has none, `others` as of `Family`."""
    rules = partial(_rules, depths, layer)
    return Family(
        title, published, model_types, rules, depths=depths, carried=tuple(carried), untrainable=reason, **others
    )


def _carried(title: str, published: str, model_type: str, reason: str, **names: str) -> Family:
    """A family whose layers are carried, depths included; `names` are arguments of `frame`."""

    def rules(config: HFConfig, layout: Layout) -> list[Rule]:
        return frame(config, layout, **names)  # type: ignore[arg-type]

    return Family(title, published, (model_type,), rules, carried=(r"(model|lm_head)\.",), untrainable=reason)


def _indexed(title: str, model_type: str) -> Family:
    """A family of sparse attention whose depths have DeepSeek's names; their layers are carried as the trunk's are."""
    depths = Depths(r"^model\.layers\.(\d+)\.eh_proj\.weight$", carried=r"model\.layers\.(\d+)\.")
    carried, features = [r"(model|lm_head)\."], {**STORED_HEAD, **COPIES}
    return _with_depths(title, title, (model_type,), SPARSE, depths, carried, features=features)


def _ernie_flags(config: HFConfig, layout: Layout) -> list[str]:
    return [*gqa_depths(config, layout, _ERNIE_ATTENTION(config)), *rope_flags(config, interleaved=True)]


def _mlp(config: HFConfig, place: Place) -> list[Rule]:
    width = config.integer("intermediate_size")
    return mlp_rules(f"{place.hf}mlp.", f"{place.mcore}mlp.", config.integer("hidden_size"), width)


def _exaone_flags(config: HFConfig, layout: Layout) -> list[str]:
    """Full attention has no positions if other layers have windows."""
    kinds = config.words("mtp_layer_types", layout.depths) or ["full_attention"]
    if "sliding_attention" in kinds:
        raise UntrainableError("depths with sliding windows")
    flags = gqa_depths(config, layout, gqa(config, norms=True))
    flags += [] if config.has("sliding_window") else rope_flags(config)
    return flags + ([*expert_flags(config), *ALL_LAYERS] if layout.has("depth of experts") else [])


def _mimo_layer(config: HFConfig, layout: Layout, place: Place, depth: int) -> list[Rule]:
    return [mlp_norm(place, config.integer("hidden_size"), name="pre_mlp_layernorm"), *_mlp(config, place)]


def _longcat_layer(config: HFConfig, layout: Layout, place: Place, depth: int) -> list[Rule]:
    hidden, vocabulary = config.integer("hidden_size"), config.integer("vocab_size")
    width = config.integer("ffn_hidden_size", "intermediate_size")
    return [
        *norm_rules(place, hidden, mla=True, moe=False),
        *mla_rules(place, latent_attention(config)),
        *mlp_rules(f"{place.hf}transformer_layer.mlp.", f"{place.mcore}mlp.", hidden, width),
        rename("model.mtp.embed_tokens.weight", "mtp.layers.0.embedding.word_embeddings.weight", (vocabulary, hidden)),
    ]


def _longcat_flags(config: HFConfig, layout: Layout) -> list[str]:
    return [*depth_flags(config, layout), *latent_flags(config)]


def _longcat_scales(config: HFConfig) -> dict[str, float]:
    """The family scales queries and compressed keys and values; Megatron does not, so their norms do."""
    attention, scales = latent_attention(config), {}
    if attention.query_rank is not None and config.flag("mla_scale_q_lora"):
        scales["self_attention.q_layernorm.weight"] = math.sqrt(attention.hidden / attention.query_rank)
    if config.flag("mla_scale_kv_lora"):
        scales["self_attention.kv_layernorm.weight"] = math.sqrt(attention.hidden / attention.key_rank)
    return scales


_LAYER = "model.layers.{n}."
_LONGCAT_IN_VLLM = {
    "eh_proj": "eh_proj",
    **dict.fromkeys(("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"), f"{_LAYER}self_attn.fused_qkv_a_proj"),
    **dict.fromkeys(("transformer_layer.mlp.gate_proj", "transformer_layer.mlp.up_proj"), f"{_LAYER}mlp.gate_up_proj"),
    "transformer_layer.": _LAYER,
    "": _LAYER,
}
"""As `LongCatFlashMTP` builds them: it has no table of fused projections, so their own names are compared."""


def _step_layer(config: HFConfig, layout: Layout, place: Place, depth: int) -> list[Rule]:
    hidden, vocabulary = config.integer("hidden_size"), config.integer("vocab_size")
    head, own = f"{place.hf}transformer.shared_head.output.weight", f"mtp.layers.{depth}.output_layer.weight"
    return [mlp_norm(place, hidden), *_mlp(config, place), rename(head, own, (vocabulary, hidden))]


def _step_flags(config: HFConfig, layout: Layout) -> list[str]:
    return [*framed_depths(config, layout), *CENTRED]


_ERNIE_ATTENTION = partial(biased, key="use_bias", out="use_bias")
_ERNIE = Decoder(_ERNIE_ATTENTION, mlp_bias="use_bias")
_EXAONE = Decoder(partial(gqa, norms=True), mlp_bias=None, experts=partial(moe, bias="e_score_correction_bias"))

DEPTHS_ONLY: tuple[Family, ...] = (
    _with_depths(
        "EXAONE-MoE",
        "EXAONE-MoE",
        ("exaone_moe",),
        "layers with sliding windows beside layers without positions",
        replace(ONE_DEPTH, flags=_exaone_flags),
        [r"model\.layers\."],
        lambda config, layout, place, depth: _EXAONE.layer(config, layout, place, layout.has("depth of experts")),
        features={**STORED_HEAD, "depth of experts": r"^mtp\.layers\.0\.mlp\.experts\."},
        defaults={"first_k_dense_replace": 1},
    ),
    _with_depths(
        "ERNIE-4.5 MoE",
        "ERNIE-4.5 with experts",
        ("ernie4_5_moe",),
        "a router of softmax scores with a correction bias, and depths without a norm before the head",
        Depths(
            r"^model\.mtp_linear_proj\.(\d+)\.weight$",
            "model.mtp_block.{k}.",
            (".model.mtp_emb_norm.{k}", ".model.mtp_hidden_norm.{k}", ".model.mtp_linear_proj.{k}", None),
            carried=r"model\.mtp_linear_proj\.(\d+)\.",
            flags=_ernie_flags,
            served={"": "model.layers.{n}."},
        ),
        [r"model\.layers\.", r"model\.mtp_linear_proj\.\d+\.bias$"],
        lambda config, layout, place, depth: _ERNIE.layer(config, layout, place, sparse=False),
    ),
    _with_depths(
        "MiMo-V2",
        "MiMo-V2",
        ("mimo_v2_flash",),
        "sliding windows with sinks, and values of another width than keys",
        Depths(
            r"^model\.mtp\.layers\.(\d+)\.eh_proj\.weight$",
            "model.mtp.layers.{k}.",
            names=("enorm", "hnorm", "eh_proj", "final_layernorm"),
            default=None,
            published=3,
            carried=r"model\.mtp\.layers\.(\d+)\.",
            flags=framed_depths,
        ),
        [r"model\.layers\.", r"model\.mtp\.layers\.\d+\.(input_layernorm|self_attn)\."],
        _mimo_layer,
        defaults={"rms_norm_eps": None, "layernorm_epsilon": 1e-5},
    ),
    _with_depths(
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
            flags=_longcat_flags,
            scales=_longcat_scales,
            served=_LONGCAT_IN_VLLM,
        ),
        [r"model\.layers\."],
        _longcat_layer,
        defaults={"rope_interleave": True, "mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    ),
    _with_depths(
        "Step-3.5",
        "Step-3.5, Step-3.7",
        ("step3p5", "step3p7"),
        "sliding windows with gates by head, and depths fed from before the final norm",
        Depths(
            r"^model\.layers\.(\d+)\.eh_proj\.weight$",
            names=("enorm", "hnorm", "eh_proj", "transformer.shared_head.norm"),
            carried=r"model\.layers\.(\d+)\.",
            before_norm=True,
            flags=_step_flags,
            served={"": "model.layers.{n}.mtp_block."},
        ),
        [r"model\.layers\.", r"(vision_model|vit_large_projector|model\.vision)"],
        _step_layer,
    ),
    _with_depths(
        "EXAONE 4",
        "EXAONE 4.0, 4.5",
        ("exaone4",),
        AFTER,
        replace(ONE_DEPTH, carried=r"mtp\.()", flags=framed_depths),
        [r"(model|lm_head)\.", r"mtp\.layers\.0\."],
    ),
    _with_depths(
        "GLM-OCR, text",
        "GLM-OCR, text",
        ("glm_ocr_text",),
        AFTER,
        Depths(carried=r"model\.(?:language_model\.)?layers\.(\d+)\.", flags=framed_depths),
        [r"(model|lm_head)\."],
        features={**STORED_HEAD, **COPIES},
    ),
    _indexed("DeepSeek-V3.2", "deepseek_v32"),
    _indexed("GLM-5", "glm_moe_dsa"),
    _carried("Gemma", "Gemma", "gemma", "a gated MLP with GELU"),
    _carried("Gemma 2", "Gemma 2", "gemma2", f"softcapped scores and logits, and {AFTER}"),
    _carried("Gemma 3", "Gemma 3, text", "gemma3_text", f"{AFTER}, and rotary positions that differ by layer"),
    _carried("VaultGemma", "VaultGemma", "vaultgemma", "softcapped scores and logits, and a gated MLP with GELU"),
    _carried("OLMo 2", "OLMo 2", "olmo2", f"{AFTER}, and {WHOLE}"),
    _carried("OLMo 3", "OLMo 3", "olmo3", f"{AFTER}, and {WHOLE}"),
    _carried("OLMoE", "OLMoE", "olmoe", WHOLE),
    _carried("FlexOlmo", "FlexOlmo", "flex_olmo", f"{AFTER}, and {WHOLE}"),
    _carried("GLM-4, second form", "GLM-4-0414", "glm4", AFTER),
    _carried("HunYuan, dense", "HunYuan 0.5B to 7B", "hunyuan_v1_dense", TURNED),
    _carried("HunYuan, experts", "HunYuan A13B", "hunyuan_v1_moe", TURNED),
    _carried("Cohere", "Command R", "cohere", BESIDE),
    _carried("Cohere 2", "Command R7B, Command A", "cohere2", BESIDE),
    _carried("Phi", "Phi-1, 1.5, 2", "phi", BESIDE, norm="final_layernorm"),
    _carried("Persimmon", "Persimmon", "persimmon", "norms of queries and keys with biases", norm="final_layernorm"),
    _carried("StarCoder 2", "StarCoder 2", "starcoder2", "GELU by tanh, which Megatron only has fused"),
    _carried("Ministral 3", "Ministral 3", "ministral3", "queries scaled by their position"),
    _carried("MiniMax-M2", "MiniMax-M2", "minimax_m2", WHOLE),
    _carried("Apertus", "Apertus", "apertus", "the activation xIELU"),
    _carried("DiffLlama", "DiffLlama", "diffllama", "differences of two attentions"),
    _carried("BitNet", "BitNet b1.58", "bitnet", "norms inside of attention and MLP"),
    _carried("HyperCLOVA X", "HyperCLOVA X SEED Think", "hyperclovax", AFTER),
    _carried("Phi-MoE", "Phi-3.5-MoE", "phimoe", "a router that masks near scores"),
    _carried("A.X K1", "A.X K1", "axk1", AFTER),
    _carried("MiniCPM3", "MiniCPM3", "minicpm3", "factors of embedding, logits and residual beside latent attention"),
    _carried("AFMoE", "Trinity", "afmoe", AFTER),
    _carried("Kimi Linear", "Kimi Linear", "kimi_linear", "Kimi's delta attention"),
    _with_depths(
        "Mellum",
        "Mellum 2",
        ("mellum",),
        "rotary positions that differ by layer",
        replace(ONE_DEPTH, keys=("num_nextn_predict_layers", "num_mtp_layers"), carried=r"mtp\.()"),
        [r"(model|lm_head)\.", r"mtp\.layers\.0\."],
    ),
    _carried("Laguna", "Laguna", "laguna", "gated attention whose heads and positions differ by layer"),
    _carried("Llama 4, text", "Llama 4, text", "llama4_text", "attention in chunks, and scores on the experts' input"),
)
"""Only equal bits and equal names prove the layers: transformers computes both sides."""
