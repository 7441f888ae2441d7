"""What `megatron-mtp plan` says of a training step on this machine, beside the step itself.

    python benchmarks/planning.py                    the steps of train_step.py and depth_cost.py, D = 0, 1, 2 and 4
    python benchmarks/planning.py --cpu-time         one thread and its CPU time: for a machine that others use
    python benchmarks/planning.py --quick            does it run? (the figures mean nothing)

Rates of products, attention and copies are measured first, in seconds; then steps of all D take turns, and a profile of
one step each gives the peak of its memory. Optimizer and weights are there before a step, so that a step's peak is its
activations and losses.
"""

import sys
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.training.global_vars import destroy_global_vars

from benchmarks import depth_cost, train_step
from benchmarks.harness import MIB, Found, Goal, Table, allocated_peak, interleave, main
from benchmarks.sides import ON_CPU, Sizes, set_up_megatron
from megatron_mtp.extensions.plan.here import card_here
from megatron_mtp.extensions.plan.launch import read
from megatron_mtp.extensions.plan.planning import NAIVE, Option, plan
from megatron_mtp.extensions.plan.sizes import model_of

GOAL = 0.1
"""Planned over measured is off by at most so much, of time and of memory."""
DEPTHS = (0, 1, 2, 4)
REPEATS = {"cpu": 7, "cuda": 7, "quick": 1}
FORGET = (
    *(destroy_global_vars, destroy_num_microbatches_calculator, destroy_rerun_state_machine),
    parallel_state.destroy_model_parallel,
)
"""What Megatron keeps of a run, before another one is set up in the process."""
OF = {"train_step": train_step.DEFAULTS, "depth_cost": depth_cost.DEFAULTS}


FLAGS = {"--cpu-time": {"action": "store_true", "help": "one thread and its CPU time"}}


def planning(wanted: Namespace) -> Found:
    """Plan and measure the steps of both benchmarks."""
    if wanted.cpu_time:
        torch.set_num_threads(1)
    rows, results, goals = list[tuple[Any, ...]](), dict[str, Any](), list[Goal]()
    for name, defaults in OF.items():
        options = planned(defaults[wanted.place], wanted.cpu_time)
        seconds, peaks = measured(defaults[wanted.place], wanted.repeats, wanted.cpu_time)
        for depths in DEPTHS:
            option, peak = options[depths], peaks[depths] or 0.0
            held = option.memory[0].parts
            mib = (held["activations"] + held["losses"]) / MIB
            time_off, memory_off = option.time.seconds / seconds[depths] - 1, mib / peak - 1
            rows.append((name, depths, seconds[depths], option.time.seconds, time_off, peak, mib, memory_off))
            results[f"{name}, D={depths}"] = {"seconds by part": option.time.parts}
            goals.append(Goal(f"{name}, D={depths}: time off", abs(time_off), GOAL))
            goals.append(Goal(f"{name}, D={depths}: memory off", abs(memory_off), GOAL))
    header = ("benchmark", "D", "s", "s planned", "off", "MiB", "MiB planned", "off")
    return Found(results, goals, [Table("A step, planned and measured", header, rows)])


def words_of(sizes: Sizes) -> list[str]:
    """The launch line of `sides.set_up_megatron`."""
    given = {name: value for name, value in asdict(sizes).items() if name != "dtype"}
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += f"--global-batch-size {sizes.micro_batch_size} --swiglu --normalization RMSNorm".split()
    words += "--disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --transformer-impl local".split()
    return [*words, *(["--bf16"] if sizes.dtype == "bf16" else [])]


def planned(sizes: Sizes, cpu_time: bool) -> dict[int, Option]:
    """The plan of every D, by rates that are measured now."""
    words = words_of(sizes)
    card = card_here(model_of(read(words)), time.process_time if cpu_time else time.perf_counter)
    made = plan(words, card, 1)
    return {depths: made.of(depths, NAIVE)[0] for depths in DEPTHS}


def measured(sizes: Sizes, repeats: int, cpu_time: bool) -> tuple[dict[int, float], dict[int, float | None]]:
    """Median seconds of a step, and the peak of one, by D."""
    for destroy in FORGET:
        destroy()
    set_up_megatron(sizes, max(DEPTHS))
    sides = {depths: depth_cost.build(depths) for depths in DEPTHS}
    steps = {
        str(depths): lambda depths=depths, side=side: depth_cost.step(depths, side) for depths, side in sides.items()
    }
    medians = interleave(steps, repeats, synchronize=torch.cuda.synchronize).medians("cpu" if cpu_time else "wall")
    seconds = {depths: medians[str(depths)] for depths in DEPTHS}
    return seconds, {depths: allocated_peak(steps[str(depths)], ON_CPU).mib for depths in DEPTHS}


if __name__ == "__main__":
    main(planning, __doc__, ON_CPU, REPEATS, FLAGS)
