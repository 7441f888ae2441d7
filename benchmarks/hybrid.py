"""What a hybrid's training step costs against Megatron's own hybrid MTP, and how a long text's tokens are decoded.

    python benchmarks/hybrid.py                      both parts
    python benchmarks/hybrid.py --part decode        plain decoding alone
    python benchmarks/hybrid.py --quick              does it run? (the figures mean nothing)

train    A trunk of Mamba-2, attention and MLP, with D = 1 and 2 depths of attention and MLP. Both sides train the same
         weights on the same batches with Megatron's DDP, optimizer, schedule and `train_step`; without the libraries of
         its kernels both have the same portable layers. They take turns step by step, and their first step must agree.
decode   A trunk of Mamba-2 alone: seconds of a token around the 200th and around the 2,000th, plain decoding. What is
         remembered of a text does not grow, so neither should the time. States take in rows once in 96 tokens, and the
         windows are a multiple of that. The median of several texts. The same weights by Megatron's modules, which take
         turns with ours text by text, and must give the same tokens.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training import get_args
from megatron.training.argument_utils import hybrid_config_from_args

from benchmarks.harness import (
    Goal,
    Table,
    add_common_flags,
    compare,
    hardware,
    interleave,
    limit_threads,
    report,
)
from benchmarks.sides import (
    ON_CPU,
    OURS,
    SAME,
    THEIRS,
    Side,
    Sizes,
    check_same,
    copy_weights,
    make_batches,
    megatron_forward_step,
    place,
    set_up_megatron,
    side_of,
)
from megatron_mtp.config import MTPConfig
from megatron_mtp.decoding import backend, generate
from megatron_mtp.decoding.kv_cache import ROLLED_BACK
from megatron_mtp.decoding.recurrent_layers import KEPT
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.model.arguments import MTPHybridModelConfig
from megatron_mtp.model.build import build
from megatron_mtp.model.hybrid import stack_spec
from megatron_mtp.model.portable import PortableNorm
from megatron_mtp.training.forward_step import ForwardStep
from megatron_mtp.training.metrics import Metrics

MODULES = "Megatron's modules"
STEP_GOAL, TOKEN_GOAL = 1.0, 1.1
"""A step of ours costs at most so many of Megatron's; a late token at most so many early ones."""

TRUNK, DEPTH, MAMBA_TRUNK = "M-*-M-*-", "*-", "M-M-M-M-"
DEPTHS = (1, 2)
SIZES = {
    "cpu": Sizes(192, 8, 6, 256, 8, 1024, "fp32"),
    "cuda": Sizes(2048, 8, 16, 2048, 4, 32768, "bf16"),
    "quick": Sizes(64, 8, 2, 32, 2, 256, "fp32"),
}
REPEATS = {"cpu": 15, "cuda": 50, "quick": 2}
MAMBA = "--mamba-head-dim 32 --mamba-state-dim 64 --mamba-num-groups 1"

EARLY, LATE = 200, 2000
WINDOW = 2 * (KEPT - ROLLED_BACK)
"""Tokens around each whose times are compared."""

TEXTS = {"cpu": 3, "cuda": 3, "quick": 1}


def main() -> None:
    """Measure and report."""
    wanted = parse(sys.argv[1:])
    limit_threads(wanted)
    where, command = place(wanted.quick), sys.argv
    set_up_megatron(SIZES[where], DEPTHS[0], "--hybrid-layer-pattern", pattern(TRUNK, DEPTHS[0]), *MAMBA.split())
    sys.argv = command
    results: dict[str, Any] = {"sizes": asdict(SIZES[where])}
    goals, tables = list[Goal](), list[Table]()
    for name, part in PARTS.items():
        if wanted.part in (name, "all"):
            results[name], found, shown = part(where, wanted)
            goals += found
            tables.append(shown)
    torch.distributed.destroy_process_group()
    report("hybrid", hardware(ON_CPU), results, goals, tables)


def parse(argv: list[str]) -> argparse.Namespace:
    """Ends the process with one sentence and status 2 where a number makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    add_common_flags(parser, REPEATS)
    return parser.parse_args(argv)


def pattern(trunk: str, depths: int) -> str:
    """The flag's value."""
    return "/".join([trunk, *[DEPTH] * depths])


Found = tuple[dict[str, Any], list[Goal], Table]
"""Results, goals and a table."""


def train(where: str, wanted: argparse.Namespace) -> Found:
    """Steps with every number of depths."""
    results = {}
    for depths in DEPTHS:
        get_args().mtp_num_layers, get_args().hybrid_layer_pattern = depths, pattern(TRUNK, depths)
        MTPLossLoggingHelper.tracker = {}  # it keeps the number of depths that it saw first
        sides = build_sides()
        first = check_same({name: side.step() for name, side in sides.items()}, SAME[SIZES[where].dtype])
        steps = {name: side.step for name, side in sides.items()}
        spent = interleave(steps, wanted.repeats or REPEATS[where], synchronize=torch.cuda.synchronize)
        wall = {name: [one.wall for one in rounds] for name, rounds in spent.items()}
        seconds = {name: round(statistics.median(each), 5) for name, each in wall.items()}
        results[f"D={depths}"] = {
            "pattern": pattern(TRUNK, depths),
            **asdict(compare(wall[OURS], wall[THEIRS])),
            "seconds": seconds,
            "first_step": first,
        }
    goals = [
        Goal(f"ours / Megatron's own hybrid MTP, {name}", one["ratio"], STEP_GOAL) for name, one in results.items()
    ]
    rows = [
        (name, one["seconds"][OURS], one["seconds"][THEIRS], one["ratio"], one["paired_ratio"])
        for name, one in results.items()
    ]
    return results, goals, Table(("depths", "s ours", "s Megatron", "ratio", "by round"), rows)


def build_sides() -> dict[str, Side]:
    """Both sides with the same weights."""
    dataset, args = make_batches(4), get_args()
    theirs = side_of(megatrons_config(), megatron_forward_step, dataset)
    config = hybrid_config_from_args(args, model_config_cls=MTPHybridModelConfig)
    ours = side_of(config, ForwardStep(MTPConfig(), Metrics(None)), dataset, like=theirs)
    return {OURS: ours, THEIRS: theirs}


def megatrons_config() -> Any:
    """Of Megatron's hybrid model and its own MTP, with our stack's layers where Transformer Engine is missing."""
    config = hybrid_config_from_args(get_args())
    if config.transformer.transformer_impl == "local":
        spec = stack_spec(config.transformer)
        norms = {"enorm": PortableNorm, "hnorm": PortableNorm, "layer_norm": PortableNorm}
        depth = MultiTokenPredictionLayerSubmodules(eh_proj=ColumnParallelLinear, mtp_model_layer=None, **norms)
        spec.submodules.mtp_block_spec = ModuleSpec(
            MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules([ModuleSpec(MultiTokenPredictionLayer, submodules=depth)]),
        )
        config.hybrid_stack_spec = spec
    return config


def decode(where: str, wanted: argparse.Namespace) -> Found:
    """Seconds of a token early and late in a text, of several texts."""
    runners = mamba_runners()
    early, late = (EARLY, LATE) if where != "quick" else (WINDOW // 2, 3 * WINDOW // 2)
    texts: dict[str, list[list[float]]] = {name: [] for name in runners}
    for _ in range(TEXTS[where]):
        told = {}
        for name, runner in runners.items():
            told[name], seconds = seconds_of_tokens(runner, late + WINDOW // 2 + 1)
            texts[name].append(
                [statistics.median(seconds[at - WINDOW // 2 : at + WINDOW // 2]) for at in (early, late)]
            )
        if told[OURS] != told[MODULES]:
            raise RuntimeError("the two ways of decoding give different tokens.")
    ratio = statistics.median(after / before for before, after in texts[OURS])
    results = {
        "pattern": MAMBA_TRUNK,
        "window": WINDOW,
        "milliseconds": {
            name: [[round(1e3 * one, 4) for one in text] for text in each] for name, each in texts.items()
        },
        "ratio": round(ratio, 4),
    }
    rows = [
        (name, number, *(1e3 * one for one in text))
        for name, each in texts.items()
        for number, text in enumerate(each, start=1)
    ]
    goal = Goal(f"seconds of token {late} / of token {early}, plain decoding of {MAMBA_TRUNK}", ratio, TOKEN_GOAL)
    return results, [goal], Table(("by", "text", f"ms at {early}", f"ms at {late}"), rows)


def mamba_runners() -> dict[str, Runner]:
    """A trunk of Mamba-2 and MLP without depths: as drafting runs it, and by Megatron's modules."""
    args = get_args()
    args.mtp_num_layers, args.hybrid_layer_pattern = None, MAMBA_TRUNK
    config = hybrid_config_from_args(args, model_config_cls=MTPHybridModelConfig)
    models = [build(config).cuda() for _ in range(2)]
    copy_weights(*models)
    for model in models:
        model.max_sequence_length = LATE + WINDOW
    with mock.patch.object(backend, "lean", return_value=None):
        modules = Runner(models[1])
    return {OURS: Runner(models[0]), MODULES: modules}


def seconds_of_tokens(runner: Runner, count: int) -> tuple[list[list[int]], list[float]]:
    """A text, and the seconds of each of its tokens after the first."""
    times: list[float] = []
    made = generate(runner, [list(range(5, 37))], count, emit=lambda _: times.append(time.perf_counter()))
    return made.token_ids, [after - before for before, after in itertools.pairwise(times)]


PARTS: dict[str, Callable[[str, argparse.Namespace], Found]] = {"train": train, "decode": decode}

if __name__ == "__main__":
    main()
