"""Dense decoders without depths of their own, each as the facts of its class in transformers; depths are attached.

Granite's are in granite.py.
"""

from dataclasses import replace
from functools import partial

from megatron_mtp.checkpoint.families.blocks import GQA, fused_mlp_rules, plain_mlp_rules
from megatron_mtp.checkpoint.families.decoder import (
    CENTRED_LAYER_NORM,
    LAYER_NORM,
    Decoder,
    trunk_family,
)
from megatron_mtp.checkpoint.families.family import Family
from megatron_mtp.checkpoint.families.flags import squared_relu_flags
from megatron_mtp.checkpoint.families.llama import llama_attention
from megatron_mtp.checkpoint.families.trunk import gqa, layers
from megatron_mtp.checkpoint.hf.config import ConfigError, HFConfig


def _bias(config: HFConfig, key: str = "attention_bias", out: str | None = None) -> GQA:
    """Biases of queries, keys and values if `key` is true, and of the output if `out` is."""
    return gqa(config, bias=config.flag(key), out_bias=out is not None and config.flag(out))


def _all_windows(config: HFConfig) -> list[bool]:
    """A window in every layer if `sliding_window` is a number."""
    return [config.has("sliding_window")] * layers(config)


def windows_by_type(config: HFConfig, usual: list[bool]) -> list[bool]:
    """Windows of the layers that `layer_types` names so; those of `usual` without the key.

    Raises:
        ValueError: a kind of layer is unknown.
    """
    kinds = config.words("layer_types", layers(config))
    if kinds is None:
        return usual
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(
            f"{config.source}: 'layer_types' has '{unknown[0]:.40}'; known are full_attention, sliding_attention."
        )
    return [kind == "sliding_attention" for kind in kinds]


def _ministral_windows(config: HFConfig) -> list[bool]:
    windows = windows_by_type(config, _all_windows(config))
    return windows if config.has("sliding_window") else [False] * len(windows)


def three_windows(config: HFConfig) -> list[bool]:
    """Three windows after each full attention, unless the config says otherwise."""
    return windows_by_type(config, [bool(index % 4) for index in range(layers(config))])


def _unplaced(config: HFConfig) -> list[bool]:
    """SmolLM3 leaves out the positions of every fourth layer, unless `no_rope_layers` has a 1 or 0 for each.

    Raises:
        ValueError: `no_rope_layers` is something else.
    """
    count, placed = layers(config), config.keys.get("no_rope_layers")
    if placed is None:
        interval = config.integer("no_rope_layer_interval", default=4)
        return [(index + 1) % interval == 0 for index in range(count)]
    if not isinstance(placed, list) or len(placed) < count or any(one not in (0, 1) for one in placed):
        raise ConfigError(f"{config.source}: 'no_rope_layers' must be a list of {count} times 1 or 0, one a layer.")
    return [not one for one in placed[:count]]


def _smollm3_refused(config: HFConfig) -> str | None:
    return "sliding windows" if config.flag("use_sliding_window") else None


def _stablelm_refused(config: HFConfig) -> str | None:
    if config.flag("qk_layernorm"):
        return "a norm for each head of queries and keys"
    return "attention and MLP side by side ('use_parallel_residual')" if config.flag("use_parallel_residual") else None


_LLAMA = Decoder(llama_attention)
_PLAIN = Decoder(gqa)
_GLM = Decoder(_bias, fused_mlp_rules, partial=True, interleaved=True)

DENSE: tuple[Family, ...] = (
    trunk_family(
        "Mistral",
        "Mistral 7B, Nemo, Small",
        ("mistral",),
        replace(_PLAIN, windows=_all_windows),
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "sliding_window": 4096},
    ),
    trunk_family(
        "Ministral",
        "Ministral 8B",
        ("ministral",),
        replace(_PLAIN, windows=_ministral_windows),
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "sliding_window": 4096},
    ),
    trunk_family(
        "SmolLM3",
        "SmolLM3",
        ("smollm3",),
        replace(_LLAMA, unplaced=_unplaced, refused=_smollm3_refused),
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
    ),
    trunk_family(
        "Seed-OSS",
        "Seed-OSS",
        ("seed_oss",),
        Decoder(partial(_bias, out="attention_out_bias")),
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "rms_norm_eps": 1e-6,
            "attention_bias": True,
        },
    ),
    trunk_family(
        "Jais 2",
        "Jais 2",
        ("jais2",),
        Decoder(partial(_bias, out="attention_bias"), plain_mlp_rules, activation=squared_relu_flags, norms=LAYER_NORM),
        {
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "relu2",
        },
    ),
    trunk_family(
        "Phi-3",
        "Phi-3, Phi-4, Phi-4-mini",
        ("phi3",),
        Decoder(
            lambda config: gqa(config, fused=True, query_key_value="qkv_proj"),
            fused_mlp_rules,
            partial=True,
            windows=_all_windows,
        ),
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    trunk_family(
        "GLM-4, first form",
        "GLM-4-9B",
        ("glm",),
        _GLM,
        {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1.5625e-7,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    trunk_family(
        "Helium",
        "Helium",
        ("helium",),
        Decoder(_bias, interleaved=True),
        {
            "num_key_value_heads": 20,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100000.0,
        },
    ),
    trunk_family(
        "ERNIE-4.5",
        "ERNIE-4.5, dense",
        ("ernie4_5",),
        Decoder(partial(_bias, key="use_bias", out="use_bias"), mlp_bias="use_bias", interleaved=True),
        {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
    ),
    trunk_family(
        "CWM",
        "Code World Model",
        ("cwm",),
        replace(_PLAIN, windows=three_windows),
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "sliding_window": 8192,
        },
    ),
    trunk_family(
        "InternLM3",
        "InternLM3",
        ("internlm3",),
        Decoder(partial(_bias, key="qkv_bias", out="qkv_bias"), mlp_bias="bias"),
        {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
    ),
    trunk_family(
        "IQuest-Coder",
        "IQuest-Coder V1",
        ("iquestcoder",),
        _LLAMA,
        {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
    ),
    trunk_family(
        "Arcee",
        "AFM-4.5B",
        ("arcee",),
        replace(_LLAMA, mlp=plain_mlp_rules, activation=squared_relu_flags),
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    ),
    trunk_family(
        "Nemotron",
        "Nemotron-4, Minitron",
        ("nemotron",),
        replace(_LLAMA, mlp=plain_mlp_rules, activation=squared_relu_flags, norms=CENTRED_LAYER_NORM, partial=True),
        {
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "hidden_act": "relu2",
        },
    ),
    trunk_family(
        "StableLM",
        "StableLM 2, 3B",
        ("stablelm",),
        Decoder(partial(_bias, key="use_qkv_bias"), norms=LAYER_NORM, partial=True, refused=_stablelm_refused),
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
        },
        carried=(r"model\.layers\.\d+\.self_attn\.[qk]_layernorm\.",),
    ),
)
"""Their rules and flags follow from `Decoder`; a default is that of the class, for a key that a config leaves out."""
