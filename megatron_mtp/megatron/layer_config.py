"""Configuration of a drafter's dense layers, on any kind of trunk."""

from dataclasses import asdict, fields
from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn.functional import silu

from megatron_mtp.spec.attention import AttentionSizes
from megatron_mtp.spec.head import HeadSpec
from megatron_mtp.spec.rope_scaling import SCALINGS


def layer_config(config: TransformerConfig, drafter: HeadSpec, **others: Any) -> TransformerConfig:
    """Return a dense configuration like Llama's: the trunk's layout and precision, and the drafter's sizes.

    Args:
        others: additional settings.

    Raises:
        ValueError: Megatron does not support such layers.
    """
    sizes, latents = drafter.attention, drafter.attention.latents
    names = [one.name for one in fields(TransformerConfig) if not one.name.startswith("moe_")]
    kept = {name: getattr(config, name) for name in names}
    has_own_width = sizes.channels != config.kv_channels or config.multi_latent_attention
    changes: dict[str, Any] = {
        "num_attention_heads": sizes.heads,
        "num_query_groups": sizes.groups,
        "kv_channels": sizes.channels,
        "layernorm_epsilon": sizes.epsilon,
        "softmax_scale": None if has_own_width else config.softmax_scale,
        "multi_latent_attention": latents is not None,
        "apply_rope_fusion": config.apply_rope_fusion and latents is None,
        "experimental_attention_variant": None,
        "is_hybrid_model": False,
        "no_rope_freq": None,
        "rotary_interleaved": False,
        "num_moe_experts": None,
        "expert_model_parallel_size": 1,
        "variable_seq_lengths": False,
        "ffn_hidden_size": drafter.ffn,
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": False,
        "gated_linear_unit": True,
        "activation_func": silu,
        "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": latents is not None,
        "qk_l2_norm": False,
        "attention_output_gate": False,
        "softmax_type": "learnable" if drafter.has_sinks else "vanilla",
        "window_size": drafter.windows[0],
        "window_attn_skip_freq": None,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "recompute_granularity": "full" if config.recompute_granularity == "full" else None,
        "fp8": None,
        "fp4": None,
        "mtp_use_repeated_layer": True,
        "mtp_detach_heads": False,
    }
    if latents is not None:
        return MLATransformerConfig(**(kept | changes | asdict(latents) | latent_positions(sizes) | others))
    made = TransformerConfig(**(kept | changes | others))
    if sizes.scaling is not None and sizes.scaling["rope_type"] == "yarn":
        vars(made).update(yarn_settings(sizes.scaling))
    return made


def latent_positions(sizes: AttentionSizes) -> dict[str, Any]:
    """Return Megatron's settings of rotary positions for latent attention of these sizes."""
    plain = {"rope_type": "rope", "rotary_base": sizes.theta, "rotary_percent": 1.0, "rotary_scaling_factor": 1.0}
    if sizes.scaling is None:
        return plain
    row = SCALINGS[sizes.scaling["rope_type"]]
    return {**plain, "rope_type": row.positions, **row.to_megatron(sizes.scaling, is_latent=True)}


def yarn_settings(scaling: dict[str, Any]) -> dict[str, Any]:
    """Return Megatron's YaRN settings, which its attention also reads from the configuration."""
    made = SCALINGS["yarn"].to_megatron(scaling, is_latent=False)
    return {f"yarn_{name.removeprefix('yarn_')}": value for name, value in made.items()}
