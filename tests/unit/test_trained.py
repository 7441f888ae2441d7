"""checkpoint/families/trained.py: which trained models fit into which family, and why the others do not."""

from argparse import Namespace
from typing import Any

import pytest

from megatron_mtp.checkpoint.families import trained_forms
from megatron_mtp.checkpoint.families.trained import check_computable

DENSE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "layernorm_zero_centered_gamma": False,
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "window_size": None,
    "multi_latent_attention": False,
    "qk_layernorm": False,
    "rotary_percent": 1.0,
    "rotary_base": 10000,
    "num_layers": 3,
    "ffn_hidden_size": 64,
    "num_experts": None,
}
EXPERTS = {
    "num_experts": 4,
    "moe_router_score_function": "sigmoid",
    "moe_shared_expert_gate": False,
    "moe_layer_freq": [0, 1, 1],
    "moe_shared_expert_intermediate_size": 32,
    "moe_ffn_hidden_size": 16,
    "moe_router_topk": 2,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
}


def trained(**changes: Any) -> Namespace:
    return Namespace(**{**DENSE, **changes})


def test_models_of_the_families_can_be_exported() -> None:
    check_computable(trained())
    check_computable(trained(**EXPERTS))


FOREIGN: dict[str, dict[str, Any]] = {
    "another norm than --normalization RMSNorm": {"normalization": "LayerNorm"},
    "--apply-layernorm-1p": {"layernorm_zero_centered_gamma": True},
    "another activation than --swiglu": {"swiglu": False},
    "biases": {"add_bias_linear": True},
    "other positions than --position-embedding-type rope": {"position_embedding_type": "learned_absolute"},
    "--rotary-interleaved": {"rotary_interleaved": True},
    "--window-size": {"window_size": (16, 0)},
    "--moe-router-score-function softmax": {**EXPERTS, "moe_router_score_function": "softmax"},
    "--moe-shared-expert-gate": {**EXPERTS, "moe_shared_expert_gate": True},
    "dense layers after MoE": {**EXPERTS, "moe_layer_freq": [1, 0, 1]},
    "--moe-router-group-topk other than half": {**EXPERTS, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
    "--norm-epsilon above 1e-05 inside latent attention": {
        "multi_latent_attention": True,
        "rope_type": "rope",
        "layernorm_epsilon": 1e-4,
    },
    "--rotary-percent in latent attention": {
        "multi_latent_attention": True,
        "rope_type": "rope",
        "rotary_percent": 0.5,
    },
    "--rotary-seq-len-interpolation-factor beside another": {
        "rotary_seq_len_interpolation_factor": 2,
        "use_rope_scaling": True,
    },
    "--no-rope-freq": {"no_rope_freq": [0, 1, 0]},
    "--use-mup": {"use_mup": True},
    "--apply-residual-connection-post-layernorm": {"apply_residual_connection_post_layernorm": True},
    "--glu-linear-offset": {"glu_linear_offset": 1.0},
    "--activation-func-clamp-value": {"activation_func_clamp_value": 7.0},
    "--moe-apply-probs-on-input": {**EXPERTS, "moe_apply_probs_on_input": True},
    "another --softmax-type than vanilla": {"softmax_type": "off-by-one"},
}
YARN = {"multi_latent_attention": True, "rope_type": "yarn", "rotary_scaling_factor": 40.0}


@pytest.mark.parametrize("said", FOREIGN)
def test_what_no_family_computes_is_named(said: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^the checkpoint was trained with {said}.*, which no form of a trained model here has"
    ):
        check_computable(trained(**FOREIGN[said]))


@pytest.mark.parametrize(("mscale", "whole"), [(0.7, 0.0), (0.0, 0.7), (0.0, 0.0), (1.0, 1.0), (1.0, 0.0)])
def test_scales_of_positions_that_engines_read_differently_are_named(mscale: float, whole: float) -> None:
    """transformers has g(1) / 1 where one of the two is 0, Megatron g(mscale) / g(mscale_all_dim)."""
    args = trained(**YARN, mscale=mscale, mscale_all_dim=whole)
    if mscale == 1.0:
        return check_computable(args)
    with pytest.raises(ValueError, match="one of --mscale and --mscale-all-dim without the other"):
        check_computable(args)


def test_an_argument_that_changes_nothing_is_no_hindrance() -> None:
    check_computable(trained(no_rope_freq=[0, 0, 0], rotary_seq_len_interpolation_factor=1, softmax_type="vanilla"))


@pytest.mark.parametrize("frequency", [2, [1, 0, 1]])
def test_dense_layers_have_to_come_first(frequency: Any) -> None:
    with pytest.raises(ValueError, match="dense layers after MoE"):
        check_computable(trained(**{**EXPERTS, "moe_layer_freq": frequency}))


UNFIT: list[tuple[str, dict[str, Any], str]] = [
    ("llama", EXPERTS, "names a dense family without partial rotation"),
    ("qwen3", {"rotary_percent": 0.5}, "names a dense family without partial rotation"),
    ("deepseek_v3", {}, "needs a model of --multi-latent-attention with --qk-layernorm"),
    ("deepseek_v3", {"multi_latent_attention": True}, "needs a model of --multi-latent-attention with --qk-layernorm"),
    ("mimo", {"qk_layernorm": True}, "needs a dense model without --qk-layernorm"),
    ("glm4_moe", {"ffn_hidden_size": 66}, "--ffn-hidden-size 66 cannot be shared out among two routed"),
    (
        "glm4_moe",
        {**EXPERTS, "moe_shared_expert_intermediate_size": 24},
        "24 is no multiple of --moe-ffn-hidden-size 16",
    ),
]


@pytest.mark.parametrize(("family", "changes", "said"), UNFIT)
def test_a_family_that_does_not_fit_says_what_it_needs(family: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trained_forms()[family].keys(trained(**changes))


def test_experts_as_the_config_counts_them() -> None:
    keys = trained_forms()["glm4_moe"].keys(trained(**EXPERTS))
    assert (keys["n_routed_experts"], keys["n_shared_experts"], keys["first_k_dense_replace"]) == (4, 2, 1)
    assert keys["norm_topk_prob"] is True
    dense = trained_forms()["glm4_moe"].keys(trained())
    assert (dense["n_routed_experts"], dense["moe_intermediate_size"], dense["first_k_dense_replace"]) == (2, 16, 2)


CHOSEN: list[tuple[str, dict[str, Any], int]] = [
    ("llama", {}, 0),
    ("qwen2", {"add_qkv_bias": True}, 0),
    ("qwen3", {"add_qkv_bias": True, "qk_layernorm": True}, 0),
    ("glm4_moe", {}, 2),
    ("glm4_moe", EXPERTS, 0),
    ("deepseek_v3", {"multi_latent_attention": True}, 0),
    ("deepseek_v3", {**EXPERTS, "multi_latent_attention": True}, 2),
]


@pytest.mark.parametrize(("family", "changes", "depths"), CHOSEN)
def test_one_family_fits_a_model(family: str, changes: dict[str, Any], depths: int) -> None:
    args = trained(**{"add_qkv_bias": False, **changes})
    assert [name for name, form in trained_forms().items() if form.fits(args, depths)] == [family]
