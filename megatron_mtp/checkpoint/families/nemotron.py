"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention, an MLP or experts; a depth has several such layers.

Activations are squared ReLUs without gates, and there are no positions. The published code and vLLM have no limits of
time steps, and so has Megatron; transformers' own class ignores `time_step_limit` and takes `time_step_min` as a limit
(huggingface/transformers#48989).
"""

import math
from dataclasses import replace

from megatron_mtp.checkpoint.families.blocks import Frame, Place, depth_frame, gqa_rules, moe_rules, plain_mlp_rules
from megatron_mtp.checkpoint.families.family import Depths, Family, Layout
from megatron_mtp.checkpoint.families.flags import UntrainableError, hybrid_flags, pairs, routed_flags
from megatron_mtp.checkpoint.families.recurrent import Mamba, mamba_rules
from megatron_mtp.checkpoint.families.rules import Rule, rename
from megatron_mtp.checkpoint.families.trunk import STORED_HEAD, frame, gqa, moe
from megatron_mtp.checkpoint.hf.config import ConfigError, HFConfig

KINDS = {
    **{"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*"},
    **{"mlp": "-", "moe": "E"},
}
"""Megatron's symbols of a layer's kinds, which older folders and the published patterns use as well."""
NORMS = {
    "M": "mixer.in_proj.layer_norm_weight",
    "*": "self_attention.linear_qkv.layer_norm_weight",
    "-": "mlp.linear_fc1.layer_norm_weight",
    "E": "pre_mlp_layernorm.weight",
}
USUAL = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "conv_kernel": 4, "layer_norm_epsilon": 1e-5}
"""What Megatron has in these layers, whatever the flags; `layer_norm_epsilon` that of the norm inside Mamba-2."""


def _rules(config: HFConfig, layout: Layout) -> list[Rule]:
    rules = frame(config, layout, "backbone.", embedding="embeddings.weight", norm="norm_f.weight", final="final_norm")
    for index, kind in enumerate(_trunk(config)):
        rules += _layer(config, layout, kind, Place(f"backbone.layers.{index}.", f"decoder.layers.{index}."))
    row = _row(config)
    for depth in range(layout.depths):
        first, last = f"mtp.layers.{depth * len(row)}.", f"mtp.layers.{(depth + 1) * len(row) - 1}."
        names = replace(Frame.under(first, "enorm", "hnorm", "eh_proj", None), final=f"{last}final_layernorm.weight")
        rules += depth_frame(depth, config.integer("hidden_size"), names)
        for index, kind in enumerate(row):
            stack = f"mtp.layers.{depth}.mtp_model_layer.layers.{index}."
            rules += _layer(config, layout, kind, Place(f"mtp.layers.{depth * len(row) + index}.", stack))
    return rules


def _layer(config: HFConfig, layout: Layout, kind: str, place: Place) -> list[Rule]:
    hidden = config.integer("hidden_size")
    norm = rename(f"{place.hf}norm.weight", f"{place.mcore}{NORMS[kind]}", (hidden,))
    if kind == "M":
        return [norm, *mamba_rules(place, _mamba(config))]
    if kind == "*":
        return [norm, *gqa_rules(place, gqa(config, attention="mixer"))]
    if kind == "-":
        width = config.integer("intermediate_size")
        return [norm, *plain_mlp_rules(f"{place.hf}mixer.", f"{place.mcore}mlp.", hidden, width)]
    shared = config.integer("moe_shared_expert_intermediate_size")
    experts = moe(config, layout, shared=shared, latent=_latent(config), gated=False, module="mixer")
    return [norm, *moe_rules(place, experts)]


def _latent(config: HFConfig) -> int | None:
    """Size of the latent between hidden state and experts; None without one."""
    return config.integer("moe_latent_size") if config.has("moe_latent_size") else None


def _mamba(config: HFConfig) -> Mamba:
    if config.flag("use_bias") or config.flag("mamba_proj_bias") or not config.flag("use_conv_bias"):
        raise ValueError(
            f"{config.source}: Megatron's Mamba-2 has a bias in its convolution and none in its projections, so "
            "'use_conv_bias' must be true, and 'use_bias' and 'mamba_proj_bias' false; another model does not convert."
        )
    heads, groups = config.integer("mamba_num_heads"), config.integer("n_groups")
    if heads % groups:
        raise ConfigError(f"{config.source}: 'mamba_num_heads' {heads} is no multiple of 'n_groups' {groups}.")
    width, state = config.integer("mamba_head_dim"), config.integer("ssm_state_size")
    return Mamba(config.integer("hidden_size"), heads, width, groups, state, config.integer("conv_kernel"))


def _trunk(config: HFConfig) -> str:
    """Megatron's symbols of the trunk's layers."""
    return _symbols(config, "layers_block_type", "layer_types", "hybrid_override_pattern") or "ME*-"


def _row(config: HFConfig) -> str:
    """Megatron's symbols of a depth's layers."""
    named = _symbols(config, "mtp_layers_block_type") or "*E"
    return (_symbols(config, "mtp_hybrid_override_pattern") or named) if named == "*E" else named


def _symbols(config: HFConfig, *keys: str) -> str | None:
    """From the first of these keys that is present: a list of kinds, or a text of symbols."""
    key = next((key for key in keys if config.has(key)), None)
    if key is None:
        return None
    value = config.keys[key]
    known = KINDS if isinstance(value, list) else dict.fromkeys(NORMS)
    if (
        not isinstance(value, str | list)
        or not value
        or not all(isinstance(kind, str) and kind in known for kind in value)
    ):
        raise ConfigError(
            f"{config.source}: '{key}' is {value!r:.40}; it must be a list of {', '.join(KINDS)}, or a text of "
            f"{' '.join(NORMS)}."
        )
    return "".join(KINDS.get(kind, kind) for kind in value)


def _flags(config: HFConfig, layout: Layout) -> list[str]:
    _check(config)
    mamba, pattern = _mamba(config), "/".join([_trunk(config), *[_row(config)] * layout.depths])
    sizes = {
        "mamba-num-heads": mamba.heads, "mamba-head-dim": mamba.width, "mamba-num-groups": mamba.groups,
        "mamba-state-dim": mamba.state, "position-embedding-type": "none",
    }  # fmt: skip
    flags = [*hybrid_flags(config, pattern, gqa(config)), *pairs(sizes), "--squared-relu"]
    if "E" not in pattern:
        return flags
    widths = {"moe-shared-expert-intermediate-size": config.integer("moe_shared_expert_intermediate_size")}
    if (latent := _latent(config)) is not None:
        widths["moe-latent-size"] = latent
    return [*flags, *routed_flags(config), *pairs(widths)]


def _check(config: HFConfig) -> None:
    """Refuse what Megatron has no flag for."""
    for name, usual in USUAL.items():
        if config.keys[name] != usual:
            raise UntrainableError(f"'{name}' {config.keys[name]!r:.40}, where Megatron has {usual}")
    if not _unlimited(config.keys["time_step_limit"]):
        raise UntrainableError(f"limits of time steps, 'time_step_limit' {config.keys['time_step_limit']!r:.40}")
    if config.has("sliding_window"):
        raise UntrainableError("sliding windows")


def _unlimited(limit: object) -> bool:
    """Whether time steps may be anything from 0; transformers writes infinity as an object."""
    if not isinstance(limit, list | tuple) or len(limit) != 2:
        return False
    return limit[0] == 0 and limit[1] in (math.inf, {"__float__": "Infinity"})


NEMOTRON = Family(
    "Nemotron-H",
    "Nemotron-H, Nemotron 3",
    ("nemotron_h",),
    _rules,
    depths=Depths(r"^mtp\.layers\.(\d+)\.eh_proj\.weight$", layers_key="mtp_hybrid_override_pattern"),
    features=STORED_HEAD,
    flags=_flags,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "time_step_limit": [0.0, math.inf],
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
    },
)
