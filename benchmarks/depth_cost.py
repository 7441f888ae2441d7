"""What every depth adds to the time of a training step, against what its arithmetic adds.

    python benchmarks/depth_cost.py                    D = 1, 2 and 4 beside D = 0
    python benchmarks/depth_cost.py --quick            does it run? (the figures mean nothing)

With C the multiply-adds of one layer for a token, H the hidden size, V the vocabulary and L the trunk's layers, D
depths add D (2 H^2 + C + H V) to L C + H V. All models take turns step by step, so that a load from outside meets all.
"""

import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch
from megatron.training import get_args

from benchmarks.harness import Found, Goal, Table, Timed, count, interleave, main
from benchmarks.sides import ON_CPU, Side, Sizes, build_side, make_batches, set_up_megatron
from megatron_mtp.config import MTPConfig
from megatron_mtp.model.arguments import MTPGPTModelConfig
from megatron_mtp.training.forward_step import ForwardStep
from megatron_mtp.training.metrics import Metrics

GOAL = 1.05
"""The time that depths add is at most so many times what their arithmetic adds."""

DEFAULTS = {
    "cpu": Sizes(256, 4, 4, 512, 4, 8192, "fp32"),
    "cuda": Sizes(2048, 8, 16, 2048, 4, 32768, "bf16"),
    "quick": Sizes(32, 1, 2, 32, 2, 256, "fp32"),
}
REPEATS = {"cpu": 9, "cuda": 50, "quick": 2}


FLAGS = {"--depths": {"type": count, "nargs": "+", "default": [1, 2, 4], "metavar": "D", "help": "default: 1 2 4"}}


def depth_cost(wanted: Namespace) -> Found:
    """Every number of depths beside none."""
    sizes = DEFAULTS[wanted.place]
    set_up_megatron(sizes, max(wanted.depths))
    sides = {depths: build(depths) for depths in (0, *wanted.depths)}
    steps = {str(depths): lambda depths=depths, side=side: step(depths, side) for depths, side in sides.items()}
    timed = interleave(steps, wanted.repeats, synchronize=torch.cuda.synchronize)
    results = {f"D={depths}": result(depths, timed, sizes) for depths in wanted.depths}
    return Found(
        {"sizes": asdict(sizes), "seconds without depths": timed.medians()["0"], **results},
        [Goal(f"time added / arithmetic added, {name}", one["ratio"], GOAL) for name, one in results.items()],
        [
            Table(
                "What depths add to a step",
                ("depths", "s a step", "added", "arithmetic", "ratio"),
                [(name, *one.values()) for name, one in results.items()],
            )
        ],
    )


def build(depths: int) -> Side:
    """Our model with so many depths, in training."""
    get_args().mtp_num_layers = depths or None
    return build_side(MTPGPTModelConfig, ForwardStep(MTPConfig(), Metrics(None)), make_batches(2))


def step(depths: int, side: Side) -> None:
    """A training step; Megatron's arguments are those of the process."""
    get_args().mtp_num_layers = depths or None
    side.step()


def result(depths: int, timed: Timed, sizes: Sizes) -> dict[str, Any]:
    """Part of a step without depths that is added, measured and by arithmetic."""
    added = timed.compare(str(depths), "0").paired_ratio - 1
    arithmetic = added_arithmetic(depths, sizes)
    return {
        "seconds": round(timed.medians()[str(depths)], 4),
        "added": round(added, 4),
        "arithmetic": round(arithmetic, 4),
        "ratio": round(added / arithmetic, 4),
    }


def added_arithmetic(depths: int, sizes: Sizes) -> float:
    """D (2 H^2 + C + H V) / (L C + H V); Megatron's gated MLP is 4 H wide, and attention sees half of a sequence."""
    hidden = sizes.hidden_size
    layer = 4 * hidden**2 + 3 * 4 * hidden**2 + sizes.seq_length * hidden
    head = hidden * sizes.vocab_size
    return depths * (2 * hidden**2 + layer + head) / (sizes.num_layers * layer + head)


if __name__ == "__main__":
    main(depth_cost, __doc__, ON_CPU, REPEATS, FLAGS)
