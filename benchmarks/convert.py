"""Time conversions in both directions: few large tensors against a file copy, and 4,000 small ones.

    python benchmarks/convert.py --folder DIR    all parts, in a folder with 24 GB of free space
    python benchmarks/convert.py --part count    one of fp8, size and count
    python benchmarks/convert.py --quick         does it run? (a few experts; the figures mean nothing)

`fp8` reads 2 GB of FP8 in blocks of 128, decoded weight by weight, against copying the same files. `size` converts
a synthetic model of 8 GB. Each side runs in a separate process with its own peak of resident memory: `copy` reads and
writes every tensor through safetensors, `import` and `export` are the two conversions. `count` converts 3,966 small
tensors, most of them experts, in one file and in twenty. Importing Megatron is not timed.
"""

import json
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path

import torch

from benchmarks.harness import MIB, Found, Goal, Table, in_own_process, main, resident

HIDDEN, WIDTH, VOCABULARY = 4096, 14336, 32000
ROUNDS, GIGABYTES = 3, 8.0
LAYER = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * 1024 + 3 * HIDDEN * WIDTH)
"""Bytes of a layer in bfloat16, the largest part of the model."""


def convert(wanted: Namespace) -> Found:
    """Run the part in --part, or all; with --quick, two."""
    parts = ("fp8", "count") if wanted.quick else PARTS if wanted.part is None else (wanted.part,)
    found = []
    for part in parts:
        folder = wanted.folder / part
        folder.mkdir()
        found.append(PARTS[part](folder, wanted.quick))
        shutil.rmtree(folder)
    return Found(
        {name: value for one in found for name, value in one.results.items()},
        [goal for one in found for goal in one.goals],
        [table for one in found for table in one.tables],
    )


def compare_sizes(folder: Path, quick: bool) -> Found:
    """Compare throughput and peak memory on a large model."""
    size = write_model(folder / "source", GIGABYTES)
    sides = {side: ran(side, folder, quick) for side in ("copy", "import", "export")}
    rows = [(side, seconds, size / seconds / 1e6, peak / MIB) for side, (seconds, peak) in sides.items()]
    copying, _ = sides.pop("copy")
    goals = [
        *(
            Goal(f"{side}: throughput over that of a copy", copying / one, 0.5, ">=")
            for side, (one, _) in sides.items()
        ),
        *(
            Goal(f"{side}: peak over the largest layer, MiB", (peak - LAYER) / MIB, 1024.0)
            for side, (_, peak) in sides.items()
        ),
    ]
    header = ("side", "s", "MB/s", "MiB resident at most")
    title = f"A model of {size / 1e9:.1f} GB, largest layer {LAYER / MIB:.0f} MiB"
    return Found({"bytes of the model": size}, goals, [Table(title, header, rows)])


def compare_counts(folder: Path, quick: bool) -> Found:
    """Compare seconds of both directions with the tensors in one file and in many."""
    config = EXPERTS | {"n_routed_experts": 4} if quick else EXPERTS
    rows = list[tuple[str, float]]()
    for files in (1, FILES):
        place = folder / str(files)
        write_experts(place / "source", files, config)
        rows += [(f"{side}, {files} file(s)", ran(side, place, quick)[0]) for side in ("import", "export")]
    tensors = len(experts_shapes(config))
    return Found(
        {"small tensors": tensors},
        [Goal(f"{what}: seconds", seconds, 3.0) for what, seconds in rows],
        [Table(f"{tensors:,} small tensors", ("side", "s"), rows)],
    )


def compare_fp8(folder: Path, quick: bool) -> Found:
    """Time reading quantized weights against copying their files, in turns; the best round of each counts."""
    size = write_fp8(folder / "source", part=16 if quick else 1, layers=1 if quick else 10)
    rounds = [{side: ran(side, folder, quick) for side in ("copy", "read")} for _ in range(1 if quick else ROUNDS)]
    best = {side: min(one[side][0] for one in rounds) for side in ("copy", "read")}
    peak = max(one["read"][1] for one in rounds)
    return Found(
        {"bytes in FP8": size},
        [
            Goal("read of FP8: throughput over that of a copy", best["copy"] / best["read"], 0.5, ">="),
            Goal("read of FP8: peak over two layers, MiB", (peak - 2 * LAYER) / MIB, 1024.0),
        ],
        [Table("Weights in FP8, the best round", ("side", "s"), [*best.items()])],
    )


def write_fp8(folder: Path, part: int, layers: int) -> int:
    """Write layers of a Llama in FP8 with one scale per block, with sizes divided by `part`; return their bytes."""
    from safetensors.torch import save_file

    folder.mkdir()
    size = 0
    for layer in range(layers):
        held = {}
        for name, shape in LAYER_SHAPES.items():
            rows, *columns = (one // part for one in shape)
            if columns:
                stem = f"model.layers.{layer}.{name}.weight"
                held[stem] = torch.randint(0, 120, (rows, *columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
                held[f"{stem}_scale_inv"] = torch.rand(-(-rows // 128), -(-columns[0] // 128))
        save_file(held, folder / f"model-{layer}.safetensors")
        size += sum(tensor.nbytes for tensor in held.values())
    return size


PARTS: dict[str, Callable[[Path, bool], Found]] = {
    "fp8": compare_fp8,
    "size": compare_sizes,
    "count": compare_counts,
}


FLAGS: dict[str, dict[str, Any]] = {
    "--part": {"choices": PARTS, "help": "run this part alone (default: all)"},
}


def write_model(folder: Path, gigabytes: float) -> int:
    """Write a Llama folder of random bits; return its bytes."""
    from megatron_mtp.checkpoint.hf.writer import HFShards

    folder.mkdir()
    outer = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    layers = max(1, round((gigabytes * 1e9 - 4 * VOCABULARY * HIDDEN) / LAYER + 0.5))
    shapes: dict[str, tuple[int, ...]] = {**outer, "model.norm.weight": (HIDDEN,)}
    for index in range(layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in LAYER_SHAPES.items()}
    shards = HFShards(folder, [(name, shape, torch.bfloat16) for name, shape in shapes.items()], 5 * 10**9)
    for name, shape in shapes.items():
        shards.write(name, torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    return sum(2 * torch.Size(shape).numel() for shape in shapes.values())


LAYER_SHAPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (HIDDEN, HIDDEN)),
    **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (1024, HIDDEN)),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (WIDTH, HIDDEN)),
    "mlp.down_proj": (HIDDEN, WIDTH),
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (HIDDEN,)),
}
COMMON: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0}
CONFIG = COMMON | {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
    "intermediate_size": WIDTH, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = COMMON | {
    "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "vocab_size": 128, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 128, "partial_rotary_factor": 0.5, "moe_intermediate_size": 16,
    "n_routed_experts": 216, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0, "norm_topk_prob": True,
}  # fmt: skip
FILES = 20


def write_experts(folder: Path, files: int, config: dict[str, Any]) -> None:
    """Write a GLM-4 MoE folder of zeros in this many files."""
    from megatron_mtp.checkpoint.hf.writer import HFShards

    folder.mkdir(parents=True)
    tensors = [(name, shape, torch.bfloat16) for name, shape in experts_shapes(config).items()]
    size = sum(2 * torch.Size(shape).numel() for _, shape, _ in tensors)
    HFShards(folder, tensors, -(-size // files) + 2 * 64 * 128)  # creates sparse files of zeros
    (folder / "config.json").write_text(json.dumps(config))


def experts_shapes(keys: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    from megatron_mtp.megatron.runtime import prepare

    prepare()
    from megatron_mtp.checkpoint.families import Layout, family_of
    from megatron_mtp.checkpoint.hf.config import HFConfig

    config = HFConfig.from_keys(keys)
    rules = family_of(config).all_rules(config, Layout(0))
    return {tensor.name: tensor.shape or () for rule in rules for tensor in rule.hf}


def ran(side: str, folder: Path, quick: bool) -> tuple[float, int]:
    """Return seconds and peak memory of a side, in a separate process unless it is a quick run."""
    return run_side(side, folder) if quick else in_own_process(run_side, side, folder)


def run_side(side: str, folder: Path) -> tuple[float, int]:
    """Return seconds of the work itself, and the whole process's peak memory in bytes."""
    if side != "copy":
        from megatron_mtp.megatron.runtime import prepare

        prepare()
        import megatron_mtp.checkpoint.convert.import_hf  # noqa: F401  (importing Megatron is not timed)
    started = time.perf_counter()
    _WORK[side](folder)
    return time.perf_counter() - started, resident("VmHWM")


def _copy(folder: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    (folder / "copied").mkdir()
    for file in sorted((folder / "source").glob("*.safetensors")):
        with safe_open(file, framework="pt") as stream:
            tensors = {name: stream.get_tensor(name).clone() for name in stream.keys()}  # noqa: SIM118
        save_file(tensors, folder / "copied" / file.name)
    shutil.rmtree(folder / "copied")


def _import(folder: Path) -> None:
    from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
    from megatron_mtp.checkpoint.convert.stream import Options

    hf_to_mcore(folder / "source", folder / "mcore", Options(quiet=True))


def _export(folder: Path) -> None:
    from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
    from megatron_mtp.checkpoint.convert.hf_form import form_of
    from megatron_mtp.checkpoint.convert.stream import Options

    mcore_to_hf(folder / "mcore", folder / "back", Options(quiet=True), form_of(folder / "mcore"))


def _read(folder: Path) -> None:
    from megatron_mtp.checkpoint.hf.folder import HFFolder

    source = HFFolder(folder / "source")
    for name in source.tensors:
        source.read(name)


_WORK = {"read": _read, "copy": _copy, "import": _import, "export": _export}


if __name__ == "__main__":
    main(convert, __doc__, flags=FLAGS)
