"""A family is one row, here or in an external package: the commands run the example of docs/develop/extending.md."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fork_server
import hf_models
import pytest
import torch
from documents import ROOT, blocks
from hf_models import Model, Tensors, frame, layer_of, make, read

DEPTHS = 2
COMMANDS = """
import json, sys
from megatron_mtp.cli.main import main
for arguments in json.loads(sys.argv[1]):
    if status := main(["convert", *arguments]):
        sys.exit(status)
"""
"""Runs several commands in one process, which takes longer to start than to convert."""

INSTALLED = """
import sys
sys.path.insert(0, sys.argv[2])
from megatron_mtp.checkpoint.families import FAMILIES
from megatron_mtp.checkpoint.verify.reference_forms import FORMS
for table in (FAMILIES, FORMS):
    vars(table).pop("_registered", None)
"""
"""Makes a fork find a new package, even if its tables have already been listed."""


def heron_depths(trunk: Tensors, depths: int) -> Tensors:
    out: Tensors = {}
    for k in range(depths):
        hf = f"model.drafters.{k}."
        out |= {hf + name: tensor for name, tensor in layer_of(trunk, "model.layers.2.").items()}
        names = {"embedding": "embed_norm", "hidden": "hidden_norm", "projection": "join", "final": "norm"}
        out |= frame(**{part: f"{hf}{name}.weight" for part, name in names.items()})
    return out


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    heron = Model("llama", {}, (DEPTHS,), heron_depths, keys={"model_type": "heron"})
    monkeypatch.setitem(hf_models.MODELS, "heron", heron)
    return make(tmp_path / "source", "heron", DEPTHS)


def convert(path: Path, *commands: list[object]) -> subprocess.CompletedProcess[str]:
    """Run commands of `convert` with modules at `path` before all others; in a fork if the package is unmodified."""
    words = json.dumps([[str(word) for word in command] for command in commands])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    if not (path / "megatron_mtp").exists():
        code = [sys.executable, "-c", INSTALLED + COMMANDS, words, str(path)]
        return fork_server.run(code, env=environment, cwd=path)
    code = [sys.executable, "-c", COMMANDS, words]
    return subprocess.run(code, capture_output=True, text=True, env=environment, cwd=path)


def example() -> tuple[str, str]:
    """Return the family's row, and its description for `verify`."""
    section = (ROOT / "docs/develop/extending.md").read_text().split("\n## A model family\n")[1].split("\n## ")[0]
    (_, family), (_, form) = blocks(section, "python")
    return family, form


def in_the_package(path: Path) -> None:
    """Copy the package and add the family's rows."""
    package = shutil.copytree(ROOT / "megatron_mtp", path / "megatron_mtp")
    family, form = example()
    families, forms = package / "checkpoint/families", package / "checkpoint/verify/reference_forms.py"
    row, table = family.split("HERON = ")[1].rstrip(), "DENSE: tuple[Family, ...] = (\n"
    dense = (families / "dense.py").read_text()
    (families / "dense.py").write_text(dense.replace(table, f"{table}{row},\n"))
    types = (families / "__init__.py").read_text()
    (families / "__init__.py").write_text(types.replace("mimo llama", "heron mimo llama"))
    form = form.replace("from megatron_mtp.checkpoint.verify.reference_forms import DepthForm\n", "")
    text = forms.read_text().replace("\n_OWN = {\n", f'\n{form}\n_OWN = {{\n    "heron": HERON_FORM,\n')
    forms.write_text(text)


def outside(path: Path) -> None:
    """Create an installed package whose entry points add the family."""
    family, form = example()
    (path / "heron.py").write_text(family)
    (path / "heron_form.py").write_text(form)
    installed = path / "heron-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: heron\nVersion: 1.0\n", encoding="utf-8")
    (installed / "entry_points.txt").write_text(
        "[megatron_mtp.families]\nheron = heron:HERON\n[megatron_mtp.reference_forms]\nheron = heron_form:HERON_FORM\n",
        encoding="utf-8",
    )


@pytest.mark.matrix
@pytest.mark.parametrize("add", [in_the_package, outside])
def test_a_new_family_survives_a_round_trip_with_the_same_logits(
    add: Callable[[Path], None], source: Path, tmp_path: Path
) -> None:
    mcore, back, added = tmp_path / "mcore", tmp_path / "back", tmp_path / "added"
    added.mkdir()
    add(added)
    done = convert(
        added,
        ["hf-to-mcore", source, mcore, "--json"],
        ["mcore-to-hf", mcore, back, "--json"],
        ["verify", back, mcore, "--json"],
    )
    assert done.returncode == 0, done.stderr
    imported, exported, proved = (json.loads(line) for line in done.stdout.splitlines())
    assert (imported["family"], imported["depths"], exported["depths"]) == ("Heron", DEPTHS, DEPTHS)
    before, after = read(source), read(back)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == DEPTHS
    assert logits_of(proved) == ["trunk", "depth 1", "depth 2"]
    assert proved["ok"]


def logits_of(proved: dict[str, Any]) -> list[str]:
    """Return what `verify` has compared."""
    ends = " logits, largest difference"
    names = [check["name"] for check in proved["checks"] if check["made"]]
    return [name.removesuffix(ends) for name in names if name.endswith(ends)]


@pytest.mark.matrix
def test_an_unregistered_family_is_unknown(source: Path, tmp_path: Path) -> None:
    done = convert(tmp_path, ["hf-to-mcore", source, tmp_path / "mcore"])
    assert done.returncode == 2
    assert "the model_type 'heron' is unknown here; the nearest that converts is 'nemotron'" in done.stderr
    assert not (tmp_path / "mcore").exists()
