"""Multi-head latent attention: DeepSeek-V3 and related models, DeepSeek-V2's softmax router, Youtu's dense layers."""

from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_mtp.checkpoint.families.decoder import Decoder, family_of_decoder
from megatron_mtp.checkpoint.families.family import (
    COPIES,
    EITHER_COUNT,
    NESTED,
    PACKED,
    Depths,
    Family,
    UntrainableError,
)
from megatron_mtp.checkpoint.families.flags import pairs, shared_flags, softmax_router_flags
from megatron_mtp.checkpoint.families.trained import TrainedForm, expert_keys
from megatron_mtp.checkpoint.families.trunk import latent_attention, moe
from megatron_mtp.checkpoint.hf.config import HFConfig


def _trained_keys(args: Namespace) -> dict[str, Any]:
    if not args.multi_latent_attention or not args.qk_layernorm or args.rotary_percent != 1.0:
        needs = "a model of --multi-latent-attention with --qk-layernorm, and without --rotary-percent"
        raise ValueError(f"--family deepseek_v3 needs {needs}.")
    return {
        "num_key_value_heads": args.num_attention_heads,
        "q_lora_rank": args.q_lora_rank,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_nope_head_dim": args.qk_head_dim,
        "qk_rope_head_dim": args.qk_pos_emb_head_dim,
        "qk_head_dim": args.qk_head_dim + args.qk_pos_emb_head_dim,
        "head_dim": args.qk_pos_emb_head_dim,
        "v_head_dim": args.v_head_dim,
        "rope_interleave": True,
        **expert_keys(args),
    }


def _v2_expert_flags(config: HFConfig) -> list[str]:
    scaling = {"moe-router-topk-scaling-factor": config.number("routed_scaling_factor")}
    router = [*softmax_router_flags(config, normed=False), *pairs(scaling), *_group_flags(config)]
    return [*router, *shared_flags(config)]


def _group_flags(config: HFConfig) -> list[str]:
    """Return flags of group-limited routing.

    Groups are scored by their best expert, and Megatron uses `chosen // some`.

    Raises:
        UntrainableError: Megatron scores groups by more, or the config has a router that transformers ignores.
    """
    if config.flag("norm_topk_prob"):
        raise UntrainableError("a 'norm_topk_prob', which transformers ignores in this family and vLLM does not")
    method = config.keys.get("topk_method", "greedy")
    if method == "greedy":
        return []
    if method != "group_limited_greedy":
        raise UntrainableError(f"a router with 'topk_method' {method!r:.40}")
    groups, some = config.integer("n_group"), config.integer("topk_group")
    chosen = config.integer("num_experts_per_tok")
    if chosen // some != 1:
        raise UntrainableError(
            f"groups of experts that Megatron would score by their {chosen // some} best ('num_experts_per_tok' "
            f"{chosen} // 'topk_group' {some}) instead of 1"
        )
    return pairs({"moe-router-num-groups": groups, "moe-router-group-topk": some})


_DENSE = Decoder(latent_attention, mlp_bias=None)
_V2 = replace(_DENSE, experts=partial(moe, bias=None), expert_flags=_v2_expert_flags)
_V3 = replace(_DENSE, experts=moe, depths=Depths())

LATENT: tuple[Family, ...] = (
    family_of_decoder(
        "DeepSeek-V3",
        "DeepSeek-V3, R1, Kimi-K2, Kimi-K2.5",
        ("deepseek_v3", "kimi_k2", "kimi_k25"),
        _V3,
        features={**COPIES, **PACKED, **NESTED},
        carried=(r"^(vision_tower|mm_projector)\.",),
        trained=TrainedForm(
            models="latent attention",
            engines=("transformers", "vLLM", "SGLang"),
            architecture="DeepseekV3ForCausalLM",
            keys=_trained_keys,
            fits=lambda args, depths: bool(args.multi_latent_attention),
        ),
    ),
    family_of_decoder(
        "GLM-4 MoE Lite",
        "GLM-4.7-Flash",
        ("glm4_moe_lite",),
        _V3,
        features={**COPIES, **PACKED},
        defaults={"first_k_dense_replace": 1},
    ),
    family_of_decoder(
        "DeepSeek-V2",
        "DeepSeek-V2, V2-Lite, Coder-V2",
        ("deepseek_v2",),
        _V2,
        features=PACKED,
        defaults={"rope_interleave": True, "n_routed_experts": 64},
    ),
    family_of_decoder(
        "Sarvam, latent attention",
        "Sarvam 105B",
        ("sarvam_mla",),
        replace(_V3, depths=Depths(keys=EITHER_COUNT)),
        features={**COPIES, **PACKED},
        defaults={
            "q_lora_rank": None,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_interleave": True,
            "max_position_embeddings": 4096,
            "first_k_dense_replace": 1,
            "num_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_experts_per_tok": 8,
        },
    ),
    family_of_decoder("Youtu-LLM", "Youtu-LLM", ("youtu",), _DENSE),
)
