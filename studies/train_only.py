"""What training the depths alone takes, against training them with the trunk: time and memory of a step.

    python studies/train_only.py                     the shape of SmolLM2-135M with two depths, distilled
    python studies/train_only.py --loss tv           by another loss
    python studies/train_only.py --quick             does it run? (the figures mean nothing)

The joint side trains everything by cross-entropy, as `pretrain_gpt.py` does by default; the other has `--mtp-train-
only` with `--mtp-loss`. Memory is the peak of all that a side allocates from nothing to the end of its second step:
weights, gradients, optimizer state and activations. Both sides then take turns step by step.

Run at a2c7934.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch

from benchmarks.harness import (
    Goal,
    add_common_flags,
    allocated_peak,
    compare,
    hardware,
    interleave,
    limit_threads,
    report,
    Table,
)
from benchmarks.sides import ON_CPU, Side, Sizes, build_side, make_batches, place, set_up_megatron
from megatron_mtp.config import MTPConfig
from megatron_mtp.losses import LOSSES
from megatron_mtp.model.build import MTPGPTModelConfig
from megatron_mtp.training.forward_step import ForwardStep
from megatron_mtp.training.metrics import Metrics

GOAL = 0.6
"""Of the joint side's time, and of its memory."""

DEPTHS = 2
JOINT, ALONE = "joint", "depths alone"
SMOLLM2 = "--ffn-hidden-size 1536 --group-query-attention --num-query-groups 3 --rotary-base 100000".split()
DEFAULTS = {
    "cpu": Sizes(576, 30, 9, 512, 2, 49152, "bf16"),
    "cuda": Sizes(576, 30, 9, 2048, 8, 49152, "bf16"),
    "quick": Sizes(48, 4, 3, 32, 2, 256, "bf16"),
}
REPEATS = {"cpu": 5, "cuda": 20, "quick": 1}


def main() -> None:
    """Measure and report."""
    wanted = parse(sys.argv[1:])
    where = place(wanted.quick)
    limit_threads(wanted)
    sizes, command = DEFAULTS[where], sys.argv
    set_up_megatron(sizes, DEPTHS, *SMOLLM2)
    sys.argv = command
    settings = {JOINT: MTPConfig(), ALONE: MTPConfig(mtp_train_only=True, mtp_loss=wanted.loss)}
    sides: dict[str, Side] = {}
    peaks = {name: allocated_peak(starter(name, one, sides), ON_CPU).mib for name, one in settings.items()}
    steps = {name: side.step for name, side in sides.items()}
    spent = interleave(steps, wanted.repeats or REPEATS[where], synchronize=torch.cuda.synchronize)
    torch.distributed.destroy_process_group()
    wall = {name: [one.wall for one in rounds] for name, rounds in spent.items()}
    results = {
        "sizes": asdict(sizes),
        "loss": wanted.loss,
        "seconds": {name: round(statistics.median(seconds), 4) for name, seconds in wall.items()},
        "MiB": peaks,
        "time ratio": round(compare(wall[ALONE], wall[JOINT]).paired_ratio, 4),
        "memory ratio": round((peaks[ALONE] or 0) / (peaks[JOINT] or 1), 4),
    }
    report(
        "train_only",
        hardware(ON_CPU),
        results,
        [Goal(f"{what} of the joint side's", results[f"{what} ratio"], GOAL) for what in ("time", "memory")],
        [Table(("", "s a step", "MiB"), [(name, results["seconds"][name], peaks[name]) for name in settings])],
    )


def parse(argv: list[str]) -> argparse.Namespace:
    """Ends the process with one sentence and status 2 where a value makes no sense."""
    parser = argparse.ArgumentParser(
        description="Time and memory of training the depths alone, against training them with the trunk.",
        epilog="example: python studies/train_only.py --loss ce --repeats 10",
    )
    losses = [name for name in LOSSES if name != "mix"]
    parser.add_argument("--loss", choices=losses, default="kd", help="of the depths on the frozen trunk; default: kd")
    add_common_flags(parser, REPEATS)
    return parser.parse_args(argv)


def starter(name: str, settings: MTPConfig, sides: dict[str, Side]) -> Callable[[], Any]:
    """Builds a side and takes its first two steps; the optimizer has its state after the first."""

    def start() -> None:
        forward_step = ForwardStep(settings, Metrics(None))
        sides[name] = build_side(MTPGPTModelConfig, forward_step, make_batches(2), settings=settings)
        for _ in range(2):
            sides[name].step()

    return start


if __name__ == "__main__":
    main()
