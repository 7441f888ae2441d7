"""Published drafter configs in every format: read with their own sizes, or rejected with the key's name."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mtp.checkpoint.convert.drafter_form import DrafterForm, form_in, in_order
from megatron_mtp.checkpoint.hf.folder import drafter_kind
from megatron_mtp.spec.attention import AttentionSizes, LatentSizes
from megatron_mtp.spec.head import HeadSpec, TrunkSpec

YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}

SPECFORGE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57], "use_aux_hidden_state": True},
    "draft_vocab_size": 32000,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 40960,
    "num_attention_heads": 56,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", **{name: YARN[name] for name in YARN if name != "rope_type"}}
    | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "max_position_embeddings": 163840,
    "attention_bias": False,
}
"""EAGLE-3 on DeepSeek-V3's latent attention."""

SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
        "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
    },
    "draft_vocab_size": 32000,
    "norm_before_residual": False,
    "target_hidden_size": None,
    "transformer_layer_config": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "vocab_size": 151936,
        "hidden_act": "silu",
        "attention_bias": False,
    },
}

ZLAB: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "dflash_config": {"target_layer_ids": [1, 8, 15, 22, 29], "mask_token_id": 248319, "block_size": 16},
    "num_target_layers": 32,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 5,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
    "layer_types": ["full_attention"] * 5,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "hidden_act": "silu",
}
"""DFlash on Qwen3.5-4B, whose heads have 256 channels."""

DSPARK: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "model_type": "qwen3",
    "block_size": 7,
    "dflash_config": {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "target_layer_ids": [1, 19, 38, 57, 76],
        "mask_token_id": 154856,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "num_target_layers": 78,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "num_hidden_layers": 5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 8000000,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
}
"""DSpark on GLM-5.2's latent attention."""

SPECULATORS_BLOCKS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_config": {
        "algorithm": "dflash",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
    },
    "block_size": 8,
    "mask_token_id": 151669,
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "draft_vocab_size": 32000,
    "sample_from_anchor": False,
    "sliding_window_non_causal": True,
    "target_hidden_size": None,
    "transformer_layer_config": {
        **SPECULATORS["transformer_layer_config"],
        "model_type": "qwen3",
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention"] * 5,
        "sliding_window": 2048,
        "use_sliding_window": True,
    },
}
SPECULATORS_DSPARK = {
    **SPECULATORS_BLOCKS,
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    "sample_from_anchor": True,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
"""Block drafters of speculators 0.9, all of their layers windowed."""

K3: dict[str, Any] = {
    **SPECFORGE,
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "num_target_layers": 5,
    "target_num_hidden_layers": 93,
    "kv_lora_rank": 512,
    "mla_use_nope": False,
    "fc_norm": True,
}

DFLASH2: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "is_causal": False,
    "dflash_config": {
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": 248070,
        "selector_rank": 256,
        "selector_top_k": 16,
        "target_layer_ids": [1, 16, 31, 46, 61],
    },
    "num_target_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 5,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "hidden_act": "silu",
    "attention_bias": False,
}
"""DFlash2 of z-lab; speculators has the keys of `dflash_config` at the top level."""

KIMI: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", **{name: YARN[name] for name in YARN if name != "rope_type"}}
    | {"factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "max_position_embeddings": 262144,
    "attention_bias": False,
}
"""EAGLE-3 with latent attention on Kimi-K2.5, whose ids count states."""

GPT_OSS: dict[str, Any] = {
    **SPECFORGE,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 11, 21], "use_aux_hidden_state": True},
    "hidden_size": 2880,
    "intermediate_size": 17280,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "rope_theta": 150000,
    "rope_scaling": None,
}


def trunk(layers: int, hidden: int, vocabulary: int, **more: Any) -> Namespace:
    sizes = {"num_layers": layers, "hidden_size": hidden, "vocab_size": vocabulary, "max_position_embeddings": 2**18}
    return Namespace(**sizes, **more)


def read(folder: Path, keys: dict[str, Any], behind: Namespace, count: str | None = None) -> Any:
    (folder / "config.json").write_text(json.dumps(keys))
    return form_in(folder, behind, ["d2t", "lm_head.weight"] if "draft_vocab_size" in keys else [], count)


DEEPSEEK, QWEN3 = trunk(61, 7168, 129280), trunk(36, 4096, 151936)
QWEN35 = trunk(64, 2560, 248320, hybrid_layer_pattern="G-G-G-*-" * 8)
KIMI_OUTPUTS = {**KIMI, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}}
KIMI_K2 = trunk(61, 7168, 163840)
GLM = trunk(78, 6144, 154880)
QWEN38 = trunk(128, 5120, 248320, hybrid_layer_pattern="G-G-G-*-" * 16)


def convolved(**inner: Any) -> dict[str, Any]:
    """Return DFLASH2 with other keys of its block."""
    return {**DFLASH2, "dflash_config": {**DFLASH2["dflash_config"], **inner}}


@pytest.mark.parametrize(
    ("keys", "behind", "kind", "layers", "sizes"),
    [
        (
            SPECFORGE,
            DEEPSEEK,
            "eagle3",
            (2, 30, 58),
            (56, 8, 128, 1e-6, 10000, {**YARN, "attention_factor": 1.0}),
        ),
        (SPECULATORS, QWEN3, "eagle3", (2, 18, 33), (32, 8, 128, 1e-6, 1000000, None)),
        (ZLAB, QWEN35, "dflash", (2, 9, 16, 23, 30), (32, 8, 128, 1e-6, 10000000, None)),
        (DSPARK, GLM, "dspark", (2, 20, 39, 58, 77), (64, 16, 64, 1e-5, 8000000, None)),
        (GPT_OSS, trunk(24, 2880, 201088), "eagle3", (2, 12, 22), (64, 8, 64, 1e-6, 150000, None)),
        (
            {**ZLAB, "block_size": 16, "dflash_config": {"target_layer_ids": [1, 29], "mask_token_id": 9}},
            QWEN35,
            "dflash",
            (2, 30),
            (32, 8, 128, 1e-6, 10000000, None),
        ),
        (
            {**SPECULATORS, "architectures": ["Eagle3DraftModel"], "eagle_aux_hidden_state_layer_ids": [3, 18, 30]},
            QWEN3,
            "eagle3",
            (3, 18, 30),
            (32, 8, 128, 1e-6, 1000000, None),
        ),
    ],
    ids=["SpecForge", "speculators", "z-lab", "DSpark", "gpt-oss", "older z-lab", "speculators with ids"],
)
def test_a_published_config_is_read_with_its_own_sizes(
    tmp_path: Path, keys: dict[str, Any], behind: Namespace, kind: str, layers: tuple[int, ...], sizes: tuple[Any, ...]
) -> None:
    form = read(tmp_path, keys, behind)
    names = "num_attention_heads num_key_value_heads head_dim rms_norm_eps rope_theta rope_scaling".split()
    assert (form.kind.kind, form.kind.layers) == (kind, layers)
    assert tuple(form.sizes.get(name) for name in names) == sizes


@pytest.mark.parametrize("name", ["Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"])
def test_latent_attention_of_kimi_is_read_with_its_own_sizes(tmp_path: Path, name: str) -> None:
    form = read(tmp_path, {**KIMI, "architectures": [name], "num_aux_hidden_states": 3}, KIMI_K2, "states")
    assert (form.kind.kind, form.kind.layers) == ("eagle3", (2, 30, 58))
    assert form.kind.attention.latents == LatentSizes(1536, 512, 128, 64, 128)
    assert form.sizes["rope_scaling"] == {**YARN, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    shapes = {
        tensor.name.removeprefix("midlayer.self_attn."): tensor.shape for rule in form.rules() for tensor in rule.hf
    }
    assert {key: shape for key, shape in shapes.items() if key.startswith(("q_", "kv_", "o_"))} == {
        "q_a_proj.weight": (1536, 14336),
        "q_a_layernorm.weight": (1536,),
        "q_b_proj.weight": (64 * 192, 1536),
        "kv_a_proj_with_mqa.weight": (576, 14336),
        "kv_a_layernorm.weight": (512,),
        "kv_b_proj.weight": (64 * 256, 512),
        "o_proj.weight": (7168, 64 * 128),
    }


@pytest.mark.parametrize(
    ("keys", "kind", "steps"),
    [
        (SPECULATORS_BLOCKS, "dflash", 7),
        ({**SPECULATORS_BLOCKS, "architectures": ["DFlashDraftModel"]}, "dflash", 7),
        (SPECULATORS_DSPARK, "dspark", 8),
    ],
    ids=["DFlashSpeculator", "DFlashDraftModel", "DSparkSpeculator"],
)
def test_block_drafters_of_speculators_are_read(tmp_path: Path, keys: dict[str, Any], kind: str, steps: int) -> None:
    found = read(tmp_path, keys, QWEN3).kind
    assert (found.kind, found.layers, found.drafts, found.depth) == (kind, (2, 10, 18, 26, 34), steps, 5)
    assert (found.window, found.full_layers, found.causal, found.mask_token) == (2048, (), False, 151669)
    assert found.own.get("drafter_markov_rank") == (256 if kind == "dspark" else None)


def of_model_optimizer(**inner: Any) -> dict[str, Any]:
    """Return SPECFORGE with the keys of Model-Optimizer's export."""
    usual = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
    usual |= {"next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1}
    return {**SPECFORGE, "eagle_config": {**SPECFORGE["eagle_config"], **usual, **inner}}


def test_eagle_drafters_of_model_optimizer_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, of_model_optimizer(), DEEPSEEK).kind.layers == (2, 30, 58)
    without = dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"), False)
    state = {**of_model_optimizer(**without), "architectures": ["LlamaForCausalLMEagle"], "draft_vocab_size": None}
    assert read(tmp_path, state, DEEPSEEK).kind.kind == "eagle"


@pytest.mark.parametrize("at_top", [False, True], ids=["z-lab", "speculators"])
def test_dflash2_is_read_from_either_level_of_keys(tmp_path: Path, at_top: bool) -> None:
    keys = DFLASH2 if not at_top else {**DFLASH2, **DFLASH2["dflash_config"], "dflash_config": None}
    form = read(tmp_path, keys, QWEN38)
    kind = form.kind
    assert (kind.kind, kind.layers, kind.drafts, kind.depth) == ("dflash2", (2, 17, 32, 47, 62), 7, 5)
    assert (kind.own["drafter_markov_rank"], kind.window, kind.causal, kind.idle_rows) == (256, 2048, False, 1)
    assert len([tensor for rule in form.rules() for tensor in rule.hf]) == 81


DOMINO: dict[str, Any] = {
    "architectures": ["DominoDraftModel"],
    "block_size": 16,
    "emb_dim": 256,
    "dflash_config": {
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
        "shift_label": True,
    },
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""SpecForge's configs/qwen3-8b-domino.json, without what engines do not read."""


def of_domino(architecture: str = "DominoDraftModel", **inner: Any) -> dict[str, Any]:
    return {**DOMINO, "architectures": [architecture], "dflash_config": {**DOMINO["dflash_config"], **inner}}


@pytest.mark.parametrize("architecture", ["DominoDraftModel", "DFlashDraftModel"], ids=["SpecForge", "Model-Optimizer"])
@pytest.mark.parametrize(("shifts", "drafts"), [(True, 16), (False, 15)])
def test_domino_drafters_are_read(tmp_path: Path, architecture: str, shifts: bool, drafts: int) -> None:
    form = read(tmp_path, of_domino(architecture, shift_label=shifts), QWEN3)
    kind = form.kind
    assert (kind.kind, kind.layers, kind.drafts, kind.depth) == ("domino", (2, 10, 18, 26, 34), drafts, 5)
    assert (kind.own["drafter_markov_rank"], kind.own["drafter_gru_size"]) == (256, 1024)
    assert (kind.idle_rows, kind.causal) == (1 - shifts, 0)
    shapes = {tensor.name: tensor.shape for rule in form.rules() for tensor in rule.hf}
    assert shapes["prefix_gru.weight_ih_l0"] == (3072, 4096)
    assert shapes["embed_proj.0.weight"] == (256, 5120)


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        ({"shift_label": None}, "lacks shift_label, by which rows draft the next token or their own; add it"),
        ({"pure_draft_prefix_len": 2}, "has pure_draft_prefix_len 2, which is 1 in drafters that are known here"),
        ({"pure_draft_prefix_len": None}, "lacks pure_draft_prefix_len; fetch the folder again"),
        ({"projector_type": "another"}, "has projector_type another, which is domino"),
    ],
)
def test_other_forms_of_domino_are_refused(tmp_path: Path, inner: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read(tmp_path, of_domino(**inner), QWEN3)


PEAGLE: dict[str, Any] = {
    "architectures": ["PEagleDraftModel"],
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "vocab_size": 151936,
    "draft_vocab_size": 32000,
}
"""SpecForge's configs/qwen3-8b-peagle.json, which leaves the mask token to training."""


@pytest.mark.parametrize("name", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_p_eagle_drafters_are_read(tmp_path: Path, name: str) -> None:
    kind = read(tmp_path, {**PEAGLE, name: 151669}, QWEN3).kind
    assert (kind.kind, kind.layers, kind.depth, kind.mask_token) == ("peagle", (2, 18, 33), 4, 151669)
    assert (kind.own["drafter_norm_before_residual"], kind.windows) == (False, (None,) * 4)


def test_p_eagle_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no mask_token_id among the 151936 tokens .*; give a"):
        read(tmp_path, PEAGLE, QWEN3)


def test_an_eagle3_drafter_that_reads_five_layers_is_rejected(tmp_path: Path) -> None:
    keys = {**SPECULATORS, "eagle_aux_hidden_state_layer_ids": [2, 10, 18, 26, 33]}
    with pytest.raises(ValueError, match=r"reads 5 layers \(2 10 18 26 33\), .* reads 3; give"):
        read(tmp_path, keys, QWEN3)


def scaled_values(scale: float | None) -> dict[str, Any]:
    """Return ZLAB as the drafter of MiMo-V2.5, whose values are multiplied by a number."""
    return {**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "attention_value_scale": scale}}


def test_a_value_scale_of_1_means_no_scale(tmp_path: Path) -> None:
    assert read(tmp_path, scaled_values(None), QWEN35).kind == read(tmp_path, scaled_values(1.0), QWEN35).kind


@pytest.mark.parametrize("keys", [ZLAB, DSPARK], ids=["DFlash", "DSpark"])
def test_the_draft_count_of_a_block_drafter_is_read(tmp_path: Path, keys: dict[str, Any]) -> None:
    form = read(tmp_path, keys, QWEN35 if keys is ZLAB else GLM)
    assert (form.kind.drafts, form.kind.depth) == ((15, 5) if keys is ZLAB else (7, 5))


SLIDING = {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 2048}
OF_WINDOWS = {**SLIDING, "layer_types": ["sliding_attention"] * 5}


@pytest.mark.parametrize(
    ("keys", "window", "full", "causal", "sinks"),
    [
        ({}, None, (), 0, False),
        ({"is_causal": True}, None, (), 1, False),
        ({"sliding_window_non_causal": False}, None, (), 0, False),
        ({**SLIDING, "use_sliding_window": True, "is_causal": False}, 2048, (5,), 0, False),
        ({**SLIDING, "sliding_window_non_causal": True}, 2048, (5,), 0, False),
        ({**SLIDING, "sliding_window_non_causal": False}, 2048, (5,), 2, False),
        ({**OF_WINDOWS, "sliding_window_non_causal": False, "is_causal": True}, 2048, (), 1, False),
        (OF_WINDOWS, 2048, (), 1, False),
        ({"dflash_config": {**ZLAB["dflash_config"], "use_swa": True, "swa_window_size": 512}}, 512, (), 0, False),
        (
            {"dflash_config": {**ZLAB["dflash_config"], "use_swa": True, "swa_window_size": 512, "causal": False}},
            512,
            (),
            0,
            False,
        ),
        ({"dflash_config": {**ZLAB["dflash_config"], "attention_sink_bias": True}}, None, (), 0, True),
    ],
    ids=[
        "full", "causal", "speculators, full", "z-lab", "speculators", "speculators, by layer", "both keys", "no word",
        "MiMo", "Model-Optimizer", "sinks",
    ],
)  # fmt: skip
def test_windows_causality_and_sinks_are_read_as_engines_serve_them(
    tmp_path: Path, keys: dict[str, Any], window: int | None, full: tuple[int, ...], causal: int, sinks: bool
) -> None:
    kind = read(tmp_path, {**ZLAB, **keys}, QWEN35).kind
    assert (kind.window, kind.full_layers, kind.causal, kind.has_sinks) == (window, full, causal, sinks)


@pytest.mark.parametrize("is_before", [True, False])
def test_the_residual_of_speculators_is_read(tmp_path: Path, is_before: bool) -> None:
    keys = {**SPECULATORS, "norm_before_residual": is_before}
    assert read(tmp_path, keys, QWEN3).kind.own["drafter_norm_before_residual"] == is_before


def test_a_windowed_eagle3_drafter_is_read(tmp_path: Path) -> None:
    """speculators writes it by default since 2026-07."""
    own = {"layer_types": ["sliding_attention"], "sliding_window": 2048, "use_sliding_window": True}
    layer = {**SPECULATORS["transformer_layer_config"], **own}
    kind = read(tmp_path, {**SPECULATORS, "transformer_layer_config": layer}, QWEN3).kind
    assert (kind.window, kind.full_layers, kind.causal) == (2048, (), False)


def test_the_anchor_row_may_be_excluded_from_drafting(tmp_path: Path) -> None:
    kind = read(tmp_path, {**DSPARK, "sample_from_anchor": False}, GLM).kind
    assert (kind.drafts, kind.idle_rows) == (6, 1)


@pytest.mark.parametrize(
    ("keys", "behind", "named"),
    [
        ({**ZLAB, "norm_before_residual": True}, QWEN35, "norm_before_residual"),
        ({**SPECULATORS, "norm_before_fc": True}, QWEN3, "norm_before_fc"),
        ({**KIMI_OUTPUTS, "use_aux_norm": True}, KIMI_K2, "use_aux_norm, a form"),
        (scaled_values(0.612), QWEN35, "attention_value_scale, a form"),
        ({**SPECULATORS, "target_hidden_size": 5120}, QWEN3, "target_hidden_size 5120, and the trunk 4096"),
        ({**DSPARK, "has_embed_tokens": True, "has_lm_head": False}, GLM, "has_embed_tokens"),
        ({**DSPARK, "aux_hidden_stream": "attn_res"}, GLM, "aux_hidden_stream"),
        ({**DSPARK, "dflash_config": {**DSPARK["dflash_config"], "attention_mode": "mla"}}, GLM, "attention_mode"),
        ({**ZLAB, **SLIDING, "sliding_window": None}, QWEN35, "sliding_window None, which is a number from 1 on"),
        ({**ZLAB, "layer_types": ["chunked"] * 5}, QWEN35, "layer_types"),
        ({**ZLAB, "num_key_value_heads": 7}, QWEN35, "sizes that no drafter has: .* in 7 groups"),
        ({**ZLAB, "layer_types": None, "use_sliding_window": True}, QWEN35, "use_sliding_window without layer_types"),
        ({**GPT_OSS, "attention_sink_bias": True}, trunk(24, 2880, 201088), "attention_sink_bias"),
        ({**ZLAB, "sample_from_anchor": True}, QWEN35, "sample_from_anchor"),
        ({**ZLAB, "partial_rotary_factor": 0.25}, QWEN35, "partial_rotary_factor"),
        ({**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "conv_kernel_size": 2}}, QWEN35, "conv_kernel_size"),
        (convolved(conv_group_size=8), QWEN38, "conv_group_size 8, which is 16"),
        (convolved(conv_kernel_size=3), QWEN38, "conv_kernel_size 3, which is 2"),
        (convolved(selector_top_k=8), QWEN38, "selector_top_k 8, which is 16"),
        (convolved(output_multiplier=0.2), QWEN38, "output_multiplier"),
        ({**DFLASH2, "architectures": ["DFlashDraftModel"]}, QWEN38, "conv_kernel_size, a form"),
        ({**DFLASH2, "sample_from_anchor": True}, QWEN38, "sample_from_anchor"),
        (
            {**DFLASH2, "draft_vocab_size": 32000},
            QWEN38,
            "draft_vocab_size 32000, and a DFlash2 drafter",
        ),
        ({**SPECFORGE, "rope_scaling": {"type": "longrope"}}, DEEPSEEK, "rope_type 'longrope'"),
        ({**SPECFORGE, "num_hidden_layers": 2}, DEEPSEEK, "num_hidden_layers 2"),
        ({**SPECFORGE, "kv_lora_rank": 512}, DEEPSEEK, "kv_lora_rank, a form"),
        (of_model_optimizer(use_aux_hidden_state=False), DEEPSEEK, "use_aux_hidden_state, a form"),
        (of_model_optimizer(use_input_layernorm_in_first_layer=False), DEEPSEEK, "use_input_layernorm_in_first_layer"),
        (of_model_optimizer(use_last_layernorm=False), DEEPSEEK, "use_last_layernorm, a form"),
        (of_model_optimizer(use_mtp_layernorm=True), DEEPSEEK, "use_mtp_layernorm, a form"),
        (of_model_optimizer(parallel_draft_step=4), DEEPSEEK, "parallel_draft_step, a form"),
        ({**SPECULATORS, "fc_norm": True}, QWEN3, "fc_norm, a form"),
        ({**SPECULATORS, "norm_output": True}, QWEN3, "norm_output, a form"),
        ({**SPECULATORS_DSPARK, "markov_head_type": "gated"}, QWEN3, "markov_head_type, a form"),
        ({**SPECULATORS_DSPARK, "enable_confidence_head": False}, QWEN3, "enable_confidence_head, a form"),
        ({**ZLAB, "has_embed_tokens": True, "has_lm_head": False}, QWEN35, "has_embed_tokens, a form"),
        ({**ZLAB, "quantization_config": {"quant_algo": "NVFP4"}}, QWEN35, "quantization_config, a form"),
        ({**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "projector_type": "other"}}, QWEN35, "projector_type, a"),
        (
            {**DSPARK, "dflash_config": {**DSPARK["dflash_config"], "projector_type": "other"}},
            GLM,
            "projector_type other, which is dspark",
        ),
        ({**SPECFORGE, "num_aux_hidden_states": 4}, DEEPSEEK, "num_aux_hidden_states 4, which is 3"),
        ({**KIMI_OUTPUTS, "kv_lora_rank": None}, KIMI_K2, "kv_lora_rank None, which is not a number above 0"),
        ({**KIMI_OUTPUTS, "rope_interleave": False}, KIMI_K2, "rope_interleave False, which is True"),
        (
            {**KIMI_OUTPUTS, "rope_scaling": {"type": "llama3", "factor": 8}},
            KIMI_K2,
            "rope_type 'llama3'; known are default, yarn in",
        ),
        ({**KIMI_OUTPUTS, "fc_norm": True}, KIMI_K2, "fc_norm, a form"),
    ],
)
def test_an_unsupported_config_key_is_rejected_by_name(
    tmp_path: Path, keys: dict[str, Any], behind: Namespace, named: str
) -> None:
    with pytest.raises(ValueError, match=f"config.json has (a )?{named}"):
        read(tmp_path, keys, behind)


def test_ambiguous_causality_of_windowed_layers_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lacks is_causal, and engines take windowed layers as causal"):
        read(tmp_path, {**ZLAB, **SLIDING}, QWEN35)


OF_BLOCKS = {**SLIDING, "dflash_config": {**ZLAB["dflash_config"], "causal": True}}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({**SLIDING, "is_causal": False, "sliding_window_non_causal": False}, "is_causal False and sliding_window_non"),
        ({**SLIDING, "is_causal": True, "sliding_window_non_causal": False}, "is_causal True and sliding_window_non"),
        ({**OF_BLOCKS, "is_causal": False}, "is_causal False and causal True"),
        ({**OF_BLOCKS, "is_causal": True, "swa_window_size": 512}, "swa_window_size 512 and sliding_window 2048"),
        ({**SLIDING, "is_causal": True, "use_swa": True}, "use_swa and layer_types"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 10000.0 and rope_theta of rope_p"),
    ],
)
def test_keys_that_contradict_one_another_are_refused_by_their_names(
    keys: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=named):
        read(tmp_path, {**ZLAB, **keys}, QWEN35)


@pytest.mark.parametrize("architecture", ["K3DSparkModel", "DFlashLagunaForCausalLM", "PeagleQwen3ForCausalLM"])
def test_another_architecture_is_refused_by_its_name(tmp_path: Path, architecture: str) -> None:
    keys = {**K3, "architectures": [architecture]}
    with pytest.raises(ValueError, match=f"has architectures .*{architecture}.*; give a .*LlamaForCausalLMEagle3"):
        read(tmp_path, keys, DEEPSEEK)
    assert drafter_kind(tmp_path) is None


@pytest.mark.parametrize("count", [None, "outputs", "states"])
def test_ambiguous_layer_ids_must_be_given_by_a_flag(tmp_path: Path, count: str | None) -> None:
    """For 61 layers, 2, 30, 58 under the key of outputs are the states that engines read."""
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}
    for keys in ({**SPECFORGE, "eagle_config": ids}, {**SPECFORGE, "eagle_config": ids, **ids}):
        if count is None:
            with pytest.raises(ValueError, match=r"eagle_aux_.* 2 30 58 within eagle_config, .*-layer-ids"):
                read(tmp_path, keys, DEEPSEEK)
        else:
            layers = read(tmp_path, keys, DEEPSEEK, count).kind.layers
            assert layers == ((3, 31, 59) if count == "outputs" else (2, 30, 58))


def test_the_three_layer_numberings_give_the_same_drafter(tmp_path: Path) -> None:
    plain = {name: value for name, value in SPECFORGE.items() if name != "eagle_config"}
    outputs = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 19, 39]}}
    for own in (outputs, {"eagle_aux_hidden_state_layer_ids": [5, 20, 40]}, {"target_layer_ids": [4, 19, 39]}):
        assert read(tmp_path, {**plain, **own}, DEEPSEEK).kind.layers == (5, 20, 40)


@pytest.mark.parametrize(
    ("offsets", "order"),
    [([0, 94], [0, 1]), ([95, -1], [1, 0]), ([0, 95], None), ([-1, 5], None), ([4, 3], None)],
    ids=["first and last token", "in another order", "past the last token", "before the first token", "a token twice"],
)
def test_draft_tokens_must_be_unique_tokens_of_the_trunk(offsets: list[int], order: list[int] | None) -> None:
    """Of 96 tokens; an offset is added to a draft's index."""
    trunk = TrunkSpec(5, 96, 16, 8, AttentionSizes(2, 2, 8, 1e-6, 1e4))
    form = DrafterForm(HeadSpec.resolve("eagle3", {}, trunk), 16, torch.arange(2), True)
    if order is not None:
        assert in_order(form, {"d2t": torch.tensor(offsets)}).order_N.tolist() == order
    else:
        with pytest.raises(ValueError, match="d2t names a token twice, or one that the trunk does not have"):
            in_order(form, {"d2t": torch.tensor(offsets)})
