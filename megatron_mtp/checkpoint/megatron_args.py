"""Megatron's arguments for a converted model: what `--use-checkpoint-args` finds, and what builds the model."""

import sys
from argparse import Namespace

from megatron.training.arguments import parse_args

from megatron_mtp.checkpoint.families.flags import UntrainableError
from megatron_mtp.checkpoint.plan import HFModel
from megatron_mtp.config import add_yarn_arguments


def flags_of(model: HFModel) -> tuple[list[str] | None, str | None]:
    """Megatron's flags of a model, or None and the reason why Megatron cannot run it."""
    if model.family.flags is None:
        return None, model.family.untrainable
    try:
        return model.family.flags(model.config, model.layout), None
    except UntrainableError as reason:
        return None, str(reason)


def depth_flags_of(model: HFModel) -> list[str] | None:
    """Megatron's flags for the depths of a model whose trunk it cannot run; None where it cannot run them either."""
    try:
        return None if model.family.depth_flags is None else model.family.depth_flags(model.config, model.layout)
    except UntrainableError:
        return None


def megatron_arguments(model: HFModel) -> Namespace:
    """The arguments that a checkpoint of this model keeps; without a model to build, the reason and few others."""
    flags, reason = flags_of(model)
    if flags is None:
        return Namespace(mtp_num_layers=model.layout.depths or None, megatron_mtp_untrainable=reason)
    return parsed(flags, model.config.integer("vocab_size"))


def check_trainable(args: Namespace, name: str) -> None:
    """Refuse the arguments of a conversion that Megatron has no model for.

    Args:
        name: of the checkpoint, as messages call it.

    Raises:
        ValueError: it is one.
    """
    reason = getattr(args, "megatron_mtp_untrainable", None)
    if reason:
        why = f": it has {reason}" if isinstance(reason, str) else ""  # older conversions do not say why
        raise ValueError(
            f"{name} was converted from a model that Megatron cannot run{why}; mcore-to-hf converts it back."
        )


def parsed(flags: list[str], vocabulary: int) -> Namespace:
    """Flags through Megatron's own parser; the vocabulary is padded as Megatron does for one tensor-parallel rank."""
    args = parse_flags(flags)
    multiple = args.make_vocab_size_divisible_by
    args.padded_vocab_size = -(-vocabulary // multiple) * multiple
    return args


def parse_flags(flags: list[str]) -> Namespace:
    """Megatron's parser reads `sys.argv` and nothing else."""
    argv, sys.argv = sys.argv, ["megatron", *flags]
    try:
        return parse_args(add_yarn_arguments)
    finally:
        sys.argv = argv


MODEL_ARGUMENTS = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups kv_channels "
    "seq_length max_position_embeddings position_embedding_type rotary_base rotary_percent rotary_interleaved "
    "use_rope_scaling rope_scaling_factor rotary_seq_len_interpolation_factor add_bias_linear add_qkv_bias swiglu "
    "squared_relu quick_geglu glu_linear_offset activation_func_clamp_value normalization layernorm_epsilon "
    "layernorm_zero_centered_gamma apply_residual_connection_post_layernorm qk_layernorm qk_l2_norm "
    "untie_embeddings_and_output_weights attention_output_gate softmax_type "
    "window_size window_attn_skip_freq no_rope_freq mrope_section "
    "yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int "
    "use_mup mup_base_hidden_size mup_embedding_mult mup_output_mult mup_attn_scale_power mup_base_head_dim "
    "experimental_attention_variant linear_attention_freq linear_conv_kernel_dim linear_key_head_dim "
    "linear_num_key_heads linear_num_value_heads linear_value_head_dim dsa_indexer_head_dim dsa_indexer_n_heads "
    "dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_k_norm_epsilon "
    "dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu "
    "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type "
    "rotary_scaling_factor mscale mscale_all_dim original_max_position_embeddings beta_fast beta_slow "
    "num_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk "
    "moe_router_score_function moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_dtype "
    "moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_router_pre_softmax "
    "moe_router_load_balancing_type moe_aux_loss_coeff moe_shared_expert_intermediate_size moe_shared_expert_gate "
    "moe_apply_probs_on_input moe_latent_size moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size "
    "mtp_num_layers mtp_use_repeated_layer mtp_architecture vocab_size padded_vocab_size make_vocab_size_divisible_by "
    "attention_dropout hidden_dropout"
).split()
"""Arguments that say what a model computes: Megatron's own `--use-checkpoint-args` restores only some of them.

`vocab_size` counts rows without those that pad them; a converted model may have more of them than its tokenizer tokens.
"""
