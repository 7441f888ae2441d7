"""Folders whose weights are quantized in blocks."""

import json
from pathlib import Path

import torch
from hf_models import Tensors, make, read, write
from torch import Tensor
from trunk_models import TRUNKS

FLOAT_8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8}}},
}


PACKED = ("gate_up_proj", "down_proj")


def quantized(folder: Path, tensors: Tensors, settings: dict[str, object]) -> Path:
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
    return quantized(folder, tensors, FLOAT_8)


def blocked_folder(folder: Path) -> Path:
    """Write compressed-tensors FP8 with a scale for each block of 16 rows and columns."""
    tensors = read(make(folder, TRUNKS["mistral"], 0, torch.bfloat16))
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = 1 + torch.rand([-(-size // 16) for size in tensors[name].shape])
    weights = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [16, 16]}
    return quantized(folder, tensors, {**FLOAT_8, "config_groups": {"group_0": {"weights": weights}}})


def mxfp4_folder(folder: Path) -> Path:
    """Write gpt-oss with random bytes for its experts; a group has 32 numbers, so sizes are multiples of 32."""
    sizes = {"hidden_size": 64, "intermediate_size": 32}
    tensors = read(make(folder, TRUNKS["gpt_oss"], 0, torch.bfloat16, changes=sizes))
    for name in [name for name in tensors if name.endswith(PACKED)]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16)).byte()
        tensors[f"{name}_scales"] = torch.randint(120, 128, (experts, rows, columns // 32)).byte()
    return quantized(folder, tensors, {"quant_method": "mxfp4"})
