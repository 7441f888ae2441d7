"""rope_scaling.py: a row converts a `config.json` to Megatron's arguments and back."""

from argparse import Namespace
from typing import Any

import pytest

from megatron_mtp.spec.rope_scaling import SCALINGS, megatrons_scaling, scaling_arguments
from megatron_mtp.training.loading import LoadPlan, check_positions

YARN = {"factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
CASES: dict[str, tuple[dict[str, Any], bool, dict[str, Any]]] = {
    "default": ({}, False, {}),
    "linear": ({"factor": 4.0}, False, {"rotary_seq_len_interpolation_factor": 4}),
    "llama3": (
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        False,
        {"use_rope_scaling": True, "rope_scaling_factor": 8.0},
    ),
    "yarn": (
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.0, "truncate": False},
        False,
        {
            "rotary_scaling_factor": 16.0,
            "yarn_original_max_position_embeddings": 64,
            "yarn_beta_fast": 32.0,
            "yarn_beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
            "yarn_correction_range_round_to_int": False,
        },
    ),
    "yarn in latent attention": (
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
        True,
        {
            "rotary_scaling_factor": 16.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.5,
        },
    ),
}
"""For each scaling: its keys, whether attention is latent, and Megatron's arguments."""


@pytest.mark.parametrize("case", CASES)
def test_a_rope_scaling_survives_a_round_trip_through_megatron(case: str) -> None:
    (keys, is_latent, arguments), kind = CASES[case], case.partition(" ")[0]
    row = SCALINGS[kind]
    assert row.to_megatron(keys, is_latent) == arguments
    assert {*arguments} <= {*scaling_arguments(is_latent)}
    positions = {"position_embedding_type": row.positions, "rope_type": row.positions}
    assert megatrons_scaling({**positions, **arguments}.get, is_latent) == {"rope_type": kind, **keys}


def test_scaling_values_that_are_not_set_are_megatrons_defaults() -> None:
    arguments = {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0}
    assert megatrons_scaling(arguments.get, False) == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
        "truncate": True,
    }


def test_megatrons_latent_attention_reads_yarn_alone() -> None:
    arguments = {"rope_type": "rope", "use_rope_scaling": True, "rope_scaling_factor": 8.0}
    assert megatrons_scaling(arguments.get, is_latent=True) == {"rope_type": "default"}
    assert [name for name, row in SCALINGS.items() if row.in_latent] == ["default", "yarn"]


@pytest.mark.parametrize(
    ("is_latent", "name"), [(False, "yarn_beta_fast"), (False, "rope_scaling_factor"), (True, "beta_fast")]
)
def test_a_rope_scaling_that_differs_from_the_checkpoint_is_rejected(is_latent: bool, name: str) -> None:
    args, stored = (Namespace(multi_latent_attention=is_latent, **{name: value}) for value in (32.0, 16.0))
    with pytest.raises(ValueError, match=f"was trained with {name} 16.0, and this run has 32.0; give"):
        check_positions(LoadPlan(), args, stored, "a")
    assert check_positions(LoadPlan(finetune=True), args, stored, "a").messages
    assert check_positions(LoadPlan(), args, args, "a") == LoadPlan()
