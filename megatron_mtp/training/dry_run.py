"""`--dry-run`: the plan of a job with a layout of any size, made by one process without a GPU.

Megatron's own parser reads and checks the flags. The model of the first rank of every pipeline stage is built on the
meta device, over process groups that never send anything. So parameters are counted; activations are estimated, by
`memory.py`.
"""

import math
import os
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training.arguments import parse_args
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_mtp.checkpoint.mcore.iterations import TRACKER, unnamed_iteration
from megatron_mtp.model.arguments import CUDA, flags_without
from megatron_mtp.model.build import MTPModelConfig, build
from megatron_mtp.model.trunk import MTPTrunk
from megatron_mtp.training.arguments import checked_model_config, parse_run_args
from megatron_mtp.training.data_flags import check_data
from megatron_mtp.training.flags import add_mtp_arguments, all_parser
from megatron_mtp.training.memory import PARTS, Memory, Parameter, memory_of, portable_share, sizes, symbols_of

GIB = 2**30
RESOLVED = ("ffn_hidden_size", "global_batch_size", "kv_channels", "padded_vocab_size")
"""Sizes that Megatron derives if no flag gives them."""


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: what its first rank holds."""

    parameters: list[Parameter]
    layers: int
    memory: Memory


def plan(argv: list[str], ranks: int) -> str:
    """The plan of a job of so many ranks (0: the fewest that the layout takes), in lines.

    Raises:
        ValueError: the flags are wrong, or the layout does not fit the ranks.
    """
    _pretend(ranks or _fewest_ranks())
    argv += flags_without(CUDA)
    with _tracked(argv):
        args = parse_run_args()
        config = checked_model_config(args)
    config.transformer.perform_initialization = False
    stages = [_stage(args, config, rank) for rank in _first_ranks(args)]
    return "\n".join([*_flags(args), "", *_layout(args), "", *_table(stages), "", *_notes(args)])


@contextmanager
def _tracked(argv: list[str]) -> Iterator[None]:
    """Where the tracker of --load is empty, which a run would mend, read the checkpoint from a folder of links."""
    load = parse_args(add_mtp_arguments).load
    newest = None if load is None else unnamed_iteration(Path(load))
    if newest is None:
        yield
        return
    with TemporaryDirectory(prefix="megatron-mtp-") as folder:
        for path in Path(load).absolute().iterdir():
            if path.name != TRACKER:
                (Path(folder) / path.name).symlink_to(path)
        (Path(folder) / TRACKER).write_text(str(newest))
        argv += ["--load", folder]
        yield


def _pretend(ranks: int) -> None:
    """Pass the checks of arguments as the first rank of a job on GPUs."""
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)})
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # the kernels for experts need it


def _fewest_ranks() -> int:
    os.environ.setdefault("WORLD_SIZE", "1")
    args = parse_args(add_mtp_arguments)
    dense = args.tensor_model_parallel_size * args.context_parallel_size
    experts = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
    return int(args.pipeline_model_parallel_size * math.lcm(dense, experts))


def _first_ranks(args: Namespace) -> list[int]:
    """The first rank of every pipeline stage; stages are the outermost dimension, unless a flag makes it data."""
    stages = args.pipeline_model_parallel_size
    apart = args.world_size // stages
    if args.use_tp_pp_dp_mapping:
        apart = args.tensor_model_parallel_size * args.context_parallel_size
    return [stage * apart for stage in range(stages)]


def _stage(args: Namespace, config: MTPModelConfig, rank: int) -> Stage:
    """Build the chunks of a rank's model on the meta device."""
    with _job(args, rank), _on_meta():
        groups = ProcessGroupCollection.use_mpu_process_groups()
        chunks = args.virtual_pipeline_model_parallel_size
        models = [_chunk(config, chunk) for chunk in (range(chunks) if chunks else [None])]
        parameters = [one for model in models for one in sizes(model, args)]
        layers = sum(len(model.decoder.layers) for model in models)
        kinds = _symbols(args, models, layers)
        return Stage(parameters, layers, memory_of(args, parameters, kinds, groups.pp.rank()))


def _symbols(args: Namespace, models: list[MTPTrunk], layers: int) -> str:
    """The layers of a stage, by the symbols of a pattern."""
    if args.hybrid_layer_pattern is None:
        return symbols_of(args, layers)
    return "".join(symbol for model in models for symbol in model.decoder.layer_type_list)


def _chunk(config: MTPModelConfig, chunk: int | None) -> MTPTrunk:
    if chunk is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
    return build(config, vp_stage=chunk)


@contextmanager
def _job(args: Namespace, rank: int) -> Iterator[None]:
    """The process groups of a rank of the job, without the other ranks."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.world_size)
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(args.seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@contextmanager
def _on_meta() -> Iterator[None]:
    """Make every tensor without storage, also where Megatron names the current device."""
    current = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment,return-value]
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.cuda.current_device = current


def _flags(args: Namespace) -> list[str]:
    """The flags of the run with the values that Megatron has derived, without those of this machine."""
    parser, machine = all_parser("train"), set(flags_without(CUDA))
    given, defaults = parse_args(add_mtp_arguments), parser.parse_args([])
    lines = []
    for action in parser._actions:
        if not hasattr(given, action.dest) or machine & set(action.option_strings):
            continue
        value = getattr(given, action.dest)
        if value != getattr(defaults, action.dest) or action.dest in RESOLVED:
            is_off = isinstance(action, BooleanOptionalAction) and not value
            shown = "" if action.nargs == 0 else f" {getattr(args, action.dest)}"
            lines.append(f"  {action.option_strings[-1 if is_off else 0]}{shown}")
    return ["flags, without those at Megatron's defaults:", *sorted(lines)]


def _layout(args: Namespace) -> list[str]:
    sizes_of = {
        "data": args.data_parallel_size,
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "context": args.context_parallel_size,
        "expert": args.expert_model_parallel_size,
    }
    parallel = ", ".join(f"{name} {size}" for name, size in sizes_of.items())
    batch = f"{args.global_batch_size} sequences of {args.seq_length} tokens"
    tokens = args.global_batch_size * args.seq_length
    return [
        f"layout of {args.world_size} ranks: {parallel}",
        f"step: {batch}, {tokens:,} tokens, in {get_num_microbatches()} microbatches of {args.micro_batch_size} on "
        "every data-parallel rank",
    ]


def _table(stages: list[Stage]) -> list[str]:
    """Parameters by part, in all and on a rank of every stage, with that rank's memory."""
    total = {part: sum(one.total for stage in stages for one in stage.parameters if one.part == part) for part in PARTS}
    lines = [f"parameters: {sum(total.values()):,}", *(f"  {part:<10}{size:>20,}" for part, size in total.items()), ""]
    for number, stage in enumerate(stages):
        memory, local = stage.memory, sum(one.local for one in stage.parameters)
        named = {
            "weights": memory.weights,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "activations": memory.activations,
        }
        gib = " + ".join(f"{name} {size / GIB:.2f}" for name, size in named.items())
        lines += [
            f"a rank of stage {number} holds {_contents(stage)}: {local:,} parameters",
            f"  {memory.total / GIB:.2f} GiB = {gib}",
        ]
    return lines


def _contents(stage: Stage) -> str:
    parts = {one.part: one for one in stage.parameters}
    words = {
        "embedding": "the embedding",
        "trunk": f"{stage.layers} layers",
        "depths": "the depths",
        "head": "the head",
    }
    copies = {part: "" if part not in parts or parts[part].total else "a copy of " for part in words}
    return ", ".join(copies[part] + word for part, word in words.items() if part in parts)


def _notes(args: Namespace) -> list[str]:
    notes = [
        "memory: weights, gradients and Adam's state are counted; activations are estimated (Korthikanti et al., "
        "arXiv:2205.05198, table 2, with attention that keeps no scores); what kernels need comes on top."
    ]
    notes += [
        f"memory: {symbol} layers are estimated with the kernels of {kernels}; without these, such a layer keeps "
        f"{portable_share(args, symbol):.1f} times as much."
        for symbol, kernels in ((Symbols.MAMBA, "mamba_ssm"), (Symbols.GDN, "fla"))
        if symbol in (args.hybrid_layer_pattern or "")
    ]
    try:
        check_data(args)
    except ValueError as error:
        notes.append(f"data: {error}")
    return notes
