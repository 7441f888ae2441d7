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

import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import get_args

from benchmarks.harness import Found, Goal, Table, allocated_peak, count, interleave, main, resident_peak
from benchmarks.sides import ON_CPU, OURS, SAME, THEIRS, THEIRS_AGAIN, Sizes, build_sides, check_same, set_up_megatron

GOAL = 1.05
"""A step of ours costs at most so many steps of Megatron's."""

DEFAULTS = {
    "cpu": Sizes(192, 4, 6, 256, 16, 1024, "fp32"),
    "cuda": Sizes(2048, 8, 16, 2048, 4, 32768, "bf16"),
    "quick": Sizes(32, 1, 2, 32, 2, 256, "fp32"),
}
REPEATS = {"cpu": 15, "cuda": 50, "quick": 2}


FLAGS: dict[str, dict[str, Any]] = {
    "--depths": {"type": count, "nargs": "+", "default": [1, 2, 4], "metavar": "D", "help": "default: 1 2 4"},
    "--self-check": {"action": "store_true", "help": "time a second copy of Megatron's side too: the noise"},
}
for _name, _kind in Sizes.__annotations__.items():
    _values = ", ".join(f"{getattr(sizes, _name)} ({where})" for where, sizes in DEFAULTS.items())
    FLAGS[f"--{_name.replace('_', '-')}"] = {"type": _kind, "help": f"default: {_values}"}
FLAGS["--dtype"]["choices"] = tuple(SAME)


def train_step(wanted: Namespace) -> Found:
    """Every number of depths in --depths."""
    given = {name: getattr(wanted, name) for name in Sizes.__annotations__}
    sizes = Sizes(
        **asdict(DEFAULTS[wanted.place]) | {name: value for name, value in given.items() if value is not None}
    )
    set_up_megatron(sizes, max(wanted.depths))
    results = {}
    for depths in wanted.depths:
        results[f"D={depths}"] = measure(depths, sizes, wanted.repeats, wanted.self_check)
        print(f"> D={depths}: {results[f'D={depths}']}", flush=True)  # a run that is cut short has said this much
    return Found(
        {"sizes": asdict(sizes), "repeats": wanted.repeats, **results},
        [Goal(f"ours / Megatron's own MTP, {name}", result["ratio"], GOAL) for name, result in results.items()],
        [_table(results)],
    )


def measure(depths: int, sizes: Sizes, repeats: int, self_check: bool) -> dict[str, Any]:
    """Time and memory of both sides with D depths."""
    get_args().mtp_num_layers = depths
    MTPLossLoggingHelper.tracker = {}  # it keeps the number of depths that it saw first
    sides = build_sides(self_check)
    first = check_same({name: side.step() for name, side in sides.items()}, SAME[sizes.dtype])
    steps = {name: side.step for name, side in sides.items()}
    timed = interleave(steps, repeats, synchronize=torch.cuda.synchronize)

    def compared(side: str) -> dict[str, Any]:
        by_cpu = asdict(timed.compare(side, THEIRS, "cpu"))
        return {**asdict(timed.compare(side, THEIRS)), "cpu_seconds": by_cpu}

    return _rounded(
        {
            **compared(OURS),
            "seconds": timed.medians(),
            "allocated_peak": {name: asdict(allocated_peak(steps[name], ON_CPU)) for name in (OURS, THEIRS)},
            "resident_peak": {name: asdict(resident_peak(steps[name], ON_CPU)) for name in (OURS, THEIRS)},
            "first_step": first,
            **({"self_check": compared(THEIRS_AGAIN)} if self_check else {}),
        }
    )


def _rounded(value: Any) -> Any:
    """Five decimals: a timing is not more precise."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def _table(results: dict[str, dict[str, Any]]) -> Table:
    """Seconds a step, their ratio, the same by round and of CPU time, the steps' peaks; the noise where asked."""
    header = "depths/s ours/s Megatron/ratio/by round/quartiles/CPU time/MiB ours/MiB Megatron".split("/")
    rows: list[tuple[Any, ...]] = []
    for name, result in results.items():
        peaks = [result["allocated_peak"][side]["mib"] for side in (OURS, THEIRS)]
        rows.append((name, *_cells(result, result["seconds"], OURS), *peaks))
        if "self_check" in result:
            rows.append(("noise", *_cells(result["self_check"], result["seconds"], THEIRS_AGAIN), None, None))
    return Table("A training step", header, rows)


def _cells(found: dict[str, Any], seconds: dict[str, float], side: str) -> tuple[Any, ...]:
    low, high = found["paired_quartiles"]
    ratios = (found["ratio"], found["paired_ratio"], f"{low:.3f} .. {high:.3f}", found["cpu_seconds"]["paired_ratio"])
    return (seconds[side], seconds[THEIRS], *ratios)


if __name__ == "__main__":
    main(train_step, __doc__, ON_CPU, REPEATS, FLAGS)
