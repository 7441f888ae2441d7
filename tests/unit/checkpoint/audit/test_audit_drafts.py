"""What drafts in a folder: MTP layers of every published family, a DSpark drafter inside a model, or nothing."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import Tensors, make, read, write
from judged_models import QUIET
from trunk_models import LEFT

from megatron_mtp.checkpoint.audit.auditing import audit
from megatron_mtp.checkpoint.convert.edit import Init, plan_attaching, plan_dropping
from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.graft import plan_graft
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.cli import audit as page
from megatron_mtp.cli.convert import main
from megatron_mtp.megatron.checkpoint.reader import StoredDepths

SIZE = 4


def folder_of(path: Path, keys: dict[str, Any], names: Sequence[str]) -> Path:
    """Create a folder of tiny tensors: a trunk of two layers, plus tensors with these names."""
    trunk = [f"model.layers.{layer}.{part}.weight" for layer in (0, 1) for part in ("self_attn.o_proj", "mlp.up_proj")]
    every = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", *trunk, *names]
    path.mkdir()
    write(path, {name: torch.randn(SIZE, SIZE) for name in every})
    (path / "config.json").write_text(json.dumps({"vocab_size": SIZE, "num_hidden_layers": 2, **keys}))
    return path


def layer(prefix: str, *frame: str) -> list[str]:
    """Return the tensor names of an MTP layer: those of a trunk layer, and its frame."""
    return [f"{prefix}{part}.weight" for part in ("self_attn.o_proj", "mlp.up_proj", *frame)]


def drafts_line(result: dict[str, Any]) -> str:
    """Return an audit's line about what drafts; empty if there is none."""
    lines = page.text_of(result).splitlines()
    return next((line.removeprefix("   drafts: ") for line in lines if line.startswith("   drafts: ")), "")


def alarms(result: dict[str, Any]) -> list[str]:
    return [f"{one['guess']}: {one['says']}" for one in result["findings"] if one["severity"] != "note"]


# --- every published family -------------------------------------------------------------------------------------------

FRAME, OWN_NORM = ("enorm", "hnorm", "eh_proj", "shared_head.norm"), ("enorm", "hnorm", "eh_proj", "final_layernorm")
FIRST = "embedding half first; fed after the final norm"
NEXTN = f"MTP, by 'num_nextn_predict_layers'; {FIRST}"
APART = "two projections, one of the embedding and one of the hidden state; fed after the final norm"
NEXT_IN_TEXT = {"text_config": {"num_nextn_predict_layers": 1, "num_hidden_layers": 2}}
Made = tuple[str, int] | tuple[dict[str, Any], list[str]]


def behind(*frame: str, prefix: str = "model.layers.2.") -> list[str]:
    """Return the names of one MTP layer after the two trunk layers."""
    return layer(prefix, *frame)


def typed(model_type: str, **keys: Any) -> dict[str, Any]:
    return {"model_type": model_type, "num_nextn_predict_layers": 1, **keys}


ROWS: dict[str, tuple[Made, int, str]] = {
    "deepseek_v3, kimi_k2": (("deepseek_v3", 1), 1, NEXTN),
    "sarvam_moe": (("sarvam_moe", 1), 1, NEXTN),
    "sarvam_mla": (("sarvam_mla", 1), 1, NEXTN),
    "glm4_moe": (("glm4_moe", 2), 2, NEXTN),
    "glm4v_moe": (("glm4v_moe", 1), 1, NEXTN),
    "glm4_moe_lite": (("glm4_moe_lite", 1), 1, NEXTN),
    "glm_ocr": (("glm_ocr", 1), 1, NEXTN),
    "deepseek_v32, glm_moe_dsa": ((typed("deepseek_v32"), behind(*FRAME)), 1, NEXTN),
    "glm5_next": (
        ({"model_type": "glm5_next", **NEXT_IN_TEXT}, behind(*FRAME, prefix="model.language_model.layers.2.")),
        1, NEXTN,
    ),
    "hy_v3": (("hy_v3", 1), 1, NEXTN),
    "hy_v4, counted": ((typed("hy_v4", num_nextn_predict_layers=2), behind(*OWN_NORM)), 1, NEXTN),
    "hy_v4, by its own name": ((typed("hy_v4_vl"), behind(*OWN_NORM, prefix="model.mtp_layers.0.")), 1, NEXTN),
    "step3p7": (("step3p7", 3), 3, NEXTN.replace("after", "before")),
    "bailing_moe_v2": (("bailing_moe", 1), 1, NEXTN),
    "bailing_hybrid": ((typed("bailing_hybrid"), behind(*OWN_NORM)), 1, NEXTN),
    "kimi_k3": (
        ({"model_type": "kimi_k3", **NEXT_IN_TEXT}, behind(*FRAME, prefix="language_model.model.layers.2.")), 1, NEXTN,
    ),
    "dots3_note": ((typed("dots3_note"), [*behind(*FRAME), "model.mtp.embed_tokens.weight"]), 1, NEXTN),
    "pangu_ultra_moe": ((typed("pangu_ultra_moe"), behind(*FRAME)), 1, NEXTN),
    "qwen3_5": (("qwen3_5_text", 1), 1, f"MTP, by 'mtp_num_hidden_layers'; {FIRST}"),
    "intern_s2_preview": (("intern_s2_preview", 1), 1, f"MTP, by 'mtp_num_hidden_layers'; {FIRST}"),
    "interns2_mobius": (
        ({"model_type": "interns2_mobius", "text_config": {"mtp_num_hidden_layers": 1, "num_hidden_layers": 2}},
         [*layer("mtp.layers.0."), *(f"mtp.{one}.weight" for one in ("fc", "norm", "pre_fc_norm_embedding",
                                                                     "pre_fc_norm_hidden"))]),
        1, f"MTP, by 'mtp_num_hidden_layers'; {FIRST}",
    ),
    "exaone_moe": (("exaone_moe", 1), 1, NEXTN),
    "mellum": (
        (typed("mellum"), [*layer("mtp.layers.0."), *(f"mtp.{one}.weight" for one in ("fc", "norm",
         "pre_fc_norm_embedding", "pre_fc_norm_hidden"))]), 1, NEXTN,
    ),
    "qwen4_exp": (
        ({"model_type": "qwen4_exp", "mtp_num_hidden_layers": 1},
         [*layer("mtp.layers.0."), *(f"mtp.{one}.weight" for one in ("fc_embedding", "fc_hidden", "norm",
          "pre_fc_norm_embedding", "pre_fc_norm_hidden", "hyper_connection_mixer"))]),
        1, f"MTP, by 'mtp_num_hidden_layers'; {APART}",
    ),
    "granite_docling": (({"model_type": "granite_docling"}, layer("mtp.layers.0.", "enorm")), 1, f"MTP; {FIRST}"),
    "nemotron_h": (("nemotron_h", 3), 3, NEXTN),
    "nemotron_h_omni": (("nemotron_h_omni", 1), 1, NEXTN),
    "nemotron3_5_transcribe": (("nemo_speechlm", 1), 1, NEXTN),
    "nemotron_h_puzzle": (("nemotron_h_puzzle", 1), 1, NEXTN),
    "mimo": (("mimo", 1), 1, "MTP, by 'num_nextn_predict_layers'; hidden half first; fed after the final norm"),
    "mimo_v2": (("mimo_v2_flash", 3), 3, f"MTP; {FIRST}"),
    "ernie4_5_moe": (("ernie4_5_moe", 1), 1, NEXTN),
    "longcat_flash": (("longcat_flash", 1), 1, f"MTP; {FIRST}"),
    "minimax_m3_vl": (
        ({"model_type": "minimax_m3_vl", "text_config": {"num_mtp_modules": 2, "num_hidden_layers": 2}},
         [name for k in (0, 1) for name in layer(f"language_model.mtp.layers.{k}.transformer_layer.")
          + [f"language_model.mtp.layers.{k}.{one}.weight" for one in OWN_NORM]]),
        2, "MTP, by 'num_mtp_modules'; embedding half first; fed after the final norm, "
        "later MTP layers before their norm",
    ),
    "inkling_mm_model": (
        ({"model_type": "inkling_mm_model", "mtp_config": {"num_nextn_predict_layers": 2},
          "text_config": {"num_hidden_layers": 2}},
         [name for k in (0, 1) for name in layer(f"model.mtp.layers.{k}.transformer_block.")
          + [f"model.mtp.layers.{k}.{one}.weight" for one in ("embed_norm", "hidden_norm", "input_proj")]]),
        2, "MTP, by 'mtp_config'; hidden half first; fed after the final norm",
    ),
    "gemma4_assistant": (({"model_type": "gemma4_assistant"}, []), 0, "no MTP layers"),
    "deepseek_v4": (
        (typed("deepseek_v4"), layer("mtp.0.", "enorm", "hnorm", "e_proj", "h_proj", "norm")), 1,
        f"MTP, by 'num_nextn_predict_layers'; {APART}",
    ),
    "a DSpark drafter": (
        ({"model_type": "deepseek_v4", "dspark_block_size": 5}, layer("mtp.0.", "main_proj")), 0,
        "DSpark, stages 1, block 5, by 'dspark_block_size'; no MTP layers",
    ),
}  # fmt: skip
"""Rows of families: a model of the tables, or keys and names of a folder; MTP layers; the line about what drafts."""


def of_row(row: str, path: Path) -> Path:
    (kind, rest), *_ = ROWS[row]
    if isinstance(kind, dict) and isinstance(rest, list):
        return folder_of(path, kind, rest)
    assert isinstance(kind, str)
    assert isinstance(rest, int)
    return make(path, LEFT.get(kind, kind), rest)


@pytest.mark.parametrize("row", ROWS)
def test_an_audit_lists_the_drafting_layers_of_a_family(row: str, tmp_path: Path) -> None:
    result = audit(of_row(row, tmp_path / "hf"))
    depths, line = ROWS[row][1:]
    assert result["sides"][0]["depths"]["files"] == depths
    assert drafts_line(result) == line
    assert [one for one in alarms(result) if one.startswith(("depth", "MTP"))] == []


NOT_DESCRIBED = ("granite_docling", "mellum", "deepseek_v32, glm_moe_dsa")
DESCRIBED_ROWS = [row for row in ROWS if isinstance(ROWS[row][0][0], dict) and ROWS[row][1]]


@pytest.mark.parametrize("row", [row for row in DESCRIBED_ROWS if row not in NOT_DESCRIBED])
def test_a_lost_head_of_a_family_that_does_not_convert_is_found(
    row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = of_row(row, tmp_path / "hf")
    whole = read(folder)
    frames = [name for name in whole if re.search(r"(proj|fc|fc_embedding|input_proj)\.weight$", name)]
    frames = [name for name in frames if "mtp" in name or ".2." in name]
    lost = next(name for name in frames if "o_proj" not in name and "up_proj" not in name)
    write(folder, {name: one for name, one in whole.items() if name != lost})
    found = alarms(audit(folder))
    assert any(one.startswith("depth incomplete") and lost in one for one in found), found
    assert main(["hf-to-mcore", str(folder), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "does not convert: " in said
    assert "megatron-mtp audit describes the folder" in said
    assert len(said.splitlines()) == 1


def test_an_unknown_model_type_is_rejected_with_the_nearest_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path / "hf", {"model_type": "qwen3_6_moe"}, [])
    assert main(["hf-to-mcore", str(folder), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.endswith(
        "the model_type 'qwen3_6_moe' is unknown here; the nearest that converts is 'qwen3_5_moe'; megatron-mtp audit "
        "describes the folder, and docs/develop/extending.md how to add a family.\n"
    )


# --- a DSpark drafter inside a model ----------------------------------------------------------------------------------

DSPARK = {
    "dspark_block_size": 5,
    "dspark_markov_rank": 2,
    "dspark_target_layer_ids": [0, 1],
    "dspark_noise_token_id": 3,
}
LAST = ("norm", "markov_head.markov_w1", "markov_head.markov_w2", "confidence_head.proj", "hc_head_fn", "hc_head_base")
STAGES = [
    *layer("mtp.0.", "main_proj", "main_norm"),
    *layer("mtp.1."),
    *layer("mtp.2.", *LAST),
]
PREVIEW = layer("mtp.0.", "enorm", "hnorm", "e_proj", "h_proj", "norm", "head", "hc_head_fn")
V4 = {"model_type": "deepseek_v4", "num_nextn_predict_layers": 3, **DSPARK}
TEXT = {"model_type": "deepseek_v41_text", "n_mtp_layers": 3, "num_nextn_predict_layers": 3, **DSPARK}
LARGE = ["mtp_dspark.layers.0.attn.wq.weight", "mtp_dspark.main_proj.weight"]
LOST_STAGE = [name for name in STAGES if not name.startswith("mtp.2.")]
TWINS: dict[str, tuple[dict[str, Any], list[str], str, list[str]]] = {
    "V4, preview": (
        {"model_type": "deepseek_v4", "num_nextn_predict_layers": 1}, PREVIEW,
        "MTP, by 'num_nextn_predict_layers'; two projections, one of the embedding and one of the hidden state; "
        "fed after the final norm", [],
    ),
    "V4, 0731": (V4, STAGES, "DSpark, stages 3, block 5, by 'dspark_block_size'; no MTP layers", []),
    "V4.1": (
        {"model_type": "deepseek_v41", "text_config": TEXT},
        [name.replace("markov_w1", "embed").replace("markov_w2", "head") for name in STAGES if "hc_head" not in name],
        "DSpark, stages 3, block 5, by 'dspark_block_size'; no MTP layers", [],
    ),
    "Mistral Large 4": (
        {"model_type": "mistral_large4", **DSPARK}, LARGE,
        "DSpark, stages 1, block 5, by 'dspark_block_size'; no MTP layers", [],
    ),
    "a stage lost": (
        V4, LOST_STAGE, "DSpark, stages 2, block 5, by 'dspark_block_size'; no MTP layers",
        ["drafter incomplete: The DSpark drafter inside of the model lacks stage 2."],
    ),
    "the first head lost": (
        V4, [name for name in STAGES if "main_proj" not in name],
        "DSpark, stages 3, block 5, by 'dspark_block_size'; no MTP layers",
        ["drafter incomplete: The DSpark drafter inside of the model lacks 'mtp.0.main_proj'."],
    ),
    "a layer of a stage lost": (
        V4, [name for name in STAGES if name != "mtp.1.mlp.up_proj.weight"],
        "DSpark, stages 3, block 5, by 'dspark_block_size'; no MTP layers",
        ["drafter incomplete: The DSpark drafter inside of the model lacks 'mtp.1.mlp.up_proj.weight'."],
    ),
    "dropped by a save": (
        V4, [], "DSpark, stages 0, block 5, by 'dspark_block_size'; no MTP layers",
        ["drafter dropped: The config has 'dspark_block_size', 'dspark_target_layer_ids', 'dspark_noise_token_id' and "
         "1 more, but the files hold no tensor of a DSpark drafter."],
    ),
    "the keys lost": (
        {"model_type": "deepseek_v4", "num_nextn_predict_layers": 3}, STAGES,
        "DSpark, stages 3, block not in the config; no MTP layers",
        ["drafter incomplete: The files hold a DSpark drafter of 3 stages, in mtp.*, but the config lacks "
         "'dspark_block_size', 'dspark_target_layer_ids', 'dspark_noise_token_id' and 1 more, so engines do not load "
         "it."],
    ),
}  # fmt: skip
"""Keys and tensors of a folder, the line about what drafts, and what is wrong."""


@pytest.mark.parametrize("twin", TWINS)
def test_a_drafter_inside_a_model_does_not_count_as_a_depth(twin: str, tmp_path: Path) -> None:
    keys, names, line, wrong = TWINS[twin]
    result = audit(folder_of(tmp_path / "hf", keys, names))
    assert alarms(result) == wrong
    assert drafts_line(result) == line
    (side,) = result["sides"]
    assert side["depths"]["files"] == (1 if twin == "V4, preview" else 0)
    says = [one["says"] for one in result["findings"] if one["guess"] == "drafter inside"]
    assert len(says) == (twin not in ("V4, preview", "dropped by a save"))
    assert all("no MTP layers. Engines load it by the method 'dspark'" in one for one in says)


@pytest.mark.parametrize("twin", ["V4, 0731", "V4.1", "Mistral Large 4", "a stage lost"])
def test_a_folder_with_a_drafter_inside_is_refused_by_its_name(
    twin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, names, *_ = TWINS[twin]
    folder, out = folder_of(tmp_path / "hf", keys, names), tmp_path / "out"
    for command in (["hf-to-mcore", folder, out], ["graft", folder, folder, out]):
        capsys.readouterr()
        assert main([str(word) for word in command]) == 2
        assert "a DSpark drafter" in capsys.readouterr().err, command
        assert not list(tmp_path.glob("out*"))


@pytest.mark.usefixtures("megatron")
def test_a_drafter_inside_a_known_model_is_carried_but_not_a_depth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "hf", "deepseek_v3-lean", 0)
    stages = {name: torch.randn(SIZE, SIZE) for name in STAGES}
    keys = json.loads((folder / "config.json").read_text()) | DSPARK | {"num_nextn_predict_layers": 3}
    write(folder, read(folder) | stages)
    (folder / "config.json").write_text(json.dumps(keys))
    assert alarms(audit(folder)) == []
    done = hf_to_mcore(folder, tmp_path / "mcore", QUIET)
    assert done["depths"] == 0
    assert done["drafter inside"] == "a DSpark drafter of 3 stages, in mtp.*, carried as it is, and no MTP layers"
    assert alarms(audit(tmp_path / "mcore")) == []
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", QUIET, form_of(tmp_path / "mcore"))
    assert_same(read(folder), read(tmp_path / "back"))
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == keys
    what = f"{tmp_path / 'mcore'} has a DSpark drafter of 3 stages, in mtp.*, not MTP layers; "
    with pytest.raises(ValueError, match=what):
        plan_attaching(tmp_path / "mcore", 1, Init("random"))
    with pytest.raises(ValueError, match=what):
        plan_dropping(tmp_path / "mcore", 1)
    with pytest.raises(ValueError, match=f"{folder} has a DSpark drafter of 3 stages"):
        plan_graft(folder, tmp_path / "mcore", QUIET)
    plan_dropping(tmp_path / "mcore", 0).write(tmp_path / "less", QUIET)
    mcore_to_hf(tmp_path / "less", tmp_path / "trunk", QUIET, form_of(tmp_path / "less"))
    assert_same({name: one for name, one in read(folder).items() if name not in stages}, read(tmp_path / "trunk"))
    left = json.loads((tmp_path / "trunk" / "config.json").read_text())
    assert {name for name in keys if name not in left} == {*DSPARK, "num_nextn_predict_layers"}
    assert StoredDepths.of([f"carried.{name}" for name in STAGES]).layers == 0


def assert_same(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
