"""`convert hf-to-mcore --trunk-only`: the trunk of a folder whose MTP layers are intact, damaged or missing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from attach_settings import command_of, settings
from grafted_folders import OF_DEPTHS, lost, tensors
from hf_models import MODELS, Tensors, make, read, write
from judged_models import QUIET
from tiers import tiered

from megatron_mtp.checkpoint.audit.auditing import audit
from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.cli.convert import main
from megatron_mtp.common.acceptance import RECORD

pytestmark = pytest.mark.usefixtures("megatron", "forked_python")

WITH_DEPTHS = sorted((name, max(model.depths)) for name, model in MODELS.items() if max(model.depths))


def imported(folder: Path, out: Path, *flags: str) -> int:
    return main(["hf-to-mcore", str(folder), str(out), *flags])


def damaged(folder: Path) -> Path:
    """Return the same folder without the last tensor of its MTP layers."""
    held = read(folder)
    kept = read(lost(Path(shutil.copytree(folder, folder.with_name("kept")))))
    write(folder, {name: tensor for name, tensor in held.items() if name != max(held.keys() - kept.keys())})
    return folder


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    assert [key for key in found if not torch.equal(found[key], wanted[key])] == []


@pytest.mark.parametrize(("name", "depths"), tiered(WITH_DEPTHS, [("glm4_moe", 3), ("longcat_flash", 1)]))
def test_the_trunk_is_that_of_the_whole_model(
    name: str, depths: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "hf", name, depths)
    assert imported(folder, tmp_path / "whole") == 0
    kept = read(lost(Path(shutil.copytree(folder, tmp_path / "lost"))))
    carried = {f"carried.{tensor}" for tensor in read(folder).keys() - kept.keys()}
    trunk = {key: one for key, one in tensors(tmp_path / "whole").items() if not OF_DEPTHS.match(key)}
    trunk = {key: one for key, one in trunk.items() if key not in carried}
    number = len(read(folder)) - len(kept)
    capsys.readouterr()
    assert imported(folder, tmp_path / "left", "--trunk-only") == 0
    said = f"warning: --trunk-only left out the MTP layers of {folder}, {number} tensors; the trunk alone is here\n"
    assert said in capsys.readouterr().out
    assert imported(tmp_path / "lost", tmp_path / "gone", "--trunk-only") == 0
    said = f"warning: {tmp_path}/lost holds no tensor of an MTP layer; the trunk alone is here\n"
    assert said in capsys.readouterr().out
    assert imported(damaged(folder), tmp_path / "rest", "--trunk-only") == 0
    for out in ("left", "gone", "rest"):
        assert_equal(tensors(tmp_path / out), trunk)


@pytest.mark.parametrize("harm", [lost, damaged])
def test_a_lost_head_without_the_flag_is_rejected_with_both_fixes(
    harm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = harm(make(tmp_path / "hf", "mimo", 1))
    capsys.readouterr()
    assert imported(folder, tmp_path / "out") == 2
    error = capsys.readouterr().err
    if harm is lost:
        assert "on its trunk (megatron-mtp convert graft), or convert the trunk alone (megatron-mtp convert " in error
        assert error.endswith("hf-to-mcore --trunk-only).\n")
    assert not list(tmp_path.glob("out*"))


def test_a_trunk_alone_takes_new_layers_and_is_exported_with_them(tmp_path: Path) -> None:
    folder = lost(make(tmp_path / "hf", "glm4_moe", 1))
    (folder / RECORD).write_text(json.dumps({"acceptance": [0.5]}))
    assert imported(folder, tmp_path / "trunk", "--trunk-only") == 0
    assert not (tmp_path / "trunk" / RECORD).exists()  # it describes the MTP layers
    assert not load_model(tmp_path / "trunk").config.mtp_num_layers
    mcore_to_hf(tmp_path / "trunk", tmp_path / "again", QUIET, form_of(tmp_path / "trunk"))
    assert json.loads((tmp_path / "again" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert main(["attach-mtp", str(tmp_path / "trunk"), str(tmp_path / "new"), "--mtp-num-layers", "2"]) == 0
    mcore_to_hf(tmp_path / "new", tmp_path / "back", QUIET, form_of(tmp_path / "new"))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 2


def test_a_plan_says_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "hf", "mimo", 1)
    capsys.readouterr()
    assert imported(folder, tmp_path / "out", "--trunk-only", "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["depths"] == 0
    assert plan["warning"].startswith("--trunk-only left out the MTP layers of")


@pytest.mark.parametrize("flags", [[], ["--drafter", "eagle3"]])
def test_attach_takes_the_trunk_alone_where_the_layers_are_lost(flags: list[str], tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", "mimo", 1)
    args = settings(folder, tmp_path / "run", *flags)
    assert "--trunk-only" not in (command_of("trunk", args) or [])
    lost(folder)
    wanted = ["convert", "hf-to-mcore", str(folder), f"{tmp_path}/run/trunk", "--trunk-only", "--resume"]
    assert command_of("trunk", args) == wanted
    assert main(wanted[1:]) == 0


def test_attach_does_not_import_only_the_trunk_if_layers_are_damaged(tmp_path: Path) -> None:
    args = settings(damaged(make(tmp_path / "hf", "mimo", 1)), tmp_path / "run")
    assert "--trunk-only" not in (command_of("trunk", args) or [])


@pytest.mark.parametrize("name", tiered(["mimo", "glm4_moe", "nemotron_h"], ("mimo",)))
def test_verify_compares_the_trunk_and_reports_the_omitted_head(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = damaged(make(tmp_path / "hf", name, 1))
    assert imported(folder, tmp_path / "trunk", "--trunk-only") == 0
    capsys.readouterr()
    assert main(["verify", str(folder), str(tmp_path / "trunk")]) == 0
    said = capsys.readouterr().out
    assert "ok   tensors of MTP layers that --trunk-only left out: " in said
    assert "(reference: the record of the import)" in said
    assert "ok   trunk logits, largest difference" in said
    whole = read(folder)
    write(folder, {**whole, "lm_head.weight": whole["lm_head.weight"] + 1})
    assert main(["verify", str(folder), str(tmp_path / "trunk")]) == 1
    assert main(["attach-mtp", str(tmp_path / "trunk"), str(tmp_path / "new"), "--mtp-num-layers", "1"]) == 0
    assert main(["verify", str(folder), str(tmp_path / "new")]) == 2  # the folder does not have these layers


UNKNOWN = {"mtp.0.join.weight": torch.ones(3, 3)}


@pytest.mark.parametrize(("name", "depths", "harm"), [("glm4_moe", 1, lost), ("mimo", 1, damaged), ("llama", 0, None)])
def test_an_audit_names_the_flag_where_the_trunk_would_convert(
    name: str, depths: int, harm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "hf", name, depths)
    if harm is None:
        write(folder, read(folder) | UNKNOWN)
    else:
        harm(folder)
    (found,) = (one for one in audit(folder)["findings"] if one["severity"] == "error")
    assert found["advice"].endswith(", or convert the trunk alone (megatron-mtp convert hf-to-mcore --trunk-only)")
    assert imported(folder, tmp_path / "trunk", "--trunk-only") == 0
    write(folder, {key: one for key, one in read(folder).items() if "layers.1." not in key})
    assert all("--trunk-only" not in one["advice"] for one in audit(folder)["findings"])
