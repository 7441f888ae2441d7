"""Time decoding of one request on a CPU: against reading the weights, against transformers and llama.cpp.

    python benchmarks/decoding.py                         both models, float32 and bfloat16
    python benchmarks/decoding.py --model small           only the quickstart's model, or one of its shape
    python benchmarks/decoding.py --gguf FOLDER           llama.cpp's rate too, from llama-bench on FOLDER/<case>.gguf
    python benchmarks/decoding.py --quick                 does it run? (the figures mean nothing)

A plain step reads every weight once. So the rate at which this process sums a tensor as large as the weights, with the
same threads, bounds its tokens per second: from memory for the large model, from a cache for the small one.

    large    the shape of SmolLM2-135M with two MTP layers: 30 layers, H 576, 9 heads, 3 groups, vocabulary 49,152, tied
    small    the quickstart's: 7 layers, one MTP layer, H 192, 3 heads, vocabulary 1,024; its checkpoint if it exists

Both draft two tokens per round, the small model by applying its MTP layer twice.

Weights are random except for the checkpoint's; drafts agree as often as `accepted_length` states. The sides take turns,
run by run, on the same weights; results are medians. llama.cpp's rates in the goals were measured on another machine of
the same kind, and are scaled by the two machines' bounds.
"""

import json
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path

import torch

from benchmarks.agreeing import SMOLLM2, agreeing_model, bytes_of_a_step
from benchmarks.harness import Found, Goal, Table, Timed, interleave, main
from benchmarks.llama import greedy, llama_of
from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.decoding import generate, load_runner
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.extensions.cpu_rows.compiled import library
from megatron_mtp.megatron.runtime import prepare
from megatron_mtp.model.build import join_world

ON_CPU = prepare()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LLAMA_CPP = {"float32": 50.4 / 89, "bfloat16": 84.4 / 178}
"""Fraction of the bound that llama.cpp reached with the large model, on two threads of an AMD EPYC."""


@dataclass(frozen=True)
class Shape:
    """A model, and the amount of work to time."""

    sizes: dict[str, Any]
    depths: int
    drafts: dict[str, Any]
    noise: float
    new_tokens: int
    rounds: int


SHAPES = {
    "large": Shape(SMOLLM2, 2, {"method": "mtp", "num_speculative_tokens": 2}, 0.5, 64, 4),
    "small": Shape(
        {"layers": 7, "hidden": 192, "vocabulary": 1024, "heads": 3, "ffn": 512},
        1,
        {"method": "mtp_eagle", "num_speculative_tokens": 2},
        0.7,
        128,
        15,
    ),
}
QUICK = Shape(
    {"layers": 2, "hidden": 128, "vocabulary": 512}, 2, {"method": "mtp", "num_speculative_tokens": 2}, 0.5, 6, 1
)
PROMPT = list(range(5, 37))


CHECKPOINT = {"type": Path, "default": Path("runs/quickstart/checkpoint"), "help": "of the small model"}
FLAGS: dict[str, dict[str, Any]] = {
    "--model": {"choices": [*SHAPES, "all"], "default": "all", "help": "default: all"},
    "--dtype": {"choices": [*DTYPES, "all"], "default": "all", "help": "default: all"},
    "--checkpoint": CHECKPOINT,
    "--gguf": {"type": Path, "metavar": "FOLDER", "help": "with large-float32.gguf and so on, for llama-bench"},
}


def decoding(wanted: Namespace) -> Found:
    """Measure the models and dtypes in the flags."""
    join_world()
    dtypes = [*DTYPES] if wanted.dtype == "all" else [wanted.dtype]
    results: dict[str, Any] = {"compiled": all(library(DTYPES[dtype]) is not None for dtype in dtypes)}
    goals: list[Goal] = []
    for model in SHAPES if wanted.model == "all" else [wanted.model]:
        for dtype in dtypes:
            print(f"timing: {model} {dtype}", file=sys.stderr, flush=True)
            results[f"{model} {dtype}"], found = measured(model, dtype, wanted)
            goals += found
    return Found(results, goals, [rates_table(results)])


def measured(model: str, dtype: str, wanted: Namespace) -> tuple[dict[str, Any], list[Goal]]:
    """Return tokens per second of every side of a case, and its goals."""
    shape = shape_of(model, wanted)
    runner = runner_of(model, DTYPES[dtype], wanted)
    trunk, depths = llama_of(runner.model, DTYPES[dtype])
    texts, drafts = dict[str, list[int]](), list[AcceptanceStats]()

    def ours(side: str, config: dict[str, Any] | None) -> None:
        made = generate(runner, [PROMPT], shape.new_tokens, None, config)
        texts[side] = made.token_ids[0]
        if config:
            drafts.append(made.stats)

    def theirs(side: str, depths: Any) -> None:
        texts[side] = greedy(trunk, depths, PROMPT, shape.new_tokens)

    sides = {
        "plain": partial(ours, "plain", None),
        "draft": partial(ours, "draft", shape.drafts),
        "transformers": partial(theirs, "transformers", None),
        "transformers mtp": partial(theirs, "transformers mtp", depths),
    }
    timed = interleave(sides, wanted.repeats or shape.rounds, warm_up=1)
    check_tokens(f"{model} {dtype}", texts, runner.dtype)
    weights = bytes_of_a_step(runner.model)
    read = read_rate(weights)
    results = {
        "tokens_per_second": {side: round(shape.new_tokens / median, 1) for side, median in timed.medians().items()},
        "accepted_length": round((drafts[-1].emitted - 1) / (drafts[-1].target_forwards - 1), 3),
        "read_gb_per_second": round(read / 1e9, 1),
        "bound": round(read / weights, 1),
        "llama.cpp": llama_bench(wanted.gguf, f"{model}-{dtype}", shape.new_tokens),
    }
    return results, goals_of(model, dtype, timed, results)


def shape_of(model: str, wanted: Namespace) -> Shape:
    return QUICK if wanted.quick else SHAPES[model]


def runner_of(model: str, dtype: torch.dtype, wanted: Namespace) -> Runner:
    """Load the model, small or large: the small one's checkpoint if there is one, else random weights."""
    shape = shape_of(model, wanted)
    if model == "small" and wanted.checkpoint.is_dir() and not wanted.quick:
        return load_runner(wanted.checkpoint, dtype=dtype)
    return Runner(agreeing_model(depths=shape.depths, noise=shape.noise, **shape.sizes).to(dtype))


def check_tokens(name: str, texts: dict[str, list[int]], dtype: torch.dtype) -> None:
    """Print where a side diverges from plain decoding, and fail if one of ours does in float32."""
    for side, text in texts.items():
        same = next((n for n, (a, b) in enumerate(zip(text, texts["plain"], strict=True)) if a != b), len(text))
        if same < len(text):
            print(f"{name}: {side} parts from plain decoding after {same} of {len(text)} tokens")
            if dtype == torch.float32 and not side.startswith("transformers"):
                raise SystemExit("ours must not")


def read_rate(size: int, calls: int = 20) -> float:
    """Return the bytes per second of summing a tensor of that size, the best of several calls."""
    tensor = torch.ones(size // 4)
    took = []
    for _ in range(calls):
        began = time.perf_counter()
        tensor.sum()
        took.append(time.perf_counter() - began)
    return tensor.nbytes / min(took)


def llama_bench(folder: Path | None, case: str, tokens: int) -> float | None:
    """Return llama.cpp's tokens per second of plain decoding; None if not requested.

    Raises:
        SystemExit: it was requested, but llama-bench or the file is missing.
    """
    if folder is None:
        return None
    program, file = shutil.which("llama-bench"), folder / f"{case}.gguf"
    if program is None or not file.is_file():
        raise SystemExit(f"--gguf needs llama-bench on the PATH and {file}; leave the flag out for no llama.cpp.")
    command = [program, "-m", str(file), "-p", "0", "-n", str(tokens), "-t", str(torch.get_num_threads()), "-o", "json"]
    (row,) = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return float(row["avg_ts"])


def goals_of(model: str, dtype: str, timed: Timed, results: dict[str, Any]) -> list[Goal]:
    name, rates = f"{model} {dtype}", results["tokens_per_second"]

    over_plain = timed.compare("plain", "draft").paired_ratio
    if model == "large":
        theirs = results["llama.cpp"] or LLAMA_CPP[dtype] * results["bound"]
        return [
            Goal(f"{name}: plain over llama.cpp", rates["plain"] / theirs, 0.85, ">="),
            Goal(f"{name}: drafting over plain", over_plain, 1.0, ">="),
        ]
    if dtype != "float32":
        return []
    return [
        Goal(f"{name}: plain, tokens a second", rates["plain"], 1400, ">="),
        Goal(f"{name}: drafting over plain", over_plain, 1.3, ">="),
        Goal(
            f"{name}: drafting over transformers' MTP",
            timed.compare("transformers mtp", "draft").paired_ratio,
            2.0,
            ">=",
        ),
    ]


def rates_table(results: dict[str, Any]) -> Table:
    """Return tokens per second, one case per line."""
    cases = {name: one for name, one in results.items() if name != "compiled"}
    sides = list(next(iter(cases.values()))["tokens_per_second"])
    rows = [
        [name, *one["tokens_per_second"].values(), one["llama.cpp"], one["bound"], one["accepted_length"]]
        for name, one in cases.items()
    ]
    return Table("Decoding", ["tokens a second", *sides, "llama.cpp", "bound", "accepted length"], rows)


if __name__ == "__main__":
    main(decoding, __doc__, ON_CPU, {name: shape.rounds for name, shape in SHAPES.items()}, FLAGS)
