"""Small folders in every quantized format: real names, shapes and dtypes, random numbers, scales of 1."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hf_models import Tensors, make, read, write
from torch import Tensor

from megatron_mtp.checkpoint.hf.folder import HFFolder
from megatron_mtp.checkpoint.hf.quantized import QuantizationSettings
from megatron_mtp.data.tokenizer import train_bpe

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
DEPTH = ("model.layers.3.",)


def coded(tensors: Tensors, form: Callable[[str, Tensor], Tensors], plain: tuple[str, ...] = DEPTH) -> Tensors:
    """Quantize the projections of layers, except those whose names start with `plain`."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        whole = not name.endswith("_proj.weight") or name.startswith(plain) or "eh_proj" in name or tensor.dim() != 2
        out |= {name: tensor} if whole else form(name.removesuffix("weight"), tensor)
    return out


def fp8(stem: str, weight: Tensor) -> Tensors:
    return {f"{stem}weight": weight.to(E4M3), f"{stem}weight_scale_inv": torch.ones(1, 1)}


def modelopt_fp8(stem: str, weight: Tensor) -> Tensors:
    scales = {f"{stem}weight_scale": torch.ones(()), f"{stem}input_scale": torch.ones(())}
    return {f"{stem}weight": weight.to(E4M3), **scales}


def rows(stem: str, weight: Tensor) -> Tensors:
    return {f"{stem}weight": weight.to(E4M3), f"{stem}weight_scale": torch.ones(weight.size(0), 1)}


def nibbles(stem: str, weight: Tensor, group: int, scale: torch.dtype, **more: Tensor) -> Tensors:
    numbers = {"weight_packed": torch.randint(1, 7, (weight.size(0), weight.size(1) // 2)).byte()}
    numbers["weight_scale"] = torch.ones(weight.size(0), weight.size(1) // group).to(scale)
    return {stem + name: tensor for name, tensor in (numbers | more).items()}


def nvfp4(stem: str, weight: Tensor) -> Tensors:
    return nibbles(stem, weight, 16, E4M3, weight_global_scale=torch.ones(1), input_global_scale=torch.ones(1))


def modelopt_nvfp4(stem: str, weight: Tensor) -> Tensors:
    parts = nibbles(stem, weight, 16, E4M3, weight_scale_2=torch.ones(()), input_scale=torch.ones(()))
    return {name.replace("weight_packed", "weight"): tensor for name, tensor in parts.items()}


def mxfp4(stem: str, weight: Tensor) -> Tensors:
    return nibbles(stem, weight, 32, torch.uint8)


def words(*shape: int) -> Tensor:
    return torch.randint(1, 2**31, shape, dtype=torch.int64).to(torch.int32)


def packed(stem: str, weight: Tensor) -> Tensors:
    scale, size = torch.ones(weight.size(0), weight.size(1) // 16).bfloat16(), torch.tensor(weight.shape)
    numbers = words(weight.size(0), weight.size(1) // 8)
    return {f"{stem}weight_packed": numbers, f"{stem}weight_scale": scale, f"{stem}weight_shape": size}


def int8(stem: str, weight: Tensor) -> Tensors:
    numbers = (100 * weight).to(torch.int8)
    return {f"{stem}weight": numbers, f"{stem}weight_scale": torch.ones(weight.size(0), 1)}


def awq(stem: str, weight: Tensor) -> Tensors:
    rows, columns = weight.shape
    parts = {"qweight": words(columns, rows // 8), "qzeros": words(2, rows // 8), "scales": torch.ones(2, rows).half()}
    return {stem + name: tensor for name, tensor in parts.items()}


def gptq(stem: str, weight: Tensor) -> Tensors:
    rows, columns = weight.shape
    parts = {"qweight": words(columns // 8, rows), "qzeros": words(1, rows // 8), "scales": torch.ones(1, rows).half()}
    parts["g_idx"] = torch.zeros(columns, dtype=torch.int32)
    return {stem + name: tensor for name, tensor in parts.items()}


def nf4(stem: str, weight: Tensor) -> Tensors:
    parts = {"weight.absmax": torch.ones(4), "weight.quant_map": torch.ones(16)}
    parts |= {"weight.quant_state.bitsandbytes__nf4": torch.zeros(9).byte()}
    return {f"{stem}weight": torch.zeros(weight.numel() // 2, 1).byte()} | {stem + n: t for n, t in parts.items()}


E4M3 = torch.float8_e4m3fn


def groups(bits: int, kind: str, strategy: str, ignore: str = r"re:.*layers\.3\..*") -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": [ignore, "lm_head"]}


FORMS: dict[str, tuple[Callable[[str, Tensor], Tensors], dict[str, Any]]] = {
    "fp8": (fp8, FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.3"]}),
    "fp8 rows": (rows, groups(8, "float", "channel")),
    "modelopt fp8": (modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["model.layers.3*"]}),
    "nvfp4": (nvfp4, groups(4, "float", "tensor_group")),
    "modelopt nvfp4": (
        modelopt_nvfp4,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["*layers.3*"]},
    ),
    "mxfp4": (mxfp4, groups(4, "float", "group")),
    "int4": (packed, groups(4, "int", "group")),
    "int8": (int8, groups(8, "int", "channel")),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["model.layers.3"]}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "dynamic": {r"-:.*layers\.3\..*": {}}}),
    "bitsandbytes": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}
"""Formats, each with a config that leaves the MTP layer unquantized."""
SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}


def quantized(folder: Path, form: str) -> Path:
    make(folder, "glm4_moe", 1, torch.bfloat16, changes=SIZES)
    write(folder, coded(read(folder), FORMS[form][0]))
    with_keys(folder, quantization_config=FORMS[form][1])
    return folder


RUN = ("fp8", "awq", "modelopt nvfp4")
"""Formats that commands run on."""


def readable_pair(folder: Path, form: str) -> tuple[Path, Path]:
    """Write a quantized folder, `coded`, with a tokenizer and an MTP layer that drafts, and the same numbers in 16
    bits, `plain`.
    """
    changes = {**SIZES, "vocab_size": 260, "max_position_embeddings": 64}
    target, plain = make(folder / "coded", "glm4_moe", 1, torch.bfloat16, changes=changes), folder / "plain"
    tokenizer = train_bpe(["some words to make a vocabulary of"] * 3, 260, folder / "tokenizer")
    shutil.copytree(tokenizer, target, dirs_exist_ok=True)
    shutil.copytree(target, plain)
    write(target, {name: smaller(name, one) for name, one in coded(read(target), FORMS[form][0]).items()})
    with_keys(target, quantization_config=FORMS[form][1])
    reader = HFFolder(target, QuantizationSettings.of(target, json.loads((target / "config.json").read_text())).numbers)
    write(plain, {name: reader.read(name) for name in reader.tensors})
    return target, plain


def smaller(name: str, tensor: Tensor) -> Tensor:
    """Return scales that give random 4-bit codes the size of real weights."""
    is_scale = name.endswith((".scales", ".weight_scale_2"))
    return tensor / 64 if is_scale else tensor


def with_keys(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    keys = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in keys.items() if value != "absent"}))
