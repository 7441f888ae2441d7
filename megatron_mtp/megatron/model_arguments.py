"""Arguments that describe a model."""

from megatron_mtp.spec.head import DRAFTER_SETTINGS
from megatron_mtp.spec.rope_scaling import scaling_arguments

MODEL_ARGUMENTS = [
    *scaling_arguments(is_latent=False),
    *scaling_arguments(is_latent=True),
    *DRAFTER_SETTINGS,
    *"num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups kv_channels "
    "seq_length max_position_embeddings position_embedding_type rotary_base rotary_percent rotary_interleaved "
    "add_bias_linear add_qkv_bias swiglu "
    "squared_relu quick_geglu glu_linear_offset activation_func_clamp_value normalization layernorm_epsilon "
    "layernorm_zero_centered_gamma apply_residual_connection_post_layernorm qk_layernorm qk_l2_norm "
    "untie_embeddings_and_output_weights attention_output_gate softmax_type "
    "window_size window_attn_skip_freq no_rope_freq mrope_section "
    "use_mup mup_base_hidden_size mup_embedding_mult mup_output_mult mup_attn_scale_power mup_base_head_dim "
    "experimental_attention_variant linear_attention_freq linear_conv_kernel_dim linear_key_head_dim "
    "linear_num_key_heads linear_num_value_heads linear_value_head_dim dsa_indexer_head_dim dsa_indexer_n_heads "
    "dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_k_norm_epsilon "
    "dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu "
    "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim "
    "num_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk "
    "moe_router_score_function moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_dtype "
    "moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_router_pre_softmax "
    "moe_router_load_balancing_type moe_aux_loss_coeff moe_shared_expert_intermediate_size moe_shared_expert_gate "
    "moe_apply_probs_on_input moe_latent_size moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size "
    "hybrid_layer_pattern mamba_state_dim mamba_head_dim mamba_num_heads mamba_num_groups "
    "mtp_num_layers mtp_use_repeated_layer mtp_unroll mtp_repeated_layer_shares_kv "
    "mtp_repeated_layer_first_pass_kv mtp_architecture vocab_size "
    "drafter_beside_mtp drafter_steps padded_vocab_size make_vocab_size_divisible_by attention_dropout "
    "hidden_dropout".split(),
]
"""Arguments that determine what a model computes. Megatron's own `--use-checkpoint-args` restores only some of them.
`vocab_size` counts rows without padding rows; a converted model may have more rows than its tokenizer has tokens.
"""
