"""Megatron's flags for the families that it can run: the model's arguments, as `--use-checkpoint-args` finds them.

Megatron has no flag for what it does not know how to compute; then these functions raise `UntrainableError`, and the
model is converted tensor by tensor only.
"""

from collections.abc import Mapping
from typing import Any

from megatron_mtp.checkpoint.families.blocks import GQA, MLA
from megatron_mtp.checkpoint.families.trunk import is_dense, layers
from megatron_mtp.checkpoint.hf_config import HFConfig


class UntrainableError(ValueError):
    """This very model, of a family that Megatron can run, uses something that it cannot."""


def dense_flags(config: HFConfig, attention: GQA, depths: int) -> list[str]:
    """A dense model with grouped-query attention."""
    if attention.out_bias or config.flag("mlp_bias"):
        raise UntrainableError(
            "biases of the output projection or the MLP, which Megatron has only together with all others"
        )
    windows = config.flag("use_sliding_window") or (config.words("layer_types", 0) is not None and _slides(config))
    if windows:
        raise UntrainableError("sliding windows")
    return [
        *common_flags(config, depths, layers(config), config.integer("intermediate_size")),
        *gqa_flags(config, attention),
        *rope_flags(config, config.number("partial_rotary_factor", default=1.0)),
    ]


def moe_flags(config: HFConfig, attention: GQA, depths: int) -> list[str]:
    """A model of experts with grouped-query attention and DeepSeek's router."""
    fraction = rotated_part(config, 1.0)
    return [
        *common_flags(config, depths, layers(config), config.integer("intermediate_size")),
        *gqa_flags(config, attention),
        *rope_flags(config, fraction),
        *expert_flags(config),
    ]


def mla_flags(config: HFConfig, attention: MLA, depths: int) -> list[str]:
    """DeepSeek-V3's model."""
    return [
        *common_flags(config, depths, layers(config), config.integer("intermediate_size")),
        *latent_flags(config, attention),
        *expert_flags(config),
    ]


def common_flags(config: HFConfig, depths: int, count: int, width: int) -> list[str]:
    """Sizes, norms and MLP of a model of so many layers."""
    activation = config.keys.get("hidden_act", "silu")
    if activation != "silu":
        raise UntrainableError(f"the activation '{activation!s:.40}'")
    longest = config.integer("max_position_embeddings", default=4096)
    vocabulary = config.integer("vocab_size")
    flags = pairs({
        "num-layers": count, "hidden-size": config.integer("hidden_size"), "ffn-hidden-size": width,
        "num-attention-heads": config.integer("num_attention_heads"), "seq-length": longest,
        "max-position-embeddings": longest, "norm-epsilon": config.number(*_EPSILON, default=1e-6),
        "vocab-size": vocabulary, "attention-dropout": 0.0, "hidden-dropout": 0.0,
    })  # fmt: skip
    flags += ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope"]
    if not config.flag("tie_word_embeddings"):
        flags.append("--untie-embeddings-and-output-weights")
    return flags + (pairs({"mtp-num-layers": depths}) if depths else [])


_EPSILON = ("rms_norm_eps", "layer_norm_epsilon", "layernorm_epsilon")


def latent_flags(config: HFConfig, attention: MLA) -> list[str]:
    """Multi-head latent attention."""
    if config.flag("rope_interleave", default=True) is False:
        raise UntrainableError("RoPE in halves; Megatron's latent attention has it interleaved")
    query = {} if attention.query_rank is None else {"q-lora-rank": attention.query_rank}
    sizes = query | {
        "kv-lora-rank": attention.key_rank, "qk-head-dim": attention.content,
        "qk-pos-emb-head-dim": attention.position, "v-head-dim": attention.value, "kv-channels": attention.value,
    }  # fmt: skip
    return ["--multi-latent-attention", *pairs(sizes), "--qk-layernorm", *_mla_rope(config)]


def gqa_flags(config: HFConfig, attention: GQA) -> list[str]:
    """Grouped-query attention without its positions."""
    flags = pairs({"num-query-groups": attention.groups, "kv-channels": attention.widths[0]})
    flags.append("--group-query-attention")
    return flags + ["--add-qkv-bias"] * attention.bias + ["--qk-layernorm"] * attention.norms


def rope_flags(config: HFConfig, fraction: float) -> list[str]:
    """Rotary positions of a part of every head."""
    rope = config.rope
    kind = rope.get("rope_type", "default")
    flags = pairs({"rotary-base": _base(config), "rotary-percent": fraction})
    if kind == "llama3":
        usual = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        if any(rope.get(name, value) != value for name, value in usual.items()):
            raise UntrainableError("a Llama 3 rotary scaling with other numbers than Megatron's")
        return [*flags, "--use-rope-scaling", *pairs({"rope-scaling-factor": _number(rope, "factor", 8.0)})]
    if kind != "default":
        raise UntrainableError(f"the rotary scaling '{kind!s:.40}' outside of latent attention")
    return flags


def _mla_rope(config: HFConfig) -> list[str]:
    rope = config.rope
    kind = rope.get("rope_type", "default")
    flags = pairs({"rotary-base": _base(config)})
    if kind == "default":
        return [*flags, "--rope-type", "rope"]
    if kind != "yarn":
        raise UntrainableError(f"the rotary scaling '{kind!s:.40}'")
    fixed = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    if any(rope.get(name, value) != value for name, value in fixed.items()):
        raise UntrainableError("a YaRN scaling with other numbers than Megatron's")
    names = {"rotary-scaling-factor": "factor", "mscale": "mscale", "mscale-all-dim": "mscale_all_dim"}
    flags += pairs({flag: _number(rope, name, 1.0) for flag, name in names.items() if name in rope})
    return [*flags, "--rope-type", "yarn"]


def expert_flags(config: HFConfig) -> list[str]:
    """DeepSeek-V3's router: sigmoid scores, a correction bias for the choice, groups, weights normed and scaled."""
    experts, chosen = config.integer("n_routed_experts", "num_experts"), config.integer("num_experts_per_tok")
    width, dense = config.integer("moe_intermediate_size"), config.integer("first_k_dense_replace", default=0, least=0)
    count = layers(config)
    if is_dense(config):
        return []
    if config.flag("norm_topk_prob", default=True) == (chosen == 1):
        raise UntrainableError("router weights that are normed over one expert, or not normed over several")
    flags = pairs({
        "num-experts": experts, "moe-router-topk": chosen, "moe-ffn-hidden-size": width,
        "moe-layer-freq": f"[{','.join(str(int(index >= dense)) for index in range(count))}]",
        "moe-router-score-function": "sigmoid", "moe-router-load-balancing-type": "none",
        "moe-router-topk-scaling-factor": config.number("routed_scaling_factor", default=1.0),
        "moe-router-bias-update-rate": 1e-3, "moe-router-dtype": "fp32",
    })  # fmt: skip
    flags.append("--moe-router-enable-expert-bias")
    shared = config.integer("n_shared_experts", "num_shared_experts", default=0, least=0)
    if shared:
        flags += pairs({"moe-shared-expert-intermediate-size": shared * width})
    groups = config.integer("n_group", default=1)
    if groups > 1:
        flags += pairs(
            {"moe-router-num-groups": groups, "moe-router-group-topk": config.integer("topk_group", default=1)}
        )
    return flags


def _base(config: HFConfig) -> int:
    base = config.rope.get("rope_theta", 10000)
    if isinstance(base, bool) or not isinstance(base, (int, float)) or base != int(base) or base < 1:
        raise UntrainableError(f"the rotary base {base!r:.40}, which is no whole number")
    return int(base)


def _number(rope: dict[str, Any], name: str, default: float) -> float:
    value = rope.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UntrainableError(f"a rotary setting '{name}' of {value!r:.40}")
    return float(value)


def rotated_part(config: HFConfig, default: float) -> float:
    """Part of a head that is rotated."""
    nested = config.rope.get("partial_rotary_factor")
    if isinstance(nested, (int, float)) and not isinstance(nested, bool):
        return float(nested)
    return config.number("partial_rotary_factor", default=default)


def _slides(config: HFConfig) -> bool:
    return "sliding_attention" in (config.words("layer_types", 0) or config.keys["layer_types"])


def pairs(values: Mapping[str, object]) -> list[str]:
    """Flags and their values, one after another."""
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]
