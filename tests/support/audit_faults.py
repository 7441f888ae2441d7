"""Faults planted in small folders of five families, each with the explanation that an audit must give.

The kinds come from public bug reports: modified tensors, configs that count missing tensors, files that no index lists,
wrong dtypes, dropped MTP layers, and layers, MTP layers or experts in a different order.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hf_models import Tensors, make
from safetensors.torch import load_file, save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
Spoil = Callable[[Path], None]


@dataclass(frozen=True)
class Kind:
    """Facts about a family that the faults need.

    Attributes:
        depths: number of MTP layers in the folder.
        dtype: of its tensors.
        projection: an MTP layer's input projection.
        query: a projection whose rows are heads, and the number of rows.
        output: a matrix that is not square.
        norm: a norm of the trunk.
        depth: pattern of the last MTP layer's tensors.
        part: a tensor of an MTP layer.
        config: a key that changes the computation, and another value.
    """

    depths: int
    dtype: torch.dtype
    projection: str
    query: tuple[str, int]
    output: str
    norm: str
    depth: str
    part: str
    config: tuple[str, Any]


KINDS = {
    "mimo": Kind(
        3,
        torch.bfloat16,
        "model.mtp_layers.0.input_proj.weight",
        ("model.layers.0.self_attn.q_proj.weight", 16),
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.2.input_layernorm.weight",
        r"mtp_layers\.2\.",
        "model.mtp_layers.1.token_layernorm.weight",
        ("rms_norm_eps", 1e-3),
    ),
    "deepseek_v3": Kind(
        3,
        torch.float32,
        "model.layers.3.eh_proj.weight",
        ("model.layers.0.self_attn.q_b_proj.weight", 12),
        "model.layers.1.mlp.experts.2.down_proj.weight",
        "model.layers.2.post_attention_layernorm.weight",
        r"layers\.5\.",
        "model.layers.4.hnorm.weight",
        ("routed_scaling_factor", 1.0),
    ),
    "glm4_moe": Kind(
        3,
        torch.float32,
        "model.layers.4.eh_proj.weight",
        ("model.layers.2.self_attn.q_proj.weight", 16),
        "model.layers.0.mlp.down_proj.weight",
        "model.norm.weight",
        r"layers\.5\.",
        "model.layers.3.enorm.weight",
        ("norm_topk_prob", False),
    ),
    "qwen3_next": Kind(
        1,
        torch.bfloat16,
        "mtp.fc.weight",
        ("mtp.layers.0.self_attn.k_proj.weight", 16),
        "model.layers.0.linear_attn.out_proj.weight",
        "model.layers.1.input_layernorm.weight",
        r"mtp\.",
        "mtp.norm.weight",
        ("num_experts_per_tok", 3),
    ),
    "nemotron_h": Kind(
        3,
        torch.bfloat16,
        "mtp.layers.2.eh_proj.weight",
        ("backbone.layers.2.mixer.q_proj.weight", 16),
        "backbone.layers.1.mixer.experts.1.up_proj.weight",
        "backbone.layers.0.norm.weight",
        r"mtp\.layers\.[45]\.",
        "mtp.layers.0.hnorm.weight",
        ("layer_norm_epsilon", 1e-3),
    ),
}


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        family: a key of `KINDS`.
        kind: tensor, config, index, type, missing depth or wrong order.
        what: what was changed.
        guess: the explanation that must come first.
        spoil: function that plants the fault in a folder.
    """

    family: str
    kind: str
    what: str
    guess: str
    spoil: Spoil

    def __str__(self) -> str:
        return f"{self.family}-{self.what}".replace(" ", "-")


def sound(root: Path) -> dict[str, Path]:
    """Create an intact folder of every family, in three files with an index."""
    return {name: make(root / name, name, kind.depths, kind.dtype, shards=True) for name, kind in KINDS.items()}


def spoiled(fault: Fault, source: Path, target: Path) -> Path:
    """Copy a folder and plant the fault."""
    shutil.copytree(source, target)
    fault.spoil(target)
    return target


def faults() -> list[Fault]:
    """Return all faults."""
    return [Fault(name, *row) for name, kind in KINDS.items() for row in (*_common(name, kind), *_own(name))]


LATENT, COPY = "model.layers.1.self_attn.q_b_proj.weight", "model.layers.4.shared_head.head.weight"
Row = tuple[str, str, str, Spoil]


def _common(name: str, kind: Kind) -> Iterator[Row]:
    query, width = kind.query
    yield "tensor", "halves of the projection swapped", "halves swapped", on(kind.projection, halves)
    yield "tensor", "heads permuted", "other numbers", on(query, lambda t: blocks(t, width))
    yield "tensor", "matrix transposed", "shape", on(kind.output, lambda t: t.T.contiguous())
    yield "tensor", "norm plus 1", "other numbers", on(kind.norm, lambda t: (t.double() + 1).to(t.dtype))
    yield "tensor", "a tensor lost", "tensor missing", drop(re.escape(kind.output))
    yield "config", f"{kind.config[0]} changed", "config", config(**{kind.config[0]: kind.config[1]})
    yield "index", "file left out of the index", "unindexed file", unlist
    yield "index", "file cut short", "damaged file", cut
    yield "type", "rounded", "rounded", on(kind.output, narrow)
    dropped = "MTP dropped" if kind.depths == 1 else "depth missing"
    yield "missing depth", "last depth dropped", dropped, drop(kind.depth)
    yield "missing depth", "a tensor of a depth dropped", "depth incomplete", drop(re.escape(kind.part))


def _own(name: str) -> list[Row]:
    """Return faults that fit only one family."""
    return {
        "mimo": [
            ("wrong order", "depths exchanged", "other numbers", swap(r"mtp_layers\.0", "mtp_layers.1")),
            ("config", "fewer depths", "depth count", config(num_nextn_predict_layers=2)),
            (
                "tensor",
                "gate and up exchanged",
                "other numbers",
                swap(r"1\.mlp\.gate_", "1.mlp.up_"),
            ),
        ],
        "deepseek_v3": [
            ("wrong order", "experts permuted", "other numbers", swap(r"2\.mlp\.experts\.1", "2.mlp.experts.4")),
            ("tensor", "head left at the embedding", "other numbers", tie),
            (
                "tensor",
                "rotary rows interleaved",
                "other numbers",
                on(LATENT, rotary),
            ),
        ],
        "glm4_moe": [
            ("wrong order", "layers off by one", "other numbers", swap(r"layers\.1", "layers.2")),
            (
                "tensor",
                "a copy of the head is stale",
                "stale copy",
                on(COPY, noisy),
            ),
            ("missing depth", "all depths dropped", "MTP dropped", drop(r"layers\.[345]\.")),
        ],
        "qwen3_next": [
            ("wrong order", "experts permuted", "other numbers", swap(r"(mtp\S*experts)\.0", r"\1.3")),
            (
                "tensor",
                "a projection of zeros",
                "other numbers",
                on("mtp.layers.0.self_attn.o_proj.weight", torch.zeros_like),
            ),
            ("index", "index names another file", "damaged file", misplace),
        ],
        "nemotron_h": [
            ("wrong order", "depths exchanged", "other numbers", swap(r"mtp\.layers\.([01])\.", two_on)),
            ("tensor", "a matrix doubled", "other numbers", on("mtp.layers.0.mixer.o_proj.weight", lambda t: 2 * t)),
            ("type", "a tensor of NaN", "not finite", on("mtp.layers.3.norm.weight", lambda t: t * float("nan"))),
        ],
    }[name]


def on(name: str, change: Callable[[Tensor], Tensor]) -> Spoil:
    """Change one tensor."""
    return lambda folder: rewrite(folder, lambda tensors: {**tensors, name: change(tensors[name])}, name)


def drop(pattern: str) -> Spoil:
    """Remove tensors whose names match the pattern from files and index."""

    def spoil(folder: Path) -> None:
        before = len(json.loads((folder / INDEX).read_text())["weight_map"])
        rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if not re.search(pattern, n)})
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] = {n: f for n, f in index["weight_map"].items() if not re.search(pattern, n)}
        assert len(index["weight_map"]) < before
        (folder / INDEX).write_text(json.dumps(index))

    return spoil


def swap(pattern: str, other: str | Callable[[re.Match[str]], str]) -> Spoil:
    """Swap the values of tensors whose names match the pattern with those of the names that `re.sub` returns."""

    def spoil(folder: Path) -> None:
        every = read(folder)
        pairs = {name: re.sub(pattern, other, name, count=1) for name in every if re.search(pattern, name)}
        assert pairs
        both = pairs | {two: one for one, two in pairs.items()}
        rewrite(folder, lambda tensors: {n: every[both[n]] if n in both else t for n, t in tensors.items()})

    return spoil


def two_on(match: re.Match[str]) -> str:
    """Return the matching name in the other MTP layer: Nemotron's have two layers each."""
    return f"mtp.layers.{int(match.group(1)) + 2}."


def config(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        keys = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(keys | changes))

    return spoil


def unlist(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    file = sorted(set(index["weight_map"].values()))[1]
    index["weight_map"] = {name: other for name, other in index["weight_map"].items() if other != file}
    (folder / INDEX).write_text(json.dumps(index))


def misplace(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    names, files = list(index["weight_map"]), sorted(set(index["weight_map"].values()))
    index["weight_map"][names[5]] = next(file for file in files if file != index["weight_map"][names[5]])
    (folder / INDEX).write_text(json.dumps(index))


def cut(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])


def tie(folder: Path) -> None:
    """Replace the head and its copies in some of the MTP layers by the embedding."""
    embedding = read(folder)["model.embed_tokens.weight"]
    rewrite(folder, lambda tensors: {n: embedding if n == "lm_head.weight" else t for n, t in tensors.items()})


def halves(tensor: Tensor) -> Tensor:
    return torch.cat(tensor.chunk(2, 1)[::-1], 1)


def blocks(tensor: Tensor, width: int) -> Tensor:
    """Return heads of this many rows in reverse order."""
    return tensor.unflatten(0, (-1, width)).flip(0).flatten(0, 1).contiguous()


def rotary(tensor: Tensor, width: int = 12) -> Tensor:
    rows = [*range(0, width, 2), *range(1, width, 2)]
    return tensor.unflatten(0, (-1, width))[:, rows].flatten(0, 1).contiguous()


def narrow(tensor: Tensor) -> Tensor:
    """Round float32 to bfloat16, and bfloat16 to FP8 precision."""
    if tensor.dtype == torch.float32:
        return tensor.bfloat16()
    return tensor.to(torch.float8_e4m3fn).to(tensor.dtype)


def noisy(tensor: Tensor) -> Tensor:
    return tensor + 0.01 * torch.randn_like(tensor)


def read(folder: Path) -> Tensors:
    """Read all tensors of a folder."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def rewrite(folder: Path, change: Callable[[Tensors], Tensors], name: str = "") -> None:
    """Change the tensors of every file, or of the file that contains `name`."""
    seen = 0
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        if not name or name in tensors:
            save_file({key: tensor.contiguous() for key, tensor in change(tensors).items()}, file)
            seen += 1
    assert seen, f"{name} is not in {folder}"
