"""Hybrid trunks: Qwen3-Next and Qwen3.5 with Gated DeltaNet, Nemotron-H with Mamba-2, both combined with attention.

Megatron's checkpoints store the rows of a fused projection and of a convolution separately by purpose, in the order of
heads, so that any number of tensor-parallel ranks can take their heads. Letters in comments: K key heads, V value
heads, P channels of a head.

Qwen: a layer of the folder corresponds to two layers of Megatron's hybrid trunk: G or *, then E or -. All norms are
zero-centered (1 + w) in Megatron, and all in the folder except those after the delta rule. The single MTP layer has
gated attention.

Nemotron: each layer is Mamba-2, attention, an MLP or experts; an MTP layer has several such layers. Activations are
squared ReLUs without gates, and there are no positions. The published code, vLLM and Megatron do not limit time steps;
transformers' own class ignores `time_step_limit` and uses `time_step_min` as a limit (huggingface/transformers#48989).
"""

import math
from dataclasses import replace
from functools import partial

from megatron_mtp.checkpoint.families.blocks import Place, depth_frame, gqa_rules, mlp_rules, moe_rules, plain_mlp_rules
from megatron_mtp.checkpoint.families.family import ONE_DEPTH, STORED_HEAD, Depths, Family, Layout, UntrainableError
from megatron_mtp.checkpoint.families.flags import (
    CENTRED,
    hybrid_flags,
    pairs,
    rope_flags,
    routed_flags,
    softmax_expert_flags,
    swiglu_flags,
)
from megatron_mtp.checkpoint.families.rules import ByKind, Computed, HFTensor, Map, Piece, Rule, Split, rename
from megatron_mtp.checkpoint.families.trunk import (
    ORIGINAL,
    ORIGINAL_NORMS,
    check_words,
    depth_frames,
    frame,
    gqa,
    layers,
    llama_attention,
    moe,
    stepped_layers,
)
from megatron_mtp.checkpoint.hf import Shape
from megatron_mtp.checkpoint.hf.config import ConfigError, HFConfig


def delta_rules(place: Place, config: HFConfig, layout: Layout) -> list[Rule]:
    """Return rules of Gated DeltaNet (arXiv:2412.06464) and of the norm before it, part of Megatron's projection."""
    hf, mcore, hidden = f"{place.hf}linear_attn.", f"{place.mcore}self_attention.", config.integer("hidden_size")
    heads, width = config.integer("linear_num_value_heads"), config.integer("linear_value_head_dim")
    rows, kernel = _delta_rows(config), config.integer("linear_conv_kernel_dim")
    convolved = {part: rows[part] for part in ("query", "key", "value")}
    projected = _grouped if config.model_type == "qwen3_next" else _by_kind
    return [
        rename(f"{place.hf}input_layernorm.weight", f"{mcore}in_proj.layer_norm_weight", (hidden,)),
        *projected(hf, f"{mcore}in_proj.weight.", rows, config),
        _split(f"{hf}conv1d.weight", f"{mcore}conv1d.weight.", convolved, (1, kernel)),
        rename(f"{hf}A_log", f"{mcore}A_log", (heads,)),
        rename(f"{hf}dt_bias", f"{mcore}dt_bias", (heads,)),
        _delta_norm(f"{hf}norm.weight", f"{mcore}out_norm.weight", width, layout.has(ORIGINAL_NORMS)),
        rename(f"{hf}out_proj.weight", f"{mcore}out_proj.weight", (hidden, rows["z"])),
    ]


def _delta_rows(config: HFConfig) -> dict[str, int]:
    """Return rows of the projection by their output, under Megatron's names and in its order; queries are like keys."""
    keys, values = (config.integer(f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if values % keys:
        raise ConfigError(
            f"{config.source}: 'linear_num_value_heads' {values} is not a multiple of 'linear_num_key_heads' {keys}."
        )
    key, value = keys * config.integer("linear_key_head_dim"), values * config.integer("linear_value_head_dim")
    return {"query": key, "key": key, "value": value, "z": value, "beta": values, "alpha": values}


def _grouped(hf: str, mcore: str, rows: dict[str, int], config: HFConfig) -> list[Rule]:
    """Order a key head's query, key, values and gates before the next head's; likewise its values' betas and alphas."""
    keys, hidden, rules = config.integer("linear_num_key_heads"), config.integer("hidden_size"), []
    for name, parts in {"in_proj_qkvz": ("query", "key", "value", "z"), "in_proj_ba": ("beta", "alpha")}.items():
        whole = {part: rows[part] for part in parts}
        by_kind = ByKind(keys, tuple(count // keys for count in whole.values()))
        rules.append(_split(f"{hf}{name}.weight", mcore, whole, (hidden,), by_kind))
    return rules


def _by_kind(hf: str, mcore: str, rows: dict[str, int], config: HFConfig) -> list[Rule]:
    others, hidden = {"z": "in_proj_z", "beta": "in_proj_b", "alpha": "in_proj_a"}, config.integer("hidden_size")
    convolved = {part: count for part, count in rows.items() if part not in others}
    return [
        _split(f"{hf}in_proj_qkv.weight", mcore, convolved, (hidden,)),
        *(rename(f"{hf}{name}.weight", f"{mcore}{part}", (rows[part], hidden)) for part, name in others.items()),
    ]


def mamba_rules(place: Place, config: HFConfig) -> list[Rule]:
    """Return rules of Mamba-2 (arXiv:2405.21060) without the norm before it, with the same names on both sides."""
    if config.flag("use_bias") or config.flag("mamba_proj_bias") or not config.flag("use_conv_bias"):
        raise ValueError(
            f"{config.source}: Megatron's Mamba-2 has a bias in its convolution and none in its projections, so "
            "'use_conv_bias' must be true, and 'use_bias' and 'mamba_proj_bias' false; another model does not convert."
        )
    heads, groups = config.integer("mamba_num_heads"), config.integer("n_groups")
    if heads % groups:
        raise ConfigError(f"{config.source}: 'mamba_num_heads' {heads} is not a multiple of 'n_groups' {groups}.")
    hf, mcore, hidden = f"{place.hf}mixer.", f"{place.mcore}mixer.", config.integer("hidden_size")
    inner, shared = heads * config.integer("mamba_head_dim"), groups * config.integer("ssm_state_size")
    rows, kernel = {"z": inner, "x": inner, "B": shared, "C": shared, "dt": heads}, config.integer("conv_kernel")
    return [
        _split(f"{hf}in_proj.weight", f"{mcore}in_proj.weight.", rows, (hidden,)),
        *(
            _split(f"{hf}conv1d.{kind}", f"{mcore}conv1d.{kind}.", {part: rows[part] for part in "xBC"}, rest)
            for kind, rest in {"weight": (1, kernel), "bias": ()}.items()
        ),
        *(rename(f"{hf}{name}", f"{mcore}{name}", (heads,)) for name in ("A_log", "dt_bias", "D")),
        rename(f"{hf}norm.weight", f"{mcore}norm.weight", (inner,)),
        rename(f"{hf}out_proj.weight", f"{mcore}out_proj.weight", (hidden, inner)),
    ]


def _split(hf: str, mcore: str, rows: dict[str, int], rest: Shape, how: Map | None = None) -> Rule:
    """Cut an HF tensor into Megatron's; the parts are consecutive in HF unless `how` is given."""
    pieces = tuple(Piece(f"{mcore}{part}", (count, *rest)) for part, count in rows.items())
    return Rule((HFTensor(hf, (sum(rows.values()), *rest)),), pieces, how or Split(tuple(rows.values())))


def _delta_norm(hf: str, mcore: str, width: int, original: bool) -> Rule:
    """Convert the norm after the delta rule: Megatron's is zero-centered like the model's other norms; HF's is not."""
    kept = [Piece(f"{ORIGINAL}{hf}", (width,))] * original
    return Rule((HFTensor(hf, (width,)),), (*kept, Piece(mcore, (width,), wide=True)), Computed(original, minus=1))


QWEN_DEPTHS = replace(ONE_DEPTH, keys=("mtp_num_hidden_layers", "num_nextn_predict_layers"), published=1)
MIXERS = {"linear_attention": "G", "full_attention": "*"}
DENSE_TYPES = ("qwen3_5", "qwen3_5_text")


def _qwen_rules(config: HFConfig, layout: Layout) -> list[Rule]:
    prefix = "model.language_model." if layout.has("nested") else "model."
    rules = frame(config, layout, prefix, final="final_norm")
    for index, kinds in enumerate(_qwen_trunk(config)):
        places = [Place(f"{prefix}layers.{index}.", f"decoder.layers.{2 * index + half}.") for half in (0, 1)]
        rules += _qwen_layer(config, layout, kinds, places, layout.has("packed experts"))
    if layout.depths:
        places = [Place("mtp.layers.0.", f"mtp.layers.0.mtp_model_layer.layers.{half}.") for half in (0, 1)]
        (around,) = depth_frames(QWEN_DEPTHS, config, places[:1])
        rules += around + _qwen_layer(config, layout, _qwen_depth(config), places, layout.has("packed depth"))
    return rules


def _qwen_layer(config: HFConfig, layout: Layout, kinds: str, places: list[Place], packed: bool) -> list[Rule]:
    """Return rules of one layer of the folder, which is two layers in Megatron, of these kinds and indices."""
    first, second = places
    channels = _qwen_channel_rules(config, layout, kinds[1], second, packed)
    if kinds[0] == "G":
        return delta_rules(first, config, layout) + channels
    norm, hidden = f"{first.mcore}self_attention.linear_qkv.layer_norm_weight", config.integer("hidden_size")
    rules = [rename(f"{first.hf}input_layernorm.weight", norm, (hidden,)), *gqa_rules(first, _qwen_attention(config))]
    return rules + channels


def _qwen_channel_rules(config: HFConfig, layout: Layout, kind: str, place: Place, packed: bool) -> list[Rule]:
    norm, hidden = f"{place.hf}post_attention_layernorm.weight", config.integer("hidden_size")
    if kind == "-":
        rules = mlp_rules(f"{place.hf}mlp.", f"{place.mcore}mlp.", hidden, config.integer("intermediate_size"))
        return [rename(norm, f"{place.mcore}mlp.linear_fc1.layer_norm_weight", (hidden,)), *rules]
    shared = config.integer("shared_expert_intermediate_size")
    experts = moe(
        config, layout, shared=shared, shared_name="shared_expert", shared_gate=True, bias=None, packed=packed
    )
    return [rename(norm, f"{place.mcore}pre_mlp_layernorm.weight", (hidden,)), *moe_rules(place, experts)]


_qwen_attention = partial(llama_attention, norms=True, gated=True)


def _qwen_trunk(config: HFConfig) -> list[str]:
    """Return Megatron's two symbols of every layer."""
    count = layers(config)
    interval = config.integer("full_attention_interval", default=4)
    usual = ["linear_attention" if number % interval else "full_attention" for number in range(1, count + 1)]
    kinds = config.words("layer_types", count) or usual
    check_words(config, "layer_types", kinds, tuple(MIXERS))
    return [MIXERS[kind] + _qwen_channels(config, index) for index, kind in enumerate(kinds)]


def _qwen_depth(config: HFConfig) -> str:
    """Return Megatron's symbols of the depth; engines give it the MLP or experts that the first layer would have."""
    return f"*{_qwen_channels(config, 0)}"


def _qwen_channels(config: HFConfig, index: int) -> str:
    if not {config.model_type, config.text_type}.isdisjoint(DENSE_TYPES) or not config.integer("num_experts", least=0):
        return "-"
    return "E" if stepped_layers(config)[index] else "-"


def _qwen_flags(config: HFConfig, layout: Layout) -> list[str]:
    if _qwen_attention(config).out_bias:
        raise UntrainableError("biases of all projections of attention, which Megatron has only with all others")
    if config.rope["rope_type"] != "default":
        raise UntrainableError("a rotary scaling, which Megatron's hybrid model does not have")
    pattern = "/".join(["".join(_qwen_trunk(config)), *[_qwen_depth(config)] * layout.depths])
    names = "num_key_heads num_value_heads key_head_dim value_head_dim conv_kernel_dim".split()
    sizes = {f"linear-{name.replace('_', '-')}": config.integer(f"linear_{name}") for name in names}
    return [
        *hybrid_flags(config, pattern, _qwen_attention(config)), *swiglu_flags(config), *CENTRED,
        "--position-embedding-type", "rope", *rope_flags(config), "--attention-output-gate", *pairs(sizes),
        *(softmax_expert_flags(config) if "E" in pattern else []),
    ]  # fmt: skip


KINDS = {**{"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*"}, **{"mlp": "-", "moe": "E"}}
"""Megatron's symbols for kinds of layers, which older folders and published patterns also use."""
NORMS = {
    "M": "mixer.in_proj.layer_norm_weight",
    "*": "self_attention.linear_qkv.layer_norm_weight",
    "-": "mlp.linear_fc1.layer_norm_weight",
    "E": "pre_mlp_layernorm.weight",
}
USUAL = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "conv_kernel": 4, "layer_norm_epsilon": 1e-5}
"""Megatron's fixed settings of these layers, whatever the flags; `layer_norm_epsilon` is for the norm inside Mamba-2.
"""


NEMOTRON_DEPTHS = Depths(
    r"^mtp\.layers\.(\d+)\.eh_proj\.weight$", "mtp.layers.", layers_key="mtp_hybrid_override_pattern"
)


def puzzle_rules(config: HFConfig, layout: Layout) -> list[Rule]:
    """Return rules of everything around the layers, for trunk and MTP layers."""
    around = (_around(config, depth) for depth in range(layout.depths))
    return [*_nemotron_frame(config, layout), *(rule for rules in around for rule in rules)]


def _nemotron_frame(config: HFConfig, layout: Layout) -> list[Rule]:
    return frame(config, layout, "backbone.", embedding="embeddings", norm="norm_f", final="final_norm")


def _around(config: HFConfig, depth: int) -> list[Rule]:
    """Return rules of a depth's parts outside its layers, which are stored on the first and the last layer."""
    row = len(_nemotron_row(config))
    first, last = f"mtp.layers.{depth * row}.", f"mtp.layers.{(depth + 1) * row - 1}."
    names = (f"{first}enorm", f"{first}hnorm", f"{first}eh_proj", f"{last}final_layernorm")
    return depth_frame(depth, config.integer("hidden_size"), names)


def _nemotron_rules(config: HFConfig, layout: Layout) -> list[Rule]:
    rules = _nemotron_frame(config, layout)
    for index, kind in enumerate(_nemotron_trunk(config)):
        rules += _nemotron_layer(config, layout, kind, Place(f"backbone.layers.{index}.", f"decoder.layers.{index}."))
    row = _nemotron_row(config)
    for depth in range(layout.depths):
        rules += _around(config, depth)
        for index, kind in enumerate(row):
            stack = f"mtp.layers.{depth}.mtp_model_layer.layers.{index}."
            rules += _nemotron_layer(config, layout, kind, Place(f"mtp.layers.{depth * len(row) + index}.", stack))
    return rules


def _nemotron_layer(config: HFConfig, layout: Layout, kind: str, place: Place) -> list[Rule]:
    hidden = config.integer("hidden_size")
    norm = rename(f"{place.hf}norm.weight", f"{place.mcore}{NORMS[kind]}", (hidden,))
    if kind == "M":
        return [norm, *mamba_rules(place, config)]
    if kind == "*":
        return [norm, *gqa_rules(place, gqa(config, attention="mixer"))]
    if kind == "-":
        width = config.integer("intermediate_size")
        return [norm, *plain_mlp_rules(f"{place.hf}mixer.", f"{place.mcore}mlp.", hidden, width)]
    shared = config.integer("moe_shared_expert_intermediate_size")
    experts = moe(config, layout, shared=shared, latent=_nemotron_latent(config), gated=False, module="mixer")
    return [norm, *moe_rules(place, experts)]


def _nemotron_latent(config: HFConfig) -> int | None:
    """Return the size of the latent between hidden state and experts; None without one."""
    return config.integer("moe_latent_size") if config.has("moe_latent_size") else None


def _nemotron_trunk(config: HFConfig) -> str:
    """Return Megatron's symbols of the trunk's layers."""
    return _symbols(config, "layers_block_type", "layer_types", "hybrid_override_pattern") or "ME*-"


def _nemotron_row(config: HFConfig) -> str:
    """Return Megatron's symbols of a depth's layers."""
    named = _symbols(config, "mtp_layers_block_type") or "*E"
    return (_symbols(config, "mtp_hybrid_override_pattern") or named) if named == "*E" else named


def _symbols(config: HFConfig, *keys: str) -> str | None:
    """Read the first of these keys that is present: a list of kinds, or a string of symbols."""
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


def _nemotron_flags(config: HFConfig, layout: Layout) -> list[str]:
    _nemotron_check(config)
    pattern = "/".join([_nemotron_trunk(config), *[_nemotron_row(config)] * layout.depths])
    sizes = {
        "mamba-num-heads": config.integer("mamba_num_heads"), "mamba-head-dim": config.integer("mamba_head_dim"),
        "mamba-num-groups": config.integer("n_groups"), "mamba-state-dim": config.integer("ssm_state_size"),
        "position-embedding-type": "none",
    }  # fmt: skip
    flags = [*hybrid_flags(config, pattern, gqa(config)), *pairs(sizes), "--squared-relu"]
    if "E" not in pattern:
        return flags
    widths = {"moe-shared-expert-intermediate-size": config.integer("moe_shared_expert_intermediate_size")}
    if (latent := _nemotron_latent(config)) is not None:
        widths["moe-latent-size"] = latent
    return [*flags, *routed_flags(config), *pairs(widths)]


def _nemotron_check(config: HFConfig) -> None:
    """Refuse what Megatron has no flag for."""
    for name, usual in USUAL.items():
        if config.keys[name] != usual:
            raise UntrainableError(f"'{name}' {config.keys[name]!r:.40}, where Megatron has {usual}")
    if not _unlimited(config.keys["time_step_limit"]):
        raise UntrainableError(f"limits of time steps, 'time_step_limit' {config.keys['time_step_limit']!r:.40}")
    if config.has("sliding_window"):
        raise UntrainableError("sliding windows")


def _unlimited(limit: object) -> bool:
    """Return whether time steps are unlimited above 0; transformers writes infinity as an object."""
    if not isinstance(limit, list | tuple) or len(limit) != 2:
        return False
    return limit[0] == 0 and limit[1] in (math.inf, {"__float__": "Infinity"})


_QWEN3_NEXT = Family(
    "Qwen3-Next",
    "Qwen3-Next, Qwen3.5, 3.6 and 3.8 with experts",
    ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
    _qwen_rules,
    depths=QWEN_DEPTHS,
    features={
        **STORED_HEAD,
        "nested": r"^model\.language_model\.",
        "packed experts": r"^model\.(language_model\.)?layers\.\d+\.mlp\.experts\.gate_up_proj$",
        "packed depth": r"^mtp\.layers\.0\.mlp\.experts\.gate_up_proj$",
        ORIGINAL_NORMS: r"\.linear_attn\.norm\.weight$",
    },
    carried=(r"model\.visual\.",),
    flags=_qwen_flags,
    defaults={"partial_rotary_factor": 0.25, "norm_topk_prob": True},
)
HYBRID: tuple[Family, ...] = (
    _QWEN3_NEXT,
    replace(
        _QWEN3_NEXT,
        title="Qwen3.5",
        published="Qwen3.5, 3.6 and 3.8, dense",
        model_types=DENSE_TYPES,
        config_class="qwen3_5_text",
    ),
    replace(
        _QWEN3_NEXT,
        title="Intern-S2",
        published="Intern-S2 Preview",
        model_types=("intern_s2_preview",),
        config_class="qwen3_5_moe_text",
        carried=(r"(model\.)?(visual|time_series)\.",),
    ),
    Family(
        "Nemotron-H",
        "Nemotron-H, Nemotron 3",
        ("nemotron_h",),
        _nemotron_rules,
        depths=NEMOTRON_DEPTHS,
        flags=_nemotron_flags,
        defaults={"moe_intermediate_size": 7688},
    ),
)
