"""Cost of a second training run on states cached by the first (--mtp-state-cache).

    python benchmarks/state_cache.py                     a dense trunk of four layers, trained here
    python benchmarks/state_cache.py --trunk NAME=DIR    a Hugging Face model in its place, such as SmolLM2-135M
    python benchmarks/state_cache.py --quick             does it run? (the figures mean nothing)

Reports CPU seconds of whole processes, including loading, and the median step in wall time: without the flag, computing
and storing states, reading states, and reading with a draft vocabulary. The second and third have bit-identical losses.
The goal is a fifth of the cost.
"""

import resource
import statistics
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path

from benchmarks.harness import Found, Goal, Table, count, main
from benchmarks.recipes import SAME_RATES, SHARED, TRUNK_FLAG, Bench, recipe_flags
from benchmarks.verbs import run
from megatron_mtp.common.files import remove
from megatron_mtp.training.read_runs import read_rows

HEADS = ("kd", "eagle3", "dspark")
GOAL = 0.2


@dataclass(frozen=True)
class Cost:
    """Cost of a training: CPU seconds of its process, seconds of its median step, and its last loss."""

    cpu: float
    step: float
    loss: float


def state_cache(wanted: Namespace) -> Found:
    """Run all trainings of every kind of head."""
    quick = wanted.place == "quick"
    model, name = (wanted.trunk.model, wanted.trunk.name) if wanted.trunk else (None, "dense")
    steps, context = wanted.steps or (2 if quick else 20), 64 if model is None else 256
    bench = Bench(wanted.folder / wanted.place / name, model, steps, 24 if quick else 160)
    bench.train_trunk(name, 4 if quick else 200)
    drafted = 128 if model is None else 8192
    costs: dict[str, dict[str, Cost]] = {}
    for head in HEADS[: 1 if quick else None]:
        remove(bench.place / "states")
        kept = ["--mtp-state-cache", bench.place / "states"]
        sides: dict[str, list[Any]] = {
            "without": [],
            "first": kept,
            "second": kept,
            f"second, {drafted} drafted tokens": [*kept, "--mtp-draft-vocab-size", drafted],
        }
        costs[head] = {side: trained(bench, name, context, head, flags) for side, flags in sides.items()}
    same = all(of["first"].loss == of["second"].loss for of in costs.values())
    rows = [
        (head, side, cost.cpu, cost.step, cost.cpu / of["without"].cpu, cost.step / of["without"].step)
        for head, of in costs.items()
        for side, cost in of.items()
    ]
    header = (
        "head",
        "training",
        "CPU seconds",
        "seconds of a step",
        "of the CPU seconds without",
        "of the step without",
    )
    goals = [
        Goal("losses of a second training that differ from the first one's", float(not same), 0),
        Goal(f"a second step of {HEADS[0]} over one without states", rows[2][5], GOAL),
    ]
    results = {
        "steps": steps,
        "tokens of a step": 512,
        "costs": {head: {side: asdict(cost) for side, cost in of.items()} for head, of in costs.items()},
    }
    return Found(results, goals, [Table(f"trainings of {steps} steps on {name}", header, rows)])


def trained(bench: Bench, trunk: str, context: int, head: str, more: list[Any]) -> Cost:
    """Return the cost of a training of the bench's steps."""
    folder, text = bench.place / "run", bench.texts["same"]
    remove(folder)  # from the previous training
    batch = 512 // context
    flags = ["--use-checkpoint-args", "--load", bench.place / "trunks" / trunk, "--finetune", *SHARED[-3:]]
    flags += ["--data-path", text.trained, "--split", "1", "--tokenizer-model", bench.tokenizer]
    flags += ["--seq-length", context, "--micro-batch-size", batch, "--global-batch-size", batch, "--eval-iters", 0]
    flags += ["--train-iters", bench.steps, "--eval-interval", bench.steps, "--mtp-metrics-dir", folder]
    flags += ["--log-interval", 1, *recipe_flags(head, trunk, context), *SAME_RATES.split()]
    flags += ["--bf16"] if bench.model is not None else []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run("train", *flags, *more)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rows = read_rows(folder)
    return Cost(cpu, statistics.median(row["step seconds"] for row in rows), rows[-1]["mtp_1 loss"])


FLAGS: dict[str, dict[str, Any]] = {
    "--steps": {"type": count, "metavar": "N", "help": "of a training; default: 20"},
    "--trunk": TRUNK_FLAG,
}

if __name__ == "__main__":
    main(state_cache, __doc__, flags=FLAGS)
