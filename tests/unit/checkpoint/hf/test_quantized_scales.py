"""Scales in every dtype: read as the numbers they represent, or rejected by name.

Each format is built from random codes and scales, whose product is known. A byte scale is E8M0, 2 ** (byte - 127): read
as an integer, it would make weights 500 times too large.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import Tensors, make, read, write
from judged_models import QUIET
from quantized_models import SIZES, coded, groups, with_keys
from torch import Tensor

from megatron_mtp.checkpoint.audit.auditing import audit
from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import kept_form
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.hf.folder import HFFolder
from megatron_mtp.checkpoint.hf.quantized import QuantizationSettings

E4M3, E8M0, BYTE = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
TRUNK = "model.layers.1.self_attn.q_proj."
Made = tuple[Tensors, Tensor]
"""A weight's parts by name suffix, and the weight."""
Encode = Callable[[int, int], Made]
Parts = dict[str, Tensor]


def powers(*shape: int) -> Tensor:
    """Return powers of two from 1/64 to 1/8."""
    return torch.exp2(torch.randint(-6, -2, shape).float())


def stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (scale.log2() + 127).to(BYTE) if dtype == BYTE else scale.to(dtype)


def spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Return the scale of every number."""
    high, wide = rows // scale.size(0), columns // scale.size(1)
    return scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)


def fp8(dtype: torch.dtype, name: str, shape: Callable[[int, int], tuple[int, int]], flat: bool = False) -> Encode:
    def encode(rows: int, columns: int) -> Made:
        codes, scale = torch.randn(rows, columns).to(E4M3), powers(*shape(rows, columns))
        kept = stored(scale, dtype)
        return {"weight": codes, name: kept.flatten() if flat else kept}, codes.float() * spread(scale, rows, columns)

    return encode


def blocks(rows: int, columns: int) -> tuple[int, int]:
    return rows // 16, columns // 16


def by_row(rows: int, columns: int) -> tuple[int, int]:
    return rows, 1


def of_32(rows: int, columns: int) -> tuple[int, int]:
    return rows, columns // 32


def single(rows: int, columns: int) -> tuple[int, int]:
    return 1, 1


def fp4(group: int, dtype: torch.dtype, numbers: str, scales: str, **whole: Tensor) -> Encode:
    def encode(rows: int, columns: int) -> Made:
        codes, scale = torch.randint(0, 16, (rows, columns)), powers(rows, columns // group)
        packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(BYTE)
        factor = {"weight_global_scale": 0.5, "weight_scale_2": 2.0}.get(next(iter(whole), ""), 1.0)
        parts = {numbers: packed.view(torch.int8) if scales == "scale" else packed, scales: stored(scale, dtype)}
        return {**parts, **{name: one.clone() for name, one in whole.items()}}, E2M1[codes] * spread(
            scale, rows, columns
        ) * factor

    return encode


def in_words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack 4-bit numbers [.., 8 n] into words [.., n]; number j of a word goes to place order[j]."""
    places = 16 ** torch.tensor(order, dtype=torch.int64)
    words = (codes.long().unflatten(-1, (-1, 8)) * places).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def packed(rows: int, columns: int) -> Made:
    codes, scale = torch.randint(0, 16, (rows, columns)), powers(rows, columns // 16).bfloat16()
    parts = {"weight_packed": in_words(codes), "weight_scale": scale, "weight_shape": torch.tensor([rows, columns])}
    return parts, (codes - 8) * spread(scale.float(), rows, columns)


def int8(flat: bool) -> Encode:
    def encode(rows: int, columns: int) -> Made:
        codes, scale = torch.randint(-127, 128, (rows, columns)), powers(rows, 1) / 64
        kept = {"weight": codes.to(torch.int8), "weight_scale": scale.flatten() if flat else scale}
        return kept, codes * scale

    return encode


def of_columns(awq: bool) -> Encode:
    """AWQ packs along the columns of a row, GPTQ along the rows of a column."""

    def encode(rows: int, columns: int) -> Made:
        codes, zeros = torch.randint(0, 16, (columns, rows)), torch.randint(1, 16, (columns // 16, rows))
        scale = powers(columns // 16, rows).half()
        parts = {"scales": scale}
        if awq:
            order = (0, 4, 1, 5, 2, 6, 3, 7)
            parts |= {"qweight": in_words(codes, order), "qzeros": in_words(zeros, order)}
        else:
            parts |= {"qweight": in_words(codes.T).T.contiguous(), "qzeros": in_words(zeros - 1)}
            parts["g_idx"] = (torch.arange(columns) // 16).to(torch.int32)
        each = [one.repeat_interleave(16, 0) for one in (zeros, scale.float())]
        return parts, ((codes - each[0]) * each[1]).T

    return encode


BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 16]}
OF_MODELOPT = {"quant_method": "modelopt"}


@dataclass(frozen=True)
class Case:
    encode: Encode
    says: dict[str, Any]
    form: str
    side: dict[str, Any] = field(default_factory=dict)


ONE, HALF = torch.tensor([2.0]), torch.tensor(2.0)
CASES: dict[str, Case] = {
    "FP8, blocks, float32": Case(fp8(torch.float32, "weight_scale_inv", blocks), BLOCKS, "FP8, blocks"),
    "FP8, blocks, bytes": Case(fp8(BYTE, "weight_scale_inv", blocks), BLOCKS, "FP8, blocks"),
    "FP8, blocks, E8M0": Case(fp8(E8M0, "weight_scale_inv", blocks), BLOCKS, "FP8, blocks"),
    "FP8, blocks, DeepSeek-V4": Case(fp8(E8M0, "scale", blocks), BLOCKS, "FP8, blocks"),
    "FP8, rows": Case(fp8(torch.bfloat16, "weight_scale", by_row), groups(8, "float", "channel"), "FP8, rows"),
    "FP8, rows, one axis": Case(
        fp8(torch.float32, "weight_scale", by_row, flat=True),
        OF_MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "FP8, rows",
    ),
    "FP8, tensor": Case(
        fp8(torch.float32, "weight_scale", single, flat=True), OF_MODELOPT | {"quant_algo": "FP8"}, "FP8, tensor"
    ),
    "MXFP8, compressed-tensors": Case(fp8(BYTE, "weight_scale", of_32), groups(8, "float", "group"), "MXFP8"),
    "MXFP8, modelopt": Case(fp8(BYTE, "weight_scale", of_32), OF_MODELOPT | {"quant_algo": "MXFP8"}, "MXFP8"),
    "MXFP8, modelopt's side file": Case(
        fp8(BYTE, "weight_scale", of_32), {}, "MXFP8", {"quantization": {"quant_algo": "MXFP8", "exclude_modules": []}}
    ),
    "MXFP8, in blocks": Case(
        fp8(BYTE, "weight_scale_inv", of_32), {"quant_method": "mxfp8", "weight_block_size": [1, 32]}, "FP8, blocks"
    ),
    "NVFP4, compressed-tensors": Case(
        fp4(16, E4M3, "weight_packed", "weight_scale", weight_global_scale=ONE),
        groups(4, "float", "tensor_group"), "NVFP4, compressed-tensors",
    ),
    "NVFP4, modelopt": Case(
        fp4(16, E4M3, "weight", "weight_scale", weight_scale_2=HALF), OF_MODELOPT | {"quant_algo": "NVFP4"},
        "NVFP4, modelopt",
    ),
    "MXFP4, bytes": Case(
        fp4(32, BYTE, "weight_packed", "weight_scale"), groups(4, "float", "group"), "MXFP4, compressed-tensors"
    ),
    "MXFP4, E8M0": Case(
        fp4(32, E8M0, "weight_packed", "weight_scale"), groups(4, "float", "group"), "MXFP4, compressed-tensors"
    ),
    "MXFP4, DeepSeek-V4": Case(fp4(32, E8M0, "weight", "scale"), BLOCKS, "MXFP4, DeepSeek-V4"),
    "integers, packed": Case(packed, groups(4, "int", "group"), "integers, packed"),
    "int8": Case(int8(flat=False), groups(8, "int", "channel"), "int8, compressed-tensors"),
    "int8, one axis": Case(int8(flat=True), groups(8, "int", "channel"), "int8, compressed-tensors"),
    "AWQ": Case(of_columns(awq=True), {"quant_method": "awq", "bits": 4}, "AWQ"),
    "GPTQ": Case(of_columns(awq=False), {"quant_method": "gptq", "bits": 4, "group_size": 16}, "GPTQ"),
}  # fmt: skip
FIRST = ("FP8, blocks, bytes", "MXFP8, compressed-tensors", "MXFP4, DeepSeek-V4")
"""Cases of the first tier."""


def tiered(names: list[str], first: tuple[str, ...]) -> list[Any]:
    return [name if name in first else pytest.param(name, marks=pytest.mark.matrix) for name in names]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("scales") / "hf", "glm4_moe", 1, torch.bfloat16, changes=SIZES)


def folder_of(case: Case, plain: Path, target: Path) -> tuple[Path, Tensors]:
    """Create a folder in the format of a case, and return its weights."""
    torch.manual_seed(7)
    truth: Tensors = {}

    def form(stem: str, weight: Tensor) -> Tensors:
        parts, truth[f"{stem}weight"] = case.encode(*weight.shape)
        return {stem + name: tensor.contiguous() for name, tensor in parts.items()}

    folder = Path(shutil.copytree(plain, target))
    write(folder, coded(read(folder), form, ("none",)))
    if case.side:
        (folder / "hf_quant_config.json").write_text(json.dumps(case.side))
    lists = {"ignore": [], "config_groups": case.says["config_groups"]} if "config_groups" in case.says else {}
    with_keys(folder, **({"quantization_config": case.says | lists} if case.says else {}))
    return folder, truth


def alarms(folder: Path) -> list[str]:
    return [one["says"] for one in audit(folder)["findings"] if one["severity"] != "note"]


def reader(folder: Path) -> HFFolder:
    return HFFolder(folder, QuantizationSettings.of(folder, json.loads((folder / "config.json").read_text())).numbers)


@pytest.mark.parametrize("name", tiered([*CASES], FIRST))
def test_a_sound_folder_has_no_finding_and_converts_to_its_numbers(name: str, plain: Path, tmp_path: Path) -> None:
    folder, truth = folder_of(CASES[name], plain, tmp_path / "hf")
    assert alarms(folder) == []
    source = reader(folder)
    assert all(CASES[name].form in [form.name for form in one.forms] for one in source.quantized.values())
    assert source.quantized.keys() == truth.keys()
    hf_to_mcore(folder, tmp_path / "mcore", QUIET)
    form = kept_form(tmp_path / "mcore")
    assert form is not None
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", QUIET, form)
    back = read(tmp_path / "back")
    assert [one for one, weight in truth.items() if not torch.equal(back[one].float(), weight)] == []


Change = Callable[[Parts], Parts]


def typed(part: str, dtype: torch.dtype) -> Change:
    """Keep the bits for integer dtypes, and the number for others."""
    return lambda parts: {part: parts[part].float().to(dtype)}


def repeated(part: str) -> Change:
    return lambda parts: {part: parts[part].repeat(2, *[1] * (parts[part].dim() - 1))}


def filled(part: str, value: int) -> Change:
    return lambda parts: {part: torch.full_like(parts[part].view(BYTE), value).view(parts[part].dtype)}


def four_in_a_word(parts: Parts) -> Parts:
    """Pack four columns into an int32, as kernels keep E8M0 scales in memory."""
    scale = parts["weight_scale_inv"]
    padded = torch.nn.functional.pad(scale, (0, -scale.size(1) % 4))
    return {"weight_scale_inv": padded.contiguous().view(torch.int32)}


DAMAGED: dict[str, tuple[str, Change, str]] = {
    "FP8 with int32 scales": (
        "FP8, blocks, float32", typed("weight_scale_inv", torch.int32),
        f"has '{TRUNK}weight_scale_inv' of type int32; in the form 'FP8, blocks' it must be of type float32, bfloat16, "
        "float16, float64, uint8 (E8M0) or float8_e8m0fnu (E8M0)",
    ),
    "FP8 with four scales in a word": ("FP8, blocks, bytes", four_in_a_word, "weight_scale_inv' of type int32"),
    "FP8 with int8 scales": (
        "FP8, blocks, float32", typed("weight_scale_inv", torch.int8), "weight_scale_inv' of type int8"
    ),
    "FP8 with scales in E4M3": (
        "FP8, blocks, float32", typed("weight_scale_inv", E4M3), "weight_scale_inv' of type float8_e4m3fn"
    ),
    "FP8 with scales that torch has under another name": (
        "FP8, blocks, float32", typed("weight_scale_inv", torch.uint16), "weight_scale_inv' of type 'U16'"
    ),
    "bytes that are NaN": ("FP8, blocks, bytes", filled("weight_scale_inv", 255), "numbers that are NaN"),
    "E8M0 that is NaN": ("FP8, blocks, E8M0", filled("weight_scale_inv", 255), "numbers that are NaN"),
    "MXFP8 of too many groups": ("MXFP8, compressed-tensors", repeated("weight_scale"), "nor one for 32 numbers of a"),
    "MXFP8 with float32 scales": (
        "MXFP8, modelopt", typed("weight_scale", torch.float32), "with scales of shape 64x2, which are neither"
    ),
    "NVFP4 whose scales are bytes": (
        "NVFP4, modelopt", typed("weight_scale", BYTE), "weight_scale' of type uint8 (E8M0); in the form 'NVFP4, modelo"
    ),
    "NVFP4 whose scale of all is an integer": (
        "NVFP4, compressed-tensors", typed("weight_global_scale", torch.int32), "weight_global_scale' of type int32"
    ),
    "MXFP4 with float16 scales": (
        "MXFP4, bytes", typed("weight_scale", torch.float16), "weight_scale' of type float16"
    ),
    "FP4 of DeepSeek-V4 with float32 scales": (
        "MXFP4, DeepSeek-V4", typed("scale", torch.float32), "scale' of type float32; in the form 'MXFP4, DeepSeek-V4'"
    ),
    "packed integers with integer scales": (
        "integers, packed", typed("weight_scale", torch.int32), "weight_scale' of type int32"
    ),
    "int8 with integer scales": ("int8", typed("weight_scale", torch.int64), "weight_scale' of type int64"),
    "int8 with zero points of another shape": (
        "int8", lambda parts: {"weight_zero_point": torch.ones(3, 1).to(torch.int8)}, "zero points of 3x1"
    ),
    "int8 with zero points that are not integers": (
        "int8", lambda parts: {"weight_zero_point": torch.ones(64, 1)}, "weight_zero_point' of type float32"
    ),
    "AWQ with integer scales": ("AWQ", typed("scales", torch.int32), "scales' of type int32"),
    "AWQ with zero points of 16 bits": ("AWQ", typed("qzeros", torch.float16), "qzeros' of type float16"),
    "GPTQ with zero points of 64 bits": ("GPTQ", typed("qzeros", torch.int64), "qzeros' of type int64"),
    "GPTQ whose index is float32": ("GPTQ", typed("g_idx", torch.float32), "g_idx' of type float32"),
}  # fmt: skip
FOUND_FIRST = (
    "FP8 with int32 scales", "bytes that are NaN", "NVFP4 whose scales are bytes", "GPTQ with zero points of 64 bits",
)  # fmt: skip


@pytest.mark.parametrize("name", tiered([*DAMAGED], FOUND_FIRST))
def test_a_scale_of_another_type_is_found_and_refused(name: str, plain: Path, tmp_path: Path) -> None:
    """It is the only finding; layers and MTP layers are still described, and nothing is converted."""
    base, change, says = DAMAGED[name]
    folder, _ = folder_of(CASES[base], plain, tmp_path / "hf")
    held = read(folder)
    parts = {name.removeprefix(TRUNK): tensor for name, tensor in held.items() if name.startswith(TRUNK)}
    write(folder, held | {TRUNK + part: tensor.contiguous() for part, tensor in change(parts).items()})
    result = audit(folder)
    found = [one["says"] for one in result["findings"] if one["severity"] != "note"]
    assert any(says in one for one in found), found
    assert result["sides"][0]["layers"] == {"config": 3, "files": 3}
    assert result["sides"][0]["depths"] == {"config": 1, "files": 1}
    if "NaN" not in name:
        with pytest.raises(ValueError, match=re.escape(TRUNK)):
            hf_to_mcore(folder, tmp_path / "mcore", QUIET)
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]
