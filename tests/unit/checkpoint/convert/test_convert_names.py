"""`convert inspect --names`: the name table of a folder equals that of its checkpoint."""

import json
from pathlib import Path

import pytest
from hf_models import make, read

from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.inspecting import names
from megatron_mtp.cli.main import main
from megatron_mtp.megatron.checkpoint.reader import DistReader

LINES = [
    "model.mtp_layers.*.input_proj.weight [48, 96]"
    " -> mtp.layers.*.eh_proj.weight [48, 96]  (halves swapped)  (2 times)",
    "model.layers.*.mlp.gate_proj.weight [56, 48], model.layers.*.mlp.up_proj.weight [56, 48]"
    " -> decoder.layers.*.mlp.linear_fc1.weight [112, 48]  (one after another)  (3 times)",
    "model.norm.weight [48] -> decoder.final_layernorm.weight [48]",
]


@pytest.mark.parametrize(("name", "depths"), [("mimo", 2), ("glm4_moe", 1), ("nemotron_h", 1)])
def test_every_tensor_of_both_sides_is_named_with_its_shape(name: str, depths: int, tmp_path: Path) -> None:
    folder, mcore = make(tmp_path / "hf", name, depths), tmp_path / "mcore"
    hf_to_mcore(folder, mcore, Options(quiet=True))
    rows, tensors, reader = names(folder, rows=True), read(folder), DistReader(mcore)
    assert names(mcore, rows=True) == rows
    assert names(mcore) == names(folder)
    theirs = {hf["name"]: tuple(hf["shape"]) for row in rows for hf in row["hugging_face"]}
    assert theirs == {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    ours = {
        key: tuple(m["shape"]) for row in rows for m in row["megatron"] for key in (m["key"], *m.get("aliases", ()))
    }
    assert ours == {key: reader.shape(key) for key in reader.keys}


def test_inspect_names_prints_lines_per_kind_or_json_per_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make(tmp_path / "hf", "mimo", 2))
    assert main(["convert", "inspect", "--names", folder]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in LINES if f"  {line}" not in shown] == []
    assert main(["convert", "inspect", "--names", "--json", folder]) == 0
    (row,) = [
        row for row in json.loads(capsys.readouterr().out)["names"] if row["megatron"][0]["key"].startswith("output")
    ]
    assert row == {
        "hugging_face": [{"name": "lm_head.weight", "shape": [96, 48]}],
        "megatron": [{"key": "output_layer.weight", "shape": [96, 48]}],
        "map": "",
    }
    assert main(["convert", "inspect", folder, "--json"]) == 0
    assert "names" not in json.loads(capsys.readouterr().out)
