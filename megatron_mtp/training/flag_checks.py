"""Checks of Megatron's flags that Megatron itself makes late, without a clear sentence or not at all: two tables.

In:  the parsed arguments; a flag that was not given is None and passes.
Out: nothing, or a ValueError that names the flag, its value and what is allowed.
"""

import math
import re
import socket
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from megatron_mtp.config import trained_depths
from megatron_mtp.platform import cpu
from megatron_mtp.platform.kernels import transformer_engine_works

LARGEST = 2**63 - 1
REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
"""A name on the Hub: NAME or OWNER/NAME."""


@dataclass(frozen=True)
class Range:
    """The numbers that flags take: how the sentence describes them, and whether a number is allowed."""

    description: str
    holds: Callable[[float], bool]
    flags: str


RANGES = (
    Range(
        "1 or more",
        lambda number: 1 <= number <= LARGEST,
        "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups seq_length "
        "max_position_embeddings vocab_size make_vocab_size_divisible_by num_experts moe_router_topk "
        "moe_ffn_hidden_size q_lora_rank kv_lora_rank micro_batch_size global_batch_size train_iters "
        "train_samples lr_decay_iters lr_decay_samples eval_interval log_interval save_interval exit_interval "
        "exit_duration_in_mins tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
        "expert_model_parallel_size recompute_num_layers loss_scale_window tensorboard_log_interval "
        "expert_tensor_parallel_size eval_global_batch_size eval_micro_batch_size qk_head_dim qk_pos_emb_head_dim "
        "v_head_dim num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank dist_ckpt_workers "
        "save_retain_interval num_dataset_builder_threads distributed_timeout_minutes lr_wsd_decay_iters "
        "moe_shared_expert_intermediate_size mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads "
        "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim",
    ),
    Range(
        "0 or more",
        lambda number: 0 <= number <= LARGEST,
        "local_rank eval_iters lr_warmup_iters lr_warmup_samples num_workers manual_gc_interval ckpt_step",
    ),
    Range("a whole number from 1 to 2^32 - 1", lambda number: 1 <= number < 2**32, "seed"),
    Range(
        "a number of 0 or more",
        lambda number: 0 <= number < math.inf,
        "lr min_lr lr_warmup_init weight_decay start_weight_decay end_weight_decay init_method_std "
        "hysteresis embedding_init_method_std decoupled_lr decoupled_min_lr moe_z_loss_coeff",
    ),
    Range(
        "a number above 0",
        lambda number: 0 < number < math.inf,
        "layernorm_epsilon rotary_base rope_scaling_factor adam_eps loss_scale initial_loss_scale min_loss_scale "
        "rotary_scaling_factor",
    ),
    Range("a number, 0 for no clipping", math.isfinite, "clip_grad"),
    Range("a number above 0, and at most 1", lambda number: 0 < number <= 1, "rotary_percent"),
    Range("a number from 0 to 1", lambda number: 0 <= number <= 1, "lr_warmup_fraction"),
    Range(
        "a number from 0 to less than 1",
        lambda number: 0 <= number < 1,
        "hidden_dropout attention_dropout adam_beta1 adam_beta2 sgd_momentum",
    ),
)


def check_ranges(args: Namespace) -> None:
    """Raises ValueError at the first flag whose number cannot be trained with."""
    for allowed in RANGES:
        for name in allowed.flags.split():
            number = getattr(args, name, None)
            if isinstance(number, int | float) and not allowed.holds(number):
                raise ValueError(f"{flag(name)} is {number}; give {allowed.description}.")


def check_relations(args: Namespace) -> None:
    """Raises ValueError at the first two flags that do not go together."""
    for relation in RELATIONS:
        if (sentence := relation(args)) is not None:
            raise ValueError(sentence)


def check_machine(args: Namespace) -> None:
    """Raises ValueError at the first flag that this machine cannot train with; a dry run may be for another."""
    for relation in (_recomputed, _grouped_gemm, _low_precision, _cuda_graphs, _resiliency):
        if (sentence := relation(args)) is not None:
            raise ValueError(sentence)


def check_tokenizer_folder(args: Namespace) -> None:
    """Raises ValueError where transformers would look for --tokenizer-model on the Hub, and cannot reach it."""
    name = args.tokenizer_model
    if args.tokenizer_type != "HuggingFaceTokenizer" or name is None or Path(name).exists():
        return
    if REPOSITORY.fullmatch(name) is None:
        raise ValueError(f"--tokenizer-model is {name}, which is no folder; give the one of a Hugging Face tokenizer.")
    from huggingface_hub import constants, try_to_load_from_cache

    if try_to_load_from_cache(name, "tokenizer_config.json") is None and not _is_reachable(constants.ENDPOINT):
        raise ValueError(
            f"--tokenizer-model is {name}, which is no folder here, and the Hugging Face Hub cannot be reached; give "
            "the folder of a tokenizer."
        )


def _is_reachable(address: str) -> bool:
    """Whether its name can be looked up; a proxy looks names up itself."""
    if getproxies():
        return True
    try:
        socket.getaddrinfo(urlsplit(address).hostname, 443)
    except OSError:
        return False
    return True


def flag(name: str) -> str:
    """How Megatron calls the argument of this name."""
    return "--norm-epsilon" if name == "layernorm_epsilon" else "--" + name.replace("_", "-")


def _precision(args: Namespace) -> str | None:
    if args.bf16 and args.fp16:
        return "--bf16 and --fp16 were given; drop one of the two."
    return None


def _heads(args: Namespace) -> str | None:
    if args.kv_channels is not None or not _known(args, "hidden_size", "num_attention_heads"):
        return None
    if args.hidden_size % args.num_attention_heads:
        return (
            f"--hidden-size is {args.hidden_size}, which --num-attention-heads {args.num_attention_heads} does not "
            "divide; give a multiple of it, or --kv-channels."
        )
    return None


def _rotated_channels(args: Namespace) -> str | None:
    if args.position_embedding_type != "rope" or args.multi_latent_attention:
        return None
    if _known(args, "hidden_size", "num_attention_heads"):
        channels = args.kv_channels or args.hidden_size // args.num_attention_heads
        if channels % 2:
            return (
                f"a head has {channels} channels (--kv-channels, else --hidden-size / --num-attention-heads), which "
                "rope cannot rotate in pairs; give an even number."
            )
    return None


def _gated_width(args: Namespace) -> str | None:
    """Megatron halves it where it warms its fused functions up, before it builds a model."""
    if not args.swiglu or not _known(args, "ffn_hidden_size"):
        return None
    width = args.ffn_hidden_size // args.tensor_model_parallel_size
    if width % 2:
        return (
            f"--ffn-hidden-size is {args.ffn_hidden_size}, of which a tensor-parallel rank has {width}, and Megatron "
            "takes an odd number with --swiglu nowhere; give a multiple of 2 for every rank."
        )
    return None


def _groups(args: Namespace) -> str | None:
    if not args.group_query_attention or not _known(args, "num_attention_heads", "num_query_groups"):
        return None
    if args.num_attention_heads % args.num_query_groups:
        return (
            f"--num-query-groups is {args.num_query_groups}, which does not divide --num-attention-heads "
            f"{args.num_attention_heads}; give a number that divides it."
        )
    return None


def _positions(args: Namespace) -> str | None:
    if _known(args, "seq_length", "max_position_embeddings") and args.seq_length > args.max_position_embeddings:
        return (
            f"--seq-length is {args.seq_length}, but --max-position-embeddings is {args.max_position_embeddings}; give "
            "positions for the whole sequence."
        )
    return None


def _depths(args: Namespace) -> str | None:
    if _known(args, "mtp_num_layers", "seq_length") and trained_depths(args) >= args.seq_length:
        name = "mtp_num_layers" if getattr(args, "mtp_unroll", None) is None else "mtp_unroll"
        return (
            f"{flag(name)} is {getattr(args, name)}, but sequences of --seq-length {args.seq_length} have no token "
            "that far ahead; give fewer depths, or longer sequences."
        )
    return None


def _ranks(args: Namespace) -> str | None:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    product = math.prod(getattr(args, name) for name in names)
    if args.world_size % product:
        given = " ".join(f"{flag(name)} {getattr(args, name)}" for name in names if getattr(args, name) > 1)
        return (
            f"{given} needs a multiple of {product} processes, and there are {args.world_size}; start as many with "
            "torchrun --nproc-per-node, or give smaller sizes."
        )
    return None


def _batches(args: Namespace) -> str | None:
    if not _known(args, "global_batch_size", "micro_batch_size"):
        return None
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    replicas = args.world_size // model
    is_fixed = args.rampup_batch_size is None and not args.decrease_batch_size_if_needed
    if is_fixed and args.global_batch_size % (args.micro_batch_size * replicas):
        return (
            f"--global-batch-size is {args.global_batch_size}, which is no multiple of --micro-batch-size "
            f"{args.micro_batch_size} times the {replicas} replicas of the model; give one that is."
        )
    return None


def _learning_rates(args: Namespace) -> str | None:
    if args.lr is not None and args.min_lr is not None and args.min_lr > args.lr:
        return f"--min-lr is {args.min_lr}, which is more than --lr {args.lr}; give a smaller one."
    return None


def _warmup(args: Namespace) -> str | None:
    if args.train_iters is None:
        return None
    steps = args.lr_decay_iters or args.train_iters
    if args.lr_warmup_iters and args.lr_warmup_iters >= steps:
        return (
            f"--lr-warmup-iters is {args.lr_warmup_iters}, but the learning rate decays over {steps} steps "
            "(--lr-decay-iters, else --train-iters); give fewer."
        )
    return None


def _experts(args: Namespace) -> str | None:
    if _known(args, "num_experts", "moe_router_topk") and args.moe_router_topk > args.num_experts:
        return f"--moe-router-topk is {args.moe_router_topk}, but --num-experts is {args.num_experts}; give fewer."
    return None


def _yarn(args: Namespace) -> str | None:
    if args.rope_type == "yarn" and not args.multi_latent_attention:
        return (
            "--rope-type is yarn, which Megatron takes with --multi-latent-attention alone; give that too, or drop the "
            "flag."
        )
    return None


def _resiliency(args: Namespace) -> str | None:
    names = ("fault_injector_ranks", "fault_injector_num_ranks", "enable_ft_package")
    values = {name: getattr(args, name, None) for name in names}
    given = next((name for name, value in values.items() if value is not None and value is not False), None)
    if given is not None and find_spec("nvidia_resiliency_ext") is None:
        return (
            f"{flag(given)} needs the package nvidia-resiliency-ext, which is not here; install it, or drop the flag."
        )
    return None


def _low_precision(args: Namespace) -> str | None:
    for name in ("fp8", "fp4"):
        if getattr(args, name) and not transformer_engine_works():
            return (
                f"--{name}-format is {getattr(args, name)}, which Megatron computes with Transformer Engine alone, and "
                "that is not here; the run would have full precision: drop the flag."
            )
    return None


def _cuda_graphs(args: Namespace) -> str | None:
    if args.cuda_graph_impl != "none" and cpu.installed():
        return f"--cuda-graph-impl is {args.cuda_graph_impl}, which needs a CUDA device; drop the flag."
    if args.optimizer_cuda_graph and cpu.installed():
        return "--optimizer-cuda-graph was given, which needs a CUDA device; drop the flag."
    return None


def _recomputed(args: Namespace) -> str | None:
    modules = sorted({"layernorm", "moe_act", "mla_up_proj"} & set(args.recompute_modules or ()))
    if modules and not transformer_engine_works():
        return (
            f"--recompute-modules names {' and '.join(modules)}, which Megatron recomputes with Transformer Engine "
            "alone, and that is not here; name others, such as core_attn or mlp."
        )
    return None


def _grouped_gemm(args: Namespace) -> str | None:
    if args.moe_grouped_gemm and args.num_experts is not None and cpu.installed():
        return "--moe-grouped-gemm was given, which there is for CUDA devices alone; drop the flag."
    return None


def _loader(args: Namespace) -> str | None:
    if args.dataloader_type == "external":
        return "--dataloader-type is external, which is for scripts with loaders of their own; give single or cyclic."
    return None


def _validation_sets(args: Namespace) -> str | None:
    if args.full_validation != args.multiple_validation_sets:
        return "--full-validation and --multiple-validation-sets work together alone; give both, or neither."
    return None


def _data_sources(args: Namespace) -> str | None:
    sources = {
        "--mock-data": args.mock_data,
        "--data-path": args.data_path,
        "--data-args-path": args.data_args_path,
        "--train-data-path and its like": args.train_data_path or args.valid_data_path or args.test_data_path,
        "--per-split-data-args-path": args.per_split_data_args_path,
    }
    given = [name for name, value in sources.items() if value]
    if len(given) > 1:
        return f"{' and '.join(given)} were given, but data comes from one source alone; drop all but one."
    return None


def _conversations(args: Namespace) -> str | None:
    if args.sft and args.tokenizer_type not in (None, "SFTTokenizer"):
        return f"--sft was given with --tokenizer-type {args.tokenizer_type}, not with SFTTokenizer; give that."
    return None


def _prompts(args: Namespace) -> str | None:
    others = [name for name in ("sft", "mock_data", "fim_data") if getattr(args, name)]
    if args.mtp_mask_prompts and others:
        return (
            f"--mtp-mask-prompts was given with {flag(others[0])}, whose data is not of megatron-mtp sample; drop one."
        )
    return None


def _known(args: Namespace, *names: str) -> bool:
    """Whether all of them are known; arguments that come from a checkpoint are None until it is read."""
    return all(getattr(args, name) is not None for name in names)


RELATIONS: tuple[Callable[[Namespace], str | None], ...] = (
    _precision,
    _heads,
    _rotated_channels,
    _gated_width,
    _groups,
    _positions,
    _depths,
    _ranks,
    _batches,
    _learning_rates,
    _warmup,
    _experts,
    _yarn,
    _loader,
    _validation_sets,
    _data_sources,
    _conversations,
    _prompts,
)
