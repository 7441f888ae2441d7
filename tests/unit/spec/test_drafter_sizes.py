"""spec/attention.py and model/rope.py: a drafter's heads on every trunk, and its angles against transformers'."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron_single import LATENT, transformer_config
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_mtp.megatron.patterns import symbols_of_a_layer
from megatron_mtp.model.arguments import MTPGPTModelConfig, layers_to_read, trunk_spec
from megatron_mtp.model.rope import rotary_of
from megatron_mtp.model.trunk_facts import trunk_spec_of
from megatron_mtp.spec.attention import (
    AttentionSizes,
    LatentSizes,
    latent_settings,
    own_sizes,
    size_settings,
    windows_of,
)
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.spec.rope_scaling import scaling_of
from megatron_mtp.training.settings import drafter_arguments

TRUNK = AttentionSizes(16, 2, 256, 1e-6, 1e7)
LATENTS = LatentSizes(24, 512, 128, 64, 128)
NOTHING: dict[str, Any] = {}
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def test_sizes_are_the_trunks_unless_given() -> None:
    assert own_sizes(2048, TRUNK, NOTHING) == TRUNK
    given = {"drafter_kv_channels": 128, "drafter_num_attention_heads": 32, "drafter_num_query_groups": 8}
    assert own_sizes(2048, TRUNK, given) == AttentionSizes(32, 8, 128, 1e-6, 1e7)


@pytest.mark.parametrize(
    ("hidden", "heads", "groups", "channels"),
    [(7168, 56, 14, 128), (6144, 48, 12, 128), (2048, 16, 4, 128), (1536, 24, 6, 64), (64, 8, 2, 8)],
)
def test_heads_behind_latent_attention_fill_the_hidden_size(
    hidden: int, heads: int, groups: int, channels: int
) -> None:
    behind = replace(TRUNK, latents=LATENTS)
    assert own_sizes(hidden, behind, NOTHING) == AttentionSizes(heads, groups, channels, 1e-6, 1e7)


@pytest.mark.parametrize(
    ("hidden", "is_latent", "given", "said"),
    [
        (48, True, {}, "16 heads of 3 channels in 4 groups; give an even"),
        (64, False, {"drafter_num_query_groups": 3}, "16 heads of 256 channels in 3 groups; give an even"),
        (64, False, {"drafter_kv_channels": 5}, "16 heads of 5 channels in 2 groups; give an even"),
    ],
)
def test_impossible_drafter_sizes_are_rejected(hidden: int, is_latent: bool, given: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        own_sizes(hidden, replace(TRUNK, latents=LATENTS if is_latent else None), given)


OF_LATENTS = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}
OF_LATENTS |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 0.8}


def test_latent_attention_has_the_sizes_and_positions_of_a_latent_trunk() -> None:
    trunk = replace(TRUNK, scaling=OF_LATENTS, latents=LATENTS)
    made = own_sizes(2048, trunk, {"drafter_multi_latent_attention": []})
    assert made == AttentionSizes(16, 16, 192, 1e-6, 1e7, OF_LATENTS, LATENTS)
    assert own_sizes(2048, TRUNK, latent_settings(made)) == made
    plain = {name: value for name, value in OF_LATENTS.items() if "mscale" not in name}
    assert own_sizes(2048, trunk, NOTHING).scaling == plain
    behind_plain = own_sizes(2048, replace(TRUNK, scaling=plain), {LATENT_FLAG: [0, 8, 4, 2, 6]})
    assert behind_plain.latents == LatentSizes(None, 8, 4, 2, 6)
    assert behind_plain.scaling == {**plain, "mscale": 1.0, "mscale_all_dim": 0.0}


LATENT_FLAG = "drafter_multi_latent_attention"


@pytest.mark.parametrize(
    ("scaling", "given", "said"),
    [
        (None, {LATENT_FLAG: []}, "has no numbers, and the trunk has no latent attention to take them from; give Q KV"),
        (None, {LATENT_FLAG: [8, 8, 8, 8]}, "attention is 8 8 8 8; give the five numbers Q KV NOPE ROPE V"),
        (None, {LATENT_FLAG: [8, 8, 8, 3, 8]}, "attention is 8 8 8 3 8; give the five numbers Q KV NOPE ROPE V"),
        (None, {LATENT_FLAG: [8, 8, 8, 2, 8], "drafter_kv_channels": 4}, "given with --drafter-kv-channels, which is"),
        (
            {"rope_type": "linear", "factor": 4.0},
            {LATENT_FLAG: [8, 8, 8, 2, 8]},
            "the trunk's rotary positions have a rope_type 'linear'; known are default, yarn in latent attention; give",
        ),
        (
            None,
            {LATENT_FLAG: [8, 8, 8, 2, 8], "drafter_rope_scaling": '{"rope_type": "yarn", "attention_factor": 1}'},
            "--drafter-rope-scaling has a setting 'attention_factor' of rope_type 'yarn'; known are",
        ),
    ],
)
def test_impossible_latent_attention_is_rejected(
    scaling: dict[str, Any] | None, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        own_sizes(2048, replace(TRUNK, scaling=scaling), given)


def test_only_other_sizes_are_kept_as_settings() -> None:
    usual = AttentionSizes(16, 2, 256, 1e-6, 1e7, YARN)
    assert {*size_settings(usual, 2048, usual).values()} == {None}
    own = size_settings(AttentionSizes(32, 2, 256, 1e-6, 5e5), 2048, usual)
    assert {name: value for name, value in own.items() if value is not None} == {
        "drafter_num_attention_heads": 32,
        "drafter_rotary_base": 5e5,
        "drafter_rope_scaling": '{"rope_type": "default"}',
    }
    assert own_sizes(2048, usual, own) == AttentionSizes(32, 2, 256, 1e-6, 5e5)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 2.0},
        {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1},
        {**YARN, "attention_factor": 1.3, "truncate": False},
        {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64},
    ],
    ids=["default", "linear", "llama3", "yarn with mscale", "yarn with a factor", "yarn"],
)
@pytest.mark.usefixtures("megatron")
def test_angles_are_those_of_transformers(scaling: dict[str, Any] | None) -> None:
    sizes = AttentionSizes(4, 2, 32, 1e-6, 5e4, None if scaling is None else scaling_of(scaling))
    made = rotary_of(sizes, transformer_config(None), parallel_state.get_context_parallel_group())(100, offset=3)
    angles_L11C, factor = made if isinstance(made, tuple) else (made, 1.0)
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": 5e4}
    rope |= {"high_freq_factor": 4.0} if rope["rope_type"] == "llama3" else {}
    rope = {**rope, "rope_type": rope.pop("type", rope["rope_type"])}
    config = LlamaConfig(hidden_size=32, num_attention_heads=1, head_dim=32, rope_parameters=rope)
    theirs = LlamaRotaryEmbedding(config)
    cosine, sine = theirs(torch.zeros(1, 1, 32), torch.arange(3, 103).unsqueeze(0))
    for ours, other in ((angles_L11C.cos() * factor, cosine), (angles_L11C.sin() * factor, sine)):
        torch.testing.assert_close(ours[:, 0, 0].cpu(), other[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rope_type": "longrope", "factor": 4}, "a rope_type 'longrope'; known are default, linear, llama3, yarn"),
        ({"partial_rotary_factor": 0.25}, "a partial_rotary_factor of 0.25; a drafter turns whole heads"),
        ({"rope_type": "linear", "factors": 4}, "a setting 'factors' of rope_type 'linear'; known are"),
        ({"rope_type": "linear"}, "a rotary setting 'factor' of None, which is not a number"),
    ],
)
def test_other_scalings_are_refused_by_name(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scaling_of(keys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("yarn", "--drafter-rope-scaling is yarn, which is not a JSON object; give for example"),
        ('{"rope_type": "longrope"}', "--drafter-rope-scaling has a rope_type 'longrope'; known are"),
    ],
)
def test_an_invalid_rope_scaling_flag_is_rejected(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MTPConfig(drafter="eagle3", drafter_rope_scaling=text)


@pytest.mark.parametrize(
    ("pattern", "symbols", "layers"),
    [
        ("G-G-*-", 2, 3),
        ("GEGE|*E/*E", 2, 3),
        ("+-+-", 2, 2),
        ("M-M-*-", 1, 6),
        ("M*EM", 1, 4),
        ("**--", 1, 4),
        ("G-*", 1, 3),
    ],
)
def test_a_layer_of_pairs_has_two_symbols(pattern: str, symbols: int, layers: int) -> None:
    assert symbols_of_a_layer(pattern) == symbols
    assert layers_to_read(Namespace(hybrid_layer_pattern=pattern, num_layers=None)) == layers


OF_ARGUMENTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 256,
    "layernorm_epsilon": 1e-6,
    "rotary_base": 10000000,
    "num_layers": 8,
    "vocab_size": 100,
    "ffn_hidden_size": 64,
}


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"position_embedding_type": "rope", "rotary_percent": 0.25}, None),
        ({"position_embedding_type": "none"}, None),
        (
            {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
            scaling_of({"rope_type": "llama3", "factor": 32.0}),
        ),
        ({"rotary_seq_len_interpolation_factor": 4}, {"rope_type": "linear", "factor": 4}),
        (
            {
                "position_embedding_type": "yarn",
                "rotary_scaling_factor": 16.0,
                "yarn_original_max_position_embeddings": 64,
                "yarn_correction_range_round_to_int": False,
                "mscale": 1.0,
                "mscale_all_dim": 0.0,
            },
            {**YARN, "truncate": False},
        ),
    ],
)
def test_positions_are_the_trunks_in_the_whole_head(changes: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    args = Namespace(**OF_ARGUMENTS, **changes)
    made = own_sizes(args.hidden_size, trunk_spec(args).attention, NOTHING)
    assert made == AttentionSizes(16, 2, 256, 1e-6, 10000000, scaling)


def test_arguments_and_config_give_the_same_latent_attention() -> None:
    scaled = {"rope_type": "yarn", "rotary_scaling_factor": 16.0, "original_max_position_embeddings": 64}
    scaled |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 0.7}
    config = transformer_config(None, hidden_size=64, **{**LATENT, **scaled})
    ours = trunk_spec_of(MTPGPTModelConfig(transformer=config, vocab_size=8)).attention
    args = Namespace(**{**OF_ARGUMENTS, **scaled, "hidden_size": 64, "multi_latent_attention": True})
    args.layernorm_epsilon, args.rotary_base = config.layernorm_epsilon, config.rotary_base
    for trunk in (ours, trunk_spec(args).attention):
        assert own_sizes(64, trunk, NOTHING) == AttentionSizes(8, 2, 8, 1e-5, 10000, YARN)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"drafter_num_attention_heads": 6},
            "6 heads, which 4 tensor-parallel ranks cannot share; give --drafter-num-att",
        ),
        ({}, "2 key heads, which 4 tensor-parallel ranks cannot share; give --drafter-num-query-groups"),
        (
            {LATENT_FLAG: [10, 12, 8, 4, 8]},
            "10 channels of compressed queries, .* give another Q in --drafter-multi-lat",
        ),
        (
            {LATENT_FLAG: [0, 12, 8, 2, 8]},
            r"14 channels of compressed keys \(KV \+ ROPE\), .* give others in --drafter-mul",
        ),
    ],
)
def test_sizes_that_tensor_parallel_ranks_cannot_split_are_rejected(given: dict[str, Any], said: str) -> None:
    of_run = {"drafter": "eagle3", "tensor_model_parallel_size": 4, **OF_ARGUMENTS, **given}
    unset = dict.fromkeys(("drafter_layers", "drafter_num_layers", "drafter_markov_rank"))
    with pytest.raises(ValueError, match=said):
        drafter_arguments(Namespace(**unset, **of_run))


ALL, BEFORE = None, (-1, 0)


@pytest.mark.parametrize(
    ("width", "full", "causal", "blocks", "in_one_direction"),
    [
        (None, None, 0, (ALL, ALL), (ALL, ALL)),
        (None, None, 1, (BEFORE, BEFORE), (BEFORE, BEFORE)),
        (4, None, 0, ((3, -1), (3, -1)), ((3, 0), (3, 0))),
        (4, [2], 0, ((3, -1), ALL), ((3, 0), ALL)),
        (4, [2], 1, ((3, 0), BEFORE), ((3, 0), BEFORE)),
        (4, [1], 2, (ALL, (3, 0)), (ALL, (3, 0))),
    ],
)
def test_a_window_of_w_reaches_back_by_one_less_and_ahead_unless_causal(
    width: int | None, full: list[int] | None, causal: int, blocks: object, in_one_direction: object
) -> None:
    assert windows_of(width, full or (), causal, 2, sees_ahead=True) == blocks
    assert windows_of(width, full or (), causal, 2, sees_ahead=False) == in_one_direction


@pytest.mark.parametrize(
    ("width", "full", "causal", "said"),
    [
        (None, [1], 0, "--drafter-full-layers is 1, of 2 layers with --drafter-window-size None"),
        (4, [1, 2], 0, "--drafter-full-layers is 1 2, of 2 layers"),
        (4, [3], 0, "--drafter-full-layers is 3, of 2 layers"),
        (4, None, 2, "--drafter-causal 2 needs both windowed and full layers"),
        (None, None, 2, "--drafter-causal 2 needs both windowed and full layers"),
    ],
)
def test_windows_for_no_layer_or_every_layer_are_rejected(
    width: int | None, full: list[int] | None, causal: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        windows_of(width, full or (), causal, 2, sees_ahead=True)
