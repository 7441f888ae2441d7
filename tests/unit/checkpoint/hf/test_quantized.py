"""Quantized folders are read as transformers reads them, converted, and exported in bfloat16 under the same names."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make, read, write
from judged_models import QUIET
from quantized_folders import blocked_folder, fp8_folder, mxfp4_folder
from quantized_models import FORMS
from quantized_models import quantized as coded_folder
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import hf_folder_form, kept_form
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.hf.folder import HFFolder
from megatron_mtp.checkpoint.hf.forms.form import MisfitError, Numbers
from megatron_mtp.checkpoint.hf.forms.fp4 import FP4, from_mxfp4
from megatron_mtp.checkpoint.hf.quantized import QuantizationSettings, activation_scales, quantized_weights
from megatron_mtp.checkpoint.verify.reference_forms import read_tensors


def test_mxfp4_is_read_as_transformers_reads_it() -> None:
    torch.manual_seed(1)
    blocks, scales = torch.randint(0, 256, (3, 8, 2, 16)).byte(), torch.randint(100, 150, (3, 8, 2)).byte()
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(from_mxfp4({"_blocks": blocks, "_scales": scales}, Numbers()), theirs)


def test_a_byte_holds_two_fp4_numbers_lower_half_first() -> None:
    blocks, scales = torch.tensor([[[[0x21, 0xF7]]]]).byte(), torch.tensor([[[128]]]).byte()
    expected = [2 * FP4[number] for number in (1, 2, 7, 15)]
    assert from_mxfp4({"_blocks": blocks, "_scales": scales}, Numbers()).flatten().tolist() == expected


F8, BF16, BYTE = torch.float8_e4m3fn, torch.bfloat16, torch.uint8
ONES = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("name", "scale", "expected"),
    [
        ("w_scale_inv", torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [[1, 1, 1, 2], [1, 1, 1, 2], [3, 3, 3, 4]]),
        ("w_scale", torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [[1, 1, 1, 2], [1, 1, 1, 2], [3, 3, 3, 4]]),
        (
            "w_scale",
            torch.tensor([[1.0, 2.0], [4.0, 8.0]]).to(torch.float8_e8m0fnu),
            [[1, 1, 1, 2]] * 2 + [[4, 4, 4, 8]],
        ),
        ("w_scale", torch.tensor([[2.0], [3.0], [0.5]]), [[2] * 4, [3] * 4, [0.5] * 4]),
        ("w_scale", torch.tensor(0.5), [[0.5] * 4] * 3),
    ],
)
def test_a_weight_is_multiplied_by_the_scale_of_its_block_row_or_tensor(
    name: str, scale: Tensor, expected: list[list[float]]
) -> None:
    stored = {"w": ((3, 4), F8), name: (tuple(scale.shape), scale.dtype)}
    found = quantized_weights(stored, Numbers(block=(2, 3)))["w"]
    part = f"weight{name.removeprefix('w')}"
    assert found.parts == {"weight": "w", part: name}
    assert found.decode({"weight": ONES.to(F8), part: scale}).tolist() == expected


def test_every_weight_of_several_tensors_is_found_with_its_parts() -> None:
    stored = {
        "a.weight": ((4, 6), F8), "a.weight_scale_inv": ((2, 2), torch.float32),
        "b.weight": ((4, 6), F8), "b.weight_scale": ((4, 1), BF16), "b.input_scale": ((1,), BF16),
        "c_blocks": ((2, 8, 1, 16), BYTE), "c_scales": ((2, 8, 1), BYTE),
    }  # fmt: skip
    weights = quantized_weights(stored, Numbers(block=(2, 3)))
    assert {name: (tuple(weight.parts.values()), weight.shape) for name, weight in weights.items()} == {
        "a.weight": (("a.weight", "a.weight_scale_inv"), (4, 6)),
        "b.weight": (("b.weight", "b.weight_scale"), (4, 6)),
        "c": (("c_blocks", "c_scales"), (2, 32, 8)),
    }
    assert activation_scales(stored) == ["b.input_scale"]


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ({"w": ((4, 6), BF16), "w_scale_inv": ((2, 2), BF16)}, "is bfloat16, but 'w_scale_inv' with it is the scale"),
        ({"w": ((4, 6), BF16), "w_scale": ((1,), BF16)}, "is bfloat16, but 'w_scale' with it is the scale"),
        ({"w": ((4, 6), F8)}, "is FP8 without 'w_scale_inv' or 'w_scale'"),
        ({"w": ((4, 6), F8), "w_scale_inv": ((1, 1), BF16)}, "is FP8 of shape 4x6 with scales of shape 1x1"),
        ({"w": ((4, 6), F8), "w_scale": ((1, 6), BF16)}, "is FP8 of shape 4x6 with scales of shape 1x6"),
        ({"w": ((4, 6), F8), "w_scale": ((1,), BF16), "w_scale_inv": ((2, 2), BF16)}, "has two scales"),
        (
            {"w": ((2, 32, 8), BF16), "w_blocks": ((2, 8, 1, 16), BYTE), "w_scales": ((2, 8, 1), BYTE)},
            "is stored next to a whole 'w' too",
        ),
        ({"w_blocks": ((2, 8, 1, 16), BYTE), "w_scales": ((2, 8), BYTE)}, "is not a weight in MXFP4"),
    ],
)
def test_incomplete_quantized_tensors_are_rejected(stored: dict[str, Any], says: str) -> None:
    """Regression: a leftover scale once made a BF16 weight 1,000 times smaller, in every comparison alike."""
    (weight,) = quantized_weights(stored, Numbers(block=(2, 3))).values()
    assert says in weight.fault
    with pytest.raises(MisfitError, match=re.escape(says)):
        weight.decode({})


def rows_folder(folder: Path) -> Path:
    """Write Llama's FP8 with one scale per row."""
    folder = fp8_folder(folder)
    keys = json.loads((folder / "config.json").read_text())
    keys["quantization_config"] = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


@pytest.mark.parametrize("make_folder", [fp8_folder, blocked_folder, rows_folder, mxfp4_folder])
def test_a_quantized_folder_converts_and_comes_back_in_bfloat16(make_folder: object, tmp_path: Path) -> None:
    assert callable(make_folder)
    folder = make_folder(tmp_path / "hf")
    hf_to_mcore(folder, tmp_path / "mcore", QUIET)
    form = kept_form(tmp_path / "mcore")
    assert form is not None
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", QUIET, form)
    numbers = QuantizationSettings.of(folder, json.loads((folder / "config.json").read_text())).numbers
    source, back = HFFolder(folder, numbers), read(tmp_path / "back")
    assert source.quantized
    assert source.tensors.keys() == back.keys()
    assert [name for name, tensor in back.items() if not torch.equal(tensor, source.read(name))] == []
    assert {tensor.dtype for tensor in back.values()} == {torch.bfloat16}
    theirs = read_tensors(folder)  # verify's reference reader, which shares no code with HFFolder
    assert [name for name in back if not torch.equal(theirs[name], source.read(name).float())] == []
    keys = json.loads((tmp_path / "back/config.json").read_text())
    assert "quantization_config" not in keys
    assert keys["dtype"] == "bfloat16"


@pytest.mark.parametrize("form", [name for name in FORMS if name != "bitsandbytes"])
def test_a_folder_of_every_form_becomes_a_trunk_with_its_head(form: str, tmp_path: Path) -> None:
    """The dtype is that of 16-bit scales, otherwise bfloat16; the reader's bits survive the round trip."""
    folder = coded_folder(tmp_path / "hf", form)
    hf_to_mcore(folder, tmp_path / "mcore", QUIET)
    kept = kept_form(tmp_path / "mcore")
    assert kept is not None
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", QUIET, kept)
    keys = json.loads((folder / "config.json").read_text())
    source, back = HFFolder(folder, QuantizationSettings.of(folder, keys).numbers), read(tmp_path / "back")
    assert source.tensors.keys() == back.keys()
    assert [name for name, tensor in back.items() if not torch.equal(tensor, source.read(name))] == []
    halves = {torch.bfloat16, torch.float16} if form in ("awq", "gptq") else {torch.bfloat16}
    assert {tensor.dtype for name, tensor in back.items() if not name.endswith("bias")} == halves
    theirs = read_tensors(folder)
    assert [name for name in back if not torch.equal(theirs[name], source.read(name).float())] == []


@pytest.mark.parametrize("place", ["quantization_config", "compression_config", "text_config"])
def test_an_export_has_no_quantization_in_its_config(place: str, tmp_path: Path) -> None:
    """Even if the tensors were already bfloat16, or the key is in the text model's config."""
    folder = make(tmp_path / "hf", "llama", 0, torch.bfloat16)
    keys = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    keys[place] = {"quantization_config": settings, "model_type": "llama"} if place == "text_config" else settings
    (folder / "config.json").write_text(json.dumps(keys))
    hf_to_mcore(folder, tmp_path / "mcore", QUIET)
    form = kept_form(tmp_path / "mcore")
    assert form is not None
    assert "fp8" not in json.dumps(form.keys)
    assert "fp8" not in json.dumps(hf_folder_form(folder).keys)


def test_a_leftover_scale_is_rejected_by_name(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path / "hf")
    name = "model.layers.0.mlp.down_proj.weight"
    write(folder, {**read(folder), name: torch.ones(48, 64).bfloat16()})
    with pytest.raises(ValueError, match=f"'{name}' is bfloat16, but '{name}_scale' with it is the scale"):
        hf_to_mcore(folder, tmp_path / "mcore", QUIET)
    assert not (tmp_path / "mcore").exists()
