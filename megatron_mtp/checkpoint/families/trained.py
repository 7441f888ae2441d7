"""Megatron's arguments to the keys of a `config.json`: the form that a trained model takes in a family.

Every key that transformers, vLLM or SGLang reads is written, even if it equals the default.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_mtp.spec.rope_scaling import megatrons_scaling

LATENT_EPSILON, LARGEST_LATENT_EPSILON = 1e-6, 1e-5
"""transformers' epsilon of the norms inside latent attention, whatever the config specifies; the largest one that
converts. Megatron and vLLM use the config's epsilon in all norms. Between the two values, logits differ by about 1e-5
of the largest.
"""


@dataclass(frozen=True)
class TrainedForm:
    """The form that a model trained by Megatron takes in a family.

    Attributes:
        models: which models take it, for the table in docs/guides/convert.md.
        engines: engines that load such a folder with its MTP layers.
        architecture: the class name by which engines recognize the model.
        keys: config keys of this family in addition to `common_keys`, from Megatron's arguments; raises ValueError if
            the model does not fit the family.
        fits: whether a model with these arguments and this many MTP layers takes this form without `--family`.
        files: further files of the folder, by name: code for a `model_type` that transformers does not have.
    """

    models: str
    engines: tuple[str, ...]
    architecture: str
    keys: Callable[[Namespace], dict[str, Any]]
    fits: Callable[[Namespace, int], bool]
    files: Mapping[str, str] = field(default_factory=dict)


def epsilon_note(args: Namespace) -> dict[str, str]:
    """Return a note for models that transformers computes with another epsilon; empty for all others."""
    epsilon = getattr(args, "layernorm_epsilon", LATENT_EPSILON)
    if not getattr(args, "multi_latent_attention", False) or epsilon == LATENT_EPSILON:
        return {}
    says = (
        f"Megatron and vLLM have the epsilon {epsilon} in them, and transformers always {LATENT_EPSILON}, so its "
        f"logits differ by some 1e-5 of the largest; only --norm-epsilon {LATENT_EPSILON} is one model in all three"
    )
    return {"norms inside latent attention": says}


def common_keys(args: Namespace, vocabulary: int, dtype: str) -> dict[str, Any]:
    """Config keys that every family has.

    Args:
        args: Megatron's.
        vocabulary: rows of the embedding in the folder.
        dtype: name of the tensors' type, "bfloat16".
    """
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
        **rotary_keys(args),
        "rope_theta": float(args.rotary_base),
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
        "attention_bias": bool(args.add_qkv_bias),
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def rotary_keys(args: Namespace, **others: float) -> dict[str, Any]:
    """`rope_parameters` with `others`, and `rope_scaling` if positions are scaled, which older engines read."""
    scaling = megatrons_scaling(lambda name: getattr(args, name, None), bool(args.multi_latent_attention))
    rope = {"rope_type": "default", "rope_theta": float(args.rotary_base), **others, **scaling}
    return {"rope_parameters": rope} | ({} if rope["rope_type"] == "default" else {"rope_scaling": rope})


def is_dense_trunk(args: Namespace, depths: int) -> bool:
    """Return whether a model has no MTP layers, no experts and no latent attention."""
    return not (depths or args.num_experts or args.multi_latent_attention)


def dense_keys(args: Namespace) -> dict[str, Any]:
    """Return no keys other than the common ones.

    Raises:
        ValueError: the model has experts, or rotates only part of each head.
    """
    if args.num_experts or args.rotary_percent != 1.0:
        raise ValueError("--family names a dense family without partial rotation, but the model is not so.")
    return {}


def expert_keys(args: Namespace) -> dict[str, Any]:
    """Return router keys that transformers and vLLM read; a dense MLP becomes two routed experts and a shared one.

    Raises:
        ValueError: the sizes cannot be expressed.
    """
    router = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    return {**router, **(_routed(args) if args.num_experts else _split_mlp(args))}


def _split_mlp(args: Namespace) -> dict[str, Any]:
    """Split a dense MLP into experts: see `split_mlp_rules`."""
    if args.ffn_hidden_size % 4:
        raise ValueError(
            f"--ffn-hidden-size {args.ffn_hidden_size} cannot be shared out among two routed and a shared expert, "
            "as this family's MTP layers need; choose --family mimo."
        )
    both = {"n_routed_experts": 2, "n_shared_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    # The trunk's last layer gets experts too: vLLM rejects a GLM-4 MoE without any experts in the trunk.
    sizes = {"moe_intermediate_size": args.ffn_hidden_size // 4, "first_k_dense_replace": args.num_layers - 1}
    return {**both, **sizes, "norm_topk_prob": True, "routed_scaling_factor": 2.0}


def _routed(args: Namespace) -> dict[str, Any]:
    shared = args.moe_shared_expert_intermediate_size or 0
    if shared % args.moe_ffn_hidden_size:
        raise ValueError(
            f"--moe-shared-expert-intermediate-size {shared} is not a multiple of --moe-ffn-hidden-size "
            f"{args.moe_ffn_hidden_size}, which no family here has; it cannot be exported."
        )
    return {
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


def _dense_first(args: Namespace) -> int | None:
    """Return the number of dense layers before the first with experts; None if a dense layer follows it."""
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        return 0 if frequency == 1 else None
    dense = list(frequency).index(1) if 1 in frequency else len(frequency)
    return dense if all(frequency[dense:]) else None


def _groups(args: Namespace) -> int:
    groups: int = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return groups
