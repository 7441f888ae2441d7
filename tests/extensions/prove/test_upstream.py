"""The corrections of upstream/: each one's test fails with the installed Megatron, and passes with the patch."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from documents import ROOT

UPSTREAM = ROOT / "upstream"
READY = sorted(path.stem for path in UPSTREAM.glob("*.patch"))


def status(name: str, megatron: Path) -> int:
    """Return pytest's exit status for the correction's test with this Megatron."""
    words = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(megatron)}
    test = str(UPSTREAM / f"test_mtp_{name}.py")
    return subprocess.run([*words, test], env=environment, capture_output=True, check=False).returncode


@pytest.mark.matrix
@pytest.mark.parametrize("name", READY)
def test_a_correction_makes_its_test_pass(name: str, tmp_path: Path) -> None:
    spec = find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    megatron = Path(spec.origin).parents[1]
    shutil.copytree(megatron, tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    assert status(name, tmp_path) == 1
    patch = (UPSTREAM / f"{name}.patch").read_text(encoding="utf-8")
    subprocess.run(["patch", "-p1", "-s"], input=patch, cwd=tmp_path, text=True, check=True)
    assert status(name, tmp_path) == 0


def test_the_page_has_every_correction() -> None:
    page = (UPSTREAM / "README.md").read_text(encoding="utf-8")
    assert READY
    assert [name for name in READY if not (UPSTREAM / f"test_mtp_{name}.py").is_file()] == []
    assert page.count("(ready)") == len(READY)
