"""Llama, Qwen2 and Qwen3 trunks: dense, no MTP of their own; depths are attached in Megatron form."""

from megatron_mtp.checkpoint.families.blocks import GQA, Place, gqa_rules, mlp_rules, norm_rules
from megatron_mtp.checkpoint.families.family import Family, Layout
from megatron_mtp.checkpoint.families.flags import dense_flags
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.families.trunk import STORED_HEAD, frame, gqa, layers, trunk_places
from megatron_mtp.checkpoint.hf.config import HFConfig


def dense_layer(place: Place, attention: GQA, width: int, mlp_bias: bool = False) -> list[Rule]:
    """A layer of any dense family with the usual names."""
    return [
        *norm_rules(place, attention.hidden, mla=False, moe=False),
        *gqa_rules(place, attention),
        *mlp_rules(f"{place.hf}mlp.", f"{place.mcore}mlp.", attention.hidden, width, mlp_bias),
    ]


def llama_attention(config: HFConfig) -> GQA:
    """Biases where `attention_bias` says so."""
    bias = config.flag("attention_bias")
    return gqa(config, bias=bias, out_bias=bias)


def qwen2_attention(config: HFConfig) -> GQA:
    """Biases of queries, keys and values."""
    return gqa(config, bias=True)


def qwen3_attention(config: HFConfig) -> GQA:
    """Norms of queries and keys."""
    bias = config.flag("attention_bias")
    return gqa(config, bias=bias, out_bias=bias, norms=True)


ATTENTION = {"llama": llama_attention, "qwen2": qwen2_attention, "qwen3": qwen3_attention}
"""What tells these families apart."""


def _rules(config: HFConfig, layout: Layout) -> list[Rule]:
    attention = ATTENTION[config.model_type](config)
    width, bias = config.integer("intermediate_size"), config.flag("mlp_bias")
    rules = frame(config, layout)
    for place in trunk_places(layers(config)):
        rules += dense_layer(place, attention, width, bias)
    return rules


def _flags(config: HFConfig, layout: Layout) -> list[str]:
    return dense_flags(config, ATTENTION[config.model_type](config), layout.depths)


def _family(title: str, **defaults: object) -> Family:
    usual = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    return Family(title, _rules, features=STORED_HEAD, flags=_flags, defaults=usual | defaults)


QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
LLAMA = _family("Llama", max_position_embeddings=2048)
QWEN2, QWEN3 = _family("Qwen2", **QWEN), _family("Qwen3", **QWEN, head_dim=128)
