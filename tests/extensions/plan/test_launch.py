"""A launch line and a Hugging Face folder, parsed without Megatron's parser."""

import json
from pathlib import Path

import pytest

from megatron_mtp.extensions.plan.launch import experts_by_layer, inner_of, of_folder, read, stages_of, without

WORDS = (
    "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --vocab-size 1000 --tensor-model-parallel-size=2 --bf16 "
    "--recompute-granularity selective --recompute-modules mlp moe_act --lr 1e-3 --mtp-num-layers 2 --unread 7"
).split()


def test_known_flags_are_read_and_others_kept() -> None:
    line = read(WORDS)
    assert (line.num_layers, line.hidden_size, line.tensor_model_parallel_size, line.bf16) == (6, 64, 2, True)
    assert (line.recompute_modules, line.depths, line.fp8_format) == (("mlp", "moe_act"), 2, None)
    assert line.vocabulary == 1024  # a multiple of 128 x 2
    assert read([*WORDS, "--num-layers", "8"]).num_layers == 8
    assert without(WORDS, "recompute_modules", "bf16")[8:12] == ["--tensor-model-parallel-size", "2", *WORDS[10:12]]


def test_a_repeated_layer_has_as_many_depths_as_passes() -> None:
    assert read([*WORDS, "--mtp-use-repeated-layer", "--mtp-unroll", "5"]).depths == 5


def test_experts_by_layer() -> None:
    assert experts_by_layer("([0]*3+[1]*2)", 5) == [False] * 3 + [True] * 2
    assert experts_by_layer("[0,1]*2", 4) == [False, True, False, True]
    assert experts_by_layer("2", 4) == [True, False, True, False]


def test_a_hybrid_counts_its_depths_in_the_pattern() -> None:
    assert read(["--hybrid-layer-pattern", "M-M*-|M-/*-/*-"]).depths == 2
    assert (inner_of("M-M*-|M-/*-/*-"), inner_of("GEGE|GE*E"), inner_of("M-M-")) == ("*-", "*E", "M-")


def test_stages_of_a_layout() -> None:
    assert stages_of("Et*3|(tt|)*2mL") == ["Ettt", "tt", "tt", "mL"]
    assert stages_of("Ett,|m|L") == ["Ett", "m", "L"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--num-layers", "--num-layers has no value"),
        ("--num-layers many", "--num-layers is 'many'; give a whole number"),
        ("--hidden-size 0", "--hidden-size is 0; give 1 or more"),
    ],
)
def test_bad_values_are_named(words: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read(words.split())


@pytest.mark.parametrize(("text", "layers"), [("[0]*2+[1]*2", 5), ("[2]", 1), ("0", 3), ("eval", 1)])
def test_bad_lists_of_experts_are_named(text: str, layers: int) -> None:
    with pytest.raises(ValueError, match="--moe-layer-freq"):
        experts_by_layer(text, layers)


def test_unknown_layout_symbols_are_rejected() -> None:
    with pytest.raises(ValueError, match="'x' is not one of E t m L"):
        stages_of("Ex|L")


def test_model_sizes_are_read_from_a_config_folder(tmp_path: Path) -> None:
    keys = {"model_type": "mimo", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    keys |= {"num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 512, "max_position_embeddings": 128}
    keys |= {"num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    line = read(of_folder(tmp_path))
    assert (line.num_layers, line.hidden_size, line.ffn_hidden_size, line.num_query_groups) == (3, 64, 160, 2)
    assert (line.swiglu, line.mtp_num_layers, line.untie_embeddings_and_output_weights) == (True, 1, True)
