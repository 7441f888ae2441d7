"""Time that MTP layers add to a training step: measured, by arithmetic, and as predicted by `megatron-mtp plan`.

    python benchmarks/depth_cost.py                    D = 1, 2 and 4 against D = 0, in two sizes
    python benchmarks/depth_cost.py --cpu-time         CPU time of one thread, for a shared machine
    python benchmarks/depth_cost.py --quick            does it run? (the figures mean nothing)

With C the multiply-adds of one layer per token, H the hidden size, V the vocabulary and L the trunk's layers, D MTP
layers add D (2 H^2 + C + H V) to L C + H V. All models take turns step by step, so that other load affects all of them.

The plan is for a CPU: rates of its products, attention and copies are measured first, in seconds. A profile of one step
gives its peak memory. Optimizer and weights exist before a step, so the peak consists of activations and losses.
"""

import sys
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.training import get_args
from megatron.training.global_vars import destroy_global_vars

from benchmarks import train_step
from benchmarks.harness import MIB, Found, Goal, Table, Timed, allocated_peak, interleave, main
from benchmarks.sides import ON_CPU, Side, Sizes, launch_line, make_batches, our_gpt, set_up_megatron
from megatron_mtp.extensions.plan.here import card_here
from megatron_mtp.extensions.plan.launch import read
from megatron_mtp.extensions.plan.planning import NAIVE, Option, plan
from megatron_mtp.extensions.plan.sizes import model_of

ADDED_GOAL, PLAN_GOAL = 1.05, 0.1
"""Added time is at most this multiple of the MTP layers' share of arithmetic; the plan's time and memory are off by at
most this fraction.
"""
DEPTHS = (0, 1, 2, 4)
SIZES = {
    "large vocabulary": {
        "cpu": Sizes(256, 4, 4, 512, 4, 8192, "fp32"),
        "cuda": Sizes(2048, 8, 16, 2048, 4, 32768, "bf16"),
        "quick": Sizes(32, 1, 2, 32, 2, 256, "fp32"),
    },
    "train_step": train_step.GPT,
}
FORGET = (
    *(destroy_global_vars, destroy_num_microbatches_calculator, destroy_rerun_state_machine),
    parallel_state.destroy_model_parallel,
)
"""Resets Megatron's state, before another run is set up in the process."""
FLAGS = {"--cpu-time": {"action": "store_true", "help": "one thread and its CPU time"}}


def depth_cost(wanted: Namespace) -> Found:
    """Compare every number of MTP layers with none, in both sizes."""
    if wanted.cpu_time:
        torch.set_num_threads(1)
    clock = "cpu" if wanted.cpu_time else "wall"
    added, planned, goals = list[tuple[Any, ...]](), list[tuple[Any, ...]](), list[Goal]()
    for name, of_place in SIZES.items():
        sizes = of_place[wanted.place]
        plans = plans_of(sizes, wanted.cpu_time) if ON_CPU else {}
        timed, peaks = measured(sizes, wanted.repeats)
        for depths, seconds in zip(DEPTHS, timed.medians(clock).values(), strict=True):
            what = f"{name}, D={depths}"
            if depths:
                share = timed.compare(str(depths), "0", clock).paired_ratio - 1
                arithmetic = added_arithmetic(depths, sizes)
                added.append((name, depths, seconds, share, arithmetic, share / arithmetic))
                goals.append(Goal(f"{what}: time added / arithmetic added", share / arithmetic, ADDED_GOAL))
            if plans:
                mib = sum(plans[depths].memory[0].parts[part] for part in ("activations", "losses")) / MIB
                said = plans[depths].time.seconds
                off = {"time": said / seconds - 1, "memory": mib / peaks[depths] - 1}
                planned.append((name, depths, seconds, said, off["time"], peaks[depths], mib, off["memory"]))
                goals += [Goal(f"{what}: {kind} off", abs(far), PLAN_GOAL) for kind, far in off.items()]
    header = ("sizes", "D", "s a step", "added", "arithmetic", "ratio")
    headed = ("sizes", "D", "s", "s planned", "off", "MiB", "MiB planned", "off")
    return Found(
        {"sizes": {name: asdict(of_place[wanted.place]) for name, of_place in SIZES.items()}},
        goals,
        [Table("What depths add to a step", header, added), Table("A step, planned and measured", headed, planned)],
    )


def measured(sizes: Sizes, repeats: int) -> tuple[Timed, dict[int, float]]:
    """Return the times of steps for every D, and the peak memory of one in MiB."""
    for destroy in FORGET:
        destroy()
    set_up_megatron(sizes, max(DEPTHS))
    sides = {depths: build(depths) for depths in DEPTHS}
    steps = {depths: lambda depths=depths, side=side: step(depths, side) for depths, side in sides.items()}
    timed = interleave({str(depths): one for depths, one in steps.items()}, repeats, synchronize=torch.cuda.synchronize)
    return timed, {depths: allocated_peak(one, ON_CPU) for depths, one in steps.items()}


def build(depths: int) -> Side:
    """Build this package's model with this many MTP layers, in training mode."""
    get_args().mtp_num_layers = depths or None
    return our_gpt(make_batches())


def step(depths: int, side: Side) -> None:
    """Run a training step; Megatron's arguments are global."""
    get_args().mtp_num_layers = depths or None
    side.step()


def added_arithmetic(depths: int, sizes: Sizes) -> float:
    """Return D (2 H^2 + C + H V) / (L C + H V); Megatron's gated MLP is 4 H wide, attention covers half a sequence."""
    hidden = sizes.hidden_size
    layer = 4 * hidden**2 + 3 * 4 * hidden**2 + sizes.seq_length * hidden
    head = hidden * sizes.vocab_size
    return depths * (2 * hidden**2 + layer + head) / (sizes.num_layers * layer + head)


def plans_of(sizes: Sizes, cpu_time: bool) -> dict[int, Option]:
    """Return the plan for every D, from rates measured now."""
    words = [*launch_line(sizes), "--transformer-impl", "local"]
    card = card_here(model_of(read(words)), time.process_time if cpu_time else time.perf_counter)
    made = plan(words, card, 1)
    return {depths: made.of(depths, NAIVE)[0] for depths in DEPTHS}


if __name__ == "__main__":
    main(depth_cost, __doc__, ON_CPU, {"cpu": 9, "cuda": 50, "quick": 2}, FLAGS)
