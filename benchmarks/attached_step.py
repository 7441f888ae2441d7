"""What a training step with attached MTP layers costs, against Megatron's own MTP in the same model.

    python benchmarks/attached_step.py                           this machine's defaults, D = 1 and 2
    python benchmarks/attached_step.py --depths 2 --repeats 40   one number of depths, more rounds
    python benchmarks/attached_step.py --quick                   does it run? (the figures mean nothing)

Both sides are a `GPTModel` with Megatron's MTP block, of Megatron's builder, with its DDP, optimizer, schedule and
`train_step`. On one side Megatron runs the block and adds its loss; on the other `attach` runs the same block, and the
loss rides along with the same weight. Sides take turns step by step, so that a load from outside meets both. The first
step has to give the same loss and the same norm of the gradient on both sides, or the benchmark ends with an error.
"""

import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import get_args
from megatron.training.models.gpt import GPTModelConfig

from benchmarks.harness import Found, Goal, Table, count, interleave, main
from benchmarks.sides import (
    BATCHES,
    ON_CPU,
    OURS,
    SAME,
    THEIRS,
    Sizes,
    build_side,
    check_same,
    make_batches,
    megatron_forward_step,
    set_up_megatron,
)
from megatron_mtp.attach import attach

GOAL = 1.0
"""A step with the attachment costs at most so many steps of Megatron's own MTP."""

DEFAULTS = {
    "cpu": Sizes(192, 4, 6, 256, 16, 1024, "fp32"),
    "cuda": Sizes(2048, 8, 16, 2048, 4, 32768, "bf16"),
    "quick": Sizes(32, 1, 2, 32, 2, 256, "fp32"),
}
REPEATS = {"cpu": 15, "cuda": 50, "quick": 2}
FLAGS = {"--depths": {"type": count, "nargs": "+", "default": [1, 2], "metavar": "D", "help": "default: 1 2"}}


def attached_step(wanted: Namespace) -> Found:
    """Every number of depths in --depths."""
    sizes = DEFAULTS[wanted.place]
    set_up_megatron(sizes, max(wanted.depths))
    results = {f"D={depths}": measure(depths, sizes, wanted.repeats) for depths in wanted.depths}
    rows = [(name, *list(result.values())[:-1]) for name, result in results.items()]
    header = ("depths", "s attached", "s Megatron", "ratio", "by round", "CPU time by round")
    return Found(
        {"sizes": asdict(sizes), "repeats": wanted.repeats, **results},
        [Goal(f"attached / Megatron's own MTP, {name}", result["by round"], GOAL) for name, result in results.items()],
        [Table("A step with attached layers", header, rows)],
    )


def measure(depths: int, sizes: Sizes, repeats: int) -> dict[str, Any]:
    """Time of both sides with D depths."""
    get_args().mtp_num_layers = depths
    MTPLossLoggingHelper.tracker = {}  # it keeps the number of depths that it saw first
    dataset, weight = make_batches(BATCHES), get_args().mtp_loss_scaling_factor
    theirs = build_side(GPTModelConfig, megatron_forward_step, dataset)
    attached = build_side(
        GPTModelConfig,
        megatron_forward_step,
        dataset,
        like=theirs,
        hooks=[lambda chunks: attach(chunks, weight=weight) and chunks],
    )
    sides = {OURS: attached, THEIRS: theirs}
    first = check_same({name: side.step() for name, side in sides.items()}, SAME[sizes.dtype])
    timed = interleave({name: side.step for name, side in sides.items()}, repeats, synchronize=torch.cuda.synchronize)
    wall, cpu = timed.compare(OURS, THEIRS), timed.compare(OURS, THEIRS, "cpu")
    return {
        "seconds": round(timed.medians()[OURS], 4),
        "seconds of Megatron": round(timed.medians()[THEIRS], 4),
        "ratio": round(wall.ratio, 4),
        "by round": round(wall.paired_ratio, 4),
        "CPU time": round(cpu.paired_ratio, 4),
        "first step": first,
    }


if __name__ == "__main__":
    main(attached_step, __doc__, ON_CPU, REPEATS, FLAGS)
