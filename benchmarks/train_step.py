"""What a training step with MTP depths costs, against Megatron's own MTP at the same setting.

    python benchmarks/train_step.py                              this machine's defaults, D = 1, 2 and 4
    python benchmarks/train_step.py --depths 2 --repeats 40      one number of depths, more rounds
    python benchmarks/train_step.py --quick                      does it run? (the figures mean nothing)

Both sides train the same weights on the same batches, with Megatron's DDP, optimizer, schedule and `train_step`. They
differ in the model (`GPTModelBuilder` against `MTPGPTModelBuilder`) and the forward step (that of Megatron's
`pretrain_gpt.py` against `ForwardStep`, the making of the shifts included). What Megatron logs between steps is
counted for neither. Without Transformer Engine both have the same portable attention and norms in their layers. Sides
take turns step by step, so that a load from outside meets both.

The first step has to give the same loss and the same norm of the gradient on both sides, or there is no comparison and
the benchmark ends with an error.
"""

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import get_args

from benchmarks.harness import (
    Goal,
    Table,
    add_common_flags,
    allocated_peak,
    compare,
    count,
    hardware,
    interleave,
    limit_threads,
    report,
    resident_peak,
)
from benchmarks.sides import (
    ON_CPU,
    OURS,
    SAME,
    THEIRS,
    THEIRS_AGAIN,
    Sizes,
    build_sides,
    check_same,
    place,
    set_up_megatron,
)

GOAL = 1.05
"""A step of ours costs at most so many steps of Megatron's."""

DEFAULTS = {
    "cpu": Sizes(192, 4, 6, 256, 16, 1024, "fp32"),
    "cuda": Sizes(2048, 8, 16, 2048, 4, 32768, "bf16"),
    "quick": Sizes(32, 1, 2, 32, 2, 256, "fp32"),
}
REPEATS = {"cpu": 15, "cuda": 50, "quick": 2}


def main() -> None:
    """Measure every number of depths in --depths, and report."""
    wanted = parse(sys.argv[1:])
    sizes, repeats = resolve(wanted)
    limit_threads(wanted)
    command = sys.argv
    set_up_megatron(sizes, max(wanted.depths))
    sys.argv = command
    results = {}
    for depths in wanted.depths:
        results[f"D={depths}"] = measure(depths, sizes, repeats, wanted.self_check)
        print(f"> D={depths}: {results[f'D={depths}']}", flush=True)  # a run that is cut short has said this much
    torch.distributed.destroy_process_group()
    report(
        "train_step",
        hardware(ON_CPU),
        {"sizes": asdict(sizes), "repeats": repeats, **results},
        [Goal(f"ours / Megatron's own MTP, {name}", result["ratio"], GOAL) for name, result in results.items()],
        [_table(results)],
    )


def parse(argv: list[str]) -> argparse.Namespace:
    """Ends the process with one sentence and status 2 where a number makes no sense."""
    parser = argparse.ArgumentParser(
        description="Time and memory of a training step with MTP depths, against Megatron's own MTP.",
        epilog="example: python benchmarks/train_step.py --depths 1 2 --hidden-size 256 --repeats 20",
    )
    for name, kind in Sizes.__annotations__.items():
        values = ", ".join(f"{getattr(sizes, name)} ({where})" for where, sizes in DEFAULTS.items())
        choices = tuple(SAME) if name == "dtype" else None
        parser.add_argument("--" + name.replace("_", "-"), type=kind, choices=choices, help=f"default: {values}")
    parser.add_argument("--depths", type=count, nargs="+", default=[1, 2, 4], metavar="D", help="default: 1 2 4")
    add_common_flags(parser, REPEATS)
    parser.add_argument(
        "--self-check", action="store_true", help="time a second copy of Megatron's side too: the noise"
    )
    return parser.parse_args(argv)


def resolve(wanted: argparse.Namespace) -> tuple[Sizes, int]:
    """The sizes and rounds of the flags; the others are the defaults of this machine, or of --quick."""
    where = place(wanted.quick)
    given = {name: getattr(wanted, name) for name in Sizes.__annotations__}
    chosen = asdict(DEFAULTS[where]) | {name: value for name, value in given.items() if value is not None}
    return Sizes(**chosen), wanted.repeats or REPEATS[where]


def measure(depths: int, sizes: Sizes, repeats: int, self_check: bool) -> dict[str, Any]:
    """Time and memory of both sides with D depths."""
    get_args().mtp_num_layers = depths
    MTPLossLoggingHelper.tracker = {}  # it keeps the number of depths that it saw first
    sides = build_sides(self_check)
    first = check_same({name: side.step() for name, side in sides.items()}, SAME[sizes.dtype])
    steps = {name: side.step for name, side in sides.items()}
    spent = interleave(steps, repeats, synchronize=torch.cuda.synchronize)
    wall = {name: [one.wall for one in rounds] for name, rounds in spent.items()}
    cpu = {name: [one.cpu for one in rounds] for name, rounds in spent.items()}
    result: dict[str, Any] = {
        **asdict(compare(wall[OURS], wall[THEIRS])),
        "seconds": {name: statistics.median(values) for name, values in wall.items()},
        "cpu_seconds": asdict(compare(cpu[OURS], cpu[THEIRS])),
        "allocated_peak": {name: asdict(allocated_peak(steps[name], ON_CPU)) for name in (OURS, THEIRS)},
        "resident_peak": {name: asdict(resident_peak(steps[name], ON_CPU)) for name in (OURS, THEIRS)},
        "first_step": first,
    }
    if self_check:
        result["self_check"] = asdict(compare(wall[THEIRS_AGAIN], wall[THEIRS]))
        result["self_check"]["cpu_seconds"] = asdict(compare(cpu[THEIRS_AGAIN], cpu[THEIRS]))
    return _rounded(result)


def _rounded(value: Any) -> Any:
    """Five decimals: a timing is not more precise."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def _table(results: dict[str, dict[str, Any]]) -> Table:
    """Seconds a step, their ratio, the same by round and of CPU time, the steps' peaks; the noise where asked."""
    header = (
        "depths",
        "s ours",
        "s Megatron",
        "ratio",
        "by round",
        "quartiles",
        "CPU time",
        "MiB ours",
        "MiB Megatron",
    )
    rows: list[tuple[Any, ...]] = []
    for name, result in results.items():
        peaks = [result["allocated_peak"][side]["mib"] for side in (OURS, THEIRS)]
        rows.append((name, *_cells(result, result["seconds"], OURS), *peaks))
        if "self_check" in result:
            rows.append(("noise", *_cells(result["self_check"], result["seconds"], THEIRS_AGAIN), None, None))
    return Table(header, rows)


def _cells(comparison: dict[str, Any], seconds: dict[str, float], side: str) -> tuple[Any, ...]:
    low, high = comparison["paired_quartiles"]
    return (
        seconds[side],
        seconds[THEIRS],
        comparison["ratio"],
        comparison["paired_ratio"],
        f"{low:.3f} .. {high:.3f}",
        comparison["cpu_seconds"]["paired_ratio"],
    )


if __name__ == "__main__":
    main()
