"""A head under a wrong name is present, but no loader finds it: conversion, graft and audit report it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_models import make, read, write
from judged_models import QUIET
from mellum import mellum_head
from tiers import tiered
from trunk_models import LEFT

from megatron_mtp.checkpoint.audit.auditing import audit
from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.families.naming import misnamed, unwrapped
from megatron_mtp.cli.convert import main

Rename = Callable[[str], str]


def head_under(prefix: str, to: str) -> Rename:
    return lambda name: to + name.removeprefix(prefix) if name.startswith(prefix) else name


def everything(prefix: str) -> Rename:
    return lambda name: prefix + name


def inside(word: str) -> Rename:
    return lambda name: name.replace("layers.0.", f"layers.0.{word}")


FC, PROJECTION = "mtp.fc.weight", "model.layers.3.eh_proj.weight"
TEXT = "model.language_model."
OCR = f"{TEXT}layers.3."
RENAMED: dict[str, tuple[str, Rename, str, str]] = {
    "head of the wrapper": ("qwen3_5", head_under("mtp.", "language_model.mtp."), f"language_model.{FC}", FC),
    "head of the model": ("qwen3_5", head_under("mtp.", "model.mtp."), f"model.{FC}", FC),
    "head beside the text": ("qwen3_5", head_under("mtp.", TEXT + "mtp."), TEXT + FC, FC),
    "no key counts it": ("qwen3_next", head_under("mtp.", "language_model.mtp."), f"language_model.{FC}", FC),
    "peft": ("qwen3_5", everything("base_model.model."), "base_model.model.lm_head.weight", "lm_head.weight"),
    "compiled": ("glm4_moe", everything("_orig_mod."), "_orig_mod.lm_head.weight", "lm_head.weight"),
    "DDP and compiled": ("mimo", everything("module._orig_mod."), "module._orig_mod.lm_head.weight", "lm_head.weight"),
    "FSDP by layer": (
        "glm4_moe",
        inside("_fsdp_wrapped_module."),
        "model.layers.0._fsdp_wrapped_module.input_layernorm.weight",
        "model.layers.0.input_layernorm.weight",
    ),
    "numbered head of the wrapper": (
        "glm4_moe",
        head_under("model.layers.3.", "model.language_model.layers.3."),
        "model.language_model.layers.3.eh_proj.weight",
        PROJECTION,
    ),
    "numbered head of the text": ("glm_ocr", head_under(OCR, "model.layers.3."), PROJECTION, f"{OCR}eh_proj.weight"),
    "own prefix lost": (
        "mimo_v2_flash",
        head_under("model.mtp.", "mtp."),
        "mtp.layers.0.eh_proj.weight",
        "model.mtp.layers.0.eh_proj.weight",
    ),
    "Mellum": ("mellum", head_under("mtp.", "model.mtp."), f"model.{FC}", FC),
}  # fmt: skip
"""A model, the renaming, one wrong name, and the right one."""
QUICK = ("head of the wrapper", "peft", "FSDP by layer", "numbered head of the text")


def with_head(folder: Path, name: str) -> Path:
    make(folder, LEFT.get(name, name), int(name not in LEFT), torch.bfloat16)
    return mellum_head(folder) if name == "mellum" else folder


@pytest.mark.parametrize("case", tiered(RENAMED, QUICK))
def test_a_misnamed_head_is_named_with_its_right_name(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, rename, wrong, right = RENAMED[case]
    folder = with_head(tmp_path / "hf", name)
    whole = read(folder)
    write(folder, {rename(key): tensor for key, tensor in whole.items()})
    count = sum(rename(key) != key for key in whole)
    for words in (["hf-to-mcore", folder], ["graft", folder, folder]):
        capsys.readouterr()
        assert main([*map(str, words), str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        assert f" and {count - 1} more, which are not names of " in said, said
        assert "rename them all alike." in said
    found, *others = (one for one in audit(folder)["findings"] if one["severity"] != "note")
    assert (found["guess"], len(found["names"])) == ("tensor misnamed", count)
    assert wrong in found["names"]
    assert misnamed({rename(key) for key in whole}, whole)[wrong] == right
    write(folder, whole)
    assert [one for one in audit(folder)["findings"] if one["severity"] != "note"] == others


def test_the_error_names_the_misnamed_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "hf", "qwen3_5", 1)
    whole = read(folder)
    capsys.readouterr()
    write(folder, {("language_model." if key == FC else "") + key: tensor for key, tensor in whole.items()})
    assert main(["hf-to-mcore", str(folder), str(tmp_path / "out")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"megatron-mtp convert: error: {folder} has 'language_model.mtp.fc.weight'")
    assert said.endswith(" 'mtp.fc.weight'; rename it.")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(("held", "counted"), [(0, 1), (1, 3), (3, 1)])
def test_a_wrong_layer_count_advises_a_download_or_another_count(
    held: int, counted: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "hf", "glm4_moe", held)
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(keys | {"num_nextn_predict_layers": counted}))
    capsys.readouterr()
    assert main(["hf-to-mcore", str(folder), str(tmp_path / "out")]) == 2
    says = "fetch or export the folder again, or put the MTP layers of the model that it was made from on its trunk"
    if held > counted:
        says = f'put "num_nextn_predict_layers": {held} there, since engines load no depth that is not counted.'
    assert says in capsys.readouterr().err


def test_names_without_what_wrappers_add() -> None:
    names = {
        "base_model.model.model.layers.4.eh_proj.weight": "model.layers.4.eh_proj.weight",
        "module.base_model.model._orig_mod.mtp.fc.weight": "mtp.fc.weight",
        "model.layers.4._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.w": "model.layers.4.mlp.w",
        "model.module.weight": "model.module.weight",
        "base_model.embed.weight": "base_model.embed.weight",
    }
    assert {name: unwrapped(name) for name in names} == names


def test_other_tensors_are_not_taken_for_misnamed_ones() -> None:
    """Two tensors of one model may differ only in the prefix."""
    both = {"model.embed_tokens.weight", "language_model.model.embed_tokens.weight"}
    assert misnamed(both, ["model.embed_tokens.weight"]) == {}
    assert misnamed({"visual.blocks.0.norm.weight"}, ["model.norm.weight"]) == {}


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_layers", None])
def test_the_depth_of_mellum_is_counted_and_comes_back(key: str | None, tmp_path: Path) -> None:
    folder = with_head(tmp_path / "hf", "mellum")
    keys = json.loads((folder / "config.json").read_text())
    keys = {name: value for name, value in keys.items() if "nextn" not in name and "mtp" not in name}
    (folder / "config.json").write_text(json.dumps(keys | ({} if key is None else {key: 1})))
    result = audit(folder)
    assert (result["sides"][0]["depths"], result["findings"]) == ({"config": key and 1, "files": 1}, [])
    hf_to_mcore(folder, tmp_path / "mcore", QUIET)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", QUIET, form_of(tmp_path / "mcore"))
    one, other = read(folder), read(tmp_path / "back")
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)
    assert audit(tmp_path / "back")["findings"] == []
