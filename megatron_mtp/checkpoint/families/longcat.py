"""LongCat-Flash: two attentions a layer and experts that do nothing; one dense depth with an embedding of its own."""

import math
from dataclasses import replace

from megatron_mtp.checkpoint.families.blocks import (
    Frame,
    Place,
    depth_frame,
    depth_layer,
    mla_rules,
    mlp_rules,
    norm_rules,
)
from megatron_mtp.checkpoint.families.deepseek import latent_attention
from megatron_mtp.checkpoint.families.depth_flags import latent_depths
from megatron_mtp.checkpoint.families.family import Depths, Family, Layout
from megatron_mtp.checkpoint.families.rules import Rule, rename
from megatron_mtp.checkpoint.families.trunk import STORED_HEAD, frame
from megatron_mtp.checkpoint.hf.config import HFConfig


def _rules(config: HFConfig, layout: Layout) -> list[Rule]:
    hidden, vocabulary = config.integer("hidden_size"), config.integer("vocab_size")
    rules = frame(config, layout)
    if layout.depths:
        place = Place("model.mtp.layers.0.", depth_layer(0))
        names = replace(Frame.under(place.hf, "enorm.m", "hnorm.m", "eh_proj", None), final="model.mtp.norm.weight")
        width = config.integer("ffn_hidden_size", "intermediate_size")
        rules += depth_frame(0, hidden, names)
        rules += norm_rules(place, hidden, mla=True, moe=False) + mla_rules(place, latent_attention(config))
        rules += mlp_rules(f"{place.hf}transformer_layer.mlp.", f"{place.mcore}mlp.", hidden, width)
        own = "mtp.layers.0.embedding.word_embeddings.weight"
        rules.append(rename("model.mtp.embed_tokens.weight", own, (vocabulary, hidden)))
    return rules


def _depth_flags(config: HFConfig, layout: Layout) -> list[str]:
    width = config.integer("ffn_hidden_size", "intermediate_size")
    return latent_depths(config, layout, latent_attention(config), width)


def _scales(config: HFConfig) -> dict[str, float]:
    """The family scales queries and compressed keys and values; Megatron does not, so their norms do."""
    attention, scales = latent_attention(config), {}
    if attention.query_rank is not None and config.flag("mla_scale_q_lora"):
        scales["self_attention.q_layernorm.weight"] = math.sqrt(attention.hidden / attention.query_rank)
    if config.flag("mla_scale_kv_lora"):
        scales["self_attention.kv_layernorm.weight"] = math.sqrt(attention.hidden / attention.key_rank)
    return scales


LONGCAT = Family(
    "LongCat-Flash",
    "LongCat-Flash",
    ("longcat_flash",),
    _rules,
    depths=Depths(
        r"^model\.mtp\.layers\.(\d+)\.eh_proj\.weight$", default=None, limit=1, flags=_depth_flags, scales=_scales
    ),
    features=STORED_HEAD,
    carried=(r"model\.layers\.",),
    untrainable="two attentions a layer around experts, some of which do nothing",
    defaults={
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000000.0,
        "rope_interleave": True,
        "q_lora_rank": 1536,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
)
