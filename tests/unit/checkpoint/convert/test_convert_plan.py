"""`convert --dry-run` reports what the conversion would do, and writes nothing."""

import errno
import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make, read, write
from judged_models import QUIET

from megatron_mtp.checkpoint.convert.import_hf import plan_import
from megatron_mtp.checkpoint.convert.stream import CheckpointFiles
from megatron_mtp.checkpoint.hf.folder import HFFolder
from megatron_mtp.cli.convert import main
from megatron_mtp.megatron.checkpoint.reader import DistReader

Disk = namedtuple("Disk", "total used free")
pytestmark = pytest.mark.usefixtures("megatron")


def told(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """Return the JSON object that the command prints."""
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def numbers(reader: DistReader) -> int:
    """Return the bytes of all tensors of a checkpoint."""
    return sum(torch.Size(reader.shape(key)).numel() * reader.dtype(key).itemsize for key in reader.keys)


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
@pytest.mark.parametrize("dtype", [[], ["--dtype", "bfloat16"]])
def test_a_plan_matches_the_conversion(
    family: str, dtype: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, mcore, back = make(tmp_path / "source", family, 1), tmp_path / "mcore", tmp_path / "back"
    plan = told(capsys, "hf-to-mcore", source, mcore, "--dry-run", *dtype)
    assert not mcore.exists()
    assert not list(tmp_path.glob("*.partial"))
    done = told(capsys, "hf-to-mcore", source, mcore, *dtype)
    assert {name: plan[name] for name in ("family", "depths", "tensors")} == {
        name: done[name] for name in ("family", "depths", "tensors")
    }
    assert plan["bytes read"] == done["bytes"]
    assert plan["bytes written"] == numbers(DistReader(mcore))
    assert plan["fits"]

    plan = told(capsys, "mcore-to-hf", mcore, back, "--dry-run")
    assert not back.exists()
    done = told(capsys, "mcore-to-hf", mcore, back)
    assert (plan["tensors"], plan["bytes read"]) == (done["tensors"], done["bytes"])
    assert plan["bytes written"] == sum(stored.bytes for stored in HFFolder(back).tensors.values())


def test_a_plan_names_every_tensor_once_for_all_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make(tmp_path / "source", "llama", 0)
    assert main(["hf-to-mcore", str(source), str(tmp_path / "mcore"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "  model.layers.*.mlp.down_proj.weight -> decoder.layers.*.mlp.linear_fc2.weight  (" in shown
    assert "carried as they are: nothing" in shown


def test_a_plan_rejects_what_the_conversion_would_reject(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make(tmp_path / "source", "llama", 0)
    keys = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**keys, "num_hidden_layers": 9}))
    assert main(["hf-to-mcore", str(source), str(tmp_path / "mcore"), "--dry-run"]) == 2
    assert "lacks 'model.layers." in capsys.readouterr().err


def test_a_conversion_that_does_not_fit_on_the_disk_is_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make(tmp_path / "source", "llama", 0), tmp_path / "mcore"
    monkeypatch.setattr("shutil.disk_usage", lambda path: Disk(10**9, 10**9, 1000))
    assert main(["hf-to-mcore", str(source), str(target), "--dry-run", "--json"]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert (plan["fits"], plan["bytes free"]) == (False, 1000)
    assert main(["hf-to-mcore", str(source), str(target)]) == 2
    says = f"{target} takes {plan['bytes written']:,} bytes, and its disk has 1,000 free; free some, or name a target"
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    monkeypatch.setattr("shutil.disk_usage", lambda path: Disk(0, 0, 0))  # reported by some network disks
    assert main(["hf-to-mcore", str(source), str(target)]) == 0


def test_a_resumed_conversion_needs_room_for_the_rest_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = make(tmp_path / "source", "llama", 0), tmp_path / "mcore"
    assert main(["hf-to-mcore", str(source), str(target)]) == 0
    shutil.move(target, tmp_path / "mcore.partial")
    plan = plan_import(source, QUIET)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Disk(10**9, 10**9, 5000))
    plan._check_room(target)
    with pytest.raises(ValueError, match="free some, or name a target"):
        plan._check_room(tmp_path / "other")


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "no room")


def test_a_conversion_names_numbers_that_are_nan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Including in the parts that an interrupted run wrote before a resume."""
    source = make(tmp_path / "source", "llama", 0)
    held = read(source)
    write(source, held | {"model.norm.weight": held["model.norm.weight"] / 0})
    says = "as in the source, some numbers are NaN or infinite in 'decoder.final_layernorm.weight'"
    assert says in told(capsys, "hf-to-mcore", source, tmp_path / "mcore")["not finite"]
    monkeypatch.setattr(CheckpointFiles, "finish", full)
    assert main(["hf-to-mcore", str(source), str(tmp_path / "again")]) != 0
    monkeypatch.undo()
    assert says in told(capsys, "hf-to-mcore", source, tmp_path / "again", "--resume")["not finite"]


def test_an_fp8_config_without_quantized_weights_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make(tmp_path / "source", "llama", 0)
    keys = json.loads((source / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (source / "config.json").write_text(json.dumps(keys))
    said = told(capsys, "hf-to-mcore", source, tmp_path / "mcore")["quantization"]
    assert said.startswith("config.json has quant_method 'fp8', but no weight is quantized")


def files(folder: Path) -> dict[str, int]:
    """Return every path below the folder with its modification time."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("init", ["last-layer", "random"])
def test_a_plan_to_drop_or_attach_mtp_layers_matches_the_result(
    init: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, mcore = make(tmp_path / "source", "glm4_moe", 2), tmp_path / "mcore"
    told(capsys, "hf-to-mcore", source, mcore)
    trunk, grown = tmp_path / "trunk", tmp_path / "grown"
    drop = ("drop-mtp", mcore, trunk)
    attach = ("attach-mtp", trunk, grown, "--mtp-num-layers", "3", "--mtp-init", init)
    for command, before, after in ((drop, 2, 0), (attach, 0, 3)):
        there = files(tmp_path)
        plan = told(capsys, *command, "--dry-run")
        assert files(tmp_path) == there
        done = told(capsys, *command)
        old, new = DistReader(command[1]), DistReader(command[2])
        assert (plan["MTP layers before"], plan["depths"], plan["target"]) == (before, after, str(command[2]))
        assert (plan["tensors"], plan["depths"]) == (done["tensors"], done["depths"])
        assert plan["bytes written"] == numbers(new)
        assert named(plan["new"]) == len(set(new.keys) - set(old.keys))
        assert named(plan["left out"]) == len(set(old.keys) - set(new.keys))


def named(lines: list[str] | str) -> int:
    """Return how many keys the lines of a plan cover."""
    if lines == "nothing":
        return 0
    return sum(int(line.split("  (")[1].split()[0]) if "  (" in line else 1 for line in lines)


def test_a_plan_refuses_a_target_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, mcore = make(tmp_path / "source", "mimo", 1), tmp_path / "mcore"
    told(capsys, "hf-to-mcore", source, mcore)
    there = files(tmp_path)
    for command in (["hf-to-mcore", source, mcore], ["mcore-to-hf", mcore, source], ["drop-mtp", mcore, source]):
        assert main([*map(str, command), "--dry-run"]) == 2
        assert "is not empty; name a new folder" in capsys.readouterr().err
    assert main(["attach-mtp", str(mcore), str(tmp_path / "new"), "--mtp-num-layers", "1", "--dry-run"]) == 2
    assert "has MTP layers already" in capsys.readouterr().err
    assert files(tmp_path) == there
