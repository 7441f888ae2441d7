"""attach.py with other releases of megatron-core: two steps have the same losses as with the installed one."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from documents import ROOT
from job_forks import worker

RELEASES = ("0.16.1", "0.17.1", "0.18.2")


Steps = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steps]:
    """Return what release_steps.py prints with a folder first on the path."""
    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}"
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, str(Path(__file__).parents[2] / "support" / "release_steps.py")]
    with worker(command, environment, tmp_path_factory.mktemp("releases") / "log") as record_of:
        yield record_of


@pytest.fixture(scope="module")
def installed(steps: Steps) -> list[float]:
    losses: list[float] = steps("")["losses"]
    return losses


@pytest.mark.matrix
@pytest.mark.parametrize("release", RELEASES)
def test_attached_layers_learn_the_same_with_every_release(
    release: str, steps: Steps, installed: list[float], tmp_path: Path
) -> None:
    words = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(tmp_path), f"megatron-core=={release}"]
    got = subprocess.run([sys.executable, "-m", "pip", "download", *words], capture_output=True, text=True, check=False)
    wheels = list(tmp_path.glob("*.whl"))
    if not wheels:
        pytest.skip(f"no wheel of megatron-core {release}: {got.stderr.strip()[-200:]}")
    with ZipFile(wheels[0]) as packed:
        packed.extractall(tmp_path / "release")
    made = steps(str(tmp_path / "release"))
    assert made["version"] == release
    assert installed[1] < installed[0]
    assert made["losses"] == pytest.approx(installed, rel=1e-6)
