"""Qwen3-Next, Qwen3.5 and Qwen3.6, dense and MoE: Gated DeltaNet and gated attention, one depth of gated attention.

A layer of the folder is two of Megatron's hybrid trunk: G or *, then E or -. All norms are zero-centred (1 + w) in
Megatron, and all in the folder except those behind the delta rule.
"""

from dataclasses import replace

from megatron_mtp.checkpoint.families.blocks import (
    GQA,
    Frame,
    Place,
    depth_frame,
    gqa_rules,
    mlp_rules,
    moe_rules,
)
from megatron_mtp.checkpoint.families.family import Depths, Family, Layout
from megatron_mtp.checkpoint.families.flags import (
    CENTRED,
    UntrainableError,
    hybrid_flags,
    pairs,
    rope_flags,
    softmax_expert_flags,
    swiglu_flags,
)
from megatron_mtp.checkpoint.families.recurrent import DeltaNet, delta_rules
from megatron_mtp.checkpoint.families.rules import Rule, rename
from megatron_mtp.checkpoint.families.trunk import ORIGINAL_NORMS, STORED_HEAD, frame, gqa, layers, moe
from megatron_mtp.checkpoint.hf.config import ConfigError, HFConfig

MIXERS = {"linear_attention": "G", "full_attention": "*"}
DENSE = ("qwen3_5", "qwen3_5_text")
STACK = "mtp.layers.0.mtp_model_layer.layers."
"""Megatron's prefix of the layers of the depth."""


def _rules(config: HFConfig, layout: Layout) -> list[Rule]:
    prefix = "model.language_model." if layout.has("nested") else "model."
    rules = frame(config, layout, prefix, final="final_norm")
    for index, kinds in enumerate(_trunk(config)):
        places = [Place(f"{prefix}layers.{index}.", f"decoder.layers.{2 * index + half}.") for half in (0, 1)]
        rules += _layer(config, layout, kinds, places, layout.has("packed experts"))
    if layout.depths:
        names = Frame.under("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        rules += depth_frame(0, config.integer("hidden_size"), names)
        places = [Place("mtp.layers.0.", f"{STACK}{half}.") for half in (0, 1)]
        rules += _layer(config, layout, _depth(config), places, layout.has("packed depth"))
    return rules


def _layer(config: HFConfig, layout: Layout, kinds: str, places: list[Place], packed: bool) -> list[Rule]:
    """One layer of the folder, which is two of Megatron's: `kinds` and `places` are theirs."""
    first, second = places
    channels = _channel_rules(config, layout, kinds[1], second, packed)
    if kinds[0] == "G":
        return delta_rules(first, _delta(config), layout) + channels
    norm, hidden = f"{first.mcore}self_attention.linear_qkv.layer_norm_weight", config.integer("hidden_size")
    rules = [rename(f"{first.hf}input_layernorm.weight", norm, (hidden,)), *gqa_rules(first, _attention(config))]
    return rules + channels


def _channel_rules(config: HFConfig, layout: Layout, kind: str, place: Place, packed: bool) -> list[Rule]:
    norm, hidden = f"{place.hf}post_attention_layernorm.weight", config.integer("hidden_size")
    if kind == "-":
        rules = mlp_rules(f"{place.hf}mlp.", f"{place.mcore}mlp.", hidden, config.integer("intermediate_size"))
        return [rename(norm, f"{place.mcore}mlp.linear_fc1.layer_norm_weight", (hidden,)), *rules]
    shared = config.integer("shared_expert_intermediate_size")
    experts = moe(
        config, layout, shared=shared, shared_name="shared_expert", shared_gate=True, bias=None, packed=packed
    )
    return [rename(norm, f"{place.mcore}pre_mlp_layernorm.weight", (hidden,)), *moe_rules(place, experts)]


def _attention(config: HFConfig) -> GQA:
    bias = config.flag("attention_bias")
    return gqa(config, bias=bias, out_bias=bias, norms=True, gated=True)


def _delta(config: HFConfig) -> DeltaNet:
    keys, values = (config.integer(f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if values % keys:
        raise ConfigError(
            f"{config.source}: 'linear_num_value_heads' {values} is no multiple of 'linear_num_key_heads' {keys}."
        )
    return DeltaNet(
        config.integer("hidden_size"),
        keys,
        values,
        key_width=config.integer("linear_key_head_dim"),
        value_width=config.integer("linear_value_head_dim"),
        kernel=config.integer("linear_conv_kernel_dim"),
        by_group=config.model_type == "qwen3_next",
    )


def _trunk(config: HFConfig) -> list[str]:
    """Megatron's two symbols of every layer."""
    count = layers(config)
    interval = config.integer("full_attention_interval", default=4)
    usual = ["linear_attention" if number % interval else "full_attention" for number in range(1, count + 1)]
    kinds = config.words("layer_types", count) or usual
    unknown = sorted(set(kinds) - MIXERS.keys())
    if unknown:
        raise ValueError(f"{config.source}: 'layer_types' has '{unknown[0]:.40}'; known are {', '.join(MIXERS)}.")
    return [MIXERS[kind] + _channels(config, index) for index, kind in enumerate(kinds)]


def _depth(config: HFConfig) -> str:
    """Megatron's symbols of the depth; engines give it the MLP or the experts that the first layer would have."""
    return f"*{_channels(config, 0)}"


def _channels(config: HFConfig, index: int) -> str:
    if config.model_type in DENSE or not config.integer("num_experts", least=0):
        return "-"
    dense = config.keys.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ConfigError(f"{config.source}: 'mlp_only_layers' is {dense!r:.40}; it must be a list of layers.")
    sparse = (index + 1) % config.integer("decoder_sparse_step", default=1) == 0
    return "E" if sparse and index not in dense else "-"


def _flags(config: HFConfig, layout: Layout) -> list[str]:
    if _attention(config).out_bias:
        raise UntrainableError("biases of all projections of attention, which Megatron has only with all others")
    if config.rope["rope_type"] != "default":
        raise UntrainableError("a rotary scaling, which Megatron's hybrid model does not have")
    delta, pattern = _delta(config), "/".join(["".join(_trunk(config)), *[_depth(config)] * layout.depths])
    sizes = {
        "linear-num-key-heads": delta.keys, "linear-num-value-heads": delta.values,
        "linear-key-head-dim": delta.key_width, "linear-value-head-dim": delta.value_width,
        "linear-conv-kernel-dim": delta.kernel,
    }  # fmt: skip
    return [
        *hybrid_flags(config, pattern, _attention(config)), *swiglu_flags(config), *CENTRED,
        "--position-embedding-type", "rope", *rope_flags(config), "--attention-output-gate", *pairs(sizes),
        *(softmax_expert_flags(config) if "E" in pattern else []),
    ]  # fmt: skip


QWEN3_NEXT = Family(
    "Qwen3-Next",
    "Qwen3-Next, Qwen3.5 and 3.6 with experts",
    ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
    _rules,
    depths=Depths(
        r"^mtp\.(fc)\.weight$",
        keys=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
        default=None,
        limit=1,
    ),
    features={
        **STORED_HEAD,
        "nested": r"^model\.language_model\.",
        "packed experts": r"^model\.(language_model\.)?layers\.\d+\.mlp\.experts\.gate_up_proj$",
        "packed depth": r"^mtp\.layers\.0\.mlp\.experts\.gate_up_proj$",
        ORIGINAL_NORMS: r"\.linear_attn\.norm\.weight$",
    },
    carried=(r"model\.visual\.",),
    flags=_flags,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
    },
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    title="Qwen3.5",
    published="Qwen3.5 and 3.6, dense",
    model_types=DENSE,
    defaults={**QWEN3_NEXT.defaults, "num_key_value_heads": 4},
)
