"""Plain decoding with a Mamba-2 trunk: time of the 2,000th token against the 200th.

    python benchmarks/long_text.py            with compiled code and with Megatron's modules
    python benchmarks/long_text.py --quick    does it run? (the figures mean nothing)

The recurrent state does not grow, so neither should the time per token. States absorb rows once every 96 tokens, and
the windows whose medians are compared are a multiple of that. Megatron's modules with the same weights take turns with
ours, sequence by sequence, and must give the same tokens.
"""

import itertools
import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path

from megatron.training import get_args
from megatron.training.argument_utils import hybrid_config_from_args

from benchmarks.harness import Found, Goal, Table, main
from benchmarks.sides import ON_CPU, OURS, copy_weights, set_up_megatron
from benchmarks.train_step import HYBRID, MAMBA
from megatron_mtp.decoding import backend, generate
from megatron_mtp.decoding.recurrent_layers import KEPT
from megatron_mtp.decoding.rows import MAX_ROWS_BACK
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.model.arguments import MTPHybridModelConfig
from megatron_mtp.model.build import build

MODULES = "Megatron's modules"
GOAL = 1.1
"""A late token takes at most this multiple of an early one's time."""
TRUNK = "M-M-M-M-"
EARLY, LATE = 200, 2000
WINDOW = 2 * (KEPT - MAX_ROWS_BACK)
"""Number of tokens around each whose times are compared."""


def long_text(wanted: Namespace) -> Found:
    """Compare seconds per token early and late in a sequence, over several sequences."""
    runners = runners_of(wanted.place)
    early, late = (WINDOW // 2, 3 * WINDOW // 2) if wanted.quick else (EARLY, LATE)
    rows = list[tuple[str, int, float, float]]()
    for number in range(1, 1 + wanted.repeats):
        told = {}
        for name, runner in runners.items():
            told[name], seconds = seconds_of_tokens(runner, late + WINDOW // 2 + 1)
            before, after = (statistics.median(seconds[at - WINDOW // 2 : at + WINDOW // 2]) for at in (early, late))
            rows.append((name, number, 1e3 * before, 1e3 * after))
        if told[OURS] != told[MODULES]:
            raise RuntimeError("the two ways of decoding give different tokens.")
    ratio = statistics.median(after / before for name, _, before, after in rows if name == OURS)
    return Found(
        {"pattern": TRUNK, "window": WINDOW, "ratio": ratio},
        [Goal(f"seconds of token {late} / of token {early}, plain decoding of {TRUNK}", ratio, GOAL)],
        [Table("A token of a long text", ("by", "text", f"ms at {early}", f"ms at {late}"), rows)],
    )


def runners_of(place: str) -> dict[str, Runner]:
    """Return a trunk of Mamba-2 and MLP without MTP layers: as drafting runs it, and with Megatron's modules."""
    set_up_megatron(HYBRID[place], 1, "--hybrid-layer-pattern", f"{TRUNK}/*-", *MAMBA.split())
    args = get_args()
    args.mtp_num_layers, args.hybrid_layer_pattern = None, TRUNK
    config = hybrid_config_from_args(args, model_config_cls=MTPHybridModelConfig)
    models = [build(config).cuda() for _ in range(2)]
    copy_weights(*models)
    for model in models:
        model.max_sequence_length = LATE + WINDOW
    with mock.patch.object(backend, "lean", return_value=None):
        modules = Runner(models[1])
    return {OURS: Runner(models[0]), MODULES: modules}


def seconds_of_tokens(runner: Runner, count: int) -> tuple[list[list[int]], list[float]]:
    """Return an output, and the seconds of each of its tokens after the first."""
    times: list[float] = []
    made = generate(runner, [list(range(5, 37))], count, emit=lambda _: times.append(time.perf_counter()))
    return made.token_ids, [after - before for before, after in itertools.pairwise(times)]


if __name__ == "__main__":
    main(long_text, __doc__, ON_CPU, {"cpu": 3, "cuda": 3, "quick": 1})
