"""A missing config key is read as transformers reads it: every key of every family is dropped in turn."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hf_models import EXPERTS, LATENT, LINEAR, MODELS, QWEN_EXPERTS, SIZES
from random_models import BOTH
from transformers import AutoConfig

from megatron_mtp.checkpoint.families import FAMILIES, Layout
from megatron_mtp.checkpoint.families.family import UntrainableError
from megatron_mtp.checkpoint.families.flags import rotated_part
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.checkpoint.verify.reference_forms import FORMS

Keys = dict[str, Any]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 5e4, **BOTH}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
MANY_HEADS = {"linear_num_key_heads": 16, "linear_num_value_heads": 16}
"""Each is a multiple of the other's default."""
KINDS: dict[str, tuple[str, Keys]] = {
    "llama": ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192}}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mimo": ("qwen2", {}),
    "deepseek_v3": ("deepseek_v3", {**EXPERTS, **LATENT, "rope_parameters": {**YARN, "beta_fast": 1, "beta_slow": 1}}),
    "kimi_k2": ("deepseek_v3", {**EXPERTS, **LATENT, "n_group": 1}),
    "glm4_moe": ("glm4_moe", {**EXPERTS, "use_qk_norm": True, "attention_bias": True}),
    "qwen3_next": ("qwen3_next", {**LINEAR, **QWEN_EXPERTS, **MANY_HEADS}),
    "qwen3_5_text": ("qwen3_5_text", {**LINEAR, **MANY_HEADS}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**LINEAR, **QWEN_EXPERTS, **MANY_HEADS}),
    "nemotron_h": ("nemotron_h", {**MODELS["nemotron_h"].config, "mamba_num_heads": 8}),
}
"""Families by `model_type`: the transformers class that runs them, and a config."""
NOT_LEFT_OUT = {
    *("vocab_size", "hidden_size", "intermediate_size", "ffn_hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("n_routed_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "shared_expert_intermediate_size"),
}
"""Sizes that a folder must have: the class's default would be as large as the published model."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_left_out_is_read_as_transformers_reads_it(kind: str) -> None:
    runs, changes = KINDS[kind]
    # 32 heads can be split into any of the group counts.
    given = copy.deepcopy({**SIZES, **changes, "hidden_size": 64, "num_attention_heads": 32})
    whole = AutoConfig.for_model(runs, **given).to_dict() | {"model_type": kind}
    compared = [key for key, keys in without_each(whole) if key not in NOT_LEFT_OUT and same(kind, runs, key, keys)]
    assert len(compared) > 10


def without_each(whole: Keys) -> Iterator[tuple[str, Keys]]:
    """Yield each key's name and the config without it, including keys of the rotary settings."""
    for key in whole.keys() - {"model_type"}:
        yield key, {name: copy.deepcopy(value) for name, value in whole.items() if name != key}
    for key in whole.get("rope_parameters", {}):
        rope = {name: value for name, value in whole["rope_parameters"].items() if name != key}
        yield f"rope_parameters.{key}", {**copy.deepcopy(whole), "rope_parameters": rope}


def same(kind: str, runs: str, key: str, keys: Keys) -> bool:
    """Return whether transformers accepts the config; fail if it reads it differently."""
    try:
        own = {name: value for name, value in copy.deepcopy(keys).items() if name != "model_type"}
        theirs = AutoConfig.for_model(runs, **own).to_dict()
    except KeyError:
        return False
    assert read(kind, {**keys, "model_type": kind}) == read(kind, {**theirs, "model_type": kind}), key
    return True


def read(kind: str, keys: Keys) -> tuple[object, list[tuple[str, object]]]:
    """Return Megatron's flags, or why there are none, and the tensors with their shapes."""
    family = FAMILIES[kind]
    config = family.complete(HFConfig.from_keys(keys))
    layout = Layout(int(family.depths is not None), frozenset({"head"}))
    assert family.flags is not None
    try:
        found: object = family.flags(config, layout)
    except UntrainableError as reason:
        found = str(reason)
    tensors = [(tensor.name, tensor.shape) for rule in family.rules(config, layout) for tensor in rule.hf]
    return found, tensors


def test_a_family_without_its_own_class_uses_its_own_defaults() -> None:
    """Bailing-MoE V2 runs in GLM-4 MoE's class, which rotates half of a head if no key is set."""
    defaults, theirs = FAMILIES["bailing_moe"].defaults, AutoConfig.for_model("glm4_moe").to_dict()
    absent = FORMS["bailing_moe"].absent
    assert {
        name: value for name, value in absent.items() if name != "partial_rotary_factor"
    }.items() <= defaults.items()
    assert absent["partial_rotary_factor"] == rotated_part(HFConfig({}, "bailing_moe").with_defaults(defaults))
    same = defaults.keys() - absent.keys() - {"num_shared_experts"}
    assert {name: theirs[name] for name in same} == {name: defaults[name] for name in same}
