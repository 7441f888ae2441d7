"""Conversion plans for the subcommands of `convert`, from their flags."""

import math
import re
from argparse import Namespace
from typing import TYPE_CHECKING

from megatron_mtp.checkpoint.hf.hub import local_folder
from megatron_mtp.common.command import check_counts

if TYPE_CHECKING:
    from megatron_mtp.checkpoint.convert.edit import Init
    from megatron_mtp.checkpoint.convert.stream import Conversion, Options

SHARD = "5GB"
"""Default of --max-shard-size."""


def plan_of(args: Namespace, how: "Options") -> "Conversion":
    """Return the conversion plan of a subcommand. Raise ValueError for invalid flags."""
    source, target = args.source, args.target
    match args.command:
        case "hf-to-mcore":
            from megatron_mtp.checkpoint.convert.import_hf import plan_import

            return plan_import(local_folder(source), how, args.trunk_only)
        case "mcore-to-hf":
            from megatron_mtp.checkpoint.convert.export_hf import plan_export
            from megatron_mtp.checkpoint.convert.hf_form import form_of
            from megatron_mtp.megatron.checkpoint.reader import DistReader

            reader = DistReader(source)
            form = form_of(reader, args.like, args.family, args.tokenizer, args.trust_remote_code)
            return plan_export(reader, target, how, form)
        case "graft":
            from megatron_mtp.checkpoint.convert.graft import plan_graft

            return plan_graft(local_folder(args.donor), local_folder(source), how, args.trust_remote_code)
        case "attach-mtp" | "drop-mtp" | "draft-vocab":
            return _edited(args, how.quiet)
        case "drafter-to-hf" | "attach-drafter":
            from megatron_mtp.checkpoint.convert.drafters import plan_attaching_drafter, plan_drafter

            if args.command == "drafter-to-hf":
                return plan_drafter(source, how)
            given = source, local_folder(args.drafter), args.drafter_layer_ids_count
            return plan_attaching_drafter(*given, args.as_kind)
        case "fit-drafter":
            return _fit_drafter(args, how.quiet)
        case _:
            from megatron_mtp.checkpoint.convert.hybrid import plan_migration

            return plan_migration(source, to_hybrid=args.command == "gpt-to-hybrid")


def _edited(args: Namespace, quiet: bool) -> "Conversion":
    from megatron_mtp.checkpoint.convert.edit import plan_attaching, plan_drafts, plan_dropping

    match args.command:
        case "attach-mtp":
            return plan_attaching(args.source, args.mtp_num_layers, init(args), quiet)
        case "drop-mtp":
            return plan_dropping(args.source, args.keep)
        case _:
            check_counts(args, "mtp_draft_vocab_size")
            return plan_drafts(args.source, args.mtp_draft_vocab_size, args.data_path, args.mtp_draft_vocab_file)


def _fit_drafter(args: Namespace, quiet: bool) -> "Conversion":
    from megatron_mtp.checkpoint.convert.edit import drafted_tokens
    from megatron_mtp.checkpoint.convert.fitting import FitData
    from megatron_mtp.checkpoint.convert.fitting_drafter import plan_fitting
    from megatron_mtp.megatron.checkpoint.reader import DistReader

    check_counts(args, "mtp_draft_vocab_size", "fit_tokens")
    size, file, drafted = args.mtp_draft_vocab_size, args.mtp_draft_vocab_file, None
    if size or file:
        vocabulary = DistReader(args.source).common()["args"].padded_vocab_size
        drafted, _ = drafted_tokens(size, args.data_path if size else None, file, vocabulary)
    data = FitData(args.data_path, args.split, args.fit_tokens)
    return plan_fitting(args.source, args.drafter_layers, drafted, data, args.seed, quiet)


def init(args: Namespace) -> "Init":
    """Return the initialization for attach-mtp's flags. Raise ValueError for flags out of range or for another mode."""
    from megatron_mtp.checkpoint.convert.edit import Init
    from megatron_mtp.checkpoint.convert.fitting import FitData

    check_counts(args, "mtp_num_layers", "fit_tokens")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed is {args.seed}; give a whole number from 0 to 2^63 - 1.")
    given = {name: value for name in ("data_path", "split", "fit_tokens") if (value := getattr(args, name)) is not None}
    if args.mtp_init != "fitted" and given:
        flag = f"--{next(iter(given)).replace('_', '-')}"
        raise ValueError(f"{flag} is of --mtp-init fitted, and --mtp-init is {args.mtp_init}; leave it out, or fit.")
    if args.mtp_init == "fitted" and not args.data_path:
        raise ValueError("--mtp-init fitted has no text; give --data-path, the prefix of a .bin and .idx.")
    return Init(args.mtp_init, args.seed, FitData(**given) if given else None)


def options(args: Namespace) -> "Options":
    """Return the conversion options from the subcommand's flags. Raise ValueError if one is out of range."""
    import torch

    from megatron_mtp.checkpoint.convert.quantizing import Quantize
    from megatron_mtp.checkpoint.convert.stream import Options

    if args.workers < 1:
        raise ValueError(f"--workers is {args.workers}; give 1 or more.")
    dtype = getattr(args, "dtype", None)
    return Options(
        dtype=None if dtype is None else getattr(torch, dtype),
        shard_bytes=size(getattr(args, "max_shard_size", SHARD)),
        workers=args.workers,
        resume=args.resume,
        quiet=args.json,
        quantize=Quantize(getattr(args, "quantize", None), getattr(args, "mtp_dtype", None)),
    )


def size(text: str) -> int:
    """Parse '5GB', '500MB' or a number to bytes. Raise ValueError for anything else."""
    match = re.fullmatch(r"(\d+\.?\d*)\s*([KMG]I?B)?", text.strip().upper())
    unit = match[2] or "" if match else ""
    power = "KMG".find(unit[:1]) + 1 if unit else 0
    count = float(match[1]) * (1024 if "I" in unit else 1000) ** power if match else 0
    if not 1 <= count < math.inf:
        raise ValueError(f"--max-shard-size is '{text}'; give a size such as 5GB or 500MB.")
    return int(count)
