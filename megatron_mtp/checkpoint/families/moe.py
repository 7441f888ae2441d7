"""Decoders with routed experts, one row per transformers class. MTP layers can be attached if the class has none.

gpt-oss: attention sinks, windows in every second layer, experts with biases whose gate and up rows alternate.
"""

from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_mtp.checkpoint.families.blocks import GQA, MoE, Place
from megatron_mtp.checkpoint.families.decoder import Decoder, family_of_decoder, mlp_bias_refused
from megatron_mtp.checkpoint.families.dense import FACTORED, GRANITE
from megatron_mtp.checkpoint.families.family import (
    COPIES,
    EITHER_COUNT,
    PACKED,
    Depths,
    Family,
    Layout,
    UntrainableError,
)
from megatron_mtp.checkpoint.families.flags import expert_flags, pairs, softmax_expert_flags, softmax_router_flags
from megatron_mtp.checkpoint.families.rules import HFTensor, InTurn, Map, Piece, Rule, Same, Then, Transposed, rename
from megatron_mtp.checkpoint.families.trained import TrainedForm, expert_keys, rotary_keys
from megatron_mtp.checkpoint.families.trunk import (
    all_layers,
    all_windows,
    biased,
    gqa,
    llama_attention,
    moe,
    qwen3_attention,
    stepped_layers,
    windows_by_type,
)
from megatron_mtp.checkpoint.hf.config import HFConfig


def _glm_attention(config: HFConfig) -> GQA:
    return biased(config, norms=config.flag("use_qk_norm"))


def _glm_keys(args: Namespace) -> dict[str, Any]:
    return {
        "use_qk_norm": bool(args.qk_layernorm),
        "partial_rotary_factor": args.rotary_percent,
        **rotary_keys(args, partial_rotary_factor=args.rotary_percent),
        **expert_keys(args),
    }


def _bailing_attention(config: HFConfig) -> GQA:
    names = {"attention": "attention", "output": "dense", "query_norm": "query_layernorm", "key_norm": "key_layernorm"}
    return biased(config, "use_qkv_bias", "use_bias", norms=config.flag("use_qk_norm"), fused=True, **names)


def _hunyuan_flags(config: HFConfig) -> list[str]:
    router = {"routed_scaling_factor": config.number("router_scaling_factor"), "norm_topk_prob": True}
    return expert_flags(config.with_defaults(router))


def _qwen2_experts(config: HFConfig, layout: Layout) -> MoE:
    shared = config.integer("shared_expert_intermediate_size")
    return moe(config, layout, shared=shared, shared_name="shared_expert", shared_gate=True, bias=None)


def _mixtral_experts(config: HFConfig, layout: Layout) -> MoE:
    width = config.integer("intermediate_size")
    keys = config.with_defaults({"moe_intermediate_size": width})
    return moe(keys, layout, shared=0, bias=None, module="block_sparse_moe", parts=("w1", "w3", "w2"))


def _qwen_flags(config: HFConfig) -> list[str]:
    return softmax_router_flags(config, config.flag("norm_topk_prob"))


def _dots_windows(config: HFConfig) -> list[bool]:
    """Return the windows: from layer `max_window_layers` on, unless `layer_types` is set."""
    first = config.integer("max_window_layers", default=62, least=0)
    return windows_by_type(lambda index: index >= first, config)


ALPHA = 1.702
"""Factor inside of the sigmoid of Megatron's quick GELU."""


class _GptOss(Decoder):
    """A decoder whose experts all have biases."""

    def mlp_or_experts(self, config: HFConfig, layout: Layout, place: Place, sparse: bool) -> list[Rule]:
        """Return rules of a router and its experts; all layers are sparse."""
        experts, hidden = config.integer("num_local_experts"), config.integer("hidden_size")
        hf, mcore, width = f"{place.hf}mlp.", f"{place.mcore}mlp.", config.integer("intermediate_size")
        fc1, fc2 = f"{mcore}experts.experts.linear_fc1.", f"{mcore}experts.experts.linear_fc2."
        up, down = f"{hf}experts.gate_up_proj", f"{hf}experts.down_proj"
        in_turn = InTurn(1)
        return [
            rename(f"{hf}router.weight", f"{mcore}router.weight", (experts, hidden)),
            rename(f"{hf}router.bias", f"{mcore}router.bias", (experts,)),
            _moved(up, (experts, hidden, 2 * width), f"{fc1}weight", Then((Transposed(), in_turn))),
            _moved(f"{up}_bias", (experts, 2 * width), f"{fc1}bias", in_turn),
            _moved(down, (experts, width, hidden), f"{fc2}weight", Transposed()),
            _moved(f"{down}_bias", (experts, hidden), f"{fc2}bias", Same()),
        ]


def _moved(name: str, shape: tuple[int, ...], key: str, how: Map) -> Rule:
    ours = (shape[0], shape[2], shape[1]) if len(shape) == 3 else shape
    return Rule((HFTensor(name, shape),), (Piece(key, ours),), how)


def _oss_activation(config: HFConfig) -> list[str]:
    """Return (up + 1) gate sigmoid(1.702 gate), with gate and up limited."""
    if config.number("swiglu_alpha") != ALPHA:
        raise UntrainableError(f"'swiglu_alpha' {config.number('swiglu_alpha')}, where Megatron has {ALPHA}")
    limit = {"activation-func-clamp-value": config.number("swiglu_limit")}
    return ["--quick-geglu", *pairs({"glu-linear-offset": 1.0, **limit})]


def _oss_refused(config: HFConfig) -> str | None:
    return None if config.flag("attention_bias") else "experts with biases and attention without"


class _GraniteExperts(Decoder):
    """Experts of a layer as two tensors, and one shared expert."""

    def mlp_or_experts(self, config: HFConfig, layout: Layout, place: Place, sparse: bool) -> list[Rule]:
        """Return rules of a router and its experts; all layers are sparse."""
        experts, hidden = config.integer("num_local_experts"), config.integer("hidden_size")
        width, shared = config.integer("intermediate_size"), _granite_shared(config)
        hf, mcore = f"{place.hf}block_sparse_moe.", f"{place.mcore}mlp."
        fc1, fc2 = "linear_fc1.weight", "linear_fc2.weight"
        rules = [
            rename(f"{hf}router.layer.weight", f"{mcore}router.weight", (experts, hidden)),
            rename(f"{hf}input_linear.weight", f"{mcore}experts.experts.{fc1}", (experts, 2 * width, hidden)),
            rename(f"{hf}output_linear.weight", f"{mcore}experts.experts.{fc2}", (experts, hidden, width)),
        ]
        if shared:
            beside, ours = f"{place.hf}shared_mlp.", f"{mcore}shared_experts."
            rules.append(rename(f"{beside}input_linear.weight", f"{ours}{fc1}", (2 * shared, hidden)))
            rules.append(rename(f"{beside}output_linear.weight", f"{ours}{fc2}", (hidden, shared)))
        return rules


def _granite_shared(config: HFConfig) -> int:
    return config.integer("shared_intermediate_size", default=0, least=0)


def _granite_flags(config: HFConfig) -> list[str]:
    shared = {"moe-shared-expert-intermediate-size": _granite_shared(config)} if _granite_shared(config) else {}
    return [*softmax_router_flags(config, normed=True), *pairs(shared)]


_OWN_NORM = ("enorm", "hnorm", "eh_proj", "final_layernorm")
_GLM = Decoder(_glm_attention, partial=True, mlp_bias=None, experts=moe, depths=Depths())
_BAILING_DEPTHS = Depths(r"^model\.layers\.(\d+)\.eh_proj\.weight$", names=_OWN_NORM)
_BAILING = Decoder(
    _bailing_attention,
    partial=True,
    embedding="word_embeddings",
    mlp_bias=None,
    experts=partial(moe, bias="gate.expert_bias"),
    depths=_BAILING_DEPTHS,
)
_HUNYUAN = Decoder(
    qwen3_attention,
    partial=True,
    mlp_bias=None,
    refused=mlp_bias_refused,
    experts=partial(moe, shared_name="shared_mlp", bias="expert_bias", router="router.gate"),
    expert_flags=_hunyuan_flags,
    depths=Depths(names=_OWN_NORM),
)
_QWEN3 = Decoder(
    qwen3_attention, experts=partial(moe, shared=0, bias=None), sparse=stepped_layers, expert_flags=_qwen_flags
)
_QWEN2 = replace(
    _QWEN3, attention=partial(biased, key="qkv_bias"), experts=_qwen2_experts, expert_flags=softmax_expert_flags
)
_MIXTRAL = Decoder(
    gqa,
    windows=all_windows,
    experts=_mixtral_experts,
    sparse=all_layers,
    expert_flags=partial(softmax_router_flags, normed=True),
)
_DOTS = Decoder(qwen3_attention, windows=_dots_windows, experts=moe)
_GPT_OSS = _GptOss(
    llama_attention,
    mlp_bias="attention_bias",
    activation=_oss_activation,
    sinks=True,
    windows=partial(windows_by_type, lambda index: index % 2 == 0),
    experts=moe,
    sparse=all_layers,
    expert_flags=partial(softmax_router_flags, normed=True),
    refused=_oss_refused,
)
_GRANITE = _GraniteExperts(
    llama_attention, multipliers=GRANITE.multipliers, experts=moe, sparse=all_layers, expert_flags=_granite_flags
)

MOE: tuple[Family, ...] = (
    family_of_decoder(
        "GLM-4 MoE",
        "GLM-4.5, 4.6 and 4.7",
        ("glm4_moe",),
        _GLM,
        features={**COPIES, **PACKED},
        trained=TrainedForm(
            models="experts, or MTP layers",
            engines=("transformers", "vLLM", "SGLang"),
            architecture="Glm4MoeForCausalLM",
            keys=_glm_keys,
            fits=lambda args, depths: not args.multi_latent_attention and bool(args.num_experts or depths),
        ),
        defaults={"partial_rotary_factor": 0.5},
    ),
    family_of_decoder(
        "Ling/Bailing-MoE V2",
        "Ling, Ring",
        ("bailing_moe", "bailing_moe_v2"),
        _BAILING,
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
    ),
    family_of_decoder(
        "Sarvam, experts",
        "Sarvam 30B",
        ("sarvam_moe",),
        replace(_BAILING, depths=replace(_BAILING_DEPTHS, keys=EITHER_COUNT)),
        defaults={
            "head_dim": 64,
            "use_qk_norm": True,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "rope_theta": 8e6,
            "first_k_dense_replace": 1,
            "num_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_experts_per_tok": 6,
        },
    ),
    family_of_decoder(
        "GLM-4 MoE, text of a model that sees",
        "GLM-4.5V, GLM-4.6V",
        ("glm4v_moe_text",),
        _GLM,
        features={**COPIES, **PACKED},
        defaults={"partial_rotary_factor": 0.5},
    ),
    family_of_decoder(
        "Hunyuan 3",
        "Hy3",
        ("hy_v3",),
        _HUNYUAN,
        features=PACKED,
        defaults={
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
            "first_k_dense_replace": 1,
        },
    ),
    family_of_decoder("Qwen3-MoE", "Qwen3, with experts", ("qwen3_moe",), _QWEN3, features=PACKED),
    family_of_decoder("Qwen2-MoE", "Qwen1.5-MoE, Qwen2-57B-A14B", ("qwen2_moe",), _QWEN2, features=PACKED),
    family_of_decoder(
        "Mixtral",
        "Mixtral 8x7B, 8x22B",
        ("mixtral",),
        _MIXTRAL,
        defaults={"num_experts_per_tok": 2, "num_local_experts": 8},
    ),
    family_of_decoder("dots.llm1", "dots.llm1", ("dots1",), _DOTS, features=PACKED),
    family_of_decoder(
        "Solar Open",
        "Solar Open",
        ("solar_open",),
        Decoder(biased, experts=moe),
        features=PACKED,
        defaults={"num_experts_per_tok": 8, "n_routed_experts": 128},
    ),
    family_of_decoder(
        "GPT-OSS",
        "gpt-oss 20B, 120B",
        ("gpt_oss",),
        _GPT_OSS,
        defaults={"num_local_experts": 128, "num_experts_per_tok": 4, "attention_bias": True},
    ),
    *(
        family_of_decoder(
            title,
            published,
            (kind,),
            _GRANITE,
            features=FACTORED,
            defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
        )
        for title, published, kind in (
            ("Granite, experts", "Granite 3, 1B-A400M, 3B-A800M", "granitemoe"),
            ("Granite, shared expert", "Granite with a shared expert", "granitemoeshared"),
        )
    ),
)
