"""Audits of single folders: no findings for intact ones of every family and format; every planted fault is found."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from added_depth import with_depth
from hf_models import MODELS, Tensors, make, read, write
from quantized_models import DEPTH, FORMS, FP8, coded, fp8, quantized, with_keys
from tiers import tiered
from trunk_models import LEFT, OTHERS

from megatron_mtp.checkpoint.audit.auditing import audit
from megatron_mtp.checkpoint.convert.plan import HFModel
from megatron_mtp.cli.convert import main
from megatron_mtp.megatron.checkpoint import HF_FILES

Spoil = Callable[[Path], None]
WITH_DEPTHS = ("mimo_v2_flash", "longcat_flash", "step3p7", "ernie4_5_moe", "exaone_moe", "exaone4_5", "glm_ocr")
CARRIED = [name for name in (*LEFT, *OTHERS, *WITH_DEPTHS) if name != "nemotron_h_puzzle"]  # its layers all differ
QUICK = ("glm_moe_dsa", "gemma3_text", "llama4_text", "mimo_v2_flash")


def made(folder: Path, name: str) -> Path:
    """Create a small folder with the family's MTP layers."""
    return make(
        folder, (LEFT | OTHERS).get(name, name), MODELS[name].depths[-1] if name in MODELS else 0, torch.bfloat16
    )


def alarms(folder: Path) -> list[str]:
    return [f"{one['guess']}: {one['says']}" for one in audit(folder)["findings"] if one["severity"] != "note"]


# --- trunks that are passed through -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix) for name in CARRIED]
)
def test_a_trunk_without_rules_is_sound_and_a_lost_tensor_or_layer_is_found(name: str, tmp_path: Path) -> None:
    """The conversion finds it too; it once wrote the rest and reported it as verified."""
    folder = made(tmp_path / name, name)
    assert alarms(folder) == []
    whole = read(folder)
    inside = [key for key in whole if re.search(r"\blayers\.\d+\.", key)]
    lost = [{key} for key in random.Random(1).sample(inside, 2)]
    lost += [{key for key in inside if re.search(r"(^|model\.)layers\.1\.", key) and "mtp" not in key}]
    for names in filter(None, lost):
        write(folder, {key: tensor for key, tensor in whole.items() if key not in names})
        assert alarms(folder), names
        with pytest.raises(ValueError, match=r"lacks|tensors of|is unknown here"):
            HFModel.read(folder)


def test_carried_tensors_of_a_checkpoint_are_checked_for_shape(tmp_path: Path) -> None:
    assert main(["hf-to-mcore", str(made(tmp_path / "hf", "mimo_v2_flash")), str(tmp_path / "saved")]) == 0
    assert alarms(tmp_path / "saved") == []
    config = tmp_path / "saved" / HF_FILES / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 60}))
    found = alarms(tmp_path / "saved")
    assert {one.partition(":")[0] for one in found} == {"shape"}
    assert any("'carried.model.layers.0.mlp.up_proj.weight': stored as [56, 48]" in one for one in found)
    assert any("'carried.model.mtp.layers.0.mlp.up_proj.weight'" in one for one in found)


def test_depths_of_a_carried_trunk_are_counted(tmp_path: Path) -> None:
    folder = made(tmp_path / "glm5", "glm_moe_dsa")
    with_depth(folder)
    assert alarms(folder) == []
    assert HFModel.read(folder).layout.depths == 1
    whole = read(folder)
    for lost in (r"layers\.2\.", r"layers\.2\.self_attn\.o_proj", r"layers\.2\.enorm"):
        write(folder, {name: tensor for name, tensor in whole.items() if not re.search(lost, name)})
        assert any("depth" in one or "MTP dropped" in one for one in alarms(folder))
        with pytest.raises(ValueError, match=r"depth|lacks"):
            HFModel.read(folder)


@pytest.mark.parametrize(
    ("name", "depths", "keys", "says"),
    [
        ("qwen3_next", 0, {}, "MTP dropped: Models of this family are published with 1 depth, and no key"),
        ("longcat_flash", 0, {}, "MTP dropped: Models of this family are published with 1 depth, and no key"),
        ("mimo_v2_flash", 2, {"num_nextn_predict_layers": "absent"}, "depth missing: Models of this family"),
        ("llama", 0, {"num_nextn_predict_layers": 1}, "MTP dropped: The config says 1 depth, the files hold 0: all"),
        ("glm4_moe", 1, {"num_nextn_predict_layers": None}, "depth count: No key of the config counts the 1 depth"),
        ("glm4_moe", 1, {"num_nextn_predict_layers": "absent"}, "depth count: No key of the config counts"),
        ("glm4_moe", 1, {"num_nextn_predict_layers": 0}, "depth count: The config says 0 depths, the files hold 1"),
    ],
)
def test_counts_of_the_config_are_compared_with_the_files(
    name: str, depths: int, keys: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = make(tmp_path / name, name, depths)
    with_keys(folder, **keys)
    (found,) = alarms(folder)
    assert found.startswith(says)


def test_experts_of_longcat_that_return_their_input_may_have_weights_or_none(tmp_path: Path) -> None:
    """transformers saves unused rows for them; published folders have none."""
    folder = make(tmp_path / "longcat", "longcat_flash", 1)
    published = read(folder)
    numbers = {int(found.group(1)) for name in published if (found := re.search(r"\.experts\.(\d+)\.", name))}
    assert (numbers, alarms(folder)) == ({0, 1, 2, 3}, [])
    assert HFModel.read(folder).layout.depths == 1
    of_one = {name: one for name, one in published.items() if ".experts.0." in name}
    saved = {
        n.replace("experts.0", f"experts.{idle}"): torch.randn_like(t) for n, t in of_one.items() for idle in (4, 5)
    }
    write(folder, {**saved, **published})
    assert alarms(folder) == []
    lost = "model.layers.1.mlp.experts.3.up_proj.weight"
    write(folder, {name: one for name, one in {**saved, **published}.items() if name != lost})
    (found,) = alarms(folder)
    assert lost in found


def test_an_index_that_later_drafts_share_needs_an_indexer(tmp_path: Path) -> None:
    """GLM-5.2 writes the key; without the indexer engines draft with a chain."""
    folder = made(tmp_path / "glm5", "glm_moe_dsa")
    with_depth(folder)
    with_keys(folder, index_share_for_mtp_iteration=True)
    assert alarms(folder) == []
    other = make(tmp_path / "glm4", "glm4_moe", 1)
    with_keys(other, index_share_for_mtp_iteration=True)
    (found,) = alarms(other)
    assert found.startswith("index share: 'index_share_for_mtp_iteration' is true, but the MTP layer has no indexer")


@pytest.mark.parametrize("copy", ["embed_tokens", "shared_head.head"])
def test_a_stale_copy_of_a_trunk_tensor_is_found(copy: str, tmp_path: Path) -> None:
    """Fine-tuning changes embedding and head, but not the copies in an MTP layer."""
    folder = make(tmp_path / "hf", "glm4_moe", 1, torch.bfloat16)
    whole = read(folder)
    (name,) = (key for key in whole if key.endswith(f"layers.3.{copy}.weight"))
    assert alarms(folder) == []
    write(folder, whole | {name: whole[name] * 1.5})
    (found,) = alarms(folder)
    assert found.startswith(f"stale copy: '{name}'")


def test_a_copy_in_a_wider_type_is_not_stale(tmp_path: Path) -> None:
    """A merge may carry an MTP layer over in float32; a single different number still makes the copy stale."""
    folder = make(tmp_path / "hf", "glm4_moe", 1, torch.bfloat16)
    whole = {name: one.float() if ".layers.3." in name else one for name, one in read(folder).items()}
    write(folder, whole)
    assert {one.partition(":")[0] for one in alarms(folder)} == {"type"}
    notes = [one["says"] for one in audit(folder)["findings"] if one["guess"] == "tied copy"]
    assert any("2 tensors repeat embedding or head, with the same numbers in another type" in one for one in notes)
    assert HFModel.read(folder).layout.depths == 1
    name = "model.layers.3.embed_tokens.weight"
    whole[name] = whole[name].clone()
    whole[name][5, 7] += 0.125
    write(folder, whole)
    assert any(one.startswith(f"stale copy: '{name}'") for one in alarms(folder))


def test_a_count_of_0_means_that_no_mtp_layer_is_expected(tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", "qwen3_next", 0)
    with_keys(folder, mtp_num_hidden_layers=0)
    assert alarms(folder) == []


# --- quantized folders -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", tiered(FORMS, [*FORMS][::3]))
def test_a_sound_quantized_folder_has_no_finding_and_a_lost_part_of_a_weight_is_found(
    form: str, tmp_path: Path
) -> None:
    folder = quantized(tmp_path / "hf", form)
    assert alarms(folder) == []
    whole = read(folder)
    scale = next(name for name in whole if name.endswith(("_scale_inv", "weight_scale", ".scales", ".absmax")))
    write(folder, {name: tensor for name, tensor in whole.items() if name != scale})
    assert any(one.startswith("quantization: ") for one in alarms(folder))
    stem = scale.removesuffix("weight_scale_inv").removesuffix("weight_scale").removesuffix("scales")
    stem = stem.removesuffix("weight.absmax")
    write(folder, {name: tensor for name, tensor in whole.items() if not name.startswith(stem)})
    assert any(f"'{stem}weight'" in one for one in alarms(folder))


@pytest.mark.parametrize(
    ("plain", "listed", "says"),
    [
        (DEPTH, ["model.layers.3"], []),
        (DEPTH, ["lm_head"], ["weights of the MTP layers are not quantized, but the config promises FP8"]),
        (
            ("none",),
            ["model.layers.3"],
            ["but the config promises no quantization"],
        ),
        (("model.",), ["model.layers.3"], ["but no weight is quantized (they are"]),
    ],
)
def test_the_list_of_unquantized_modules_is_compared_with_the_tensors(
    plain: tuple[str, ...], listed: list[str], says: list[str], tmp_path: Path
) -> None:
    folder = make(tmp_path / "hf", "glm4_moe", 1, torch.bfloat16)
    write(folder, coded(read(folder), fp8, plain))
    with_keys(folder, quantization_config=FP8 | {"modules_to_not_convert": listed})
    found = alarms(folder)
    assert len(found) == len(says)
    assert all(part in one for part, one in zip(says, found, strict=True))


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", [True, False])
def test_a_single_file_beside_an_index_is_described(shard: bool, tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", "llama", 0)
    name = "model-00001-of-00001.safetensors"
    index = {"weight_map": dict.fromkeys(read(folder), name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if shard:
        (folder / name).write_bytes((folder / "model.safetensors").read_bytes())
    (found,) = alarms(folder)
    assert found.startswith("damaged file: ")
    assert ("is both in" if shard else "or remove the index, if model.safetensors is the model") in found


def of_deepseek_v4(folder: Path, lost: str = "none") -> Path:
    """Create two layers and an MTP layer with DeepSeek-V4's names: FP8, and FP4 experts with E8M0 scales named
    `.scale`.
    """
    frame = [f"mtp.0.{part}.weight" for part in ("enorm", "hnorm", "e_proj", "h_proj", "norm")]
    tensors: Tensors = {name: torch.randn(8, 32) for name in ("embed.weight", "head.weight", *frame)}
    for part in ("layers.0.", "layers.1.", "mtp.0."):
        numbers = {"attn.wkv": torch.randn(32, 32), "ffn.experts.0.w1": torch.randint(-128, 128, (32, 16))}
        scales = {"attn.wkv": torch.ones(1, 1), "ffn.experts.0.w1": torch.ones(32, 1)}
        tensors |= {f"{part}{name}.scale": one.to(torch.float8_e8m0fnu) for name, one in scales.items()}
        tensors[f"{part}attn.wkv.weight"] = numbers["attn.wkv"].to(torch.float8_e4m3fn)
        tensors[f"{part}ffn.experts.0.w1.weight"] = numbers["ffn.experts.0.w1"].to(torch.int8)
    folder.mkdir()
    write(folder, {name: tensor for name, tensor in tensors.items() if not name.startswith(lost)})
    keys = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "vocab_size": 8}
    keys |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1, "quantization_config": FP8}
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


def counts(folder: Path) -> tuple[int, int, int]:
    """Return the layers, MTP layers and tensors that an audit reports."""
    (side,) = audit(folder)["sides"]
    return side["layers"]["files"], side["depths"]["files"], side["tensors"]


def test_a_model_of_an_unknown_type_is_described_by_its_names(tmp_path: Path) -> None:
    sound, lost = of_deepseek_v4(tmp_path / "sound"), of_deepseek_v4(tmp_path / "lost", "mtp.")
    assert (alarms(sound), counts(sound)) == ([], (2, 1, 13))
    (found,) = alarms(lost)
    assert found.startswith("MTP dropped: The config says 1 depth, the files hold 0")
    tensors = read(sound)
    write(sound, {name: 0 * tensor if tensor.dtype == torch.int8 else tensor for name, tensor in tensors.items()})
    assert alarms(sound) == []
    notes = [one["says"] for one in audit(sound)["findings"]]
    assert any("all numbers are 0" in one for one in notes)  # its training might leave such weights


@pytest.mark.parametrize(("family", "depths"), [("glm4_moe", 2), ("longcat_flash", 1)])
def test_a_config_without_a_model_type_is_described_by_its_names(family: str, depths: int, tmp_path: Path) -> None:
    """LongCat-2.0 is published like this; its MTP layer has its own embedding, which is not a copy of the trunk's."""
    folder = make(tmp_path / "hf", family, depths)
    layers, held, tensors = counts(folder)
    with_keys(folder, model_type=None)
    assert alarms(folder) == []
    assert counts(folder) == (layers, held, tensors)
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    notes = [one["says"] for one in audit(folder)["findings"]]
    assert any(one.startswith(f"The config has no model_type (architectures {name})") for one in notes)


def bare_fp8(tensors: Tensors) -> None:
    tensors[Q] = tensors[Q].to(torch.float8_e4m3fn)


def stray_scale(tensors: Tensors) -> None:
    tensors[f"{Q}_scale_inv"] = torch.ones(1, 1)


def retyped(dtype: torch.dtype) -> Callable[[Tensors], None]:
    def spoil(tensors: Tensors) -> None:
        tensors[Q] = torch.zeros(tensors[Q].shape).to(dtype)

    return spoil


Q = "model.layers.1.self_attn.q_proj.weight"
STRANGE: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "FP8 without a scale": (bare_fp8, f"'{Q}' is FP8 without '{Q}_scale_inv'"),
    "a scale beside a whole weight": (stray_scale, f"'{Q}' is float32, but '{Q}_scale_inv' with it is the scale"),
    "the type of scales": (retyped(torch.float8_e8m0fnu), "of type 'float8_e8m0fnu', which is the type of scales"),
    "a complex type": (retyped(torch.complex64), f"has '{Q}' of type 'C64', which is none of F64, F32"),
    "a type of other processors": (retyped(torch.float8_e4m3fnuz), f"has '{Q}' of type 'F8_E4M3FNUZ', which is none"),
}
"""A tensor that is not a weight, and the expected finding."""


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("strange", STRANGE)
def test_an_unknown_tensor_is_named_and_the_rest_described(strange: str, lost: bool, tmp_path: Path) -> None:
    """It also reports whether the MTP layers are complete."""
    spoil, says = STRANGE[strange]
    folder = make(tmp_path / "hf", "glm4_moe", 1)
    tensors = {
        name: tensor for name, tensor in read(folder).items() if not (lost and name.startswith("model.layers.3"))
    }
    spoil(tensors)
    write(folder, tensors)
    found = alarms(folder)
    assert any(says in one for one in found), found
    assert len(found) == (2 if lost else 1)
    assert any(one.startswith("MTP dropped") for one in found) == lost
    held = len(tensors) - (strange == "a scale beside a whole weight")
    assert counts(folder) == (3, 0 if lost else 1, held)


def test_a_shard_that_is_missing_or_broken_is_named_and_the_others_are_described(tmp_path: Path) -> None:
    """Names that the index lists for it count as present."""
    folder = make(tmp_path / "hf", "glm4_moe", 1)
    tensors = read(folder)
    first = {name for name in tensors if not name.startswith("model.layers.3")}
    write(folder, {name: tensors[name] for name in first})
    files = {name: "model.safetensors" if name in first else "other.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for says in ("into 'other.safetensors', which is not there", "other.safetensors is not a whole safetensors file"):
        (found,) = alarms(folder)
        assert says in found
        assert counts(folder) == (3, 0, len(first))
        (folder / "other.safetensors").write_bytes(b"half a file")


def test_a_warning_on_both_sides_is_not_a_difference(tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", "qwen3_next", 0)
    assert len(alarms(folder)) == 1
    both = audit(folder, folder)
    assert both["ok"]
    assert any(one["says"].startswith("On both sides: Models of this family") for one in both["findings"])


def test_an_export_without_mtp_layers_counts_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "hf", "qwen3_next", 0)
    assert main(["hf-to-mcore", str(folder), str(tmp_path / "mcore"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["MTP layers missing"].startswith("1 of 1 of the published models")
    assert main(["mcore-to-hf", str(tmp_path / "mcore"), str(tmp_path / "back")]) == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["mtp_num_hidden_layers"] == 0
    assert alarms(tmp_path / "back") == []
