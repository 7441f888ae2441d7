"""Llama, Qwen2 and Qwen3: dense trunks without MTP; depths are attached to the Megatron checkpoint."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial

from megatron_mtp.checkpoint.families.blocks import GQA, Place, gqa_rules, mlp_rules, norm_rules
from megatron_mtp.checkpoint.families.family import Family, Layout
from megatron_mtp.checkpoint.families.flags import dense_flags
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.families.trained import TrainedForm, dense_keys, is_dense_trunk
from megatron_mtp.checkpoint.families.trunk import STORED_HEAD, frame, gqa, layers, trunk_places
from megatron_mtp.checkpoint.hf.config import HFConfig

Attention = Callable[[HFConfig], GQA]
"""The attention of a model from its config: all that differs between these families."""


def dense_layer(place: Place, attention: GQA, width: int, mlp_bias: bool = False) -> list[Rule]:
    """Rules of a dense layer with the usual names."""
    return [
        *norm_rules(place, attention.hidden, mla=False, moe=False),
        *gqa_rules(place, attention),
        *mlp_rules(f"{place.hf}mlp.", f"{place.mcore}mlp.", attention.hidden, width, mlp_bias),
    ]


def llama_attention(config: HFConfig) -> GQA:
    """Biases of all projections if `attention_bias` is true."""
    bias = config.flag("attention_bias")
    return gqa(config, bias=bias, out_bias=bias)


def qwen2_attention(config: HFConfig) -> GQA:
    """Biases of queries, keys and values."""
    return gqa(config, bias=True)


def qwen3_attention(config: HFConfig) -> GQA:
    """Norms of queries and keys."""
    bias = config.flag("attention_bias")
    return gqa(config, bias=bias, out_bias=bias, norms=True)


def _rules(attention: Attention, config: HFConfig, layout: Layout) -> list[Rule]:
    width, bias = config.integer("intermediate_size"), config.flag("mlp_bias")
    rules = frame(config, layout)
    for place in trunk_places(layers(config)):
        rules += dense_layer(place, attention(config), width, bias)
    return rules


def _flags(attention: Attention, config: HFConfig, layout: Layout) -> list[str]:
    return dense_flags(config, attention(config), layout.depths)


def _dense_form(models: str, architecture: str, fits: Callable[[Namespace], bool]) -> TrainedForm:
    """The form of a dense model without depths, if `fits` holds for Megatron's arguments as well."""
    return TrainedForm(
        models=f"dense without depths{models}",
        engines=("transformers", "vLLM", "SGLang"),
        architecture=architecture,
        keys=dense_keys,
        fits=lambda args, depths: is_dense_trunk(args, depths) and fits(args),
    )


USUAL = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
QWEN = {**USUAL, "num_key_value_heads": 32, "max_position_embeddings": 32768}
LLAMA = Family(
    "Llama",
    "Llama 2 and 3, SmolLM2",
    ("llama",),
    partial(_rules, llama_attention),
    features=STORED_HEAD,
    flags=partial(_flags, llama_attention),
    trained=_dense_form("", "LlamaForCausalLM", lambda args: not (args.qk_layernorm or args.add_qkv_bias)),
    defaults={**USUAL, "max_position_embeddings": 2048},
)
QWEN2 = Family(
    "Qwen2",
    "Qwen2, Qwen2.5",
    ("qwen2",),
    partial(_rules, qwen2_attention),
    features=STORED_HEAD,
    flags=partial(_flags, qwen2_attention),
    trained=_dense_form(
        ", `--add-qkv-bias`", "Qwen2ForCausalLM", lambda args: bool(args.add_qkv_bias and not args.qk_layernorm)
    ),
    defaults=QWEN,
)
QWEN3 = Family(
    "Qwen3",
    "Qwen3, dense",
    ("qwen3",),
    partial(_rules, qwen3_attention),
    features=STORED_HEAD,
    flags=partial(_flags, qwen3_attention),
    trained=_dense_form(", `--qk-layernorm`", "Qwen3ForCausalLM", lambda args: bool(args.qk_layernorm)),
    defaults={**QWEN, "head_dim": 128},
)
