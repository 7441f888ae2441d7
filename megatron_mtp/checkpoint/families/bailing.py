"""Ling and Ring (Bailing-MoE V2): fused queries, keys and values, DeepSeek's router; depths as layers N, N+1, ..."""

from megatron_mtp.checkpoint.families.blocks import GQA, Place, gqa_rules, mlp_rules, moe_rules, norm_rules
from megatron_mtp.checkpoint.families.family import Depths, Family, Layout
from megatron_mtp.checkpoint.families.flags import moe_flags
from megatron_mtp.checkpoint.families.numbered import numbered_layers
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.families.trunk import STORED_HEAD, frame, gqa, moe
from megatron_mtp.checkpoint.hf.config import HFConfig


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
    rules = frame(config, layout, embedding="word_embeddings.weight")
    return rules + numbered_layers(config, layout, _layer, final="final_layernorm")


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
    "Ling, Ring",
    ("bailing_moe", "bailing_moe_v2"),
    _rules,
    depths=Depths(r"^model\.layers\.(\d+)\.eh_proj\.weight$"),
    features=STORED_HEAD,
    flags=_flags,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 128,
        "use_qk_norm": True,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 600000.0,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
)
