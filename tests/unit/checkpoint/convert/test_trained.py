"""checkpoint/families/trained.py and convert/computation.py: which family takes a model, and which models no family
takes.
"""

from argparse import Namespace
from typing import Any

import pytest

from megatron_mtp.checkpoint.convert.computation import check_config
from megatron_mtp.checkpoint.families import Layout, trained_forms
from megatron_mtp.checkpoint.families.trained import common_keys
from megatron_mtp.megatron.parsing import parsed

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


SIZES = (
    "--num-layers 3 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights "
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"
)
ROUTED = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 32 "
    "--moe-layer-freq [0,1,1] --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type none --moe-router-dtype fp32"
)
LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --kv-channels 8 "
    "--qk-layernorm"
)
BIAS = "--moe-router-enable-expert-bias"
PLAIN = f"{LATENT} --rope-type rope"
YARN = f"{LATENT} --rope-type yarn --rotary-scaling-factor 40 "


def check(flags: str, without: str = "") -> None:
    """Compare a model with these flags with the config.json of the first family that takes it."""
    args = parsed([flag for flag in f"{SIZES} {flags}".split() if flag not in without.split()], 128)
    name = next(name for name, form in trained_forms().items() if form.fits(args, 0))
    keys = {**common_keys(args, 128, "bfloat16"), **trained_forms()[name].keys(args), "model_type": name}
    check_config(keys, Layout(0, frozenset({"head"})), args, "the config for it", "it cannot be exported.")


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    "flags",
    [
        *("", ROUTED, PLAIN, f"{YARN} --mscale 1.0 --mscale-all-dim 1.0", f"{YARN} --mscale 1.0 --mscale-all-dim 0.0"),
        "--no-rope-freq [0,0,0] --rotary-seq-len-interpolation-factor 1 --softmax-type vanilla",
    ],
)
def test_models_of_the_families_can_be_exported(flags: str) -> None:
    check(flags)


FOREIGN = [
    ("normalization", "--normalization LayerNorm"),
    ("layernorm_zero_centered_gamma", "--apply-layernorm-1p"),
    ("position_embedding_type", "--position-embedding-type learned_absolute"),
    ("rotary_interleaved", "--rotary-interleaved"),
    ("window_size", "--window-size 16,0"),
    ("moe_shared_expert_gate", f"{ROUTED} --moe-shared-expert-gate"),
    ("moe_layer_freq", f"{ROUTED} --moe-layer-freq [1,0,1]"),
    ("moe_layer_freq", f"{ROUTED} --moe-layer-freq 2"),
    ("seq_len_interpolation_factor", "--rotary-seq-len-interpolation-factor 2 --use-rope-scaling"),
    ("no_rope_freq", "--no-rope-freq [0,1,0]"),
    ("softmax_scale", "--use-mup"),
    ("apply_residual_connection_post_layernorm", "--apply-residual-connection-post-layernorm"),
    ("qk_l2_norm", "--qk-l2-norm"),
    ("glu_linear_offset", "--glu-linear-offset 1.0"),
    ("activation_func_clamp_value", "--activation-func-clamp-value 7.0"),
    ("attention_output_gate", "--attention-output-gate"),
    ("moe_apply_probs_on_input", f"{ROUTED} --moe-apply-probs-on-input"),
    ("moe_latent_size", f"{ROUTED} --moe-latent-size 16"),
    ("moe_mlp_glu_interleave_size", f"{ROUTED} --moe-mlp-glu-interleave-size 8"),
    ("softmax_type", "--softmax-type off-by-one"),
    ("spec", "--spec a b"),
    # if one of the two is 0, transformers uses g(1) / 1, and Megatron g(mscale) / g(mscale_all_dim)
    ("mscale", f"{YARN} --mscale 0.7 --mscale-all-dim 0"),
    ("mscale", f"{YARN} --mscale 0 --mscale-all-dim 0"),
    ("mscale", f"{YARN} --mscale 0 --mscale-all-dim 0.7"),
]
"""The setting that differs, and flags of a model that no family computes."""


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(("setting", "flags"), FOREIGN)
def test_settings_that_no_family_supports_are_named(setting: str, flags: str) -> None:
    with pytest.raises(ValueError, match=f"^the checkpoint was trained with {setting} .*, but it is "):
        check(flags)


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    ("setting", "flags", "without"),
    [
        ("gated_linear_unit", "", "--swiglu"),
        ("add_bias_linear", "", "--disable-bias-linear"),
        (
            "moe_router_score_function",
            f"{ROUTED} --moe-router-score-function softmax",
            "--moe-router-enable-expert-bias",
        ),
    ],
)
def test_settings_that_every_family_requires_are_named(setting: str, flags: str, without: str) -> None:
    with pytest.raises(ValueError, match=f"^the checkpoint was trained with {setting} .*, but it is "):
        check(flags, without)


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    ("reason", "flags"),
    [
        ("norms with an epsilon of 0.0001", f"{PLAIN} --norm-epsilon 1e-4"),
        ("groups of experts .* instead of 2",
         f"{ROUTED} --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk 1"),
        ("the rotary scaling 'linear'", f"{PLAIN} --rotary-seq-len-interpolation-factor 2"),
    ],
)  # fmt: skip
def test_differences_in_engines_are_named(reason: str, flags: str) -> None:
    with pytest.raises(ValueError, match=f"^the config for it asks for {reason}.*, so the checkpoint computes"):
        check(flags)


UNFIT: list[tuple[str, dict[str, Any], str]] = [
    ("llama", EXPERTS, "names a dense family without partial rotation"),
    ("qwen3", {"rotary_percent": 0.5}, "names a dense family without partial rotation"),
    ("deepseek_v3", {}, "needs a model of --multi-latent-attention with --qk-layernorm"),
    ("deepseek_v3", {"multi_latent_attention": True}, "needs a model of --multi-latent-attention with --qk-layernorm"),
    (
        "deepseek_v3",
        {"multi_latent_attention": True, "qk_layernorm": True, "rotary_percent": 0.5},
        "with --qk-layernorm, and without --rotary-percent",
    ),
    ("mimo", {"qk_layernorm": True}, "needs a dense model without --qk-layernorm"),
    ("glm4_moe", {"ffn_hidden_size": 66}, "--ffn-hidden-size 66 cannot be shared out among two routed"),
    (
        "glm4_moe",
        {**EXPERTS, "moe_shared_expert_intermediate_size": 24},
        "24 is not a multiple of --moe-ffn-hidden-size 16",
    ),
]


@pytest.mark.parametrize(("family", "changes", "said"), UNFIT)
def test_a_family_that_does_not_fit_says_what_it_needs(family: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trained_forms()[family].keys(trained(**changes))


def test_experts_are_exported_as_the_config_counts_them() -> None:
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
