"""config.py: the settings that become flags, and error messages for wrong ones."""

import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from megatron_mtp.spec.config import ARCHITECTURES, INITS, MTPConfig


def test_the_default_settings_change_nothing() -> None:
    config = MTPConfig()
    assert config.mtp_architecture == "sequential"
    assert config.mtp_init is None
    assert config.mtp_acceptance_interval == 0
    assert config.mtp_metrics_dir is None


@pytest.mark.parametrize(
    "settings",
    [{"mtp_architecture": name} for name in ARCHITECTURES]
    + [{"mtp_init": name} for name in INITS]
    + [{"mtp_loss": name} for name in ("ce", "kd", "tv", "nla", "lk", "e2e_tv")]
    + [
        {"mtp_acceptance_interval": 10},
        {"mtp_loss": "mix", "mtp_loss_mix": "0,1,0.5"},
        {"mtp_loss_schedule": "cosine", "mtp_loss_schedule_steps": 10},
        {"mtp_token_fraction": 0.25},
    ],
)
def test_allowed_settings(settings: dict[str, Any]) -> None:
    assert MTPConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mtp_architecture": "medusa"}, "--mtp-architecture is 'medusa'; choose one of sequential, parallel."),
        (
            {"mtp_loss": "mix"},
            "--mtp-loss is mix and --mtp-loss-mix None; 'mix' needs its weights, and no other loss takes them.",
        ),
        ({"mtp_temperature": 0.0}, "--mtp-temperature is 0.0; give a number from 0.01 to 100."),
        ({"mtp_temperature": 1e-30}, "--mtp-temperature is 1e-30; give a number from 0.01 to 100."),
        ({"mtp_temperature": math.inf}, "--mtp-temperature is inf; give a number from 0.01 to 100."),
        ({"mtp_temperature": math.nan}, "--mtp-temperature is nan; give a number from 0.01 to 100."),
        (
            {"mtp_hidden_state_mixing": True, "mtp_architecture": "parallel"},
            "--mtp-hidden-state-mixing was given with --mtp-architecture parallel, where every depth reads the trunk's "
            "state alone; drop one of the two.",
        ),
        ({"mtp_lk_eta": -1.0}, "--mtp-lk-eta is -1.0; give 0 (kd alone) or more."),
        ({"mtp_lk_eta": math.inf}, "--mtp-lk-eta is inf; give 0 (kd alone) or more."),
        ({"mtp_lk_eta": math.nan}, "--mtp-lk-eta is nan; give 0 (kd alone) or more."),
        ({"mtp_label_smoothing": 1.0}, "--mtp-label-smoothing is 1.0; give 0 or more, and less than 1."),
        ({"mtp_z_loss": -1.0}, "--mtp-z-loss is -1.0; give 0 or more."),
        ({"mtp_token_fraction": 0.0}, "--mtp-token-fraction is 0.0; give a number above 0, and at most 1."),
        ({"mtp_token_fraction": 1.5}, "--mtp-token-fraction is 1.5; give a number above 0, and at most 1."),
        (
            {"mtp_loss_schedule": "step"},
            "--mtp-loss-schedule is step and --mtp-loss-schedule-steps 0; all but 'constant' need a number of steps, "
            "and 'constant' takes none.",
        ),
        (
            {"mtp_loss_schedule": "step", "mtp_loss_schedule_steps": -3},
            "--mtp-loss-schedule-steps is -3; give a number of steps, or a fraction below 1.",
        ),
        (
            {"mtp_loss_final_factor": 0.5},
            "--mtp-loss-final-factor is 0.5, which a constant lambda never reaches; give "
            "--mtp-loss-schedule step or cosine, or drop the flag.",
        ),
        ({"mtp_loss_final_factor": -0.1}, "--mtp-loss-final-factor is -0.1; give 0 or more."),
        (
            {"mtp_draft_vocab_size": 0},
            "--mtp-draft-vocab-size is 0; give 1 or more, or leave the flag out to draft all tokens.",
        ),
        (
            {"mtp_draft_vocab_size": 8, "mtp_draft_vocab_file": "ids.txt"},
            "--mtp-draft-vocab-size 8 and --mtp-draft-vocab-file ids.txt were given, but a file has its own size; drop "
            "one of the two.",
        ),
        ({"mtp_init": "zero"}, "--mtp-init is 'zero'; choose one of random, last-layer."),
        (
            {"mtp_acceptance_interval": -1},
            "--mtp-acceptance-interval is -1; give 0 (never) or a number of steps.",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_the_remedy(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^--mtp") as caught:
        MTPConfig(**settings)
    assert str(caught.value) == message


@pytest.mark.parametrize("given", ["1", "1,2,3", "1,x", "0,0", "-1,2", "1,nan"])
def test_there_is_one_loss_weight_per_depth(given: str) -> None:
    assert MTPConfig(mtp_loss_weights="1,0.5").loss_weights(2) == [1, 0.5]
    with pytest.raises(ValueError, match=r"^--mtp-loss-weights is .*; give 2 numbers of 0 or more"):
        MTPConfig(mtp_loss_weights=given).loss_weights(2)


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(FrozenInstanceError):
        MTPConfig().mtp_init = "random"  # type: ignore[misc]


def test_every_setting_is_a_flag_of_its_own_with_a_help_text_that_names_the_default() -> None:
    for field in fields(MTPConfig):
        assert field.name.startswith(("mtp_", "drafter"))
        assert "Default: " in field.metadata["help"], field.name
