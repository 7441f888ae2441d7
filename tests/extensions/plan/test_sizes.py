"""Parameters and stored activations of layers, against Megatron's own modules and a published formula."""

import pytest
from lines import QWEN3_NEXT_IN_STAGES, line_of

from megatron_mtp.extensions.plan.launch import read
from megatron_mtp.extensions.plan.sizes import default_width, kept_bytes, local_size, model_of

COUNTED = {
    "deepseek-v3-h100": ("", 682_636_472_320),
    "glm4.5": ("", 360_773_954_048),
    "qwen3-next-80b-a3b-hybrid": (QWEN3_NEXT_IN_STAGES, 81_324_862_720),
}
"""Counts by `train --dry-run` of the modules that Megatron builds; test_plan_command.py runs it."""


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_those_that_megatron_builds(name: str) -> None:
    more, size = COUNTED[name]
    assert model_of(line_of(name, more)).size == size


def test_an_expert_stage_has_as_many_parameters_as_in_megatron() -> None:
    """8 layers of DeepSeek-V3 on 2 tensor and 64 expert ranks: a rank of stage 1 in the dry run, without TE."""
    line = line_of("deepseek-v3-h100", "--transformer-impl local")
    dense, experts = local_size(model_of(line).layers[-8:], line)
    assert dense + experts == 2_348_679_168


GPT3 = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 128 --vocab-size 1000 --bf16".split()


def test_a_layer_keeps_34_bytes_a_channel() -> None:
    """arXiv:2205.05198, equations 1, 2 and 4, without the scores: 10 + 24 / t without sequence parallelism."""
    assert kept_bytes(model_of(read(GPT3)).layers[0], read(GPT3)) == 34 * 512
    split = read([*GPT3, "--tensor-model-parallel-size", "4"])
    assert kept_bytes(model_of(split).layers[0], split) == (10 + 24 / 4) * 512
    in_parts = read([*GPT3, "--tensor-model-parallel-size", "4", "--sequence-parallel"])
    assert kept_bytes(model_of(in_parts).layers[0], in_parts) == 34 * 512 / 4


def test_recomputation_leaves_activations_out() -> None:
    full = read([*GPT3, "--recompute-granularity", "full"])
    assert kept_bytes(model_of(full).layers[0], full) == 2 * 512
    selective = read([*GPT3, "--recompute-granularity", "selective", "--recompute-modules", "mlp"])
    assert kept_bytes(model_of(selective).layers[0], selective) == (34 - 2 * 2 * 4) * 512


def test_matmul_inputs_take_one_byte_in_fp8() -> None:
    """Both norms' outputs, attention's output and the MLP's inner input: 1 + 1 + 1 + 4 channels."""
    in_fp8 = read([*GPT3, "--fp8-format", "hybrid"])
    assert kept_bytes(model_of(in_fp8).layers[0], in_fp8) == (34 - 7) * 512


def test_the_width_of_a_gated_mlp_is_two_thirds() -> None:
    """As Megatron derives --ffn-hidden-size: 640 for a hidden size of 256, where two thirds of 1,024 is 682."""
    line = read([*GPT3, "--hidden-size", "256", "--swiglu"])
    assert default_width(line) == 640
    assert default_width(read(GPT3)) == 2048


def test_an_unknown_letter_of_a_pattern_is_named() -> None:
    with pytest.raises(ValueError, match="--hybrid-layer-pattern has 'D'"):
        model_of(read([*GPT3, "--hybrid-layer-pattern", "*-D"]))
