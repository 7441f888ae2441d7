"""Every key of a family's config class is read, does not affect logits, or is rejected; missing keys use its defaults.

So a new version of transformers with a new key that changes the computation fails here.
"""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from megatron_mtp.checkpoint.families import FAMILIES
from megatron_mtp.checkpoint.hf.config import HFConfig

NAMES = (
    "llama qwen2 qwen3 mistral ministral smollm3 seed_oss granite phi3 glm helium ernie4_5 cwm internlm3 iquestcoder "
    "arcee nemotron stablelm qwen3_moe qwen2_moe mixtral dots1 solar_open deepseek_v2 youtu glm4_moe_lite hy_v3 "
    "gpt_oss granite_swa jais2 granitemoe granitemoeshared"
).split()
SIZES = set(
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers num_attention_heads num_experts "
    "num_local_experts n_routed_experts num_experts_per_tok shared_expert_intermediate_size kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim".split()
)
"""Keys that a config must have, unless the class has a default that the family names."""
READ = SIZES | set(
    "num_key_value_heads head_dim hidden_act max_position_embeddings rms_norm_eps layer_norm_eps norm_eps "
    "rope_parameters tie_word_embeddings attention_bias attention_out_bias qkv_bias use_qkv_bias use_bias bias "
    "mlp_bias sliding_window use_sliding_window max_window_layers layer_types no_rope_layers no_rope_layer_interval "
    "embedding_multiplier logits_scaling residual_multiplier attention_multiplier qk_layernorm use_parallel_residual "
    "decoder_sparse_step mlp_only_layers mlp_layer_types norm_topk_prob first_k_dense_replace n_shared_experts "
    "num_shared_experts n_group topk_group topk_method routed_scaling_factor router_scaling_factor q_lora_rank "
    "rope_interleave original_max_position_embeddings swiglu_alpha swiglu_limit layer_rope_theta "
    "shared_intermediate_size".split()
)
"""Keys that rules or flags read, or that cause a model to be rejected."""
INERT = set(
    "initializer_range embedding_initializer_range use_cache pad_token_id bos_token_id eos_token_id pretraining_tp "
    "attention_dropout hidden_dropout residual_dropout resid_pdrop embd_pdrop output_router_logits "
    "router_aux_loss_coef router_jitter_noise enable_moe_fp32_combine num_mtp_layers".split()
)
"""Keys for training, generation or accumulation dtype."""
COMMON = set(CONFIG_MAPPING["llama"].__mro__[1].__dataclass_fields__)
"""Keys of every config."""


def own_keys(name: str) -> set[str]:
    return set(CONFIG_MAPPING[name].__dataclass_fields__) - (COMMON - READ)


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_the_class_is_accounted_for(name: str) -> None:
    assert own_keys(name) - READ - INERT == set()


ABSENT: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "decoder_sparse_step": (1,),
    "no_rope_layer_interval": (4,),
    "n_group": (1,),
    "topk_group": (1,),
    "topk_method": ("greedy",),
    "max_window_layers": (28, 62),
    "sliding_window": (4096,),
    "original_max_position_embeddings": (4096,),
    "first_k_dense_replace": (0,),
    "mlp_layer_types": (["dense", "sparse"],),
}
"""Values that the reader assumes for a missing key, or that have no effect."""


@pytest.mark.parametrize("name", NAMES)
def test_an_absent_key_has_the_value_of_the_class(name: str) -> None:
    fresh, defaults = CONFIG_MAPPING[name](), FAMILIES[name].complete(HFConfig({}, name)).keys
    declared = {key: field.default for key, field in CONFIG_MAPPING[name].__dataclass_fields__.items()}
    wrong = {}
    latent = {"num_key_value_heads"} if "kv_lora_rank" in declared else set()  # latent attention has no such heads
    for key in own_keys(name) & (READ - SIZES - {"rope_parameters", "head_dim"}) - latent:
        theirs = declared.get(key)
        if theirs in (None, False) or theirs in ABSENT.get(key, ()):
            continue
        if defaults.get(key) != theirs and getattr(fresh, key, None) != defaults.get(key):
            wrong[key] = (theirs, defaults.get(key))
    rope = getattr(fresh, "rope_parameters", None) or {}
    own = defaults.get("rope_parameters") or defaults
    for key in {"rope_theta", "partial_rotary_factor"} & rope.keys():
        if rope[key] != own.get(key, 1.0 if key == "partial_rotary_factor" else None):
            wrong[key] = (rope[key], own.get(key))
    assert wrong == {}
