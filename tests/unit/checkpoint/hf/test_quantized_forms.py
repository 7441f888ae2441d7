"""Every quantized format decodes to the same bits as its own library, on random tensors of odd sizes.

compressed-tensors is always installed. AWQ, GPTQ and modelopt's NVFP4 are compared with autoawq, gptqmodel, auto-round
and nvidia-modelopt, whose wheels are large; a comparison is skipped if its library cannot be imported.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from megatron_mtp.checkpoint.hf.forms.form import Numbers
from megatron_mtp.checkpoint.hf.forms.fp4 import FP4
from megatron_mtp.checkpoint.hf.forms.integers import AWQ_ORDER, unpacked
from megatron_mtp.checkpoint.hf.forms.table import FORMS

Tensors = dict[str, Tensor]
HALF = torch.float16
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def decoded(name: str, parts: Tensors, numbers: Numbers | None = None) -> Tensor:
    """Decode the weight with the table's row, and check its shape."""
    (form,) = (form for form in FORMS if form.name == name)
    assert form.decode is not None
    weight = form.decode(parts, numbers or Numbers())
    shape = form.shape({part: (tuple(one.shape), one.dtype) for part, one in parts.items()}, numbers or Numbers())
    assert shape is None or tuple(weight.shape) == shape
    return weight


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def fp8(*shape: int) -> Tensor:
    return (60 * torch.randn(shape)).to(E4M3)


def scheme(kind: str, bits: int, strategy: str, **more: Any) -> Any:
    weights = QuantizationArgs(num_bits=bits, type=kind, strategy=strategy, **more)
    return QuantizationScheme(targets=["Linear"], weights=weights)


def by_library(format: str, parts: Tensors, how: Any) -> Tensor:
    made = BaseCompressor.get_value_from_registry(format).decompress(dict(parts), how)["weight"]
    return made if made.dtype in (HALF, BF16) else made.to(BF16)


def same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


# --- FP8 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(200, 300), (128, 128), (1, 129), (257, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_fp8_in_blocks(shape: tuple[int, int], dtype: torch.dtype) -> None:
    scale = torch.rand(*(-(-size // 128) for size in shape)).to(dtype)
    parts = {"weight": fp8(*shape), "weight_scale_inv": scale}
    theirs = FP8BlockDequantizer(targets=["Linear"]).process({f"m.{name}": t for name, t in parts.items()})
    assert same(decoded("FP8, blocks", parts), theirs["m.weight"])
    blocks = {"weight": parts["weight"], "weight_scale": scale}
    how = scheme("float", 8, "block", block_structure=[128, 128])
    assert same(decoded("FP8, blocks", blocks), by_library("float-quantized", blocks, how))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, HALF])
@pytest.mark.parametrize(("name", "strategy"), [("FP8, rows", "channel"), ("FP8, tensor", "tensor")])
def test_fp8_by_row_and_tensor(name: str, strategy: str, dtype: torch.dtype) -> None:
    parts = {"weight": fp8(37, 51), "weight_scale": torch.rand(37 if strategy == "channel" else 1, 1).to(dtype)}
    assert same(decoded(name, parts), by_library("float-quantized", parts, scheme("float", 8, strategy)))


# --- 4-bit floating point ---------------------------------------------------------------------------------------------


def nibbles(rows: int, columns: int) -> Tensor:
    return torch.randint(0, 256, (rows, columns // 2)).byte()


def test_nvfp4_of_compressed_tensors() -> None:
    scale = (100 * torch.rand(7, 3)).to(E4M3)
    parts = {"weight_packed": nibbles(7, 48), "weight_scale": scale, "weight_global_scale": 1e4 * torch.rand(1)}
    how = scheme("float", 4, "tensor_group", group_size=16, scale_dtype=E4M3)
    assert same(decoded("NVFP4, compressed-tensors", parts), by_library("nvfp4-pack-quantized", parts, how))


def test_nvfp4_of_modelopt() -> None:
    modelopt = pytest.importorskip(
        "modelopt.torch.quantization.qtensor.nvfp4_tensor", reason="pip install nvidia-modelopt"
    )
    scale = (100 * torch.rand(7, 3)).to(E4M3)
    parts = {"weight": nibbles(7, 48), "weight_scale": scale, "weight_scale_2": 1e-4 * torch.rand(())}
    theirs = modelopt.NVFP4QTensor(torch.Size((7, 48)), BF16, parts["weight"]).dequantize(
        scale=scale, double_scale=parts["weight_scale_2"], block_sizes={-1: 16}
    )
    assert same(decoded("NVFP4, modelopt", parts), theirs)


def test_mxfp4_of_compressed_tensors() -> None:
    parts = {"weight_packed": nibbles(5, 96), "weight_scale": torch.randint(90, 160, (5, 3)).byte()}
    how = scheme("float", 4, "group", group_size=32, scale_dtype=torch.uint8)
    assert same(decoded("MXFP4, compressed-tensors", parts), by_library("mxfp4-pack-quantized", parts, how))


# --- integers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8, 3])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("strategy", "columns", "groups"), [("channel", 37, 1), ("group", 40, 5)])
@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_packed_integers(
    bits: int, symmetric: bool, strategy: str, columns: int, groups: int, dtype: torch.dtype
) -> None:
    packed = {"weight_packed": words(9, -(-columns * bits // 32)), "weight_scale": torch.rand(9, groups).to(dtype)}
    parts = {**packed, "weight_shape": torch.tensor([9, columns])}
    parts |= {} if symmetric else {"weight_zero_point": words(-(-9 * bits // 32), groups)}
    group = {"group_size": 8} if strategy == "group" else {}
    how = scheme("int", bits, strategy, symmetric=symmetric, **group)
    theirs = by_library("pack-quantized", parts, how)
    assert same(decoded("integers, packed", parts, Numbers(bits=(bits,))), theirs)


@pytest.mark.parametrize("symmetric", [True, False])
def test_int8(symmetric: bool) -> None:
    parts = {"weight": torch.randint(-128, 128, (9, 37)).to(torch.int8), "weight_scale": torch.rand(9, 1).to(BF16)}
    parts |= {} if symmetric else {"weight_zero_point": torch.randint(-128, 128, (9, 1)).to(torch.int8)}
    how = scheme("int", 8, "channel", symmetric=symmetric)
    assert same(decoded("int8, compressed-tensors", parts), by_library("int-quantized", parts, how))


def test_awq() -> None:
    awq = pytest.importorskip("awq.utils.packing_utils", reason="pip install autoawq")
    parts = {"qweight": words(30, 5), "qzeros": words(3, 5), "scales": torch.rand(3, 40).half()}
    theirs = awq.dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], 4, 10)
    assert same(decoded("AWQ", parts), theirs.T)


GPTQ: dict[str, dict[str, Any]] = {
    "4 bits": {}, "8 bits": {"bits": 8}, "2 bits": {"bits": 2}, "act order": {"order": True},
    "one group": {"group": 64}, "version 2": {"plus_one": False},
}  # fmt: skip


def gptq(bits: int = 4, group: int = 16, order: bool = False, zeros: Tensor | None = None) -> Tensors:
    """Return 64 columns and 32 rows."""
    index = torch.arange(64) // group
    return {
        "qweight": words(2 * bits, 32),
        "qzeros": words(64 // group, bits) if zeros is None else zeros,
        "scales": torch.rand(64 // group, 32).half(),
        "g_idx": (index[torch.randperm(64)] if order else index).to(torch.int32),
    }


@pytest.mark.parametrize("case", GPTQ)
def test_gptq_as_gptqmodel(case: str) -> None:
    """With every zero point: format 1 subtracts 1 from whole words, which borrows from the next number."""
    module = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch", reason="pip install gptqmodel")
    model = pytest.importorskip("gptqmodel.utils.model", reason="pip install gptqmodel")
    settings = dict(GPTQ[case])
    plus_one = settings.pop("plus_one", True)
    parts = gptq(**settings)
    bits, group = settings.get("bits", 4), settings.get("group", 16)
    layer = module.TorchLinear(
        bits=bits, group_size=group, sym=False, desc_act=True, in_features=64, out_features=32, bias=False
    )
    for name, tensor in parts.items():
        getattr(layer, name).data = tensor.clone()
    if plus_one:
        model.convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
    layer.post_init()
    assert same(decoded("GPTQ", parts, Numbers(zero_plus_one=plus_one)), layer.dequantize_weight().T)
    if group == 16 and not settings.get("order"):
        alone = {name: tensor for name, tensor in parts.items() if name != "g_idx"}
        assert torch.equal(
            decoded("GPTQ", alone, Numbers(bits=(bits,), group=16, zero_plus_one=plus_one)),
            decoded("GPTQ", parts, Numbers(zero_plus_one=plus_one)),
        )


@pytest.mark.parametrize(("module", "plus_one"), [("qlinear_torch", False), ("qlinear_torch_zp", True)])
@pytest.mark.parametrize("bits", [4, 2, 8, 3])
def test_gptq_as_auto_round(module: str, plus_one: bool, bits: int) -> None:
    """auto-round's own packing stores zero points unchanged; its GPTQ stores them minus 1, and never the largest."""
    layers = pytest.importorskip(f"auto_round_extension.torch.{module}", reason="pip install auto-round")
    zeros = words(4, bits)
    if plus_one:
        zeros = zeros & sum((2**bits - 2) << at for at in range(0, 32, bits)) if 32 % bits == 0 else 0 * zeros
    parts = gptq(bits, zeros=zeros)
    layer = layers.QuantLinear(bits=bits, group_size=16, infeatures=64, outfeatures=32, bias=False)
    for name in ("qweight", "qzeros", "scales"):
        getattr(layer, name).data = parts[name].clone()
    with torch.no_grad():
        theirs = layer(torch.eye(64, dtype=torch.float32)).to(HALF)
    assert same(decoded("GPTQ", parts, Numbers(bits=(bits,), zero_plus_one=plus_one)), theirs.T)


# --- examples by hand -------------------------------------------------------------------------------------------------


def test_packed_numbers_start_at_the_lowest_bits() -> None:
    word = torch.tensor([0x76543210], dtype=torch.int32)
    assert unpacked(word, 4, 8).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert unpacked(word, 4, 8, AWQ_ORDER).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert unpacked(torch.tensor([0b01_000_001 << 24, 0b1], dtype=torch.int32), 3, 11).tolist()[8:] == [1, 0, 0b101]


Loop = Callable[[int, int], float]
BY_HAND: dict[str, tuple[Tensors, Numbers, Loop]] = {}


def by_hand(name: str, parts: Tensors, numbers: Numbers) -> Callable[[Loop], Loop]:
    """Return a check of a weight of 8 rows and 16 columns against a function of row and column."""

    def keep(loop: Loop) -> Loop:
        BY_HAND[name] = parts, numbers, loop
        return loop

    return keep


torch.manual_seed(5)
_W8 = {"weight": fp8(8, 16), "weight_scale_inv": torch.rand(2, 4)}
_AWQ = {"qweight": words(16, 1), "qzeros": words(2, 1), "scales": torch.rand(2, 8).half()}
_GPTQ = {"qweight": words(2, 8), "qzeros": words(2, 1) & 0x66666666, "scales": torch.rand(2, 8).half()}
_GPTQ["g_idx"] = torch.tensor([0, 1] * 8, dtype=torch.int32)
_PACK = {"weight_packed": words(8, 2), "weight_scale": torch.rand(8, 2).to(BF16), "weight_shape": torch.tensor([8, 16])}
_NV = {"weight": nibbles(8, 16), "weight_scale": torch.rand(8, 1).to(E4M3), "weight_scale_2": torch.rand(())}


@by_hand("FP8, blocks", _W8, Numbers(block=(4, 4)))
def _blocks(row: int, column: int) -> float:
    return float(_W8["weight"][row, column].float() * _W8["weight_scale_inv"][row // 4, column // 4])


@by_hand("AWQ", _AWQ, Numbers())
def _awq(row: int, column: int) -> float:
    at = 4 * AWQ_ORDER[row]
    code, zero = (
        (int(_AWQ[name][index, 0]) >> at) & 15 for name, index in (("qweight", column), ("qzeros", column // 8))
    )
    return float((code - zero) * _AWQ["scales"][column // 8, row])


@by_hand("GPTQ", _GPTQ, Numbers())
def _gptq(row: int, column: int) -> float:
    group = int(_GPTQ["g_idx"][column])
    code = (int(_GPTQ["qweight"][column // 8, row]) >> 4 * (column % 8)) & 15
    zero = ((int(_GPTQ["qzeros"][group, 0]) >> 4 * row) & 15) + 1
    return float((code - zero) * _GPTQ["scales"][group, row])


@by_hand("integers, packed", _PACK, Numbers(bits=(4,)))
def _packed(row: int, column: int) -> float:
    code = (int(_PACK["weight_packed"][row, column // 8]) >> 4 * (column % 8)) & 15
    return float((code - 8) * _PACK["weight_scale"][row, column // 8])


@by_hand("NVFP4, modelopt", _NV, Numbers())
def _nvfp4(row: int, column: int) -> float:
    code = (int(_NV["weight"][row, column // 2]) >> 4 * (column % 2)) & 15
    return FP4[code] * float(_NV["weight_scale"][row, 0].float() * _NV["weight_scale_2"])


@pytest.mark.parametrize("name", BY_HAND)
def test_a_form_decodes_number_by_number(name: str) -> None:
    parts, numbers, loop = BY_HAND[name]
    weight = decoded(name, parts, numbers)
    expected = torch.tensor([[loop(row, column) for column in range(16)] for row in range(8)]).to(weight.dtype)
    assert torch.equal(weight, expected)
