"""Checks of flags for a run with depths: what Megatron allows and this package does not, or not with these depths.

Every check raises ValueError with one sentence that names the flag, the value and the remedy.
"""

import math
import os
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

from megatron.training.checkpointing import checkpoint_exists

from megatron_mtp.config import MTPConfig, trained_depths
from megatron_mtp.data.checks import split_weights
from megatron_mtp.model.arguments import MODEL_ARGUMENTS
from megatron_mtp.training.flag_checks import check_relations
from megatron_mtp.training.flag_checks import flag as flag_of
from megatron_mtp.training.hybrid_checks import check_hybrid
from megatron_mtp.training.unsupported import check_supported

SHARES = "--mtp-repeated-layer-shares-kv"

WITHOUT_DEPTHS = ("mtp_metrics_dir", "mtp_linear_ce_main")
"""Settings of ours that a run without depths has a use for."""

MEGATRONS_SWITCHES = ("mtp_use_repeated_layer", "mtp_detach_heads")
"""Megatron's own flags of depths, beside their number and lambda."""


def check_flags(args: Namespace, settings: MTPConfig) -> None:
    """Raises ValueError at the first flag that this run cannot have."""
    if args.split is not None:
        split_weights(args.split)
    if args.eval_interval is None:
        raise ValueError(
            "--eval-interval is missing; give the number of steps between evaluations (more than --train-iters for "
            "none before the end)."
        )
    if args.save is not None and args.save_interval is None:
        raise ValueError(f"--save is {args.save}, but --save-interval is missing; give the steps between checkpoints.")
    check_hybrid(args, settings)
    check_supported(args)
    _check_folder("--mtp-metrics-dir", settings.mtp_metrics_dir)
    _check_folder("--save", args.save)
    _check_sequences(args)
    if args.mtp_num_layers is not None:
        _check_depths(args, settings)
    else:
        _check_without_depths(args, settings)
    check_relations(args)


def _check_without_depths(args: Namespace, settings: MTPConfig) -> None:
    """Without depths, flags about them would do nothing; what a checkpoint's arguments say of the model may stay."""
    stored = MODEL_ARGUMENTS if args.use_checkpoint_args else ()
    given = [field.name for field in fields(MTPConfig) if getattr(settings, field.name) != field.default]
    given += [name for name in MEGATRONS_SWITCHES if getattr(args, name)]
    idle = [name for name in given if name not in (*WITHOUT_DEPTHS, *stored)]
    if idle:
        raise ValueError(
            f"{flag_of(idle[0])} was given without --mtp-num-layers; say how many depths to train, or drop it."
        )


def _check_folder(flag: str, named: str | None) -> None:
    """It is made when there is something to write, which must not be when it turns out that it cannot."""
    if named is None or "://" in named:
        return
    there = next(path for path in (Path(named), *Path(named).absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        kind = "a link to nowhere" if there.is_symlink() else "a file"
        raise ValueError(f"{flag} is {named}, but {there} is {kind}; name a folder.")


def _check_sequences(args: Namespace) -> None:
    """Packed rows, and how sequences are cut for context parallelism."""
    packed = args.sft or args.dataloader_inter_document_masking
    if args.dataloader_inter_document_masking and args.context_parallel_size > 1:
        raise ValueError(
            f"--dataloader-inter-document-masking was given with --context-parallel-size {args.context_parallel_size}, "
            "which cannot cut documents of any length; give --reset-attention-mask in its place."
        )
    if packed and args.pipeline_model_parallel_size > 1 and args.micro_batch_size > 1:
        raise ValueError(
            f"--micro-batch-size is {args.micro_batch_size}, but a pipeline takes one packed row at a time; give 1."
        )


def _check_depths(args: Namespace, settings: MTPConfig) -> None:
    depths, factor = args.mtp_num_layers, args.mtp_loss_scaling_factor
    if depths < 1:
        raise ValueError(
            f"--mtp-num-layers is {depths}; give 1 or more, or leave the flag out to train without depths."
        )
    if factor is not None and not 0 <= factor < math.inf:
        raise ValueError(f"--mtp-loss-scaling-factor is {factor}; give 0 or more (0.1 is Megatron's default).")
    if settings.mtp_train_only and factor == 0 and not settings.mtp_loss_final_factor:
        raise ValueError(
            "--mtp-loss-scaling-factor is 0, with which --mtp-train-only trains nothing; give more, such as 1."
        )
    _check_passes(args, settings)
    if settings.mtp_repeated_layer_shares_kv:
        _check_sharing(args)
    settings.loss_weights(trained_depths(args))
    if settings.mtp_hidden_state_mixing and trained_depths(args) < 2:
        raise ValueError(
            "--mtp-hidden-state-mixing was given with --mtp-num-layers 1, whose depth has the trunk's state alone to "
            "read; give 2 or more depths, or drop the flag."
        )
    has_checkpoint = any(map(checkpoint_exists, (args.load, args.pretrained_checkpoint)))
    if settings.mtp_init is not None and not has_checkpoint:
        raise ValueError(
            f"--mtp-init is {settings.mtp_init}, but there is no checkpoint to add depths to (--load {args.load}); "
            "give --load or --pretrained-checkpoint with one, or drop --mtp-init."
        )
    if settings.mtp_train_only and not has_checkpoint:
        raise ValueError(
            f"--mtp-train-only was given with --load {args.load}, where there is no checkpoint of a trunk; give one "
            "that exists, or --pretrained-checkpoint."
        )
    if args.position_embedding_type not in ("rope", "none"):
        raise ValueError(
            f"--position-embedding-type is {args.position_embedding_type}, which MTP cannot use, since a depth sees "
            "later tokens at earlier positions; give rope or none."
        )
    if settings.mtp_architecture == "parallel" and args.mtp_use_repeated_layer:
        raise ValueError(
            "--mtp-use-repeated-layer was given with --mtp-architecture parallel, where one repeated layer would make "
            "all depths the same; drop one of the two."
        )
    if "quantile_balancing" in (args.moe_router_load_balancing_type or ()):
        raise ValueError(
            "--moe-router-load-balancing-type is quantile_balancing, which cannot leave out the positions that a depth "
            "shifts in; give another type, such as aux_loss or none."
        )


def _check_passes(args: Namespace, settings: MTPConfig) -> None:
    """--mtp-unroll, the passes of a repeated layer."""
    passes = settings.mtp_unroll
    if passes is None:
        return
    if not args.mtp_use_repeated_layer:
        raise ValueError(
            f"--mtp-unroll is {passes} without --mtp-use-repeated-layer, but layers of their own have one pass each; "
            "give --mtp-use-repeated-layer too, or drop the flag."
        )
    if passes < args.mtp_num_layers:
        raise ValueError(
            f"--mtp-unroll is {passes}, which is less than --mtp-num-layers {args.mtp_num_layers}; give at least as "
            "many passes as depths."
        )
    if args.num_experts is not None and args.pipeline_model_parallel_layout is not None:
        raise ValueError(
            f"--mtp-unroll is {passes} with --num-experts and --pipeline-model-parallel-layout, where Megatron logs "
            "the routers of stages without experts for another number of depths, and would wait forever; drop one of "
            "the three."
        )


def _check_sharing(args: Namespace) -> None:
    """--mtp-repeated-layer-shares-kv, which needs several passes of a layer with our own attention."""
    if not args.mtp_use_repeated_layer or trained_depths(args) < 2:
        raise ValueError(
            f"{SHARES} was given, but no layer has a second pass that could share; give --mtp-use-repeated-layer and "
            "--mtp-unroll 2 or more."
        )
    recomputes = args.recompute_granularity == "full" or "core_attn" in (args.recompute_modules or ())
    for is_given, flag, why in (
        (args.multi_latent_attention, "--multi-latent-attention", "keys and values are made of latents"),
        (args.hybrid_layer_pattern is not None, "--hybrid-layer-pattern", "not all layers keep keys"),
        (args.window_size is not None, "--window-size", "a chain would leave the window of its keys"),
        (args.softmax_type != "vanilla", f"--softmax-type {args.softmax_type}", "a chain does not share sinks"),
        (args.spec not in (None, ["local"]), "--spec", "its attention may be any"),
        (args.transformer_impl != "local", "--transformer-impl transformer_engine", "its attention takes no chains"),
        (args.recompute_granularity is not None and recomputes, "recomputed attention", "keys of a pass would be lost"),
    ):
        if is_given:
            remedy = "give --transformer-impl local" if "impl" in flag else "drop one of the two"
            raise ValueError(f"{SHARES} was given with {flag}, where {why}; {remedy}.")
