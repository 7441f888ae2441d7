"""`--dry-run`: the plan of a job with a layout of any size, made by one process without a GPU.

Megatron's own parser reads and checks the flags. The model of the first rank of every pipeline stage is built on the
meta device, over process groups that never send anything, so that parameters are counted. Memory is Megatron's own
estimate for the trunk, and the same formulas for the depths. What needs libraries of GPUs changes no number:
the plan is made without it, and names the libraries.
"""

import math
import os
from argparse import BooleanOptionalAction, Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training.arguments import parse_args
from megatron.training.theoretical_memory_usage import (
    compute_activation_memory_without_sp,
    compute_weight_and_optimizer_memory,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_mtp.config import trained_depths
from megatron_mtp.model.arguments import CUDA, MTPModelConfig, flags_without
from megatron_mtp.model.build import build
from megatron_mtp.model.trunk import DRAFTER_BLOCK
from megatron_mtp.training.arguments import checked_model_config, parse_run_args, true_vocab_size
from megatron_mtp.training.checks import check_data
from megatron_mtp.training.flags import add_mtp_arguments, all_parser

GIB = 2**30
RESOLVED = ("ffn_hidden_size", "global_batch_size", "kv_channels", "padded_vocab_size")
"""Sizes that Megatron derives if no flag gives them."""

OF_LIBRARIES: dict[str, tuple[str, Any]] = {
    "fp8": ("Transformer Engine", None),
    "fp4": ("Transformer Engine", None),
    "fp8_param_gather": ("Transformer Engine", False),
    "moe_permute_fusion": ("Transformer Engine", False),
    "moe_router_fusion": ("Transformer Engine", False),
    "tp_comm_overlap": ("Transformer Engine", False),
    "moe_enable_deepep": ("DeepEP", False),
}
"""Arguments that need a library, and what they are in a plan."""

PARTS = {
    "trunk": "decoder.",
    "depths": ("mtp.", f"{DRAFTER_BLOCK}."),
    "embedding": "embedding.",
    "head": "output_layer.",
}
"""The parts of a model, and how the names of their parameters begin."""


def plan(argv: list[str], ranks: int) -> str:
    """The plan of a job of so many ranks (0: the fewest that the layout takes), in lines.

    Raises:
        ValueError: the flags are wrong, or the layout does not fit the ranks.
    """
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks or _fewest_ranks())})
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # the kernels for experts need it
    argv += flags_without(CUDA)
    args = parse_run_args(mends=False)
    flags, needed = _flags(args), without_libraries(args)
    config = checked_model_config(args)
    config.transformer.perform_initialization = False
    total, lines = Counter[str](), list[str]()
    # Stages are the outermost dimension of the ranks, unless a flag makes it data.
    stages, apart = args.pipeline_model_parallel_size, args.world_size // args.pipeline_model_parallel_size
    if args.use_tp_pp_dp_mapping:
        apart = args.tensor_model_parallel_size * args.context_parallel_size
    for stage in range(stages):
        local, whole = _parameters(args, config, stage * apart)
        total += whole
        parts = ", ".join(f"{part} {size:,}" + ("" if whole[part] else " (a copy)") for part, size in local.items())
        lines.append(f"a rank of stage {stage} holds {local.total():,} parameters: {parts}")
    counted = [f"parameters: {total.total():,}", *(f"  {part:<10}{total[part]:>20,}" for part in PARTS)]
    lines += ["", *_memory(args, local["depths"])]
    if args.chat is None:  # chats are tokenized when the job starts
        try:
            check_data(args, true_vocab_size(args))
        except ValueError as error:
            lines.append(f"data: {error}")
    return "\n".join([*flags, "", *needed, *_layout(args), "", *counted, "", *lines])


def without_libraries(args: Namespace) -> list[str]:
    """Leave out what needs libraries that this machine may lack; a line names them."""
    needed = dict[str, None]()
    for name, (library, plain) in OF_LIBRARIES.items():
        if getattr(args, name) != plain:
            setattr(args, name, plain)
            needed[library] = None
    if args.moe_token_dispatcher_type == "flex":
        needed["HybridEP" if args.moe_flex_dispatcher_backend == "hybridep" else "DeepEP"] = None
        args.moe_token_dispatcher_type = "alltoall"
    return [f"planned as for a machine with {' and '.join(needed)}", ""] if needed else []


def _fewest_ranks() -> int:
    os.environ.setdefault("WORLD_SIZE", "1")
    args = parse_args(add_mtp_arguments)
    dense = args.tensor_model_parallel_size * args.context_parallel_size
    experts = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
    return int(args.pipeline_model_parallel_size * math.lcm(dense, experts))


def _parameters(args: Namespace, config: MTPModelConfig, rank: int) -> tuple[Counter[str], Counter[str]]:
    """Parameters by part: of a rank, and of its stage over all ranks without copies, such as a tied head."""
    local, whole = Counter[str](), Counter[str]()
    with _job(args, rank):
        chunks = args.virtual_pipeline_model_parallel_size
        for chunk in range(chunks) if chunks else [None]:
            if chunk is not None:
                parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
            model = build(config, vp_stage=chunk)
            copies = {"embedding"} if not model.pre_process else set()
            copies |= {"head"} if not args.untie_embeddings_and_output_weights else set()
            for name, weight in model.named_parameters():
                part = next(part for part, start in PARTS.items() if name.startswith(start))
                tensor, expert = args.tensor_model_parallel_size, 1
                if not getattr(weight, "allreduce", True):  # an expert's
                    tensor, expert = args.expert_tensor_parallel_size, args.expert_model_parallel_size
                pieces = expert * (tensor if getattr(weight, "tensor_model_parallel", False) else 1)
                local[part] += weight.numel()
                whole[part] += 0 if part in copies else weight.numel() * pieces
    return local, whole


@contextmanager
def _job(args: Namespace, rank: int) -> Iterator[None]:
    """The process groups of a rank of the job, without the other ranks; tensors have no storage."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.world_size)
    current = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment,return-value]
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
        with torch.device("meta"):
            yield
    finally:
        torch.cuda.current_device = current
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


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
            shown = "" if action.nargs == 0 else f" {getattr(args, action.dest, value)}"  # Megatron drops older names
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


def _memory(args: Namespace, of_depths: int) -> list[str]:
    """Megatron's estimate for the trunk on the fullest rank; by its formulas, that for so many parameters of depths."""
    if args.hybrid_layer_pattern is not None:
        return ["memory: Megatron has no estimate for hybrid models."]
    trunk = Namespace(**vars(args) | {"mtp_num_layers": None})
    kept = compute_activation_memory_without_sp(trunk, get_num_microbatches())
    lines = [f"memory of the trunk on the fullest rank: {_gib(compute_weight_and_optimizer_memory(trunk), kept)}"]
    if of_depths:
        bytes_each = 6 + 12 / args.data_parallel_size if args.use_distributed_optimizer else 18
        alone = {"pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None}
        depths, none = (Namespace(**vars(args) | alone | {"num_layers": count}) for count in (trained_depths(args), 0))
        kept = compute_activation_memory_without_sp(depths, None) - compute_activation_memory_without_sp(none, None)
        lines.append(f"memory of the depths on the last stage: {_gib(of_depths * bytes_each, kept)}")
    return [*lines, "memory is Megatron's estimate (theoretical_memory_usage.py); what kernels need comes on top."]


def _gib(state: float, kept: float) -> str:
    parts = f"weights, gradients and optimizer {state / GIB:.2f} + activations {kept / GIB:.2f}"
    return f"{(state + kept) / GIB:.2f} GiB = {parts}"
