"""Megatron's flags for a model, from its config; `--use-checkpoint-args` restores them.

If Megatron cannot compute something in the config, these functions raise `UntrainableError`: the model converts, but
cannot be trained.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_mtp.checkpoint.families.blocks import GQA
from megatron_mtp.checkpoint.families.family import UntrainableError
from megatron_mtp.checkpoint.families.trained import LARGEST_LATENT_EPSILON
from megatron_mtp.checkpoint.families.trunk import latent_attention
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.spec.rope_scaling import SCALINGS, Scaling, number, positive

PARTLY_BIASED = "biases of the output projection or the MLP, which Megatron has only together with all others"
IGNORED_PART = "a 'partial_rotary_factor', which transformers ignores in this family and vLLM does not"


def hybrid_flags(config: HFConfig, pattern: str, attention: GQA) -> list[str]:
    """Return flags of a hybrid model without activation and positions.

    The pattern names the layers of trunk and MTP.
    """
    trunk, *depths = pattern.split("/")
    width = config.integer("intermediate_size", "moe_intermediate_size")
    return [
        "--hybrid-layer-pattern", pattern, *size_flags(config, len(depths), len(trunk), width), *gqa_flags(attention)
    ]  # fmt: skip


def swiglu_flags(config: HFConfig) -> list[str]:
    """Return flags of a gated MLP."""
    activation = config.keys.get("hidden_act", "silu")
    if activation != "silu":
        raise UntrainableError(f"the activation '{activation!s:.40}'")
    return ["--swiglu"]


def squared_relu_flags(config: HFConfig) -> list[str]:
    """Return flags of an MLP without a gate, with squared ReLU."""
    activation = config.keys.get("hidden_act", "relu2")
    if activation != "relu2":
        raise UntrainableError(f"the activation '{activation!s:.40}'")
    return ["--squared-relu"]


RMS_NORM = ("--normalization", "RMSNorm")
PLAIN = (*RMS_NORM, "--disable-bias-linear")
"""RMSNorm without biases."""


def size_flags(config: HFConfig, depths: int, count: int, width: int, norms: Sequence[str] = PLAIN) -> list[str]:
    """Return flags for sizes, norms and biases with these numbers of MTP and trunk layers and this MLP width.

    Raises:
        UntrainableError: Megatron cannot run the model; the same in all functions of this file.
    """
    longest = config.integer("max_position_embeddings")
    vocabulary = config.integer("vocab_size")
    flags = pairs({
        "num-layers": count, "hidden-size": config.integer("hidden_size"), "ffn-hidden-size": width,
        "num-attention-heads": config.integer("num_attention_heads"), "seq-length": longest,
        "max-position-embeddings": longest, "norm-epsilon": config.number(*EPSILON),
        "vocab-size": vocabulary, "attention-dropout": 0.0, "hidden-dropout": 0.0,
    })  # fmt: skip
    flags += norms
    if not config.flag("tie_word_embeddings"):
        flags.append("--untie-embeddings-and-output-weights")
    return flags + (pairs({"mtp-num-layers": depths}) if depths else [])


CENTRED = ["--apply-layernorm-1p"]
"""Norms that multiply by 1 + w."""
EPSILON = ("rms_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "layer_norm_eps", "norm_eps")


def latent_flags(config: HFConfig) -> list[str]:
    """Return flags of multi-head latent attention."""
    attention = latent_attention(config)
    if not config.flag("rope_interleave"):
        raise UntrainableError("RoPE in halves; Megatron's latent attention has it interleaved")
    if (epsilon := config.number(*EPSILON)) > LARGEST_LATENT_EPSILON:
        raise UntrainableError(
            f"norms with an epsilon of {epsilon}, which Megatron would use inside latent attention as well, where "
            "transformers has 1e-6"
        )
    query = {} if attention.query_rank is None else {"q-lora-rank": attention.query_rank}
    sizes = query | {
        "kv-lora-rank": attention.key_rank, "qk-head-dim": attention.content,
        "qk-pos-emb-head-dim": attention.position, "v-head-dim": attention.value, "kv-channels": attention.value,
    }  # fmt: skip
    flags = ["--position-embedding-type", "rope", "--multi-latent-attention", *pairs(sizes), "--qk-layernorm"]
    return [*flags, *_latent_rope_flags(config)]


def gqa_flags(attention: GQA) -> list[str]:
    """Return flags of grouped-query attention, without positions."""
    flags = pairs({"num-query-groups": attention.groups, "kv-channels": attention.widths[0]})
    flags.append("--group-query-attention")
    return flags + ["--add-qkv-bias"] * attention.bias + ["--qk-layernorm"] * attention.norms


def rope_flags(config: HFConfig, interleaved: bool = False) -> list[str]:
    """Return flags of rotary positions in part or all of each head, with the scalings that Megatron computes.

    Args:
        config: config of the model.
        interleaved: whether adjacent channels are rotated instead of those of both halves.
    """
    rope, part = _rope(config), rotated_part(config)
    scaling = _scaling(rope)
    if scaling.positions == "yarn" and (interleaved or part != 1):
        raise UntrainableError("a YaRN scaling of interleaved positions, or of a part of each head")
    flags = pairs({"position-embedding-type": scaling.positions, "rotary-base": _base(rope), "rotary-percent": part})
    return [*flags, *["--rotary-interleaved"] * interleaved, *_scaling_flags(scaling, rope, is_latent=False)]


UNSCALED = {
    "longrope": "LongRoPE, in which every angle changes once a text is longer than the original context",
    "dynamic": "the rotary scaling 'dynamic', in which every angle changes with the length of the text",
}
"""Why Megatron does not compute a scaling, in addition to its name."""


def _latent_rope_flags(config: HFConfig) -> list[str]:
    """Return flags of rotary positions in latent attention.

    `add_yarn_arguments` adds flags that Megatron's parser lacks.
    """
    rope = _rope(config)
    scaling, base = _scaling(rope), _base(rope)
    if rotated_part(config) != 1:
        raise UntrainableError("a 'partial_rotary_factor' with latent attention, which has channels for positions")
    if not scaling.in_latent:
        raise UntrainableError(f"the rotary scaling '{rope['rope_type']}'")
    flags = pairs({"rotary-base": base, "rope-type": scaling.positions})
    return [*flags, *_scaling_flags(scaling, rope, is_latent=True)]


def _scaling(rope: dict[str, Any]) -> Scaling:
    kind = str(rope["rope_type"])
    if kind not in SCALINGS:
        raise UntrainableError(UNSCALED.get(kind, f"the rotary scaling '{kind:.40}'"))
    return SCALINGS[kind]


def _scaling_flags(scaling: Scaling, rope: dict[str, Any], is_latent: bool) -> list[str]:
    with _untrainable():
        made = scaling.to_megatron(rope, is_latent)
    flags: list[str] = []
    for name, value in made.items():
        flag = name.replace("_", "-")
        flags += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else pairs({flag: value})
    return flags


@contextmanager
def _untrainable() -> Iterator[None]:
    """Return rotary settings that Megatron does not compute."""
    try:
        yield
    except ValueError as error:
        raise UntrainableError(str(error)) from None


def _rope(config: HFConfig) -> dict[str, Any]:
    rope = config.rope
    if any(isinstance(value, dict) for value in rope.values()):
        raise UntrainableError("rotary settings that differ from layer to layer")
    return rope


def rotated_part(config: HFConfig) -> float:
    """Return the rotated fraction of a head, from 0 to 1."""
    rope = config.rope
    with _untrainable():
        part = float(positive(rope, "partial_rotary_factor", 1.0))
    if part > 1:
        raise UntrainableError(f"a 'partial_rotary_factor' of {part}")
    return part


def _base(rope: dict[str, Any]) -> int:
    with _untrainable():
        base = float(number(rope, "rope_theta"))
    if base != int(base) or base <= 1:
        raise UntrainableError(f"the rotary base {base}, which is not a whole number above 1")
    return int(base)


def expert_flags(config: HFConfig) -> list[str]:
    """Return flags of experts with DeepSeek-V3's router.

    The router has sigmoid scores, a correction bias for the choice, groups of experts, and normalized, scaled weights.
    """
    return [*shared_flags(config), *routed_flags(config)]


def shared_flags(config: HFConfig) -> list[str]:
    """Return flags of shared experts, if there are any."""
    shared = config.integer("n_shared_experts", "num_shared_experts", default=0, least=0)
    if not shared:
        return []
    return pairs({"moe-shared-expert-intermediate-size": shared * config.integer("moe_intermediate_size")})


def by_layer(flag: str, chosen: list[bool]) -> list[str]:
    """Return a flag with 1 for every chosen layer and 0 for the others."""
    return pairs({flag: f"[{','.join(str(int(one)) for one in chosen)}]"})


def routed_flags(config: HFConfig) -> list[str]:
    """Return flags of routed experts with DeepSeek-V3's router."""
    experts, chosen = config.integer("n_routed_experts", "num_experts"), config.integer("num_experts_per_tok")
    _check_router(config)
    if config.flag("norm_topk_prob") == (chosen == 1):
        raise UntrainableError("router weights that are normed over one expert, or not normed over several")
    flags = pairs({
        "num-experts": experts, "moe-router-topk": chosen,
        "moe-ffn-hidden-size": config.integer("moe_intermediate_size"),
        "moe-router-score-function": "sigmoid", "moe-router-load-balancing-type": "none",
        "moe-router-topk-scaling-factor": config.number("routed_scaling_factor"),
        "moe-router-bias-update-rate": 1e-3, "moe-router-dtype": "fp32",
    })  # fmt: skip
    flags.append("--moe-router-enable-expert-bias")
    return flags + _group_flags(config, experts, chosen)


def softmax_expert_flags(config: HFConfig) -> list[str]:
    """Return flags of experts with a softmax router and a gated shared expert."""
    shared = {"moe-shared-expert-intermediate-size": config.integer("shared_expert_intermediate_size")}
    return [*softmax_router_flags(config, config.flag("norm_topk_prob")), *pairs(shared), "--moe-shared-expert-gate"]


def softmax_router_flags(config: HFConfig, normed: bool) -> list[str]:
    """Return flags of routed experts with a softmax router.

    `normed` if the weights of the chosen experts add up to 1.
    """
    chosen = config.integer("num_experts_per_tok")
    if normed and chosen == 1:
        raise UntrainableError("router weights that are normed over one expert")
    experts = config.integer("n_routed_experts", "num_experts", "num_local_experts")
    sizes = {
        "num-experts": experts, "moe-router-topk": chosen,
        "moe-ffn-hidden-size": config.integer("moe_intermediate_size", "intermediate_size"),
        "moe-router-score-function": "softmax", "moe-router-load-balancing-type": "none", "moe-router-dtype": "fp32",
    }  # fmt: skip
    return [*pairs(sizes), *["--moe-router-pre-softmax"] * (not normed)]


def _check_router(config: HFConfig) -> None:
    """Refuse another router: engines read these keys and transformers ignores them, so only the usual one is safe."""
    for name, usual in {"scoring_func": "sigmoid", "score_function": "sigmoid", "topk_method": "noaux_tc"}.items():
        if config.keys.get(name, usual) != usual:
            raise UntrainableError(f"a router with '{name}' {config.keys[name]!r:.40}")


def _group_flags(config: HFConfig, experts: int, chosen: int) -> list[str]:
    """Return flags of group-limited expert routing.

    transformers scores a group by the sum of its two best experts, Megatron by its `chosen // some` best.
    """
    groups, some = config.integer("n_group", default=1), config.integer("topk_group", default=1)
    if some >= groups:
        return []
    if experts % groups or experts // groups < 2:
        raise UntrainableError(f"{experts} experts in {groups} groups; every group needs as many, and at least 2")
    if chosen // some != 2:
        raise UntrainableError(
            f"groups of experts that Megatron would score by their {chosen // some} best ('num_experts_per_tok' "
            f"{chosen} // 'topk_group' {some}) instead of 2"
        )
    return pairs({"moe-router-num-groups": groups, "moe-router-group-topk": some})


def pairs(values: Mapping[str, object]) -> list[str]:
    """Convert flags and values to command-line arguments."""
    return [argument for name, value in values.items() for argument in (f"--{name}", str(value))]
