"""Time of a training step with MTP layers, against Megatron's own MTP with the same settings.

    python benchmarks/train_step.py                              a GPT, D = 1, 2 and 4
    python benchmarks/train_step.py --model attached             Megatron's GPT, whose MTP block `attach` runs
    python benchmarks/train_step.py --model hybrid               a trunk of Mamba-2, attention and MLP
    python benchmarks/train_step.py --model dspark               a policy with and without a DSpark drafter
    python benchmarks/train_step.py --depths 2 --repeats 40      one number of depths, more rounds
    python benchmarks/train_step.py --quick                      does it run? (the figures mean nothing)

Both sides train the same weights on the same batches, with Megatron's DDP, optimizer, schedule and `train_step`. They
differ in the model (`GPTModelBuilder` against `MTPGPTModelBuilder`) and the forward step (that of Megatron's
`pretrain_gpt.py` against `ForwardStep`, including computing the shifts). With `attached` they differ in one thing:
either Megatron or `attach` runs the MTP block and adds its loss, with the same weight. Megatron's logging between steps
is not timed. Without Transformer Engine and the Mamba kernel libraries, both use the same portable layers. Sides take
turns step by step, so that other load affects both.

With `dspark`, a policy is trained with and without an attached DSpark drafter (`attach(.., weight=1)`), and `train
--drafter dspark` trains the same drafter on the same trunk, frozen. A step with the drafter may take as long as both
others together, and the norm of its first gradient must match theirs combined.

The first step must have the same loss and gradient norm on both sides, otherwise the benchmark fails.
"""

import math
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training import get_args
from megatron.training.argument_utils import hybrid_config_from_args

from benchmarks.harness import Found, Goal, Table, allocated_peak, count, interleave, main
from benchmarks.sides import (
    ON_CPU,
    OURS,
    SAME_IN_BFLOAT16,
    SAME_IN_FLOAT32,
    THEIRS,
    Batches,
    Side,
    Sizes,
    both,
    make_batches,
    megatron_forward_step,
    megatron_gpt,
    our_drafter,
    our_gpt,
    set_up_megatron,
    side_of,
)
from megatron_mtp.attach import attach
from megatron_mtp.model.arguments import MTPHybridModelConfig
from megatron_mtp.model.hybrid import stack_spec
from megatron_mtp.model.norms import PortableNorm
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.training import arguments
from megatron_mtp.training.forward_step import ForwardStep
from megatron_mtp.training.metrics import Metrics

GPT = {
    "cpu": Sizes(192, 4, 6, 256, 16, 1024, "fp32"),
    "cuda": Sizes(2048, 8, 16, 2048, 4, 32768, "bf16"),
    "quick": Sizes(32, 1, 2, 32, 2, 256, "fp32"),
}
HYBRID = {
    "cpu": Sizes(192, 8, 6, 256, 8, 1024, "fp32"),
    "cuda": Sizes(2048, 8, 16, 2048, 4, 32768, "bf16"),
    "quick": Sizes(64, 8, 2, 32, 2, 256, "fp32"),
}
MAMBA = "--mamba-head-dim 32 --mamba-state-dim 64 --mamba-num-groups 1"
REPEATS = {"cpu": 15, "cuda": 50, "quick": 2}


def attached_gpt(batches: Batches, like: Side | None) -> Side:
    """Build Megatron's GPT, whose MTP block `attach` runs."""
    weight = get_args().mtp_loss_scaling_factor
    return megatron_gpt(batches, like, hooks=[lambda chunks: attach(chunks, weight=weight) and chunks])


def our_hybrid(batches: Batches, like: Side | None) -> Side:
    """Build a hybrid from Megatron's arguments with our MTP."""
    config = hybrid_config_from_args(with_pattern(), model_config_cls=MTPHybridModelConfig)
    return side_of(config, ForwardStep(MTPConfig(), Metrics(None)), batches, like)


def megatron_hybrid(batches: Batches, like: Side | None) -> Side:
    """Build Megatron's hybrid with its own MTP, with our stack's layers if Transformer Engine is missing."""
    config = hybrid_config_from_args(with_pattern())
    if config.transformer.transformer_impl == "local":
        spec = stack_spec(config.transformer)
        norms = {"enorm": PortableNorm, "hnorm": PortableNorm, "layer_norm": PortableNorm}
        depth = MultiTokenPredictionLayerSubmodules(eh_proj=ColumnParallelLinear, mtp_model_layer=None, **norms)
        spec.submodules.mtp_block_spec = ModuleSpec(
            MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules([ModuleSpec(MultiTokenPredictionLayer, submodules=depth)]),
        )
        config.hybrid_stack_spec = spec
    return side_of(config, megatron_forward_step, batches, like)


def with_pattern() -> Namespace:
    """Return Megatron's arguments, and the layers of a hybrid with this many MTP layers."""
    args = get_args()
    args.hybrid_layer_pattern = pattern(args.mtp_num_layers)
    return args


def pattern(depths: int) -> str:
    """Return the trunk's layers, plus attention and MLP for every MTP layer."""
    return "M-*-M-*-" + depths * "/*-"


@dataclass(frozen=True)
class Model:
    """Model that both sides train, and how many of Megatron's steps one step of this package may cost."""

    sizes: dict[str, Sizes]
    ours: Callable[[Batches, Side | None], Side]
    theirs: Callable[[Batches, Side | None], Side]
    goal: float


MODELS = {
    "gpt": Model(GPT, our_gpt, megatron_gpt, 1.05),
    "attached": Model(GPT, attached_gpt, megatron_gpt, 1.0),
    "hybrid": Model(HYBRID, our_hybrid, megatron_hybrid, 1.0),
}
DSPARK = "dspark"
KIND: dict[str, Any] = {
    "drafter_steps": 4,
    "drafter_layers": (1, 3),
    "drafter_num_layers": 2,
    "drafter_markov_rank": 32,
}
ATTACHED = MTPConfig(drafter=DSPARK, drafter_blocks=64, drafter_mask_token=0, **KIND)
DRAFTER = (
    "--drafter dspark --drafter-steps 4 --drafter-layers 1 3 --drafter-num-layers 2 --drafter-markov-rank 32 "
    "--drafter-blocks 64 --drafter-mask-token 0"
)
FLAGS: dict[str, dict[str, Any]] = {
    "--model": {"choices": [*MODELS, DSPARK], "default": "gpt", "help": "default: gpt"},
    "--depths": {"type": count, "nargs": "+", "default": [1, 2, 4], "metavar": "D", "help": "default: 1 2 4"},
}


def train_step(wanted: Namespace) -> Found:
    """Measure every number of MTP layers in --depths, or the policy with a head."""
    if wanted.model == DSPARK:
        return beside_policy(wanted)
    model = MODELS[wanted.model]
    sizes, most = model.sizes[wanted.place], max(wanted.depths)
    hybrid = ["--hybrid-layer-pattern", pattern(most), *MAMBA.split()] if wanted.model == "hybrid" else []
    set_up_megatron(sizes, most, *hybrid)
    first, rows = dict[str, Any](), list[tuple[Any, ...]]()
    for depths in wanted.depths:
        name = f"D={depths}"
        first[name], figures = measure(model, depths, wanted.repeats)
        rows.append((name, *figures))
        print(f"> {rows[-1]}", flush=True)  # keeps the results of an interrupted run
    header = "D/s ours/s Megatron/ratio/by round/quartiles/CPU time/MiB ours/MiB Megatron".split("/")
    return Found(
        {"sizes": asdict(sizes), "repeats": wanted.repeats, "loss and gradient norm of the first step": first},
        [Goal(f"{wanted.model}, ours / Megatron's own MTP, {row[0]}", row[3], model.goal) for row in rows],
        [Table("A training step", header, rows)],
    )


def beside_policy(wanted: Namespace) -> Found:
    """Measure a policy alone, with a DSpark head, and the head on the frozen policy."""
    sizes = replace(GPT[wanted.place], num_layers=4)
    with mock.patch.object(arguments, "check_trunk"):  # the trunk comes from the other side
        set_up_megatron(sizes, None, *DRAFTER.split())
    batches, alone, head = make_batches(), "policy alone", "train --drafter"
    steps, get_args().mtp_num_layers = get_args().mtp_num_layers, None  # the policy has none
    policy = megatron_gpt(batches)
    beside = megatron_gpt(
        batches, policy, hooks=[lambda chunks: attach(chunks, settings=ATTACHED, weight=1.0) and chunks]
    )
    get_args().mtp_num_layers = steps
    sides = {OURS: beside, alone: policy, head: our_drafter(batches, beside)}
    get_args().seed, sides[head].iteration = 0, 1  # `attach` draws blocks from seed 0 and the number of its losses
    first = {name: side.step() for name, side in sides.items()}
    tolerance, apart = (
        SAME_IN_BFLOAT16 if get_args().bf16 else SAME_IN_FLOAT32,
        [first[name][1] for name in (alone, head)],
    )
    if not math.isclose(first[OURS][1], math.hypot(*apart), rel_tol=tolerance):
        raise RuntimeError(f"the gradients of policy and head are not those of each alone, by loss and norm: {first}.")
    timed = interleave(
        {name: side.step for name, side in sides.items()}, wanted.repeats, synchronize=torch.cuda.synchronize
    )
    medians, peaks = timed.medians(), {name: allocated_peak(side.step, ON_CPU) for name, side in sides.items()}
    ratios = {name: timed.compare(OURS, name) for name in (alone, head)}
    rows = [(name, medians[name], ratios[name].paired_ratio if name in ratios else 1, peaks[name]) for name in sides]
    both_alone = round(medians[OURS] / (medians[alone] + medians[head]), 3)
    return Found(
        {"sizes": asdict(sizes), "repeats": wanted.repeats, "loss and gradient norm of the first step": first},
        [Goal("a step with DSpark / a step of the policy and one of train --drafter", both_alone, 1.0)],
        [Table("A training step", ["side", "s", "ratio by round to it", "MiB"], rows)],
    )


def measure(model: Model, depths: int, repeats: int) -> tuple[dict[str, tuple[float, float]], tuple[Any, ...]]:
    """Return the first step of both sides with D MTP layers, and step times: a row of the table."""
    sides, first = both(model.ours, model.theirs, depths)
    steps = {name: side.step for name, side in sides.items()}
    timed = interleave(steps, repeats, synchronize=torch.cuda.synchronize)
    wall, cpu = timed.compare(OURS, THEIRS), timed.compare(OURS, THEIRS, "cpu")
    low, high = wall.paired_quartiles
    ratios = (wall.ratio, wall.paired_ratio, f"{low:.3f} .. {high:.3f}", cpu.paired_ratio)
    return first, (*timed.medians().values(), *ratios, *(allocated_peak(step, ON_CPU) for step in steps.values()))


if __name__ == "__main__":
    main(train_step, __doc__, ON_CPU, REPEATS, FLAGS)
