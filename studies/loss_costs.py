"""What a training step costs with each loss of the depths: time, and memory of a depth, against those of `tv`.

    python studies/loss_costs.py                    every loss, 4 depths, 65,536 entries
    python studies/loss_costs.py --losses tv e2e_tv --repeats 10
    python studies/loss_costs.py --quick            does it run? (the figures mean nothing)

Memory of a depth is the peak of a step with all depths less that of one without, divided by the depths. The models of
all losses are there at once and take turns step by step, so that a load from outside meets all.

Run at 56bddb4.
"""

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch
from megatron.training import get_args

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
from megatron_mtp.model.build import MTPGPTModelConfig
from megatron_mtp.training.forward_step import ForwardStep
from megatron_mtp.training.metrics import Metrics
from studies.objectives import LOSSES

BASE, COUPLED = "tv", "e2e_tv"
GOAL = 1.2
"""`e2e_tv`, which sees all depths of a position at once, over `tv`, which sees one: time and memory."""

DEPTHS = 4
DEFAULTS = {
    "cpu": Sizes(256, 2, 4, 256, 4, 65536, "fp32"),
    "cuda": Sizes(2048, 4, 16, 2048, 4, 65536, "bf16"),
    "quick": Sizes(32, 1, 2, 32, 2, 256, "fp32"),
}
REPEATS = {"cpu": 5, "cuda": 20, "quick": 1}


def main() -> None:
    """Measure and report."""
    wanted = parse(sys.argv[1:])
    where = place(wanted.quick)
    limit_threads(wanted)
    sizes, command = DEFAULTS[where], sys.argv
    set_up_megatron(sizes, DEPTHS)
    sys.argv = command
    sides = {loss: build(MTPConfig(mtp_loss=loss)) for loss in wanted.losses}
    without = peak(trunk_alone())
    get_args().mtp_num_layers = DEPTHS
    mib = {loss: (peak(side) - without) / DEPTHS for loss, side in sides.items()}
    steps = {loss: side.step for loss, side in sides.items()}
    spent = interleave(steps, wanted.repeats or REPEATS[where], synchronize=torch.cuda.synchronize)
    torch.distributed.destroy_process_group()
    wall = {loss: [one.wall for one in rounds] for loss, rounds in spent.items()}
    results = {loss: result(loss, wall, mib) for loss in wanted.losses}
    measured = {"time of a step": "time ratio", "memory of a depth": "memory ratio"}
    report(
        "loss_costs",
        hardware(ON_CPU),
        {"sizes": asdict(sizes), "depths": DEPTHS, **results},
        [Goal(f"{what}, {COUPLED} / {BASE}", results[COUPLED][ratio], GOAL) for what, ratio in measured.items()],
        [
            Table(
                ("loss", "s a step", f"/ {BASE}", "MiB a depth", f"/ {BASE}"),
                [(loss, *one.values()) for loss, one in results.items()],
            )
        ],
    )


def parse(argv: list[str]) -> argparse.Namespace:
    """Ends the process with one sentence and status 2 where a value makes no sense."""
    parser = argparse.ArgumentParser(
        description="Time and memory of a training step with each loss of the depths.",
        epilog=f"example: python studies/loss_costs.py --losses {BASE} {COUPLED} --repeats 10",
    )
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES, metavar="LOSS", help="default: all")
    add_common_flags(parser, REPEATS)
    wanted = parser.parse_args(argv)
    missing = {BASE, COUPLED} - {*wanted.losses}
    if missing:
        parser.error(f"--losses lacks {' and '.join(sorted(missing))}; give {BASE} and {COUPLED}, which are compared.")
    return wanted


def build(settings: MTPConfig) -> Side:
    """Our model with the settings, in training."""
    forward_step = ForwardStep(settings, Metrics(None))
    return build_side(MTPGPTModelConfig, forward_step, make_batches(2), settings=settings)


def trunk_alone() -> Side:
    """Our model without depths; Megatron's arguments, which are those of the process, say so from here on."""
    get_args().mtp_num_layers = None
    return build(MTPConfig())


def peak(side: Side) -> float:
    """MiB that a step allocates above what is there; the first step makes the optimizer's state."""
    side.step()
    return allocated_peak(side.step, ON_CPU).mib or 0.0


def result(loss: str, wall: dict[str, list[float]], mib: dict[str, float]) -> dict[str, Any]:
    """Time and memory, each also over those of `BASE`."""
    return {
        "seconds": round(statistics.median(wall[loss]), 4),
        "time ratio": round(compare(wall[loss], wall[BASE]).paired_ratio, 4),
        "MiB": round(mib[loss], 1),
        "memory ratio": round(mib[loss] / mib[BASE], 4),
    }


if __name__ == "__main__":
    main()
