"""From Megatron's arguments to the keys of a `config.json`: KEYS are the families that a trained model can become.

Every key that transformers, vLLM or SGLang reads is written, though one of them could do with its default.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_mtp.checkpoint.families.flags import LARGEST_LATENT_EPSILON


def check_computable(args: Namespace) -> None:
    """Raises ValueError where the model computes something that no family here does."""
    wrong = [text for is_wrong, text in _FOREIGN if is_wrong(args)]
    if wrong:
        raise ValueError(
            f"the checkpoint was trained with {wrong[0]}, which no family here has; it cannot be exported."
        )


def _is_said(name: str) -> Callable[[Namespace], bool]:
    """Whether an argument has a value; checkpoints of an older Megatron do not know all of them."""

    def is_said(args: Namespace) -> bool:
        value = getattr(args, name, None)
        return any(value) if isinstance(value, list) else bool(value)

    return is_said


_ALWAYS_FOREIGN = (
    "use_mup no_rope_freq apply_residual_connection_post_layernorm qk_l2_norm glu_linear_offset "
    "activation_func_clamp_value attention_output_gate experimental_attention_variant "
    "moe_apply_probs_on_input moe_latent_size moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size "
    "heterogeneous_layers_config_path spec"
).split()
"""Arguments with which a model computes something else, whatever their value."""

_FOREIGN: list[tuple[Callable[[Namespace], bool], str]] = [
    (lambda args: args.normalization != "RMSNorm", "another norm than --normalization RMSNorm"),
    (lambda args: args.layernorm_zero_centered_gamma, "--apply-layernorm-1p"),
    (lambda args: not args.swiglu, "another activation than --swiglu"),
    (lambda args: args.add_bias_linear, "biases (without --disable-bias-linear)"),
    (lambda args: args.position_embedding_type != "rope", "other positions than --position-embedding-type rope"),
    (lambda args: args.rotary_interleaved and not args.multi_latent_attention, "--rotary-interleaved"),
    (lambda args: args.window_size is not None, "--window-size"),
    (lambda args: bool(args.num_experts) and args.moe_router_score_function != "sigmoid",
     "--moe-router-score-function softmax"),
    (lambda args: bool(args.num_experts) and bool(args.moe_shared_expert_gate), "--moe-shared-expert-gate"),
    (lambda args: bool(args.num_experts) and _dense_first(args) is None, "dense layers after MoE"),
    (lambda args: bool(args.num_experts) and _scores_groups_otherwise(args),
     "--moe-router-group-topk other than half of --moe-router-topk"),
    (lambda args: args.multi_latent_attention and args.rotary_percent != 1.0, "--rotary-percent in latent attention"),
    (lambda args: args.multi_latent_attention and args.layernorm_epsilon > LARGEST_LATENT_EPSILON,
     f"--norm-epsilon above {LARGEST_LATENT_EPSILON} inside latent attention, where transformers has 1e-6"),
    (lambda args: _is_yarn(args) and not (args.mscale and args.mscale_all_dim)
     and (args.mscale, args.mscale_all_dim) != (1.0, 0.0), "one of --mscale and --mscale-all-dim without the other"),
    (lambda args: getattr(args, "rotary_seq_len_interpolation_factor", None) not in (None, 1),
     "--rotary-seq-len-interpolation-factor"),
    (lambda args: getattr(args, "softmax_type", "vanilla") != "vanilla", "another --softmax-type than vanilla"),
    *((_is_said(name), f"--{name.replace('_', '-')}") for name in _ALWAYS_FOREIGN),
]  # fmt: skip
"""Whether a model computes something else, and how to say it."""


def common_keys(args: Namespace, vocabulary: int, dtype: str) -> dict[str, Any]:
    """Keys of every family."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.ffn_hidden_size,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": args.num_attention_heads,
        "num_key_value_heads": _groups(args),
        "head_dim": args.kv_channels or args.hidden_size // args.num_attention_heads,
        "max_position_embeddings": args.max_position_embeddings,
        "rms_norm_eps": args.layernorm_epsilon,
        "hidden_act": "silu",
        **_rope(args),
        "rope_theta": float(args.rotary_base),
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
        "attention_bias": bool(args.add_qkv_bias),
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _rope(args: Namespace, **others: float) -> dict[str, Any]:
    """Rotary settings, with the numbers that Megatron has no flags for; a scaling also as engines used to read it."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(args.rotary_base), **others}
    if _is_yarn(args):
        mscales = {"mscale": args.mscale, "mscale_all_dim": args.mscale_all_dim}
        usual = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
        others = {name: getattr(args, name, value) for name, value in usual.items()}  # older runs lack the arguments
        rope |= {"rope_type": "yarn", "factor": args.rotary_scaling_factor, **mscales, **others}
    elif args.use_rope_scaling and not args.multi_latent_attention:
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        rope |= {"rope_type": "llama3", "factor": args.rope_scaling_factor, **fixed}
    return {"rope_parameters": rope} | ({} if rope["rope_type"] == "default" else {"rope_scaling": rope})


def _is_yarn(args: Namespace) -> bool:
    """Whether latent attention scales its positions; YaRN, Megatron's default there, does nothing with factor 1."""
    return args.multi_latent_attention and args.rope_type != "rope" and args.rotary_scaling_factor != 1.0


def _dense(architecture: str) -> Callable[[Namespace], dict[str, Any]]:
    def keys(args: Namespace) -> dict[str, Any]:
        if args.num_experts or args.rotary_percent != 1.0:
            raise ValueError("--family names a dense family without partial rotation, but the model is not so.")
        return {"architectures": [architecture]}

    return keys


def _glm(args: Namespace) -> dict[str, Any]:
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "use_qk_norm": bool(args.qk_layernorm),
        "partial_rotary_factor": args.rotary_percent,
        **_rope(args, partial_rotary_factor=args.rotary_percent),
        **_experts(args),
    }


def _deepseek(args: Namespace) -> dict[str, Any]:
    if not args.multi_latent_attention or not args.qk_layernorm:
        raise ValueError("--family deepseek_v3 needs a model of --multi-latent-attention with --qk-layernorm.")
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": args.num_attention_heads,
        "q_lora_rank": args.q_lora_rank,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_nope_head_dim": args.qk_head_dim,
        "qk_rope_head_dim": args.qk_pos_emb_head_dim,
        "qk_head_dim": args.qk_head_dim + args.qk_pos_emb_head_dim,
        "head_dim": args.qk_pos_emb_head_dim,
        "v_head_dim": args.v_head_dim,
        "rope_interleave": True,
        **_experts(args),
    }


def _experts(args: Namespace) -> dict[str, Any]:
    """Router keys that transformers and vLLM read; a dense model has experts that stand for one MLP."""
    router = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    if not args.num_experts:
        if args.ffn_hidden_size % 4:
            raise ValueError(
                f"--ffn-hidden-size {args.ffn_hidden_size} cannot be shared out among two routed and a shared expert, "
                "as this family's depths need; choose --family mimo."
            )
        both = {"n_routed_experts": 2, "n_shared_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        # The trunk's last layer is in that form too: vLLM refuses a GLM-4 MoE whose trunk has no experts at all.
        sizes = {"moe_intermediate_size": args.ffn_hidden_size // 4, "first_k_dense_replace": args.num_layers - 1}
        return {**router, **both, **sizes, "norm_topk_prob": True, "routed_scaling_factor": 2.0}
    shared = args.moe_shared_expert_intermediate_size or 0
    if shared % args.moe_ffn_hidden_size:
        raise ValueError(
            f"--moe-shared-expert-intermediate-size {shared} is no multiple of --moe-ffn-hidden-size "
            f"{args.moe_ffn_hidden_size}, which no family here has; it cannot be exported."
        )
    return {
        **router,
        "n_routed_experts": args.num_experts,
        "n_shared_experts": shared // args.moe_ffn_hidden_size,
        "num_experts_per_tok": args.moe_router_topk,
        "moe_intermediate_size": args.moe_ffn_hidden_size,
        "first_k_dense_replace": _dense_first(args),
        "n_group": args.moe_router_num_groups or 1,
        "topk_group": args.moe_router_group_topk or 1,
        "norm_topk_prob": args.moe_router_topk > 1,
        "routed_scaling_factor": args.moe_router_topk_scaling_factor or 1.0,
    }


def _mimo(args: Namespace) -> dict[str, Any]:
    if args.num_experts or args.qk_layernorm or args.rotary_percent != 1.0:
        raise ValueError("--family mimo needs a dense model without --qk-layernorm and --rotary-percent.")
    config_class = {"AutoConfig": "configuration_mimo.MiMoConfig"}
    return {"architectures": ["MiMoForCausalLM"], "attention_bias": True, "auto_map": config_class}


KEYS: dict[str, Callable[[Namespace], dict[str, Any]]] = {
    "glm4_moe": _glm,
    "deepseek_v3": _deepseek,
    "mimo": _mimo,
    "llama": _dense("LlamaForCausalLM"),
    "qwen2": _dense("Qwen2ForCausalLM"),
    "qwen3": _dense("Qwen3ForCausalLM"),
}
"""Families that a trained model can become, and the keys that each has of its own."""

CODE = {
    "mimo": {
        "configuration_mimo.py": """from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""
    }
}
"""Files of a folder whose `model_type` transformers does not have: engines read the config through such a class."""


def _dense_first(args: Namespace) -> int | None:
    """Dense layers before the first of experts; None where dense ones follow."""
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        return 0 if frequency == 1 else None
    dense = list(frequency).index(1) if 1 in frequency else len(frequency)
    return dense if all(frequency[dense:]) else None


def _scores_groups_otherwise(args: Namespace) -> bool:
    """Megatron scores a group by its `topk // group_topk` best experts, the families by 2."""
    groups, some = args.moe_router_num_groups, args.moe_router_group_topk
    return bool(groups and some and some < groups and args.moe_router_topk // some != 2)


def _groups(args: Namespace) -> int:
    groups: int = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return groups
