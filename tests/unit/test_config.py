"""config.py: the settings that become flags, and what is said of wrong ones."""

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from megatron_mtp.config import ARCHITECTURES, INITS, MTPConfig


def test_the_defaults_change_nothing_of_a_run() -> None:
    config = MTPConfig()
    assert config.mtp_architecture == "sequential"
    assert config.mtp_init is None
    assert config.mtp_acceptance_interval == 0
    assert config.mtp_metrics_dir is None


@pytest.mark.parametrize(
    "settings",
    [{"mtp_architecture": name} for name in ARCHITECTURES]
    + [{"mtp_init": name} for name in INITS]
    + [{"mtp_acceptance_interval": 10}],
)
def test_allowed_settings(settings: dict[str, Any]) -> None:
    assert MTPConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mtp_architecture": "medusa"}, "--mtp-architecture is 'medusa'; choose one of sequential, parallel."),
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


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(FrozenInstanceError):
        MTPConfig().mtp_init = "random"  # type: ignore[misc]


def test_every_setting_is_a_flag_of_its_own_with_a_help_text_that_names_the_default() -> None:
    for field in fields(MTPConfig):
        assert field.name.startswith("mtp_")
        assert "Default: " in field.metadata["help"], field.name
