"""attach.py with other releases of megatron-core: two steps have the losses of the installed one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from documents import ROOT

RELEASES = ("0.16.1", "0.17.1", "0.18.2")


def steps(*paths: Path) -> dict[str, Any]:
    """What release_steps.py prints with these folders first on the path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("release_steps.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return made


@pytest.fixture(scope="module")
def installed() -> list[float]:
    losses: list[float] = steps()["losses"]
    return losses


@pytest.mark.matrix
@pytest.mark.parametrize("release", RELEASES)
def test_attached_layers_learn_the_same_with_every_release(
    release: str, installed: list[float], tmp_path: Path
) -> None:
    words = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(tmp_path), f"megatron-core=={release}"]
    got = subprocess.run([sys.executable, "-m", "pip", "download", *words], capture_output=True, text=True, check=False)
    wheels = list(tmp_path.glob("*.whl"))
    if not wheels:
        pytest.skip(f"no wheel of megatron-core {release}: {got.stderr.strip()[-200:]}")
    with ZipFile(wheels[0]) as packed:
        packed.extractall(tmp_path / "release")
    made = steps(tmp_path / "release")
    assert made["version"] == release
    assert installed[1] < installed[0]
    assert made["losses"] == pytest.approx(installed, rel=1e-6)
