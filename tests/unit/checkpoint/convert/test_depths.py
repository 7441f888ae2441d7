"""checkpoint/convert/edit.py: after `drop-mtp`, a family's folder equals one published with fewer MTP layers."""

import json
from pathlib import Path

import pytest
import torch
from hf_models import make, read
from tiers import tiered

from megatron_mtp.checkpoint.convert.edit import Init, plan_attaching, plan_dropping
from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import kept_form, with_depths
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.plan import HFModel
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.families import FAMILIES
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.megatron.checkpoint import HF_FILES, ORIGIN

QUIET = Options(quiet=True, workers=1)
CASES = [(name, 3, keep) for name in ("mimo_v2_flash", "step3p7", "nemotron_h") for keep in (0, 1)]
CASES += [("ernie4_5_moe", 3, 1), ("mimo", 3, 1), ("glm4_moe", 3, 0), ("longcat_flash", 1, 0), ("qwen3_5", 1, 0)]


@pytest.mark.parametrize(("name", "depths", "keep"), tiered(CASES, CASES[::3]))
def test_no_part_of_a_dropped_depth_is_left(name: str, depths: int, keep: int, tmp_path: Path) -> None:
    source = make(tmp_path / "source", name, depths)
    hf_to_mcore(source, tmp_path / "mcore", QUIET)
    plan_dropping(tmp_path / "mcore", keep).write(tmp_path / "less", QUIET)
    form = kept_form(tmp_path / "less")
    assert form is not None
    mcore_to_hf(tmp_path / "less", tmp_path / "back", QUIET, form)
    there, back = read(source), read(tmp_path / "back")
    assert back.keys() == read(make(tmp_path / "fewer", name, keep)).keys()
    assert [key for key in back if not torch.equal(back[key], there[key])] == []
    assert HFModel.read(tmp_path / "back").layout.depths == keep
    assert json.loads((tmp_path / "less" / HF_FILES / ORIGIN).read_text())["layout"]["depths"] == keep


@pytest.mark.parametrize(
    "damaged",
    ["[]", "3", '{"layout": 3}', '{"layout": {"features": 3}}', '{"layout": {"carried": [3]}}', '{"layout": null}'],
)
def test_a_damaged_record_of_an_import_gives_a_clear_error(damaged: str, tmp_path: Path) -> None:
    kept = tmp_path / HF_FILES
    kept.mkdir()
    (kept / "config.json").write_text('{"model_type": "llama"}')
    (kept / ORIGIN).write_text(damaged)
    with pytest.raises(ValueError, match=rf"{ORIGIN} is not a record of a conversion; fetch"):
        kept_form(tmp_path)
    (kept / ORIGIN).unlink()
    assert kept_form(tmp_path) is not None
    (kept / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="has no 'model_type'"):
        kept_form(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "name", "depth"),
    [
        ("mimo_v2_flash", "model.mtp.layers.2.self_attn.q_proj.weight", 2),
        ("mimo_v2_flash", "model.layers.2.self_attn.q_proj.weight", None),
        ("ernie4_5_moe", "model.mtp_linear_proj.1.bias", 1),
        ("step3p5", "model.layers.45.self_attn.q_proj.weight", 0),
        ("step3p5", "model.layers.44.self_attn.q_proj.weight", None),
        ("step3p7", "vision_model.conv1.weight", None),
    ],
)
def test_the_depth_of_a_carried_tensor(model_type: str, name: str, depth: int | None) -> None:
    config = HFConfig.from_keys({"model_type": model_type, "num_hidden_layers": 45})
    depths = FAMILIES[model_type].depths
    assert depths is not None
    assert depths.depth_of(config, name) == depth


def test_every_key_that_counts_depths_is_written() -> None:
    both = {"mtp_num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    none = dict.fromkeys(both, 0)
    assert with_depths({"model_type": "qwen3_next", **both}, 0) == {"model_type": "qwen3_next", **none}
    nested = {"model_type": "qwen3_5", "num_nextn_predict_layers": 1, "text_config": both}
    assert with_depths(nested, 0) == {"model_type": "qwen3_5", "num_nextn_predict_layers": 0, "text_config": none}
    one = {"model_type": "qwen3_next", "num_nextn_predict_layers": 1}
    assert with_depths(one, 0) == {"model_type": "qwen3_next", "num_nextn_predict_layers": 0}
    assert with_depths({"model_type": "mimo"}, 2) == {"model_type": "mimo", "num_nextn_predict_layers": 2}


def test_a_trunk_that_megatron_cannot_run_gets_no_depths(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", "llama", 0)
    keys = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(keys | {"hidden_act": "gelu"}))
    hf_to_mcore(source, tmp_path / "trunk", QUIET)
    with pytest.raises(ValueError, match="a model that Megatron cannot run: it has the activ"):
        plan_attaching(tmp_path / "trunk", 1, Init("random", 1)).write(tmp_path / "new", QUIET)
    assert not (tmp_path / "new").exists()
