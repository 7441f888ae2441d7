"""Quantized weights as bfloat16, where transformers gives dense ones on loading as well.

    name                      with                        format
    X.weight  FP8             X.weight_scale_inv          a scale per block (DeepSeek; arXiv:2412.19437, section 3.3)
    X.weight  FP8             X.weight_scale              a scale per tensor, row or block (compressed-tensors)
    X_blocks  4 bits each     X_scales                    MXFP4: a power of two per 32 numbers (gpt-oss)

Names, shapes and types alone decide: a scale beside a weight that is not FP8 is a fault, and never multiplied.
Scales of activations (`X.input_scale`, `k_proj.k_scale`) say nothing of a weight, and are dropped with the format.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.checkpoint.hf.config import read_json

BLOCK_SCALE, SCALE, ACTIVATION = "_scale_inv", "_scale", "input_scale"
CACHE = (".k_scale", ".v_scale", ".q_scale")
"""Endings of the scales of an attention's cache, beside a projection or the attention."""
BLOCKS, SCALES = "_blocks", "_scales"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
"""Types of which a tensor is no weight by itself; the last is that of scales that are powers of two."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Numbers of 4 bits, E2M1."""
BIAS = 127
"""What is subtracted from a stored exponent."""
SETTINGS = ("quantization_config", "compression_config")
"""Keys of a config that describe its quantization, at the top or in `text_config`."""
MODELOPT = "modelopt"
SIDE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": MODELOPT}
"""Files that mark older quantized releases."""
Shape = tuple[int, ...]
Stored = Mapping[str, tuple[Shape, torch.dtype | None]]
"""Shape and type of every tensor of a folder, by name; None for a type that torch lacks."""


@dataclass(frozen=True)
class Quantized:
    """A weight that a folder holds as several tensors.

    Attributes:
        parts: names of the tensors.
        shape: of the weight.
        decode: makes the weight, in bfloat16, of the tensors in the order of `parts`.
    """

    parts: tuple[str, ...]
    shape: Shape
    decode: Callable[..., Tensor]


@dataclass
class Weights:
    """The quantized weights of a folder.

    Attributes:
        found: the weights, by name.
        wrong: tensors that make no weight, each with a sentence that begins with its name.
    """

    found: dict[str, Quantized] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


def quantized_weights(stored: Stored, block: tuple[int, int]) -> Weights:
    """Find the weights that are stored as several tensors, and those whose tensors do not fit each other.

    Args:
        stored: the tensors of a folder.
        block: rows and columns that share a scale.
    """
    weights = Weights()
    for name, (_, dtype) in stored.items():
        if name.endswith(BLOCKS) and f"{name.removesuffix(BLOCKS)}{SCALES}" in stored:
            _add_mxfp4(weights, stored, name.removesuffix(BLOCKS))
        scales = [f"{name}{ending}" for ending in (BLOCK_SCALE, SCALE) if f"{name}{ending}" in stored]
        if not scales and dtype in FP8[:2]:
            weights.wrong[name] = f"is FP8 without a '{name}{BLOCK_SCALE}' or '{name}{SCALE}'"
        elif len(scales) == 2:
            weights.wrong[name] = f"has two scales, '{scales[0]}' and '{scales[1]}'; remove the wrong one"
        elif scales and dtype in FP8:
            _add_fp8(weights, stored, name, scales[0], block)
        elif scales and dtype is not None and dtype.is_floating_point:
            kind = str(dtype).removeprefix("torch.")
            weights.wrong[name] = (
                f"is {kind}, but '{scales[0]}' beside it is the scale of an FP8 weight; remove the scale if the weight "
                "was replaced, or restore the FP8 weight"
            )
    return weights


def activation_scales(names: Collection[str]) -> list[str]:
    """Those of the names that are scales of activations beside a weight, or of an attention's cache."""
    inputs = [name for name in names if name.endswith(ACTIVATION) and f"{name.removesuffix(ACTIVATION)}weight" in names]
    return inputs + [name for name in names if name.endswith(CACHE)]


def _add_fp8(weights: Weights, stored: Stored, name: str, scale: str, block: tuple[int, int]) -> None:
    shape, scale_shape = stored[name][0], stored[scale][0]
    blocks = (*shape[:-2], *(-(-size // step) for size, step in zip(shape[-2:], block, strict=False)))
    by_block = len(shape) >= 2 and scale_shape == blocks
    if scale.endswith(BLOCK_SCALE):
        fits = by_block
    else:
        fits = by_block or all(size == 1 for size in scale_shape) or scale_shape == (*shape[:1], 1)
    if not fits:
        weights.wrong[name] = (
            f"is FP8 of shape {_by(shape)} with scales of shape {_by(scale_shape)}, which are neither blocks of "
            f"{_by(block)} nor, of compressed-tensors, one or one a row"
        )
        return
    decode = partial(from_blocks, block=block) if by_block else from_rows
    weights.found[name] = Quantized((name, scale), shape, decode)


def _add_mxfp4(weights: Weights, stored: Stored, name: str) -> None:
    (shape, dtype), (scale_shape, scale_dtype) = stored[f"{name}{BLOCKS}"], stored[f"{name}{SCALES}"]
    if name in stored:
        weights.wrong[name] = f"is stored whole, and as '{name}{BLOCKS}' too; remove the ones that do not belong"
    elif len(shape) != 4 or dtype != torch.uint8 or scale_dtype != torch.uint8 or scale_shape != shape[:-1]:
        weights.wrong[f"{name}{BLOCKS}"] = (
            f"of shape {_by(shape)} with scales of shape {_by(scale_shape)} is no weight in MXFP4, whose bytes have "
            "the shape experts x rows x groups x 16"
        )
    else:
        experts, rows, groups, size = shape
        parts = (f"{name}{BLOCKS}", f"{name}{SCALES}")
        weights.found[name] = Quantized(parts, (experts, groups * size * 2, rows), from_mxfp4)


def _by(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "1"


def from_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply FP8 values by the scales of their blocks.

    Args:
        weight: values [..., rows, columns].
        scale: one scale per block [..., rows / block[0], columns / block[1]], rounded up.
        block: rows and columns of a block.

    Returns:
        bfloat16 [..., rows, columns].
    """
    wide = scale.float().repeat_interleave(block[0], dim=-2).repeat_interleave(block[1], dim=-1)
    return (weight.float() * wide[..., : weight.shape[-2], : weight.shape[-1]]).to(torch.bfloat16)


def from_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply FP8 values [rows, columns] by the scale of the tensor, or of each row [rows, 1]; bfloat16."""
    return (weight.float() * scale.float()).to(torch.bfloat16)


def from_mxfp4(blocks_ERGB: Tensor, scales_ERG: Tensor) -> Tensor:
    """Numbers of 4 bits, the lower half of a byte first, times a power of two per group, with rows and columns swapped.

    Args:
        blocks_ERGB: bytes [E, rows, groups, 16].
        scales_ERG: exponents [E, rows, groups].

    Returns:
        bfloat16 [E, columns, rows].
    """
    both = torch.stack([blocks_ERGB & 15, blocks_ERGB >> 4], dim=-1).flatten(-2).int()
    numbers = torch.tensor(FP4, dtype=torch.bfloat16)[both]
    scaled = torch.ldexp(numbers, scales_ERG.int().unsqueeze(-1) - BIAS)
    return scaled.flatten(-2).transpose(1, 2).contiguous()


def quantization(folder: Path, keys: dict[str, Any]) -> str | None:
    """Name how a folder is quantized: its `quant_method`, or what the files of older releases show; None if it is not.

    Args:
        folder: the folder.
        keys: of its `config.json`.
    """
    settings = quantization_settings(keys)
    if settings is None:
        file = next((name for name in SIDE_FILES if (folder / name).is_file()), None)
        if file is None or SIDE_FILES[file] != MODELOPT:
            return None if file is None else SIDE_FILES[file]
        stored = read_json(folder / file)
        stored = stored.get("quantization") if isinstance(stored, dict) else None
        settings = {"quant_method": MODELOPT, **(stored if isinstance(stored, dict) else {})}
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return "bitsandbytes"  # its older files name no method
    method = str(settings.get("quant_method") or "an unnamed method")
    weights = _group_weights(settings)
    is_fp8 = bool(weights) and all(one.get("type") == "float" and one.get("num_bits") == 8 for one in weights)
    if method == MODELOPT:
        algorithm = str(settings.get("quant_algo") or "an unnamed algorithm")
        return "fp8" if algorithm.startswith("FP8") else f"{MODELOPT} ({algorithm})"
    return "fp8" if method == "compressed-tensors" and is_fp8 else method


def block_of(keys: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale in an FP8 release, from the config's keys; 128 and 128 by default."""
    settings = quantization_settings(keys) or {}
    for block in (settings.get("weight_block_size"), *(one.get("block_structure") for one in _group_weights(settings))):
        if isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block):
            return block[0], block[1]
    return 128, 128


def without_quantization(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config for tensors in bfloat16."""
    kept = {name: value for name, value in keys.items() if name not in SETTINGS}
    text = kept.get("text_config")
    return {**kept, "text_config": without_quantization(text)} if isinstance(text, dict) else kept


def quantization_settings(keys: dict[str, Any]) -> dict[str, Any] | None:
    """What a config says of its quantization; None without a word."""
    text = keys.get("text_config")
    parts = (keys, text if isinstance(text, dict) else {})
    found = (part.get(name) for part in parts for name in SETTINGS)
    return next((settings for settings in found if settings and isinstance(settings, dict)), None)


def _group_weights(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """How compressed-tensors has quantized the weights of each group; an empty object for a group without."""
    groups = settings.get("config_groups")
    each = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") if isinstance(group, dict) else None for group in each]
    return [one if isinstance(one, dict) else {} for one in weights]
