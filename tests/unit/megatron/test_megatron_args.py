"""checkpoint/convert/import_hf.py: every Megatron argument that changes a model is stored in the checkpoint."""

import inspect
import re
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from megatron.core.transformer import MLATransformerConfig
from megatron.training import argument_utils

from megatron_mtp.checkpoint import families
from megatron_mtp.checkpoint.convert.computation import LAYERS_BESIDE, settings_of
from megatron_mtp.checkpoint.verify.prompt import Prompt
from megatron_mtp.checkpoint.verify.verify import megatron_logits
from megatron_mtp.megatron.model_arguments import MODEL_ARGUMENTS
from megatron_mtp.megatron.parsing import parse_flags, parsed
from megatron_mtp.model.arguments import MTPGPTModelConfig, config_of
from megatron_mtp.model.build import build
from megatron_mtp.model.stored_arguments import completed

HARMLESS = {
    "how the work is shared out and overlapped": (
        "account_for_* *_parallel_size *_parallel_num_weight_shards *_parallel_layout *_comm_backend cp_comm_type "
        "sequence_parallel defer_embedding_wgrad_compute delay_* wgrad_deferral_limit *overlap* tp_comm_* "
        "microbatch_group_size_per_vp_stage hybrid_context_parallel max_seqlen_per_dp_cp_rank symmetric_ar_type "
        "use_ring_exchange_p2p high_priority_a2a_comm_stream clone_scatter_output_in_embedding "
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers hierarchical_context_parallel_sizes"
    ),
    "memory and speed": (
        "*offload* recompute_* distribute_saved_activations moe_layer_recompute mlp_chunks_* cuda_graph_* *_cuda_graph "
        "*_fusion gradient_accumulation_fusion cross_entropy_fusion_impl mla_down_proj_fusion apply_rope_fusion "
        "fused_residual_rmsnorm transformer_impl use_te_activation_func use_transformer_engine_op_fuser flash_* "
        "attention_backend use_grouped_gemm_for_* moe_grouped_gemm moe_single_grouped_* moe_token_dispatcher_type "
        "moe_flex_* moe_deepep_* moe_enable_deepep moe_hybridep_* moe_ncclep_* moe_paged_stash* dsa_kernel_backend "
        "moe_router_padding_* moe_pad_* moe_permute_* use_kitchen_attention kitchen_attention_backend "
        "ep_overlap_early_attn_memory_release use_fused_weighted_squared_relu no_persist_layer_norm cache_mla_latents "
        "init_model_with_meta_device bias_* moe_expert_rank_capacity_factor"
    ),
    "precision": (
        "bf16 fp16 fp4* fp8* fp32_residual_connection apply_query_key_layer_scaling attention_softmax_in_fp32 "
        "disable_bf16_* first_last_layers_bf16 num_layers_at_* fp16_lm_cross_entropy te_precision_config_file "
        "dsa_indexer_k_norm_fp32 batch_invariant_mode deterministic_mode"
    ),
    "training alone": (
        "init_method* embedding_init_method_std perform_initialization use_cpu_initialization mtp_loss_scaling_factor "
        "mtp_detach_heads calculate_per_token_loss qk_clip* dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss "
        "moe_z_loss_coeff moe_input_jitter_eps moe_router_quantile_balancing_ema moe_router_force_* seed "
        "moe_expert_capacity_factor moe_token_drop_policy cross_entropy_loss_fusion moe_enable_routing_replay"
    ),
    "what is written down": "barrier_with_L1_time config_logger_dir log_max_attention_logit moe_per_layer_logging",
    "inference": "inference_* nccl_all_reduce_for_prefill",
    "other classes of model": "mtp_hybrid_override_pattern mtp_standalone test_mode",
    "follows from hybrid_layer_pattern": "is_hybrid_model",
    "kernels and inference of Mamba layers": "use_mamba_mem_eff_path mamba_inference_* mamba_training_ssm_states_dtype",
    "known otherwise: mup_base_hidden_size": "mup_width_mult",
    "another way to say a model": "yaml_cfg",
}
"""Arguments that reach a model's configuration but do not affect what it computes, by reason."""
TINY = (
    "--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--disable-bias-linear --max-position-embeddings 16 --position-embedding-type rope --normalization RMSNorm --swiglu"
)
MUP = "--use-mup --mup-base-hidden-size 4 --mup-embedding-mult 3"


def reaching_a_model() -> set[str]:
    """Return arguments that Megatron's builder turns into a configuration: fields of that name, and those it reads."""
    builders = (argument_utils.core_transformer_config_from_args, argument_utils.gpt_config_from_args)
    named = {name for builder in builders for name in re.findall(r"\bargs\.(\w+)", inspect.getsource(builder))}
    named |= {field.name for config in (MLATransformerConfig, MTPGPTModelConfig) for field in fields(config)}
    return named & vars(parse_flags([])).keys()


def unexplained(arguments: set[str], kept: set[str]) -> list[str]:
    patterns = " ".join(HARMLESS.values()).split()
    return sorted(name for name in arguments - kept if not any(fnmatch(name, pattern) for pattern in patterns))


def test_every_argument_that_shapes_a_model_is_kept_or_refused() -> None:
    sources = [file.read_text(encoding="utf-8") for file in Path(families.__file__).parent.glob("*.py")]
    read = {*re.findall(r"\bargs\.(\w+)", "\n".join(sources))}
    compared = {*settings_of(parsed([*TINY.split(), "--num-experts", "4"], 100)), *LAYERS_BESIDE}
    found = reaching_a_model()
    assert len(found) > 200
    assert unexplained(found, read | compared | {*MODEL_ARGUMENTS}) == []
    assert unexplained({"swiglu", "bf16", "a_new_one"}, {"swiglu"}) == ["a_new_one"]


def test_no_model_argument_is_listed_as_harmless() -> None:
    patterns = " ".join(HARMLESS.values()).split()
    assert [name for name in MODEL_ARGUMENTS if any(fnmatch(name, pattern) for pattern in patterns)] == []


@pytest.mark.usefixtures("megatron")
def test_a_mup_model_is_rebuilt_as_it_was_trained(tmp_path: Path) -> None:
    from trained_folders import save

    args = parsed([*TINY.split(), *MUP.split(), "--untie-embeddings-and-output-weights"], 100)
    made = build(config_of(completed(args)))
    assert made.config.mup_embedding_mult == 3.0
    assert made.config.mup_output_mult == 0.25
    tokens_BS, made = torch.arange(12).unsqueeze(0), made.cuda().eval()
    save(made, args, tmp_path / "mcore")
    mask = torch.ones(1, 1, 12, 12, device="cuda").tril().logical_not()
    theirs_SV = made(tokens_BS.cuda(), torch.arange(12, device="cuda").unsqueeze(0), mask)[0].cpu()
    assert torch.allclose(megatron_logits(tmp_path / "mcore", Prompt.of(tokens_BS))["trunk"], theirs_SV, atol=1e-5)
