"""Quantised folders are read as transformers reads them, converted, and exported in bfloat16 under that name."""

import json
from pathlib import Path

import pytest
import torch
from hf_models import Tensors, make, read, write
from judged_models import QUIET
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from trunk_models import TRUNKS

from megatron_mtp.checkpoint.convert.export_hf import kept_form, mcore_to_hf
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore, megatron_arguments
from megatron_mtp.checkpoint.hf.quantised import FP4, activation_scales, by_row, by_scale, coded_weights, from_mxfp4
from megatron_mtp.checkpoint.hf.shards import HFFolder, block_of

FLOAT_8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8}}},
}
PACKED = ("gate_up_proj", "down_proj")


def test_mxfp4_is_read_as_transformers_reads_it() -> None:
    torch.manual_seed(1)
    blocks, scales = torch.randint(0, 256, (3, 8, 2, 16)).byte(), torch.randint(100, 150, (3, 8, 2)).byte()
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(from_mxfp4(blocks, scales), theirs)


def test_a_byte_is_two_numbers_the_lower_half_first() -> None:
    blocks, scales = torch.tensor([[[[0x21, 0xF7]]]]).byte(), torch.tensor([[[128]]]).byte()
    expected = [2 * FP4[number] for number in (1, 2, 7, 15)]
    assert from_mxfp4(blocks, scales).flatten().tolist() == expected


def test_a_row_of_fp8_has_its_own_scale() -> None:
    weight = torch.tensor([[1.0, 2.0], [4.0, -8.0]]).to(torch.float8_e4m3fn)
    assert by_row(weight, torch.tensor([[2.0], [0.5]])).tolist() == [[2.0, 4.0], [2.0, -4.0]]
    assert by_row(weight, torch.tensor([0.5])).tolist() == [[0.5, 1.0], [2.0, -4.0]]
    with pytest.raises(ValueError, match="neither one nor one per row"):
        by_row(weight, torch.ones(1, 2))


def test_a_block_of_compressed_tensors_has_its_own_scale() -> None:
    weight = torch.tensor([[1.0, 2.0, 4.0], [1.0, -8.0, 2.0]]).to(torch.float8_e4m3fn)
    scale = torch.tensor([[2.0, 0.5], [1.0, 4.0]])
    assert by_scale(weight, scale, (1, 2)).tolist() == [[2.0, 4.0, 2.0], [1.0, -8.0, 8.0]]
    assert by_scale(weight, scale[:, :1], (1, 2)).tolist() == [[2.0, 4.0, 8.0], [1.0, -8.0, 2.0]]
    powers = torch.tensor([[2.0, 0.5], [1.0, 4.0]]).to(torch.float8_e8m0fnu)
    assert torch.equal(by_scale(weight, powers, (1, 2)), by_scale(weight, scale, (1, 2)))


def test_every_weight_of_several_tensors_is_found_with_its_parts() -> None:
    fp8, bf16, byte = torch.float8_e4m3fn, torch.bfloat16, torch.uint8
    stored = {
        "a.weight": ((4, 6), fp8), "a.weight_scale_inv": ((2, 2), torch.float32),
        "b.weight": ((4, 6), fp8), "b.weight_scale": ((4, 1), bf16), "b.input_scale": ((1,), bf16),
        "c_blocks": ((2, 8, 1, 16), byte), "c_scales": ((2, 8, 1), byte),
        "d.weight": ((4, 6), bf16), "d.weight_scale": ((1,), bf16),
    }  # fmt: skip
    found = coded_weights(stored, (2, 3))
    assert {name: (coded.parts, coded.shape) for name, coded in found.items()} == {
        "a.weight": (("a.weight", "a.weight_scale_inv"), (4, 6)),
        "b.weight": (("b.weight", "b.weight_scale"), (4, 6)),
        "c": (("c_blocks", "c_scales"), (2, 32, 8)),
    }
    assert activation_scales(stored) == ["b.input_scale"]
    ones, scale = torch.ones(4, 6).to(fp8), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert found["a.weight"].decode(ones, scale)[0].tolist() == [1, 1, 1, 2, 2, 2]


def quantised(folder: Path, tensors: Tensors, settings: dict[str, object]) -> Path:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    write(folder, tensors)
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, "quantization_config": settings}))
    return folder


def in_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return (weight.float() / scale).to(torch.float8_e4m3fn), scale


def fp8_folder(folder: Path) -> Path:
    tensors = read(make(folder, TRUNKS["mistral"], 0, torch.bfloat16))
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale"] = in_fp8(tensors[name])
        tensors[name.replace("weight", "input_scale")] = torch.ones(1)
    return quantised(folder, tensors, FLOAT_8)


def blocked_folder(folder: Path) -> Path:
    """compressed-tensors' FP8 with a scale for each block of 16 rows and columns."""
    tensors = read(make(folder, TRUNKS["mistral"], 0, torch.bfloat16))
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = 1 + torch.rand([-(-size // 16) for size in tensors[name].shape])
    weights = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [16, 16]}
    return quantised(folder, tensors, {**FLOAT_8, "config_groups": {"group_0": {"weights": weights}}})


def rows_folder(folder: Path) -> Path:
    """Llama's FP8, with a scale for each row."""
    folder = fp8_folder(folder)
    keys = json.loads((folder / "config.json").read_text())
    keys["quantization_config"] = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


def mxfp4_folder(folder: Path) -> Path:
    """gpt-oss with random bytes for its experts; a group has 32 numbers, so sizes are multiples of 32."""
    sizes = {"hidden_size": 64, "intermediate_size": 32}
    tensors = read(make(folder, TRUNKS["gpt_oss"], 0, torch.bfloat16, changes=sizes))
    for name in [name for name in tensors if name.endswith(PACKED)]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16)).byte()
        tensors[f"{name}_scales"] = torch.randint(120, 128, (experts, rows, columns // 32)).byte()
    return quantised(folder, tensors, {"quant_method": "mxfp4"})


@pytest.mark.parametrize("make_folder", [fp8_folder, blocked_folder, rows_folder, mxfp4_folder])
def test_a_quantised_folder_converts_and_comes_back_in_bfloat16(make_folder: object, tmp_path: Path) -> None:
    assert callable(make_folder)
    folder = make_folder(tmp_path / "hf")
    hf_to_mcore(folder, tmp_path / "mcore", QUIET, megatron_arguments)
    form = kept_form(tmp_path / "mcore")
    assert form is not None
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", QUIET, form)
    block = block_of(json.loads((folder / "config.json").read_text()))
    source, back = HFFolder(folder, block), read(tmp_path / "back")
    assert source.quantised
    assert source.tensors.keys() == back.keys()
    assert [name for name, tensor in back.items() if not torch.equal(tensor, source.read(name))] == []
    assert {tensor.dtype for tensor in back.values()} == {torch.bfloat16}
    keys = json.loads((tmp_path / "back/config.json").read_text())
    assert "quantization_config" not in keys
    assert keys["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "settings", [{**FLOAT_8, "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4}}}}]
)
def test_other_numbers_of_compressed_tensors_are_refused(settings: dict[str, object], tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path / "hf")
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, "quantization_config": settings}))
    with pytest.raises(ValueError, match="is quantised with compressed-tensors, which is not read here"):
        hf_to_mcore(folder, tmp_path / "mcore", QUIET, megatron_arguments)
