"""`--dry-run`: the plan of a job with a layout of any size, made by one process without a GPU.

Megatron's own parser reads and checks the flags, as on a machine with GPUs and all libraries. The model of the first
rank of every pipeline stage is built on the meta device, over process groups that never send anything, so that
parameters are counted. Memory is Megatron's own estimate for the trunk, and the same formulas for the MTP layers. What
needs libraries of GPUs changes no number: the model is built without it, and the plan names the libraries. Files that
are not on this machine are left out, and the plan names them too.
"""

import copy
import math
import os
import sys
from argparse import BooleanOptionalAction, Namespace
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core import utils as megatrons_versions
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.experimental_attention_variant import absorbed_mla
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import parse_args
from megatron.training.theoretical_memory_usage import (
    compute_activation_memory_without_sp,
    compute_weight_and_optimizer_memory,
)
from packaging.version import Version
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_mtp.model import hybrid
from megatron_mtp.model.arguments import CUDA, MTPModelConfig, arguments_without
from megatron_mtp.model.build import build
from megatron_mtp.model.linear import PortableLinear
from megatron_mtp.model.recurrent import PortableGatedDeltaNet
from megatron_mtp.model.specs import having
from megatron_mtp.spec.config import HEADS, flag_of, trained_depths
from megatron_mtp.training.arguments import checked_model_config, parse_run_args, true_vocab_size
from megatron_mtp.training.checks import check_data, check_hub, check_trunk
from megatron_mtp.training.documents import named_prefixes
from megatron_mtp.training.flags import add_mtp_arguments, all_parser

GIB = 2**30
RESOLVED = ("ffn_hidden_size", "global_batch_size", "kv_channels", "padded_vocab_size")
"""Sizes that Megatron derives if no flag gives them."""

TE_NAME = "Transformer Engine"
OF_LIBRARIES: dict[str, tuple[str, Any]] = {
    "fp8": (TE_NAME, None),
    "fp4": (TE_NAME, None),
    "fp8_param": (TE_NAME, False),
    "fp4_param": (TE_NAME, False),
    "moe_permute_fusion": (TE_NAME, False),
    "moe_router_fusion": (TE_NAME, False),
    "tp_comm_overlap": (TE_NAME, False),
    "fine_grained_activation_offloading": (TE_NAME, False),
    "moe_enable_deepep": ("DeepEP", False),
}
"""Fields of a configuration that need a library, and their values without it."""

CHECKED_KERNELS = {
    rope_utils: ("fused_apply_rotary_pos_emb",),
    moe_utils: (
        *("fused_permute", "fused_permute_with_probs", "fused_unpermute"),
        *("fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs"),
    ),
}
"""Kernels of Transformer Engine that Megatron looks for where it checks flags, by the module that imports them."""

CHECKED_VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUDA_GRAPHS_USE_NODE_PRIORITY": "1",
    "NVTE_CPU_OFFLOAD_V1": "1",
}
"""Variables of a job's environment that Megatron asks for where it checks flags."""

PARTS = {
    "trunk": "decoder.",
    "depths": tuple(f"{name}." for name in HEADS),
    "embedding": "embedding.",
    "head": "output_layer.",
}
"""The parts of a model, and how the names of their parameters begin."""


def plan(argv: list[str], ranks: int) -> str:
    """The plan of a job of so many ranks (0: the fewest that the layout takes), in lines.

    Args:
        argv: `sys.argv` itself, which Megatron's parser reads; flags of files that are not here are taken out.
        ranks: of the job.

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
    if args.chat is None and not absent.keys() & {*DATA_LISTS}:  # chats are tokenized when the job starts
        try:
            check_data(args, true_vocab_size(args))
        except ValueError as error:
            lines.append(f"data: {error}")
    return "\n".join(
        [*_flags(given, args, absent), "", *needed, *absent.values(), *_layout(args), "", *counted, "", *lines]
    )


# --- what is not on this machine -------------------------------------------------------------------------------------

TOKENIZER = ("tokenizer_model", "vocab_file", "merge_file")
CHECKPOINT = ("load", "pretrained_checkpoint")
DATA_LISTS = ("data_args_path", "per_split_data_args_path")
FILES = (*TOKENIZER, *CHECKPOINT, *DATA_LISTS, "mtp_draft_vocab_file", "te_precision_config_file")
"""Arguments that name files which are read before a run."""


def without_absent_files(argv: list[str], given: Namespace) -> dict[str, str]:
    """Take the flags of files that are not on this machine out of the words; a line for each, by the argument's name.

    Raises:
        ValueError: no plan can be made without one of them.
    """
    named = {name: getattr(given, name) for name in FILES if getattr(given, name) is not None}
    absent = {name: path for name, path in named.items() if "://" not in path and not Path(path).exists()}
    if given.load == given.save:
        absent.pop("load", None)  # the job starts anew
    for name in CHECKPOINT:
        if name in absent and given.use_checkpoint_args:
            raise ValueError(
                f"--use-checkpoint-args was given, but {flag_of(name)} {absent[name]} is not on this machine; give "
                "the flags of its model in the place of --use-checkpoint-args."
            )
    instead: list[str] = []
    if _needs_tokenizer(given, absent):
        absent.setdefault("tokenizer_type", given.tokenizer_type)
        instead = ["--tokenizer-type", "NullTokenizer"]
    if given.mtp_draft_vocab_size is not None and _data_is_elsewhere(given, absent):
        absent["mtp_draft_vocab_size"] = f"{given.mtp_draft_vocab_size}, which counts tokens of --data-path"
    argv[:] = [*_without(argv, {flag_of(name) for name in absent}), *instead]
    return {name: f"not on this machine, and planned without: {flag_of(name)} {path}" for name, path in absent.items()}


def _needs_tokenizer(given: Namespace, absent: dict[str, str]) -> bool:
    """Return whether --vocab-size has to stand for a tokenizer that is not here.

    Raises:
        ValueError: it is missing.
    """
    try:
        check_hub(given)
    except ValueError as error:
        if given.vocab_size is None:
            said = str(error).rpartition(";")[0]
            raise ValueError(f"{said}; give --vocab-size, and the plan needs no tokenizer.") from None
        return True
    if given.vocab_size is None and given.tokenizer_type == "HuggingFaceTokenizer":
        absent.pop("tokenizer_model", None)  # it comes from the Hub
    for name in TOKENIZER:
        if name in absent and given.vocab_size is None:
            raise ValueError(
                f"{flag_of(name)} is {absent[name]}, which is not on this machine; give --vocab-size, and the plan "
                "needs no tokenizer."
            )
    return any(name in absent for name in TOKENIZER)


def _data_is_elsewhere(given: Namespace, absent: dict[str, str]) -> bool:
    if any(name in absent for name in DATA_LISTS):
        return True
    return not all(Path(f"{prefix}.idx").exists() for prefix in named_prefixes(given))


def _without(argv: list[str], flags: set[str]) -> list[str]:
    """The words of a command line without these flags, each of which has one value."""
    kept, words = list[str](), iter(argv)
    for word in words:
        if word in flags:
            next(words, None)
        elif word.split("=")[0] not in flags:
            kept.append(word)
    return kept


@contextmanager
def machine_of_the_job() -> Iterator[None]:
    """While this lasts, Megatron checks flags as on a machine with a GPU of any kind and every library."""
    newest = SimpleNamespace(major=99)
    manager = "nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager"
    parts = manager.split(".")
    stubs = {".".join(parts[: end + 1]): ModuleType(part) for end, part in enumerate(parts)}
    stubs[manager].LocalCheckpointManager = object  # type: ignore[attr-defined]
    with ExitStack() as stack:
        stack.enter_context(_importable(stubs))
        stack.enter_context(having([megatrons_versions], _te_version=Version("99")))
        stack.enter_context(
            having(
                [torch.cuda],
                get_device_capability=lambda *_: (newest.major, 0),
                get_device_properties=lambda *_: newest,
            )
        )
        for module, names in CHECKED_KERNELS.items():
            stack.enter_context(having([module], **dict.fromkeys(names, object())))
        yield


@contextmanager
def _importable(stubs: Mapping[str, ModuleType]) -> Iterator[None]:
    """While this lasts, these modules are imported by their names, whatever is installed."""
    before = {name: sys.modules[name] for name in stubs if name in sys.modules}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]
        sys.modules.update(before)


def without_libraries(config: TransformerConfig) -> list[str]:
    """Take out of a checked configuration what this machine may lack; a line names the libraries."""
    needed = dict[str, None]()
    for name, (library, without) in OF_LIBRARIES.items():
        if getattr(config, name) != without:
            setattr(config, name, without)
            needed[library] = None
    if config.experimental_attention_variant is not None:
        needed[TE_NAME] = None
    if config.moe_token_dispatcher_type == "flex":
        needed["HybridEP" if config.moe_flex_dispatcher_backend == "hybridep" else "DeepEP"] = None
    dispatcher = "alltoall" if config.moe_token_dispatcher_type == "flex" else config.moe_token_dispatcher_type
    plain = arguments_without(CUDA) | {"moe_token_dispatcher_type": dispatcher, "cuda_graph_impl": "none"}
    for name, value in plain.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return [f"planned as for a machine with {' and '.join(needed)}", ""] if needed else []


class _PlannedModules(LocalSpecProvider):
    """Modules of the sizes that those of Transformer Engine have; the norm before a projection is the layer's own."""

    def linear(self) -> type:
        return PortableLinear

    def column_parallel_layer_norm_linear(self) -> type:
        return ColumnParallelLinear


def _planned_layers(config: TransformerConfig, backend: LocalSpecProvider) -> list[ModuleSpec]:
    """Layers of the trunk; Megatron makes those of --experimental-attention-variant of TE's modules alone."""
    kind = config.experimental_attention_variant
    is_linear = variants.is_linear_attention_variant(kind)
    pattern = variants.get_linear_attention_pattern(config) if is_linear else [1] * config.num_layers
    attention = variants.get_experimental_attention_variant_module_spec(config, backend)
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    layers = get_gpt_decoder_layer_specs(plain, use_transformer_engine=False, normalization=config.normalization)
    return [
        replace(layer, submodules=replace(layer.submodules, self_attention=attention)) if has_variant else layer
        for has_variant, layer in zip(pattern, layers, strict=True)
    ]


def _planned_stack(config: TransformerConfig, others: Callable[[TransformerConfig], Any]) -> Any:
    """The layers of a hybrid, sparse attention (D) among them."""
    made = others(config)
    if config.experimental_attention_variant is None:
        return made
    attention = variants.get_experimental_attention_variant_module_spec(config, _PlannedModules())
    norm = made.mla_layer.submodules.input_layernorm
    return replace(made, dsa_layer=hybrid._mixing_layer(norm, attention))


def _planned_variants() -> AbstractContextManager[None]:
    """While this lasts, layers that need Transformer Engine's modules are made without it, of the same sizes."""
    return having(
        [variants, absorbed_mla, hybrid],
        _local_submodules=partial(_planned_stack, others=hybrid._local_submodules),
        TELinear=PortableLinear,
        _get_backend_spec_provider=lambda config: _PlannedModules(),
        get_transformer_layer_with_experimental_attention_variant_spec=_planned_layers,
        GatedDeltaNet=PortableGatedDeltaNet,
    )


# --- the plan --------------------------------------------------------------------------------------------------------


def _fewest_ranks(args: Namespace) -> int:
    dense = args.tensor_model_parallel_size * args.context_parallel_size
    experts = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
    return int(args.pipeline_model_parallel_size * math.lcm(dense, experts))


def _parameters(args: Namespace, config: MTPModelConfig, rank: int) -> tuple[Counter[str], Counter[str]]:
    """Parameters by part: of a rank, and of its stage over all ranks without copies, such as a tied head."""
    local, whole = Counter[str](), Counter[str]()
    with _job(args, rank), _planned_variants():
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
    try:
        with having([torch.cuda], current_device=lambda: torch.device("meta")):
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
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _flags(given: Namespace, args: Namespace, absent: Collection[str]) -> list[str]:
    """The flags of the run with the values that Megatron has derived; those of absent files as they were given."""
    parser = all_parser("train")
    defaults = parser.parse_args([])
    lines = []
    for action in parser._actions:
        if not hasattr(given, action.dest):
            continue
        value = getattr(given, action.dest)
        if value != getattr(defaults, action.dest) or action.dest in RESOLVED:
            is_off = isinstance(action, BooleanOptionalAction) and not value
            derived = value if action.dest in absent else getattr(args, action.dest, value)  # it drops older names
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


def _memory(args: Namespace, of_depths: int) -> list[str]:
    """Megatron's estimate for the trunk on the fullest rank, and by its formulas the memory of the MTP layers."""
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
        lines.append(f"memory of the MTP layers on the last stage: {_gib(of_depths * bytes_each, kept)}")
    return [*lines, "memory is Megatron's estimate (theoretical_memory_usage.py); what kernels need comes on top."]


def _gib(state: float, kept: float) -> str:
    parts = f"weights, gradients and optimizer {state / GIB:.2f} + activations {kept / GIB:.2f}"
    return f"{(state + kept) / GIB:.2f} GiB = {parts}"
