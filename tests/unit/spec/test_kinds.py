"""spec/kinds.py: declarations of kinds become fields of `MTPConfig`, values of a drafter, arguments, and keys."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_mtp.checkpoint.convert.drafter_views import keys_of_settings, settings_in
from megatron_mtp.megatron.model_arguments import MODEL_ARGUMENTS
from megatron_mtp.spec.attention import AttentionSizes
from megatron_mtp.spec.config import OF_KINDS, MTPConfig
from megatron_mtp.spec.head import DRAFTER_SETTINGS, HeadSpec, TrunkSpec
from megatron_mtp.spec.kinds import DRAFTERS, FROM_1, Setting, readers_of, settings_of_kinds

TRUNK = TrunkSpec(24, 100, 64, 80, AttentionSizes(8, 2, 8, 1e-6, 1e4))
SWITCH = Setting(False, "Halve, in {kinds}. Default: off.", bool, key="halves")
SIZE = Setting(8, "Channels. Default: 8.", allowed=FROM_1, key="channels")
FORM = Setting("plain", "Form. Default: plain.", str, choices=("plain", "other"), key="form")
PARTS = Setting((), "Parts. Default: none.", is_list=True, key="parts")
OWN = {"drafter_halves": SWITCH, "drafter_channels": SIZE, "drafter_form": FORM, "drafter_parts": PARTS}
PATH = Path("folder")


def add(patch: pytest.MonkeyPatch, name: str, settings: Mapping[str, Setting]) -> None:
    """Register a kind like EAGLE with other settings."""
    patch.setitem(DRAFTERS._own, name, replace(DRAFTERS["eagle"], name=name, settings=settings))  # type: ignore[index]


def test_every_declared_setting_is_a_field_and_those_of_the_architecture_are_kept() -> None:
    assert {*OF_KINDS} <= {one.name for one in fields(MTPConfig)}
    kept = {name for name, setting in OF_KINDS.items() if setting.is_kept}
    assert {*OF_KINDS} - kept == {"drafter_blocks"}
    assert kept <= {*DRAFTER_SETTINGS} <= {*MODEL_ARGUMENTS}
    assert not {*OF_KINDS} - kept & {*MODEL_ARGUMENTS}
    assert {*HeadSpec.resolve("dspark", {}, TRUNK).arguments(TRUNK)} == {*DRAFTER_SETTINGS, "drafter_steps"}


def test_settings_of_kinds_are_compared_copied_and_hashed_like_all_others() -> None:
    made = MTPConfig(drafter="dspark", drafter_markov_rank=32)
    assert made == MTPConfig(drafter="dspark", drafter_markov_rank=32) != MTPConfig(drafter="dspark")
    assert hash(made) == hash(MTPConfig(drafter="dspark", drafter_markov_rank=32))
    assert replace(made, drafter_markov_rank=8, drafter="dflash2").drafter_markov_rank == 8
    with pytest.raises(ValueError, match="--drafter-markov-rank was given with --drafter eagle; give"):
        replace(made, drafter="eagle")
    with pytest.raises(TypeError, match="drafter_rank"):
        MTPConfig(drafter="dspark", drafter_rank=32)


@pytest.mark.parametrize(
    ("given", "own", "kept", "keys"),
    [
        ({}, (False, 8, "plain", ()), (None, 8, None, None), {}),
        (
            {"halves": True, "channels": 9, "form": "other", "parts": [1, 3]},
            (True, 9, "other", (1, 3)),
            (True, 9, "other", [1, 3]),
            {"halves": True, "channels": 9, "form": "other", "parts": [1, 3]},
        ),
        ({"halves": False, "channels": 8}, (False, 8, "plain", ()), (None, 8, None, None), {}),
    ],
)
def test_a_setting_survives_a_checkpoint_and_a_folder(
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    own: tuple[Any, ...],
    kept: tuple[Any, ...],
    keys: dict[str, Any],
) -> None:
    add(monkeypatch, "halver", OWN)
    made = HeadSpec.resolve("halver", {f"drafter_{name}": value for name, value in given.items()}, TRUNK)
    assert made.own == dict(zip(OWN, own, strict=True))
    arguments = made.arguments(TRUNK)
    assert {name: arguments[name] for name in OWN} == dict(zip(OWN, kept, strict=True))
    assert arguments["drafter_markov_rank"] is None  # reset, in case this drafter replaces another one
    assert HeadSpec.resolve("halver", arguments, TRUNK) == made
    written = keys_of_settings(made)
    assert {name: [*value] if name == "parts" else value for name, value in written.items()} == keys
    read = settings_in(PATH, DRAFTERS["halver"], {"hidden_size": 64, **keys})
    assert HeadSpec.resolve("halver", read, TRUNK) == made


@pytest.mark.parametrize(
    ("kind", "keys", "said"),
    [
        ("halver", {"channels": 0}, "folder/config.json has channels 0; give 1 or more."),
        ("halver", {"channels": "9"}, "folder/config.json has channels '9'; give a value of type int."),
        ("halver", {"channels": True}, "folder/config.json has channels True; give a value of type int."),
        ("halver", {"parts": ["a"]}, r"folder/config.json has parts \['a'\]; give a list with values of type"),
        ("halver", {"parts": 3}, "folder/config.json has parts 3; give a list with values of type int."),
        ("halver", {"form": "third"}, "folder/config.json has form 'third'; choose one of plain, other."),
        ("halver", {"halves": "yes"}, "folder/config.json has halves 'yes'; give true or false."),
        (
            "eagle",
            {"halves": True},
            "folder/config.json has halves, which an EAGLE drafter does not have; give another",
        ),
        ("eagle3", {"norm_before_residual": 3}, "config.json has norm_before_residual 3; give true or false."),
    ],
)
def test_config_keys_with_invalid_values_are_rejected(
    monkeypatch: pytest.MonkeyPatch, kind: str, keys: dict[str, Any], said: str
) -> None:
    add(monkeypatch, "halver", OWN)
    with pytest.raises(ValueError, match=said):
        settings_in(PATH, DRAFTERS[kind], keys)
    assert settings_in(PATH, DRAFTERS["eagle"], {"halves": False, "channels": 8, "form": None}) == {}


def test_kinds_may_share_a_setting_with_different_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, "halver", OWN)
    add(monkeypatch, "other", {"drafter_channels": replace(SIZE, default=4)})
    assert settings_of_kinds().items() > OWN.items()
    assert readers_of("drafter_channels") == ["halver", "other"]
    assert HeadSpec.resolve("other", {}, TRUNK).own == {"drafter_channels": 4}
    add(monkeypatch, "other", {"drafter_channels": replace(SIZE, help="Widths. Default: 8.")})
    with pytest.raises(ValueError, match="'halver' and 'other' declare 'drafter_channels' diff"):
        settings_of_kinds()
    add(monkeypatch, "other", {"halves": SWITCH})
    with pytest.raises(ValueError, match="'other' declares the setting 'halves'; begin it with"):
        settings_of_kinds()


def test_a_setting_of_all_drafters_cannot_be_declared_again(tmp_path: Path) -> None:
    (tmp_path / "steps-1.0.dist-info").mkdir()
    (tmp_path / "steps-1.0.dist-info/METADATA").write_text("Name: steps\nVersion: 1.0\n", encoding="utf-8")
    (tmp_path / "steps-1.0.dist-info/entry_points.txt").write_text("[megatron_mtp.heads]\nsteps = steps:ROW\n", "utf-8")
    (tmp_path / "steps.py").write_text(
        "from dataclasses import replace\n"
        "from megatron_mtp.heads.eagle.row import ROW as EAGLE\n"
        "from megatron_mtp.spec.kinds import Setting\n"
        'ROW = replace(EAGLE, name="steps", settings={"drafter_steps": Setting(3, "Steps. Default: 3.")})\n',
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "megatron_mtp", "train", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "error: --drafter-steps is a flag of all drafters; rename" in done.stderr
    assert "Traceback" not in done.stderr
