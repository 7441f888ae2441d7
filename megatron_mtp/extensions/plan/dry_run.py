"""`train --dry-run`: plans a job with a layout of any size, in one process without a GPU.

Megatron's own parser reads and checks the flags. The model is built for the first rank of every pipeline stage to count
its parameters. `memory.py` computes the memory from the flags.
"""

import math
import os
from argparse import BooleanOptionalAction, Namespace
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training.arguments import parse_args

from megatron_mtp.extensions.plan.built import PARTS, parameters
from megatron_mtp.extensions.plan.elsewhere import (
    CHECKED_VARIABLES,
    CHECKPOINT,
    DATA_LISTS,
    machine_of_the_job,
    without_absent_files,
    without_libraries,
)
from megatron_mtp.extensions.plan.launch import of_arguments, read
from megatron_mtp.extensions.plan.memory import memory_of
from megatron_mtp.extensions.plan.placement import of_line
from megatron_mtp.extensions.plan.planning import pipeline_of
from megatron_mtp.extensions.plan.report import memory_table
from megatron_mtp.extensions.plan.sizes import model_of
from megatron_mtp.spec.head import trained_depths
from megatron_mtp.training.arguments import checked_model_config, parse_run_args, true_vocab_size
from megatron_mtp.training.checks import check_data, check_trunk
from megatron_mtp.training.flags import add_mtp_arguments, all_parser

RESOLVED = ("ffn_hidden_size", "global_batch_size", "kv_channels", "padded_vocab_size")
"""Sizes that Megatron derives if they are not set by flags."""


def plan(argv: list[str], ranks: int) -> str:
    """Return the lines of the plan of a job.

    Args:
        argv: `sys.argv` itself, which Megatron's parser reads; flags for files that are missing here are removed.
        ranks: number of ranks; 0 for the fewest that the layout allows.

    Raises:
        ValueError: the flags are wrong, or the layout does not fit the ranks.
    """
    os.environ.setdefault("WORLD_SIZE", "1")
    given = parse_args(add_mtp_arguments)
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks or _fewest_ranks(given))})
    absent = without_absent_files(argv, given)
    for name, value in CHECKED_VARIABLES.items():
        os.environ.setdefault(name, value)
    with machine_of_the_job():
        args = parse_run_args(plans=True)
        if not absent.keys() & {*CHECKPOINT}:
            check_trunk(args)
        config = checked_model_config(args)
    needed = without_libraries(config.transformer)
    config.transformer.perform_initialization = False
    total, lines = Counter[str](), list[str]()
    # Pipeline stages are the outermost dimension of the ranks, unless a flag makes data parallelism the outermost.
    stages, apart = args.pipeline_model_parallel_size, args.world_size // args.pipeline_model_parallel_size
    if args.use_tp_pp_dp_mapping:
        apart = args.tensor_model_parallel_size * args.context_parallel_size
    for stage in range(stages):
        local, whole = parameters(args, config, stage * apart)
        total += whole
        parts = ", ".join(f"{part} {size:,}" + ("" if whole[part] else " (a copy)") for part, size in local.items())
        lines.append(f"a rank of stage {stage} holds {local.total():,} parameters: {parts}")
    counted = [f"parameters: {total.total():,}", *(f"  {part:<10}{total[part]:>20,}" for part in PARTS)]
    lines += ["", _memory(argv[1:], args, local["depths"])]
    if args.chat is None and not absent.keys() & {*DATA_LISTS}:  # chats are tokenized when the job starts
        try:
            check_data(args, true_vocab_size(args))
        except ValueError as error:
            lines.append(f"data: {error}")
    return "\n".join(
        [*_flags(given, args, absent), "", *needed, *absent.values(), *_layout(args), "", *counted, "", *lines]
    )


def _fewest_ranks(args: Namespace) -> int:
    dense = args.tensor_model_parallel_size * args.context_parallel_size
    experts = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
    return int(args.pipeline_model_parallel_size * math.lcm(dense, experts))


def _flags(given: Namespace, args: Namespace, absent: Collection[str]) -> list[str]:
    """Return the flags of the run with the values that Megatron derived; flags for missing files as given."""
    parser = all_parser("train")
    defaults = parser.parse_args([])
    lines = []
    for action in parser._actions:
        if not hasattr(given, action.dest):
            continue
        value = getattr(given, action.dest)
        if value != getattr(defaults, action.dest) or action.dest in RESOLVED:
            is_off = isinstance(action, BooleanOptionalAction) and not value
            derived = value if action.dest in absent else getattr(args, action.dest, value)  # Megatron drops old names
            shown = "" if action.nargs == 0 else f" {derived}"
            lines.append(f"  {action.option_strings[-1 if is_off else 0]}{shown}")
    return ["flags, without those at Megatron's defaults:", *sorted(lines)]


def _layout(args: Namespace) -> list[str]:
    sizes = {
        "data": args.data_parallel_size,
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "context": args.context_parallel_size,
        "expert": args.expert_model_parallel_size,
    }
    parallel = ", ".join(f"{name} {size}" for name, size in sizes.items())
    batch = f"{args.global_batch_size} sequences of {args.seq_length} tokens"
    tokens = args.global_batch_size * args.seq_length
    return [
        f"layout of {args.world_size} ranks: {parallel}",
        f"step: {batch}, {tokens:,} tokens, in {get_num_microbatches()} microbatches of {args.micro_batch_size} on "
        "every data-parallel rank",
    ]


def _memory(words: list[str], args: Namespace, of_drafter: int) -> str:
    """Return a table of the memory per rank for every stage.

    Args:
        of_drafter: parameters of a drafter on the last stage, whose layers the launch line does not describe. Its
            activations are estimated as those of one trunk layer per pass.
    """
    try:
        line = of_arguments(read(words), args)
        if args.drafter is not None:
            line = replace(line, mtp_num_layers=1, mtp_use_repeated_layer=True, mtp_unroll=trained_depths(args))
        model = model_of(line)
        if args.drafter is not None:
            model = replace(model, depth=replace(model.depth, products=(), vectors=of_drafter))
        placement = of_line(line, len(model.layers))
        held = memory_of(model, placement, pipeline_of(line, args.world_size), args.world_size)
    except ValueError as error:
        return f"memory: {error}"
    return f"memory of a rank, GiB\n{memory_table(held)}"
