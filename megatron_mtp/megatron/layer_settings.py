"""Settings of Megatron's configuration that have no effect on the forward pass of a dense layer."""

WITHOUT_EFFECT = frozenset(
    # choice of kernel for the same computation
    "transformer_impl attention_backend flash_attention_version attention_softmax_in_fp32 persist_layer_norm "
    "memory_efficient_layer_norm bias_activation_fusion bias_dropout_fusion masked_softmax_fusion apply_rope_fusion "
    "fused_single_qkv_rope gradient_accumulation_fusion deterministic_mode use_te_rng_tracker "
    "disable_bf16_reduced_precision_matmul cross_entropy_loss_fusion cross_entropy_fusion_impl cp_comm_type "
    # dtype: the weights determine it
    "fp16 bf16 params_dtype pipeline_dtype autocast_dtype "
    # which layers the stack contains
    "is_hybrid_model "
    # outside the layers; muP scales attention through `softmax_scale`
    "use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim "
    "mup_attn_scale_power clone_scatter_output_in_embedding "
    # training: dropout, initialization, schedule, gradients, logs
    "attention_dropout hidden_dropout init_method output_layer_init_method init_method_std embedding_init_method "
    "embedding_init_method_std perform_initialization use_cpu_initialization init_model_with_meta_device timers "
    "finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func calculate_per_token_loss "
    "defer_embedding_wgrad_compute wgrad_deferral_limit delay_wgrad_compute qk_clip qk_clip_alpha qk_clip_threshold "
    "log_max_attention_logit variable_seq_lengths deallocate_pipeline_outputs barrier_with_L1_time "
    "distribute_saved_activations config_logger_dir num_microbatches_with_partial_activation_checkpoints "
    # parallelism
    "tensor_parallel_num_weight_shards batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p "
    "microbatch_group_size_per_vp_stage hetereogenous_dist_checkpoint".split()
)
"""Settings that change nothing in the forward pass of a dense layer without gradients."""

OTHER_PARTS = (
    "yarn_",  # rotary angles and their factor
    *("moe_", "num_moe_experts", "mtp_", "expert_", "mamba_", "linear_", "dsa_"),  # other layer types
    *("recompute_", "cpu_offloading", "_cpu_offloading", "offload", "fine_grained_", "activation_offload"),  # memory
    *("tp_comm_", "overlap_", "pipeline_model", "virtual_pipeline", "num_layers_in_", "account_for_"),  # parallelism
    *("cuda_graph_", "inference_", "fp8_", "fp4_"),  # features that are off or not used here
)
"""Name prefixes of settings that do not concern a dense layer's forward pass."""
