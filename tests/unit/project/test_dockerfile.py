"""The Dockerfile, checked without Docker: what it copies is a complete package, and its commands exist."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

from documents import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGE = ROOT / "megatron_mtp"


def instructions() -> list[tuple[str, str]]:
    """Return names and arguments, with continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def of(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def copied() -> list[str]:
    """Return paths in the repository; the last word of a COPY is the destination."""
    return [source for rest in of("COPY") for source in rest.split()[:-1]]


def test_every_copied_path_exists_and_is_not_ignored() -> None:
    known = {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions()} == known
    assert [path for path in copied() if not (ROOT / path).exists()] == []
    everything, *kept = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if "**" not in line]
    assert everything == "*"
    assert sorted(kept) == sorted(f"!{path}" for path in copied())


def test_the_dockerfile_runs_an_existing_command() -> None:
    (entry,) = (json.loads(rest) for rest in of("ENTRYPOINT"))
    assert entry == ["megatron-mtp"]
    assert entry[0] in PROJECT["project"]["scripts"]
    (install,) = (rest for rest in of("RUN") if "pip install" in rest)
    assert install == 'pip install --constraint constraints.txt ".${EXTRAS}"'
    assert "EXTRAS=[serve]" in of("ARG"), "what it runs may be a server"
    named = (rest.partition("=")[0] for rest in of("ARG"))
    told = (ROOT / "docs/guides/cluster.md").read_text(encoding="utf-8")
    assert [name for name in named if name not in told] == []


def test_the_copied_files_build_a_complete_package(tmp_path: Path) -> None:
    """The wheel has every file of the package, including the report's style sheet and script."""
    context = tmp_path / "context"
    context.mkdir()
    for path in copied():
        source, ignored = ROOT / path, shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, context / path, ignore=ignored) if source.is_dir() else shutil.copy(source, context)
    build = "from setuptools import build_meta; build_meta.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=context, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert packed == {str(path.relative_to(ROOT)) for path in files}
