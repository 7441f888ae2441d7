"""What a depth costs in memory where vocabularies are large, against Megatron's own MTP, and what the step takes.

    python benchmarks/mtp_memory.py                            4,096 tokens x 65,536 and 131,072 entries
    python benchmarks/mtp_memory.py --vocab-sizes 65536        one vocabulary
    python benchmarks/mtp_memory.py --quick                    does it run? (the figures mean nothing)

The marginal memory of a depth is the peak of a training step with one depth less that of one without, both allocated by
torch. Models, batches and steps are those of sides.py, and the first step has to agree, as for train_step.py.
"""

import argparse
import gc
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
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
    table,
)
from benchmarks.sides import (
    ON_CPU,
    OURS,
    SAME,
    THEIRS,
    Sizes,
    build_sides,
    check_same,
    place,
    set_up_megatron,
)

SIDES = (OURS, THEIRS)
MARGINAL, STEP = 0.25, 1.0
"""A depth of ours needs at most so much of the memory of one of Megatron's, and a step at most so much of its time."""

DEFAULTS = {
    "cpu": Sizes(256, 2, 4, 1024, 4, 0, "fp32"),
    "cuda": Sizes(2048, 4, 16, 4096, 8, 0, "bf16"),
    "quick": Sizes(32, 1, 2, 32, 2, 0, "fp32"),
}
VOCABULARIES = {"cpu": [65536, 131072], "cuda": [65536, 131072], "quick": [1024]}
REPEATS = {"cpu": 5, "cuda": 20, "quick": 1}


def main() -> None:
    """Measure every vocabulary, and report."""
    wanted = parse(sys.argv[1:])
    where = place(wanted.quick)
    limit_threads(wanted)
    vocabularies, command = wanted.vocab_sizes or VOCABULARIES[where], sys.argv
    sizes = replace(DEFAULTS[where], vocab_size=max(vocabularies))
    set_up_megatron(sizes, depths=1)
    sys.argv = command
    results: dict[str, Any] = {}
    for vocabulary in vocabularies:
        results[str(vocabulary)] = measure(vocabulary, sizes.dtype, wanted.repeats or REPEATS[where])
        print(f"> {vocabulary} entries: {results[str(vocabulary)]}", flush=True)
    torch.distributed.destroy_process_group()
    tokens = sizes.seq_length * sizes.micro_batch_size
    goals = [
        goal
        for entries, result in results.items()
        for goal in (
            Goal(f"marginal memory of a depth, {tokens} x {entries}", result["marginal ratio"], MARGINAL),
            Goal(f"step with a depth, {tokens} x {entries}", result["step ratio"], STEP),
        )
    ]
    report("mtp_memory", hardware(ON_CPU), {"sizes": asdict(sizes), **results}, goals, [_table(results)])


def parse(argv: list[str]) -> argparse.Namespace:
    """Ends the process with one sentence and status 2 where a number makes no sense."""
    parser = argparse.ArgumentParser(
        description="Memory of an MTP depth with a large vocabulary, against Megatron's own MTP.",
        epilog="example: python benchmarks/mtp_memory.py --vocab-sizes 131072 --repeats 10",
    )
    parser.add_argument("--vocab-sizes", type=int, nargs="+", metavar="V", help="default: 65536 131072")
    add_common_flags(parser, REPEATS)
    wanted = parser.parse_args(argv)
    if any(vocabulary % 128 for vocabulary in wanted.vocab_sizes or []):
        parser.error(f"--vocab-sizes is {wanted.vocab_sizes}; give multiples of 128, to which Megatron pads.")
    return wanted


def measure(vocabulary: int, dtype: str, repeats: int) -> dict[str, Any]:
    """Peaks without and with a depth, and the time of a step with one, of both sides."""
    args = get_args()
    args.padded_vocab_size, args.vocab_size = vocabulary, vocabulary - 1
    peaks: dict[str, list[float]] = {side: [] for side in SIDES}
    for depths in (None, 1):
        args.mtp_num_layers = depths
        MTPLossLoggingHelper.tracker = {}
        sides = build_sides(self_check=False)
        check_same({name: side.step() for name, side in sides.items()}, SAME[dtype])
        for name in SIDES:
            peaks[name].append(allocated_peak(sides[name].step, ON_CPU).mib or 0.0)
        if depths:
            spent = interleave({name: sides[name].step for name in SIDES}, repeats, 1, torch.cuda.synchronize)
        del sides
        gc.collect()
    marginal = {name: with_depth - without for name, (without, with_depth) in peaks.items()}
    wall = {name: [one.wall for one in rounds] for name, rounds in spent.items()}
    return {
        "MiB without and with a depth": peaks,
        "marginal MiB": marginal,
        "marginal ratio": round(marginal[OURS] / marginal[THEIRS], 4),
        "seconds": {name: round(statistics.median(values), 4) for name, values in wall.items()},
        "step ratio": round(compare(wall[OURS], wall[THEIRS]).ratio, 4),
        "step ratio by round": round(compare(wall[OURS], wall[THEIRS]).paired_ratio, 4),
    }


def _table(results: dict[str, Any]) -> str:
    header = ("entries", "MiB a depth, ours", "Megatron's", "ratio", "s a step, ours", "Megatron's", "ratio")
    rows = [
        (
            entries,
            *(result["marginal MiB"][side] for side in SIDES),
            result["marginal ratio"],
            *(result["seconds"][side] for side in SIDES),
            result["step ratio"],
        )
        for entries, result in results.items()
    ]
    return table(header, rows)


if __name__ == "__main__":
    main()
