"""Models that Megatron would compute differently from transformers are rejected with the reason; others are not."""

import pytest
from untrainable_configs import Keys, flags

from megatron_mtp.checkpoint.families.family import UntrainableError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def without(rope: Keys, name: str) -> Keys:
    return {key: value for key, value in rope.items() if key != name}


GROUPS = {"n_routed_experts": 12, "n_group": 4}
REFUSED: list[tuple[str, Keys, str]] = [
    ("llama", {"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}}, "other numbers than Megatron's"),
    ("llama", {"rope_parameters": {**LLAMA3, "high_freq_factor": 8.0}}, "other numbers than Megatron's"),
    ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 4096}}, "other numbers"),
    ("llama", {"rope_parameters": without(LLAMA3, "original_max_position_embeddings")}, "other numbers"),
    ("llama", {"rope_parameters": LLAMA3, "original_max_position_embeddings": 4096}, "other numbers"),
    ("llama", {"rope_parameters": without(LLAMA3, "factor")}, "a rotary setting 'factor' of None"),
    ("llama", {"rope_parameters": without(LLAMA3, "low_freq_factor")}, "'low_freq_factor' of None"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "that differ from layer to layer"),
    ("llama", {"partial_rotary_factor": 0.5}, "a 'partial_rotary_factor', which transformers ignores"),
    ("qwen2", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "a 'partial_rotary_factor'"),
    ("glm4_moe", {"rope_scaling": YARN, "partial_rotary_factor": 0.5}, "a YaRN scaling of interleaved .* or of a part"),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": None}}, "a rotary setting 'factor' of None"),
    ("qwen2", {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "LongRoPE, in which every angle changes"),
    (
        "qwen2",
        {"rope_scaling": {"type": "linear", "factor": 3.0}},
        "a linear rotary scaling by 3.0, which is not a power",
    ),
    ("qwen2", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "the rotary scaling 'dynamic'"),
    ("qwen2", {"rope_theta": 10000.5}, "the rotary base 10000.5"),
    ("glm4_moe", {"partial_rotary_factor": 1.5}, "a 'partial_rotary_factor' of 1.5"),
    ("glm4_moe", {**GROUPS, "topk_group": 2, "num_experts_per_tok": 2}, "score by their 1 best"),
    ("glm4_moe", {**GROUPS, "topk_group": 1, "num_experts_per_tok": 3}, "score by their 3 best"),
    ("bailing_moe", {**GROUPS, "topk_group": 2, "num_experts_per_tok": 6}, "score by their 3 best"),
    ("deepseek_v3", {**GROUPS, "topk_group": 3, "num_experts_per_tok": 2}, "score by their 0 best"),
    ("deepseek_v3", {"n_routed_experts": 4, "n_group": 4, "topk_group": 1}, "4 experts in 4 groups"),
    ("deepseek_v3", {"norm_topk_prob": None}, "not normed over several"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "a router with 'scoring_func' 'softmax'"),
    ("deepseek_v3", {"topk_method": "greedy"}, "a router with 'topk_method' 'greedy'"),
    ("deepseek_v3", {"rope_interleave": None}, "RoPE in halves"),
    ("deepseek_v3", {"rms_norm_eps": 1e-3}, "an epsilon of 0.001"),
    ("deepseek_v3", {"partial_rotary_factor": 0.5}, "a 'partial_rotary_factor' with latent attention"),
    ("deepseek_v3", {"rope_scaling": {**YARN, "truncate": False}}, "'truncate' false"),
    ("deepseek_v3", {"rope_scaling": {**YARN, "factor": None}}, "a rotary setting 'factor' of None"),
    ("deepseek_v3", {"rope_scaling": {**YARN, "factor": 1.0, "attention_factor": 1.3}}, "'attention_factor' 1.3"),
    ("deepseek_v3", {"rope_scaling": {**YARN, "beta_slow": -1}}, "a rotary setting 'beta_slow' of -1"),
    ("deepseek_v3", {"rope_scaling": {**YARN, "factor": 10**400}}, "a rotary setting 'factor' of 1000"),
    ("llama", {"rope_parameters": {**LLAMA3, "factor": 0}}, "a rotary setting 'factor' of 0"),
    ("deepseek_v3", {"rope_theta": 1}, "the rotary base 1.0, which is not a whole number above 1"),
    ("deepseek_v3", {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "the rotary scaling 'llama3'"),
]


@pytest.mark.parametrize(("kind", "changes", "reason"), REFUSED)
def test_models_that_megatron_computes_differently_are_refused(kind: str, changes: Keys, reason: str) -> None:
    with pytest.raises(UntrainableError, match=reason):
        flags(kind, **changes)


def test_router_groups_convert_if_scored_as_in_megatron() -> None:
    some = flags("glm4_moe", **GROUPS, topk_group=2, num_experts_per_tok=4)
    place = some.index("--moe-router-num-groups")
    assert some[place : place + 4] == ["--moe-router-num-groups", "4", "--moe-router-group-topk", "2"]
    assert "--moe-router-num-groups" not in flags("glm4_moe", **GROUPS, topk_group=4, num_experts_per_tok=3)


@pytest.mark.parametrize(
    ("changes", "mscale", "whole"),
    [
        ({}, 1.0, 0.0),
        ({"mscale": 0.7}, 1.0, 0.0),
        ({"mscale": 0.7, "mscale_all_dim": 0.5}, 0.7, 0.5),
        ({"attention_factor": 1.0}, 0.0, 0.0),
        ({"factor": 1.0, "mscale_all_dim": 0.5}, 1.0, 0.0),
    ],
)
def test_yarns_scales_are_set_so_that_megatron_computes_what_transformers_does(
    changes: Keys, mscale: float, whole: float
) -> None:
    found = flags("deepseek_v3", rope_scaling={**YARN, **changes})
    assert float(found[found.index("--mscale") + 1]) == mscale
    assert float(found[found.index("--mscale-all-dim") + 1]) == whole
