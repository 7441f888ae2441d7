"""The Hugging Face form of a model that Megatron has trained: family and config from Megatron's arguments.

Models with depths become GLM-4 MoE or DeepSeek-V3 folders, since these are what transformers, vLLM and SGLang all load
with MTP; a dense model fits into them (`split_mlp_rules`). Without depths they become Llama, Qwen2 or Qwen3 folders.
"""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_mtp.checkpoint.dist_store import DistReader
from megatron_mtp.checkpoint.exporting import HFForm, kept_form
from megatron_mtp.checkpoint.families import family_of
from megatron_mtp.checkpoint.families.trunk import ZERO_QKV_BIAS, ZERO_ROUTER_BIAS
from megatron_mtp.checkpoint.hf_config import CONFIG, HFConfig, read_json
from megatron_mtp.checkpoint.plan import HFModel, stored_layout


def form_of(source: Path, like: Path | None = None, family: str | None = None, tokenizer: Path | None = None) -> HFForm:
    """The form for a checkpoint: like another folder, as a conversion has kept it, or by Megatron's arguments.

    Args:
        source: the checkpoint.
        like: an HF folder or a converted checkpoint to take config and files from.
        family: `model_type` to export to.
        tokenizer: folder of the tokenizer to copy.

    Raises:
        ValueError: flags contradict each other, or no family has what the model has.
    """
    if like is not None and family is not None:
        raise ValueError("--like and --family were given, but a folder to be like has its family; drop one of the two.")
    if like is not None:
        form = kept_form(like) or hf_folder_form(like)
        return HFForm(form.keys, form.features, form.carried, tokenizer or form.files)
    kept = kept_form(source)
    reader = DistReader(source)
    if kept is not None and family is None and _holds(kept, stored_layout(reader).depths):
        return HFForm(kept.keys, kept.features, kept.carried, tokenizer or kept.files)
    return trained_form(reader, family, tokenizer or (kept.files if kept else None))


def hf_folder_form(folder: Path) -> HFForm:
    """The form of an HF folder, whose tensors say what its config does not."""
    model = HFModel.read(folder)
    keys = read_json(folder / CONFIG)
    if model.folder.quantised:
        keys.pop("quantization_config", None)
    return HFForm(keys, tuple(model.layout.features), model.layout.carried, folder)


def _holds(form: HFForm, depths: int) -> bool:
    """Whether the family has a place for depths, where there are some."""
    return not depths or family_of(HFConfig.from_keys(form.keys)).depth_pattern is not None


def trained_form(reader: DistReader, family: str | None = None, tokenizer: Path | None = None) -> HFForm:
    """The form for a checkpoint that no conversion has made.

    Args:
        family: `model_type` of the folder; None for the one that fits.
        tokenizer: folder to copy into it; None for the one of the training run, where it is there.

    Raises:
        ValueError: no family here has what the model has, or the one asked for has not.
    """
    args = reader.common()["args"]
    _check_computable(args)
    depths = stored_layout(reader).depths
    chosen = family or _fitting(args, depths)
    if chosen not in KEYS:
        raise ValueError(f"--family is '{chosen}'; a trained model becomes one of {', '.join(KEYS)}.")
    files = tokenizer or _tokenizer_of(args)
    dtype = str(reader.dtype("decoder.final_layernorm.weight")).removeprefix("torch.")
    keys = {**_common(args, dtype), **KEYS[chosen](args), **_special_tokens(files), "model_type": chosen}
    if depths:
        keys["num_nextn_predict_layers"] = depths
    return HFForm(keys, _zero_features(reader), files=files)


def _zero_features(reader: DistReader) -> tuple[str, ...]:
    """Biases that the model does without, and that engines look for in these families: written as zeros."""
    names = {ZERO_QKV_BIAS: "self_attention.linear_qkv.bias", ZERO_ROUTER_BIAS: "mlp.router.expert_bias"}
    return tuple(feature for feature, name in names.items() if not any(key.endswith(f".{name}") for key in reader.keys))


def _fitting(args: Namespace, depths: int) -> str:
    if args.multi_latent_attention:
        return "deepseek_v3"
    if args.num_experts or depths:
        return "glm4_moe"
    if args.qk_layernorm:
        return "qwen3"
    return "qwen2" if args.add_qkv_bias else "llama"


def _check_computable(args: Namespace) -> None:
    """What the families here compute."""
    wrong = [text for is_wrong, text in _FOREIGN if is_wrong(args)]
    if wrong:
        raise ValueError(
            f"the checkpoint was trained with {wrong[0]}, which no family here has; it cannot be exported."
        )


_FOREIGN: list[tuple[Callable[[Namespace], bool], str]] = [
    (lambda args: args.normalization != "RMSNorm", "another norm than --normalization RMSNorm"),
    (lambda args: args.layernorm_zero_centered_gamma, "--apply-layernorm-1p"),
    (lambda args: not args.swiglu, "another activation than --swiglu"),
    (lambda args: args.add_bias_linear, "biases (without --disable-bias-linear)"),
    (lambda args: args.position_embedding_type != "rope", "other positions than --position-embedding-type rope"),
    (lambda args: args.rotary_interleaved and not args.multi_latent_attention, "--rotary-interleaved"),
    (lambda args: args.use_rope_scaling, "--use-rope-scaling"),
    (lambda args: args.window_size is not None, "--window-size"),
    (lambda args: bool(args.num_experts) and args.moe_router_score_function != "sigmoid",
     "--moe-router-score-function softmax"),
    (lambda args: bool(args.num_experts) and bool(args.moe_shared_expert_gate), "--moe-shared-expert-gate"),
    (lambda args: bool(args.num_experts) and _dense_first(args) is None, "dense layers after MoE"),
    (lambda args: args.multi_latent_attention and args.rope_type == "yarn" and args.rotary_scaling_factor != 1.0,
     "a rotary scaling (--rotary-scaling-factor)"),
]  # fmt: skip
"""Whether a model computes something else, and how to say it."""


def _common(args: Namespace, dtype: str) -> dict[str, Any]:
    """Keys of every family."""
    rope = {"rope_type": "default", "rope_theta": float(args.rotary_base)}
    return {
        "vocab_size": args.padded_vocab_size,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.ffn_hidden_size,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": args.num_attention_heads,
        "num_key_value_heads": _groups(args),
        "head_dim": args.kv_channels or args.hidden_size // args.num_attention_heads,
        "max_position_embeddings": args.max_position_embeddings,
        "rms_norm_eps": args.layernorm_epsilon,
        "hidden_act": "silu",
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
        "attention_bias": bool(args.add_qkv_bias),
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _dense(architecture: str) -> Callable[[Namespace], dict[str, Any]]:
    def keys(args: Namespace) -> dict[str, Any]:
        if args.num_experts or args.rotary_percent != 1.0:
            raise ValueError("--family names a dense family without partial rotation, but the model is not so.")
        return {"architectures": [architecture]}

    return keys


def _glm(args: Namespace) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": float(args.rotary_base), "partial_rotary_factor": args.rotary_percent}
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "use_qk_norm": bool(args.qk_layernorm),
        "partial_rotary_factor": args.rotary_percent,
        "rope_parameters": rope,
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
    """Router keys that transformers and vLLM read; a dense model has one expert, in its depths alone."""
    router = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    if not args.num_experts:
        if args.ffn_hidden_size % 4:
            raise ValueError(
                f"--ffn-hidden-size {args.ffn_hidden_size} cannot be shared out among two routed and a shared expert, "
                "as this family's depths need; choose --family mimo."
            )
        both = {"n_routed_experts": 2, "n_shared_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        sizes = {"moe_intermediate_size": args.ffn_hidden_size // 4, "first_k_dense_replace": args.num_layers}
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
    return {"architectures": ["MiMoForCausalLM"], "attention_bias": True}


KEYS: dict[str, Callable[[Namespace], dict[str, Any]]] = {
    "glm4_moe": _glm,
    "deepseek_v3": _deepseek,
    "mimo": _mimo,
    "llama": _dense("LlamaForCausalLM"),
    "qwen2": _dense("Qwen2ForCausalLM"),
    "qwen3": _dense("Qwen3ForCausalLM"),
}
"""Families that a trained model can become, and the keys that each has of its own."""


def _dense_first(args: Namespace) -> int | None:
    """Dense layers before the first of experts; None where dense ones follow."""
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        return 0 if frequency == 1 else None
    dense = list(frequency).index(1) if 1 in frequency else len(frequency)
    return dense if all(frequency[dense:]) else None


def _groups(args: Namespace) -> int:
    groups: int = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return groups


def _tokenizer_of(args: Namespace) -> Path | None:
    model = getattr(args, "tokenizer_model", None)
    return Path(model) if model and Path(model).is_dir() else None


def _special_tokens(folder: Path | None) -> dict[str, int]:
    """Ids of the tokens that begin and end a text, where the tokenizer has them."""
    if folder is None:
        return {}
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {name: value for name, value in ids.items() if value is not None}
