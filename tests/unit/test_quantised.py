"""Quantised folders are read as transformers reads them, converted, and exported in bfloat16 under that name."""

import json
from pathlib import Path

import pytest
import torch
from hf_models import Tensors, make, read, write
from judged_models import QUIET
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from trunk_models import LEFT, TRUNKS

from megatron_mtp.checkpoint.convert.exporting import kept_form, mcore_to_hf
from megatron_mtp.checkpoint.convert.importing import hf_to_mcore
from megatron_mtp.checkpoint.convert.megatron_flags import megatron_arguments
from megatron_mtp.checkpoint.hf.quantised import FP4, by_row, from_mxfp4
from megatron_mtp.checkpoint.hf.shards import HFFolder

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


def mxfp4_folder(folder: Path) -> Path:
    """gpt-oss with random bytes for its experts; a group has 32 numbers, so sizes are multiples of 32."""
    sizes = {"hidden_size": 64, "intermediate_size": 32}
    tensors = read(make(folder, LEFT["gpt_oss"], 0, torch.bfloat16, changes=sizes))
    for name in [name for name in tensors if name.endswith(PACKED)]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16)).byte()
        tensors[f"{name}_scales"] = torch.randint(120, 128, (experts, rows, columns // 32)).byte()
    return quantised(folder, tensors, {"quant_method": "mxfp4"})


@pytest.mark.parametrize("make_folder", [fp8_folder, mxfp4_folder])
def test_a_quantised_folder_converts_and_comes_back_in_bfloat16(make_folder: object, tmp_path: Path) -> None:
    assert callable(make_folder)
    folder = make_folder(tmp_path / "hf")
    hf_to_mcore(folder, tmp_path / "mcore", QUIET, megatron_arguments)
    form = kept_form(tmp_path / "mcore")
    assert form is not None
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", QUIET, form)
    source, back = HFFolder(folder), read(tmp_path / "back")
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
