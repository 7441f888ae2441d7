"""Memory of one MTP layer with large vocabularies, against Megatron's own MTP, and the time of a step.

    python benchmarks/mtp_memory.py                            5 numbers of tokens x 65,536 and 131,072 entries
    python benchmarks/mtp_memory.py --vocab-sizes 65536        one vocabulary
    python benchmarks/mtp_memory.py --tokens 128 1024          two numbers of tokens
    python benchmarks/mtp_memory.py --quick                    does it run? (the figures mean nothing)

Logits [N, V] are larger than the head's weight [V, H] if there are more than H tokens N, and smaller otherwise. So
without --tokens the numbers of tokens are multiples of H.

The marginal memory of an MTP layer is the peak of torch's allocations in a training step with one, minus that in a step
without. Models, batches and steps are those of sides.py, and the first steps must agree, as for train_step.py. In a
step, activations and the embedding's gradient hide part of the loss's memory: loss_alone.py measures it separately.
"""

import gc
import itertools
import sys
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path

import torch
from megatron.training import get_args

from benchmarks import loss_alone
from benchmarks.harness import Found, Goal, Table, Timed, allocated_peak, count, interleave, main
from benchmarks.sides import ON_CPU, OURS, THEIRS, Sizes, both, megatron_gpt, our_gpt, set_up_megatron

MARGINAL, MARGINAL_OF_MANY, STEP = 1.0, 0.25, 1.0
"""Goals relative to Megatron: marginal memory of an MTP layer, the same with `MANY` H tokens or more, and step time.
They also apply to the loss alone.
"""
MANY = 4
TOKENS = (0.5, 1, 2, 4, 16)
"""Tokens of a step divided by H."""

DEFAULTS = {
    "cpu": Sizes(256, 2, 4, 1024, 4, 0, "fp32"),
    "cuda": Sizes(2048, 4, 16, 4096, 8, 0, "bf16"),
    "quick": Sizes(32, 1, 2, 32, 2, 0, "fp32"),
}
VOCABULARIES = {"cpu": [65536, 131072], "cuda": [65536, 131072], "quick": [1024]}
REPEATS = {"cpu": 5, "cuda": 20, "quick": 1}


RATIOS = " ".join(map(str, TOKENS))
FLAGS: dict[str, dict[str, Any]] = {
    "--vocab-sizes": {"type": int, "nargs": "+", "metavar": "V", "help": "default: 65536 131072"},
    "--tokens": {"type": count, "nargs": "+", "metavar": "N", "help": f"of a step; default: {RATIOS} times H"},
}


def mtp_memory(wanted: Namespace) -> Found:
    """Measure every vocabulary with every number of tokens."""
    sizes, vocabularies = DEFAULTS[wanted.place], wanted.vocab_sizes or VOCABULARIES[wanted.place]
    counts, sequences = wanted.tokens or [int(ratio * sizes.hidden_size) for ratio in TOKENS], sizes.micro_batch_size
    if any(vocabulary % 128 for vocabulary in vocabularies):
        sys.exit(f"--vocab-sizes is {vocabularies}; give multiples of 128, to which Megatron pads.")
    if any(tokens % sequences for tokens in counts):
        sys.exit(f"--tokens is {counts}; give multiples of {sequences}, the sequences of a step.")
    sizes = replace(sizes, vocab_size=max(vocabularies), seq_length=max(counts) // sequences)
    set_up_megatron(sizes, depths=1)
    memory, times, goals = list[tuple[Any, ...]](), list[tuple[Any, ...]](), list[Goal]()
    for vocabulary, tokens in itertools.product(vocabularies, counts):
        what, most = f"{tokens} x {vocabulary}", MARGINAL_OF_MANY if tokens >= MANY * sizes.hidden_size else MARGINAL
        depth, timed = marginal(vocabulary, tokens, wanted.repeats)
        pairs = {"a depth": depth} | {
            f"the loss, {dtype}": loss_alone.peaks(tokens, vocabulary, sizes.hidden_size, dtype)
            for dtype in loss_alone.DTYPES
        }
        memory.append((what, *(figure for ours, theirs in pairs.values() for figure in (ours, theirs, ours / theirs))))
        goals += [Goal(f"memory of {kind}, {what}", ours / theirs, most) for kind, (ours, theirs) in pairs.items()]
        wall, cpu = timed.compare(OURS, THEIRS), timed.compare(OURS, THEIRS, "cpu")
        times.append((what, *timed.medians().values(), wall.ratio, wall.paired_ratio, cpu.paired_ratio))
        goals.append(Goal(f"step with a depth, {what}", wall.ratio, STEP))
        print(f"> {memory[-1]} {times[-1]}", flush=True)  # keeps the results of an interrupted run
    of_kinds = [word for kind in pairs for word in (f"MiB of {kind}", "Megatron's", "ratio")]
    headed = ("tokens x entries", "s a step", "Megatron's", "ratio", "by round", "CPU time")
    return Found(
        {"sizes": asdict(sizes)},
        goals,
        [
            Table("Memory that a depth adds to a step, and of the loss alone", ("tokens x entries", *of_kinds), memory),
            Table("Time of a step with a depth", headed, times),
        ],
    )


def marginal(vocabulary: int, tokens: int, repeats: int) -> tuple[tuple[float, float], Timed]:
    """Return MiB that an MTP layer adds to a step of ours and of Megatron's, and times of steps with it."""
    args = get_args()
    args.seq_length = tokens // args.micro_batch_size
    args.padded_vocab_size, args.vocab_size = vocabulary, vocabulary - 1
    without, _ = peaks_and_times(None, 0)
    with_depth, timed = peaks_and_times(1, repeats)
    return (with_depth[OURS] - without[OURS], with_depth[THEIRS] - without[THEIRS]), timed


def peaks_and_times(depths: int | None, repeats: int) -> tuple[dict[str, float], Timed]:
    """Return MiB of a step by side, and the times of this many rounds of steps."""
    gc.collect()  # earlier models have reference cycles
    sides, _ = both(our_gpt, megatron_gpt, depths)
    steps = {name: side.step for name, side in sides.items()}
    peaks = {name: allocated_peak(step, ON_CPU) for name, step in steps.items()}
    return peaks, interleave(steps, repeats, 1, torch.cuda.synchronize)


if __name__ == "__main__":
    main(mtp_memory, __doc__, ON_CPU, REPEATS, FLAGS)
