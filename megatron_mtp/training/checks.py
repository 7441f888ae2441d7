"""Checks before a run that Megatron lacks: `check_flags` for flags, `check_data` for text and vocabulary.

Each check is marked with one of three reasons: the flag is ours or our model lacks the feature (ours); the process
would crash or hang (crash); the run would continue with wrong or useless numbers (silent). Errors that Megatron raises
itself are not checked here; `startup.py` turns them into sentences.

In:  the parsed arguments; arguments from a checkpoint are None until it is read.
Out: nothing, or a ValueError with one sentence: the flag, its value, and what is allowed or what to do.
"""

import math
import os
import socket
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from urllib.parse import urlsplit
from urllib.request import getproxies

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, parse_hybrid_pattern
from megatron.training.checkpointing import checkpoint_exists

from megatron_mtp.data.checks import check_data_prefixes, check_split, check_tokenizer, check_weights, split_weights
from megatron_mtp.megatron.flags import RANGES, UNSUPPORTED
from megatron_mtp.megatron.machine import transformer_engine_works
from megatron_mtp.megatron.model_arguments import MODEL_ARGUMENTS
from megatron_mtp.megatron.patterns import RECURRENT
from megatron_mtp.spec.config import MTPConfig, flag_of
from megatron_mtp.spec.head import drafted_steps, trained_depths
from megatron_mtp.training.datasets import KINDS, OF_CHAT_FLAGS, kind_of_data
from megatron_mtp.training.documents import named_prefixes
from megatron_mtp.training.flags import CHAT_FLAGS
from megatron_mtp.training.needed import OF_DATA, check_needed
from megatron_mtp.training.reading_stages import is_packed
from megatron_mtp.training.settings import FIRST_PASS, PATTERN, SHARES, WITHOUT_DEPTHS
from megatron_mtp.training.short_log import say


def check_ranges(args: Namespace) -> None:
    """Raise ValueError at the first number that Megatron accepts but cannot train with."""
    for allowed, holds, names in RANGES:
        for name in names.split():
            number = getattr(args, name, None)
            if isinstance(number, int | float) and not holds(number):
                raise ValueError(f"{flag_of(name)} is {number}; give {allowed}.")


def check_supported(args: Namespace) -> None:
    """Raise ValueError at the first feature that this run does not support."""
    for row in UNSUPPORTED:
        if (args.mtp_num_layers is not None or not row.depths_alone) and row.is_given(args):
            raise ValueError(row.sentence())


def check_flags(args: Namespace, settings: MTPConfig) -> None:
    """Raise ValueError at the first flags that contradict each other."""
    if args.split is not None:
        split_weights(args.split)  # silent: Megatron finds numbers in any text
    check_supported(args)
    _check_folder("--mtp-metrics-dir", args.mtp_metrics_dir)  # ours
    _check_folder("--mtp-state-cache", args.mtp_state_cache)  # ours
    _check_folder("--save", args.save)  # silent until the first checkpoint
    of_depths = _without_depths(args, settings) if args.mtp_num_layers is None else _with_depths(args)
    for sentence in chain(_of_the_run(args), _of_data(args), _of_hybrids(args), of_depths, _of_shared_keys(args)):
        raise ValueError(sentence)
    if args.mtp_num_layers is not None:
        settings.loss_weights(trained_depths(args))


Sentences = Iterator[str]
"""Problems with the flags, one sentence each."""


def _of_the_run(args: Namespace) -> Sentences:
    if args.mtp_train_only and (args.mtp_lr is not None or args.mtp_clip_grad is not None):  # ours
        yield (
            "--mtp-lr or --mtp-clip-grad was given with --mtp-train-only, which trains nothing else; give --lr and "
            "--clip-grad in their place."
        )
    if args.mtp_train_only and args.overlap_moe_expert_parallel_comm:  # ours
        yield (
            "--overlap-moe-expert-parallel-comm was given with --mtp-train-only, but its schedule takes gradients of "
            "every layer, and those of the trunk have none; drop one of the two."
        )
    if args.mtp_state_cache is not None:  # ours
        yield from _of_state_cache(args)
    if args.mtp_draft_prompts is not None:  # ours
        yield from _of_draft_prompts(args)
    if args.mtp_patience is not None and not args.skip_train:  # ours
        if args.save is None or not args.eval_interval:
            yield "--mtp-patience was given without --save or --eval-interval, and keeps what is best there; add both."
        if args.async_save or args.multiple_validation_sets:
            yield (
                "--mtp-patience was given with --async-save or --multiple-validation-sets; one set of validation data "
                "decides what is best, and it is saved at once: drop one of the two."
            )
        if args.save_retain_interval is not None:  # silent: the best state is removed
            yield (
                f"--save-retain-interval {args.save_retain_interval} was given with --mtp-patience, and would remove "
                "the best state; drop one of the two, or give a larger --save-interval."
            )
    if args.mtp_clip_grad is not None and not args.clip_grad:  # ours
        yield f"--mtp-clip-grad is {args.mtp_clip_grad}, and --clip-grad 0 computes no norms; give --clip-grad above 0."
    if args.save is not None and args.save_interval is None:  # silent: nothing is saved
        yield f"--save is {args.save}, but --save-interval is missing; give the steps between checkpoints."
    if args.rampup_batch_size is not None:  # silent
        yield (
            "--rampup-batch-size was given, which Megatron 0.19 ignores; give --step-batch-size-schedule in its place, "
            "and without --global-batch-size: '0:64 1B:256' goes from 64 to 256 at a billion tokens."
        )
    if args.full_validation and not args.multiple_validation_sets:  # silent until the end of the run
        yield "--full-validation works only with --multiple-validation-sets; give both, or neither."


def _of_state_cache(args: Namespace) -> Sentences:
    """Ours: cached states that would not be the trunk's, or that nothing would read."""
    flag = f"--mtp-state-cache {args.mtp_state_cache} was given"
    if not (args.mtp_train_only or args.skip_train):
        yield f"{flag}, and the trunk is trained, so its states change; give --mtp-train-only, or drop the flag."
    if args.pipeline_model_parallel_size > 1:
        yield (
            f"{flag} with --pipeline-model-parallel-size {args.pipeline_model_parallel_size}, but earlier stages would "
            "have nothing to do; give 1."
        )
    if args.moe_expert_capacity_factor is not None:
        yield (
            f"{flag} with --moe-expert-capacity-factor, by which the states of a row depend on others; drop one "
            "of the two."
        )
    if args.use_megatron_fsdp or args.use_torch_fsdp2:
        yield f"{flag} with FSDP, whose weights a rank does not hold; give --use-distributed-optimizer in its place."


def _of_draft_prompts(args: Namespace) -> Sentences:
    """Ours: what drafting at evaluations does not support."""
    file, *more = args.mtp_draft_prompts
    if len(more) > 1 or not all(number.isdecimal() and int(number) for number in more):
        yield f"--mtp-draft-prompts is {' '.join(args.mtp_draft_prompts)}; give a file, and 1 or more prompts."
    if not Path(file).is_file():
        yield f"--mtp-draft-prompts: '{file}' is not a file; give JSON lines with a key 'prompt'."
    if args.tokenizer_type != "HuggingFaceTokenizer":
        yield f"--mtp-draft-prompts was given with --tokenizer-type {args.tokenizer_type}; give HuggingFaceTokenizer."
    if args.world_size != args.tensor_model_parallel_size:
        yield (
            f"--mtp-draft-prompts was given on {args.world_size} ranks with --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size}, and drafts only on ranks that share one model by tensor parallelism; "
            "drop the flag, and measure checkpoints by megatron-mtp generate."
        )


def _of_data(args: Namespace) -> Sentences:
    """Ours: how batches are cut and packed. Silent: several sources are given and one is read."""
    per_split = args.train_data_path or args.valid_data_path or args.test_data_path
    files = args.data_path, args.data_args_path, per_split, args.per_split_data_args_path
    if sum(map(bool, (args.chat, args.mock_data, *files))) > 1:
        yield (
            "data comes from one source: give only one of --chat, --mock-data, --data-path, --data-args-path, "
            "--train-data-path (with its like) and --per-split-data-args-path."
        )
    if args.mtp_mask_prompts and (args.mock_data or args.reads_chats):
        yield (
            "--mtp-mask-prompts was given with --mock-data or chats, which are not data of megatron-mtp sample; drop "
            "one of the two."
        )
    for name in CHAT_FLAGS:
        if getattr(args, name) and not args.chat:
            yield (
                f"{flag_of(name)} was given without --chat, and data that is tokenized already has made that choice; "
                "give --chat, or give the flag to preprocess --chat."
            )
    if args.show_example and not args.reads_chats:
        yield "--show-example needs --chat; give it, or drop the flag."
    if args.dataloader_inter_document_masking and args.context_parallel_size > 1:
        yield (
            f"--dataloader-inter-document-masking was given with --context-parallel-size {args.context_parallel_size}, "
            "which cannot cut documents of any length; give --reset-attention-mask in its place."
        )
    if is_packed(args) and args.pipeline_model_parallel_size > 1 and args.micro_batch_size > 1:
        yield f"--micro-batch-size is {args.micro_batch_size}, but a pipeline takes one packed row at a time; give 1."


def _of_hybrids(args: Namespace) -> Sentences:
    """Silent: Megatron's hybrid model does not read these settings, or fails on them in the first step."""
    layers = set(args.hybrid_layer_pattern or "")
    if Symbols.MOE in layers and args.num_experts is None:
        yield f"{PATTERN} has E, but --num-experts is missing; give it, or - for an MLP."
    if Symbols.GDN in layers and not args.swiglu:
        yield f"{PATTERN} has G, whose layers take SiLU for their convolution and gate; give --swiglu."
    if layers and args.use_rope_scaling:
        yield f"--use-rope-scaling was given with {PATTERN}, whose model does not read it; drop the flag."
    if layers and args.overlap_moe_expert_parallel_comm:
        yield (
            f"--overlap-moe-expert-parallel-comm was given with {PATTERN}, whose model has no plan for its schedule; "
            "drop the flag."
        )
    if layers & set(RECURRENT) and args.reset_attention_mask:
        yield (
            f"--reset-attention-mask was given, but recurrent layers of {PATTERN} {args.hybrid_layer_pattern} take "
            "states across documents of unpacked rows; give --dataloader-inter-document-masking, which packs them."
        )


def _without_depths(args: Namespace, settings: MTPConfig) -> Sentences:
    """Ours: flags of MTP layers would do nothing; a checkpoint's arguments about the model may stay."""
    stored = MODEL_ARGUMENTS if args.use_checkpoint_args else ()
    given = [field.name for field in fields(MTPConfig) if getattr(settings, field.name) != field.default]
    given += [name for name in ("mtp_use_repeated_layer", "mtp_detach_heads") if getattr(args, name)]
    for name in given:
        if name not in (*WITHOUT_DEPTHS, *stored):
            yield f"{flag_of(name)} was given without --mtp-num-layers; give that flag too, or drop this one."


def _with_depths(args: Namespace) -> Sentences:
    """Ours, all of them."""
    depths, passes, factor = args.mtp_num_layers, args.mtp_unroll, args.mtp_loss_scaling_factor
    if depths < 1:
        yield f"--mtp-num-layers is {depths}; give 1 or more, or 0 to train without MTP layers."
    if not 0 <= (factor or 0) < math.inf:
        yield f"--mtp-loss-scaling-factor is {factor}; give 0 or more (0.1 is Megatron's default)."
    if args.mtp_train_only and factor == 0 and not args.mtp_loss_final_factor:
        yield "--mtp-loss-scaling-factor is 0, with which --mtp-train-only trains nothing; give more, such as 1."
    if passes is not None and not args.mtp_use_repeated_layer:
        yield (
            f"--mtp-unroll is {passes} without --mtp-use-repeated-layer, but layers of their own have one pass each; "
            "give --mtp-use-repeated-layer too, or drop the flag."
        )
    if passes is not None and passes < depths:
        yield (
            f"--mtp-unroll is {passes}, which is less than --mtp-num-layers {depths}; give at least as many passes as "
            "MTP layers."
        )
    if args.seq_length is not None and trained_depths(args) >= args.seq_length:
        said = f"--mtp-num-layers is {depths} (--mtp-unroll {passes})"
        yield (
            f"{f'--drafter-steps is {passes}' if args.drafter else said}, but sequences of --seq-length "
            f"{args.seq_length} have no token that far ahead; give fewer, or longer sequences."
        )
    if args.seq_length is not None and drafted_steps(args) >= args.seq_length:
        yield (
            f"--drafter-steps is {drafted_steps(args)}, but sequences of --seq-length {args.seq_length} have no token "
            "that far ahead; give fewer, or longer sequences."
        )
    if args.mtp_hidden_state_mixing and trained_depths(args) < 2:
        yield (
            "--mtp-hidden-state-mixing was given with --mtp-num-layers 1, whose depth has the trunk's state alone to "
            "read; give 2 or more MTP layers, or drop the flag."
        )
    if args.mtp_init == "last-layer" and not _ends_with_a_depth(args.hybrid_layer_pattern or ""):
        yield (
            f"--mtp-init is last-layer, but the last stage of the trunk in {PATTERN} {args.hybrid_layer_pattern} does "
            "not end with the layers of a depth; give such a pattern, or --mtp-init random."
        )
    if args.mtp_architecture == "parallel" and args.mtp_use_repeated_layer:
        yield (
            "--mtp-use-repeated-layer was given with --mtp-architecture parallel, where one repeated layer would make "
            "all MTP layers the same; drop one of the two."
        )
    if "quantile_balancing" in (args.moe_router_load_balancing_type or ()):
        yield (
            "--moe-router-load-balancing-type is quantile_balancing, which cannot leave out the positions that a depth "
            "shifts in; give another type, such as aux_loss or none."
        )


def check_trunk(args: Namespace) -> None:
    """Raise ValueError if MTP layers are trained on a trunk that is not loaded (ours)."""
    starts = map(checkpoint_exists, (args.load, args.pretrained_checkpoint))
    if args.mtp_num_layers is not None and (args.mtp_init or args.mtp_train_only) and not any(starts):
        flag = "--mtp-train-only" if args.mtp_train_only else f"--mtp-init {args.mtp_init}"
        raise ValueError(
            f"{flag} was given with --load {args.load}, where there is no checkpoint of a trunk; give one that exists, "
            "or --pretrained-checkpoint."
        )


def _ends_with_a_depth(pattern: str) -> bool:
    """Return whether the trunk's last stage ends with a depth; a GPT's always does."""
    parsed = parse_hybrid_pattern(pattern)
    return (parsed.main_pattern or "").rpartition(Symbols.PIPE)[2].endswith(parsed.mtp_pattern or "")


def _of_shared_keys(args: Namespace) -> Sentences:
    """Ours: several passes of a layer, with this package's attention if they have a chain."""
    has_chain = args.mtp_repeated_layer_shares_kv
    if not (has_chain or args.mtp_repeated_layer_first_pass_kv):
        return
    given = SHARES if has_chain else FIRST_PASS
    if has_chain and args.mtp_repeated_layer_first_pass_kv:
        yield f"{SHARES} and {FIRST_PASS} were given, with a chain of later keys and without; drop one of the two."
    if not args.mtp_use_repeated_layer or trained_depths(args) < 2:
        yield (
            f"{given} was given, but no layer has a second pass that could share; give --mtp-use-repeated-layer and "
            "--mtp-unroll 2 or more."
        )
    for is_given, flag, why in (*_without_keys(args), *(_without_chain(args) if has_chain else _without_pass_1(args))):
        if is_given:
            remedy = "give --transformer-impl local" if "impl" in flag else "drop one of the two"
            yield f"{given} was given with {flag}, where {why}; {remedy}."


Refused = Iterator[tuple[object, str, str]]
"""Whether a flag is given, its name, and the reason why it is refused."""


def _without_keys(args: Namespace) -> Refused:
    """Refused for all layers whose passes share keys."""
    yield args.hybrid_layer_pattern is not None, PATTERN, "not all layers keep keys"
    yield args.window_size is not None, "--window-size", "a later pass would leave the window of the keys"
    yield args.spec not in (None, ["local"]), "--spec", "its attention may be any"


def _without_chain(args: Namespace) -> Refused:
    """Refused for layers that share keys with a chain."""
    recomputes = args.recompute_granularity == "full" or "core_attn" in (args.recompute_modules or ())
    yield args.multi_latent_attention, "--multi-latent-attention", "keys and values are made of latents"
    yield args.softmax_type != "vanilla", f"--softmax-type {args.softmax_type}", "a chain does not share sinks"
    yield args.transformer_impl != "local", "--transformer-impl transformer_engine", "its attention takes no chains"
    yield args.recompute_granularity is not None and recomputes, "recomputed attention", "keys of a pass would be lost"


def _without_pass_1(args: Namespace) -> Refused:
    """Refused for layers that attend only to pass 1's keys."""
    fuses = args.multi_latent_attention and args.apply_rope_fusion
    yield fuses, "latent attention but without --no-rope-fusion", "queries and keys have one set of angles"
    yield args.mla_down_proj_fusion, "--mla-down-proj-fusion", "its attention is a class of its own"
    yield args.fine_grained_activation_offloading, "--fine-grained-activation-offloading", "keys of pass 1 are released"


def _check_folder(flag: str, named: str | None) -> None:
    """Check the folder without creating it: it is created when there is something to write."""
    if named is None or "://" in named:
        return
    there = next(path for path in (Path(named), *Path(named).absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        kind = "a link to nowhere" if there.is_symlink() else "a file"
        raise ValueError(f"{flag} is {named}, but {there} is {kind}; name a folder.")


# --- the machine -----------------------------------------------------------------------------------------------------


def check_precision(args: Namespace) -> None:
    """Reject FP8 without Transformer Engine (silent: the run would use full precision)."""
    if args.fp8 and not transformer_engine_works():
        raise ValueError(
            f"--fp8-format is {args.fp8}, which Megatron computes with Transformer Engine alone, and that is not here; "
            "drop the flag."
        )


def check_writable(folder: Path) -> None:
    """Create the folder of --save, which Megatron creates only at the first save (crash, after all steps before it).

    Raises:
        ValueError: it cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"--save is {folder}, which cannot be written ({error.strerror}); give another folder."
        ) from None


def check_hub(args: Namespace) -> None:
    """Reject a tokenizer name that would be looked up on an unreachable Hub for minutes (crash)."""
    name = args.tokenizer_model
    said = (
        f"--tokenizer-model is {name}, which is not a folder here, and the Hugging Face Hub cannot be reached or has "
        "no such names; give the folder of a tokenizer."
    )
    if args.tokenizer_type == "GPT2BPETokenizer":  # even with vocabulary files, Megatron requests GPT-2's config
        name = "gpt2"
        said = (
            "--tokenizer-type is GPT2BPETokenizer, which needs the model gpt2 of the Hugging Face Hub, and that cannot "
            "be reached; give HuggingFaceTokenizer and --tokenizer-model FOLDER."
        )
    elif args.tokenizer_type != "HuggingFaceTokenizer":
        return
    if name is None or Path(name).exists() or getproxies():
        return
    from huggingface_hub import constants, try_to_load_from_cache

    try:
        if try_to_load_from_cache(name, "tokenizer_config.json") is None:
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except (OSError, ValueError):  # a path is not a name on the Hub
        raise ValueError(said) from None


# --- data ------------------------------------------------------------------------------------------------------------


def check_data(args: Namespace, vocabulary: int) -> None:
    """Check that the corpus is complete and was made with this vocabulary (crash, silent).

    Otherwise an empty part of --split is searched forever, ids outside the vocabulary crash a GPU, and a different
    tokenizer's ids are accepted.
    """
    if args.mock_data:
        return
    for given in (args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path):
        check_weights(given or [])
    prefixes = named_prefixes(args)
    check_needed(args, OF_DATA)  # silent: Megatron uses mock data
    check_data_prefixes(prefixes, vocabulary)
    if args.data_path is not None and args.split is not None:
        check_split(prefixes, args.split)
    if args.tokenizer_model is not None:
        check_tokenizer(prefixes, args.tokenizer_model)
    for line in KINDS[kind_of_data(args)].described(prefixes, args):
        say(line)
    if args.show_example:
        OF_CHAT_FLAGS["show_example"](args)
