"""Commands on quantized folders do the same as on the 16-bit model."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import read, write
from quantized_models import RUN, readable_pair, with_keys

from megatron_mtp.cli.convert import main
from megatron_mtp.common.acceptance import RECORD
from megatron_mtp.megatron.checkpoint.reader import DistReader

pytestmark = pytest.mark.usefixtures("megatron", "forked_python")


@pytest.fixture(scope="module", params=RUN)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("quantized")
    (folder / "text.txt").write_text("some words to make a vocabulary of " * 60)
    for source in ("code", "prose"):
        (folder / "texts" / source).mkdir(parents=True)
        shutil.copy(folder / "text.txt", folder / "texts" / source)
    return readable_pair(folder, request.param)


def told(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """Return the JSON that a `convert` command prints."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def evaluated(checkpoint: Path, text: Path) -> dict[str, Any]:
    line = [sys.executable, "-m", "megatron_mtp", "evaluate", "--load", checkpoint, "--text", text, "--json"]
    done = subprocess.run([*map(str, line), "--seq-length", "64", "--by-source"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    return {name: value for name, value in row.items() if name != "load"}


def check_of(folder: Path, place: Path) -> dict[str, Any]:
    """Return the result of `check`, with a trivial record."""
    shutil.copytree(folder, place / f"{folder.name}-checked")
    record = {"acceptance": [0.0, 0.0], "overlap": [0.0, 0.0]}
    (place / f"{folder.name}-checked" / RECORD).write_text(json.dumps(record))
    line = [sys.executable, "-m", "megatron_mtp", "check", place / f"{folder.name}-checked", "--json"]
    flags = ["--text", folder.parent / "text.txt", "--prompts", 8, "--prompt-tokens", 8, "--max-new-tokens", 16]
    done = subprocess.run([*map(str, (*line, *flags))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["drafts"] >= 64
    return {name: value for name, value in found.items() if name != "folder"}


def same_tensors(one: Path, other: Path) -> bool:
    ours, theirs = DistReader(one), DistReader(other)
    assert list(ours.keys) == list(theirs.keys)
    return all(torch.equal(ours.read(key), theirs.read(key)) for key in ours.keys)


def trunk_of(folder: Path, target: Path) -> Path:
    """Return the folder without its MTP layer, as after fine-tuning with transformers."""
    shutil.copytree(folder, target)
    write(target, {name: tensor for name, tensor in read(target).items() if not name.startswith("model.layers.3.")})
    return target


@pytest.mark.matrix
def test_evaluate_and_attach_of_what_convert_reads(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = []
    for folder in pair:
        place = tmp_path / folder.name
        told(capsys, "hf-to-mcore", folder, place)
        rows.append(evaluated(place, folder.parent / "texts"))
        trunk = trunk_of(folder, tmp_path / f"{folder.name}-trunk")
        with_keys(trunk, num_nextn_predict_layers=0)
        told(capsys, "hf-to-mcore", trunk, f"{place}-trunk-mcore")
        told(capsys, "attach-mtp", f"{place}-trunk-mcore", f"{place}-attached", "--mtp-num-layers", 2)
    assert rows[0] == rows[1]
    assert 0 <= rows[0]["mtp_1 acceptance"] <= 1
    assert {name: each["documents"] for name, each in rows[0]["sources"].items()} == {"code": 1, "prose": 1}
    lengths = [each["expected accepted length"] for each in rows[0]["sources"].values()]
    assert min(lengths) <= rows[0]["expected accepted length"] <= max(lengths)
    checked = [check_of(folder, tmp_path) for folder in pair]
    assert checked[0] == checked[1]
    for end in ("", "-trunk-mcore", "-attached"):
        assert same_tensors(tmp_path / f"coded{end}", tmp_path / f"plain{end}")


@pytest.mark.matrix
def test_graft_of_quantized_donor_and_target(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for folder in pair:
        trunk = trunk_of(folder, tmp_path / f"{folder.name}-trunk")
        words = ("graft", folder, trunk, tmp_path / folder.name, "--text", folder.parent / "text.txt")
        found.append(told(capsys, *words)["acceptance"])
    assert found[0] == found[1]
    assert found[0]["on the donor's trunk"] == found[0]["on the new trunk"]
    assert same_tensors(tmp_path / "coded", tmp_path / "plain")
