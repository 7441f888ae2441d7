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

import itertools
import statistics
import sys
import time
from argparse import Namespace
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

from benchmarks import sides
from benchmarks.harness import Found, Goal, Table, interleave, main
from benchmarks.sides import ON_CPU, OURS, SAME, THEIRS, Side, Sizes
from megatron_mtp.config import MTPConfig
from megatron_mtp.decoding import backend, generate
from megatron_mtp.decoding.recurrent_layers import KEPT
from megatron_mtp.decoding.rows import MAX_ROWS_BACK
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.model.arguments import MTPHybridModelConfig
from megatron_mtp.model.build import build
from megatron_mtp.model.hybrid import stack_spec
from megatron_mtp.model.norms import PortableNorm
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
WINDOW = 2 * (KEPT - MAX_ROWS_BACK)
"""Tokens around each whose times are compared."""

TEXTS = {"cpu": 3, "cuda": 3, "quick": 1}


def hybrid(wanted: Namespace) -> Found:
    """The parts in --part."""
    sizes = SIZES[wanted.place]
    sides.set_up_megatron(sizes, DEPTHS[0], "--hybrid-layer-pattern", pattern(TRUNK, DEPTHS[0]), *MAMBA.split())
    found = {name: part(wanted) for name, part in PARTS.items() if wanted.part in (name, "all")}
    return Found(
        {"sizes": asdict(sizes), **{name: one.results for name, one in found.items()}},
        [goal for one in found.values() for goal in one.goals],
        [table for one in found.values() for table in one.tables],
    )


def pattern(trunk: str, depths: int) -> str:
    """The flag's value."""
    return "/".join([trunk, *[DEPTH] * depths])


def train(wanted: Namespace) -> Found:
    """Steps with every number of depths."""
    results = {}
    for depths in DEPTHS:
        get_args().mtp_num_layers, get_args().hybrid_layer_pattern = depths, pattern(TRUNK, depths)
        MTPLossLoggingHelper.tracker = {}  # it keeps the number of depths that it saw first
        both = build_sides()
        first = sides.check_same({name: side.step() for name, side in both.items()}, SAME[SIZES[wanted.place].dtype])
        steps = {name: side.step for name, side in both.items()}
        timed = interleave(steps, wanted.repeats, synchronize=torch.cuda.synchronize)
        results[f"D={depths}"] = {
            "pattern": pattern(TRUNK, depths),
            **asdict(timed.compare(OURS, THEIRS)),
            "seconds": {name: round(median, 5) for name, median in timed.medians().items()},
            "first_step": first,
        }
    goals = [
        Goal(f"ours / Megatron's own hybrid MTP, {name}", one["ratio"], STEP_GOAL) for name, one in results.items()
    ]
    rows = [
        (name, one["seconds"][OURS], one["seconds"][THEIRS], one["ratio"], one["paired_ratio"])
        for name, one in results.items()
    ]
    header = ("depths", "s ours", "s Megatron", "ratio", "by round")
    return Found(results, goals, [Table("A training step of a hybrid", header, rows)])


def build_sides() -> dict[str, Side]:
    """Both sides with the same weights."""
    dataset, args = sides.make_batches(4), get_args()
    theirs = sides.side_of(megatrons_config(), sides.megatron_forward_step, dataset)
    config = hybrid_config_from_args(args, model_config_cls=MTPHybridModelConfig)
    ours = sides.side_of(config, ForwardStep(MTPConfig(), Metrics(None)), dataset, like=theirs)
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


def decode(wanted: Namespace) -> Found:
    """Seconds of a token early and late in a text, of several texts."""
    runners = mamba_runners()
    early, late = (EARLY, LATE) if not wanted.quick else (WINDOW // 2, 3 * WINDOW // 2)
    texts: dict[str, list[list[float]]] = {name: [] for name in runners}
    for _ in range(TEXTS[wanted.place]):
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
    header = ("by", "text", f"ms at {early}", f"ms at {late}")
    return Found(results, [goal], [Table("A token of a long text", header, rows)])


def mamba_runners() -> dict[str, Runner]:
    """A trunk of Mamba-2 and MLP without depths: as drafting runs it, and by Megatron's modules."""
    args = get_args()
    args.mtp_num_layers, args.hybrid_layer_pattern = None, MAMBA_TRUNK
    config = hybrid_config_from_args(args, model_config_cls=MTPHybridModelConfig)
    models = [build(config).cuda() for _ in range(2)]
    sides.copy_weights(*models)
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


PARTS: dict[str, Callable[[Namespace], Found]] = {"train": train, "decode": decode}
FLAGS = {"--part": {"choices": [*PARTS, "all"], "default": "all", "help": "default: all"}}

if __name__ == "__main__":
    main(hybrid, __doc__, ON_CPU, REPEATS, FLAGS)
