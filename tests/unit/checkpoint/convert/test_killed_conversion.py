"""A killed conversion leaves no folder that looks complete, and `--resume` produces the same bytes.

The first tier has conversions that fail while writing: test_resumed_conversions.py.
"""

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import fork_server
import pytest
from hf_models import make

from megatron_mtp.checkpoint.convert.hybrid import plan_migration
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.partial_folder import PLAN, RECORDS, PartialFolder
from megatron_mtp.checkpoint.convert.stream import Options

WORKER = Path(__file__).parents[3] / "support" / "killed_conversions.py"
KILLS = 8
COMMANDS = {
    "hf-to-mcore": ["hf"],
    "mcore-to-hf": ["mcore"],
    "attach-mtp": ["trunk", "--mtp-num-layers", "2"],
    "drop-mtp": ["mcore", "--keep", "1"],
    "graft": ["mcore trunk"],
}
"""Arguments of each command: its sources, then its flags."""

MIGRATIONS = {"gpt-to-hybrid": ["mcore"], "hybrid-to-gpt": ["hybrid"]}

Told = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Return the results of all commands."""
    folder = tmp_path_factory.mktemp("conversions")
    imported(folder, "deepseek_v3", "mcore", 3)
    imported(folder, "deepseek_v3", "trunk", 0)
    return killed(folder, COMMANDS)


def imported(folder: Path, family: str, name: str, depths: int) -> None:
    hf = make(folder / ("hf" if depths else "hf-trunk"), family, depths)
    hf_to_mcore(hf, folder / name, Options(quiet=True, workers=1))


def killed(folder: Path, commands: dict[str, list[str]]) -> Told:
    given = [
        [command, [str(folder / source) for source in sources.split()], *flags]
        for command, (sources, *flags) in commands.items()
    ]
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    words = [sys.executable, str(WORKER), str(folder / "killed"), str(KILLS), str(seed)]
    done = fork_server.run(words, input=json.dumps(given), env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.matrix
@pytest.mark.parametrize("command", COMMANDS)
def test_a_killed_conversion_is_resumed_to_the_same_bytes(command: str, told: Told) -> None:
    assert_resumed(told[command])


def assert_resumed(told: dict[str, Any]) -> None:
    assert told["killed"] == KILLS
    assert told["wrong"] == []


@pytest.mark.matrix
def test_a_killed_migration_is_resumed_to_the_same_bytes(tmp_path: Path) -> None:
    imported(tmp_path, "glm4_moe", "mcore", 2)
    plan_migration(tmp_path / "mcore", True).write(tmp_path / "hybrid", Options(quiet=True, workers=1))
    for told in killed(tmp_path, MIGRATIONS).values():
        assert_resumed(told)


def test_a_run_killed_before_its_plan_was_written_starts_over(tmp_path: Path) -> None:
    (tmp_path / "out.partial" / RECORDS).mkdir(parents=True)
    assert not PartialFolder(tmp_path / "out", tmp_path / "source", {"a": 1}, resume=False).resumed
    assert PartialFolder(tmp_path / "out", tmp_path / "source", {"a": 1}, resume=True).resumed


def test_a_run_killed_while_removing_its_records_is_resumed(tmp_path: Path) -> None:
    partial = PartialFolder(tmp_path / "out", tmp_path / "source", {"a": 1}, resume=False)
    partial.keep(0, "done")
    partial.path.rename(partial.target)
    again = PartialFolder(tmp_path / "out", tmp_path / "source", {"a": 1}, resume=True)
    assert again.record(0) == "done"
    again.finish()
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_with_another_plan_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / PLAN).write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        PartialFolder(tmp_path / "out", tmp_path / "source", {"a": 1}, resume=True)
    assert (tmp_path / "out" / PLAN).read_text() == "mine"
