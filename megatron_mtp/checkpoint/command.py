"""Convert checkpoints between Hugging Face and Megatron, look into them, and prove that both are the same model.

The command line of the conversions: reads the flags, calls this room, prints what was done. Exit status 2 for a
user's mistake; of `verify`, 1 for a difference, and 3 where no logits were compared.
"""

import argparse
import contextlib
import errno
import io
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_mtp.checkpoint.hf.hub import local_folder
from megatron_mtp.errors import Parser, status_of
from megatron_mtp.platform import prepare

EXAMPLES = """examples:
  # a model with MTP, ready for: megatron-mtp train --load checkpoints/glm --use-checkpoint-args ...
  megatron-mtp convert hf-to-mcore models/GLM-4.5-Air checkpoints/glm

  # the same by its name on the Hub; an interrupted download goes on
  megatron-mtp convert hf-to-mcore zai-org/GLM-4.5-Air checkpoints/glm

  # depths for a trunk that has none
  megatron-mtp convert hf-to-mcore models/Qwen3-0.6B checkpoints/qwen
  megatron-mtp convert attach-mtp checkpoints/qwen checkpoints/qwen-mtp --mtp-num-layers 2

  # a trained checkpoint, as a folder that transformers, vLLM and SGLang load with MTP; then the proof
  megatron-mtp convert mcore-to-hf runs/mine/checkpoint exported
  megatron-mtp convert verify exported runs/mine/checkpoint

an interrupted conversion leaves DST.partial; the same command with --resume goes on.
"""
DIFFERENT, UNCOMPARED = 1, 3
"""Exit status of `verify`."""
DTYPES = ("float32", "bfloat16", "float16")
SHARD = "5GB"


def main(argv: Sequence[str] | None = None, program: str = "convert.py") -> int:
    """Run the command (None: sys.argv), which speaks as `program`; return its exit status."""
    args = parse_args(argv, program)
    advice = "the same command with --resume goes on" if "resume" in args else ""
    return status_of(program, lambda: convert(args), advice=advice)


def convert(args: argparse.Namespace) -> int:
    """Run the command and print what was done; the exit status, which of `verify` is not always 0."""
    quieten()
    started = time.monotonic()
    try:
        result = COMMANDS[args.command](args)
    except OSError as error:
        raise ValueError(sentence(error, args)) from error
    result["seconds"] = round(time.monotonic() - started, 2)
    print(json.dumps(result) if args.json else text_of(result), flush=True)
    if not result.get("ok", True):
        return DIFFERENT
    return 0 if result.get("compared", True) or args.allow_uncompared else UNCOMPARED


def quieten() -> None:
    """Only this tool speaks: importing Megatron and transformers on a CPU is full of warnings."""
    warnings.filterwarnings("ignore")
    with contextlib.redirect_stderr(io.StringIO()):
        prepare()
    logging.getLogger().setLevel(logging.ERROR)
    for name in ("megatron", "transformers", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def sentence(error: OSError, args: argparse.Namespace) -> str:
    """The operating system's error, with the file and what to do."""
    what = error.filename or getattr(args, "target", "")
    if error.errno == errno.ENOSPC:
        return f"no space is left for {what}; free some, and go on with --resume."
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"{what} cannot be written ({error.strerror}); name another folder."
    return f"{what}: {error.strerror or error}."


def hf_to_mcore(args: argparse.Namespace) -> dict[str, Any]:
    """`convert hf-to-mcore`."""
    from megatron_mtp.checkpoint.convert.importing import hf_to_mcore
    from megatron_mtp.checkpoint.convert.megatron_flags import flags_of, megatron_arguments
    from megatron_mtp.checkpoint.convert.plan import HFModel
    from megatron_mtp.checkpoint.proof.reference import check_carried

    source = local_folder(args.source)
    if args.dry_run:
        from megatron_mtp.checkpoint.convert.dry_run import plan_import

        return plan_import(source, args.target, options(args))

    def arguments(model: HFModel) -> argparse.Namespace:
        if model.family.untrainable is not None:
            check_carried(source, {name: stored.shape for name, stored in model.folder.tensors.items()})
        return megatron_arguments(model)

    done = asdict(hf_to_mcore(source, args.target, options(args), arguments))
    _, reason = flags_of(HFModel.read(source))
    return done | ({} if reason is None else {"trainable here": False, "why not": reason})


def mcore_to_hf(args: argparse.Namespace) -> dict[str, Any]:
    """`convert mcore-to-hf`."""
    from megatron_mtp.checkpoint.convert.exporting import mcore_to_hf
    from megatron_mtp.checkpoint.convert.hf_form import form_of
    from megatron_mtp.checkpoint.mcore.iterations import iteration_folder
    from megatron_mtp.checkpoint.mcore.stored_depths import stored_draft_vocabulary

    form = form_of(args.source, args.like, args.family, args.tokenizer, args.trust_remote_code)
    if args.dry_run:
        from megatron_mtp.checkpoint.convert.dry_run import plan_export

        return plan_export(args.source, args.target, options(args), form)
    done = asdict(mcore_to_hf(args.source, args.target, options(args), form))
    drafted = stored_draft_vocabulary(iteration_folder(args.source))
    if drafted is not None:
        done["draft vocabulary"] = f"{drafted.numel()} tokens, left out: the depths of the folder draft all tokens"
    return done


def attach(args: argparse.Namespace) -> dict[str, Any]:
    """`convert attach-mtp`."""
    from megatron_mtp.checkpoint.convert.depths import attach_depths, plan_attaching
    from megatron_mtp.checkpoint.convert.dry_run import plan_change

    if args.mtp_num_layers < 1:
        raise ValueError(f"--mtp-num-layers is {args.mtp_num_layers}; give 1 or more.")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed is {args.seed}; give a whole number from 0 to 2^63 - 1.")
    depths = args.mtp_num_layers, args.mtp_init, args.seed
    if args.dry_run:
        return plan_change(plan_attaching(args.source, *depths), args.target)
    return asdict(attach_depths(args.source, args.target, *depths, options(args)))


def drop(args: argparse.Namespace) -> dict[str, Any]:
    """`convert drop-mtp`."""
    from megatron_mtp.checkpoint.convert.depths import drop_depths, plan_dropping
    from megatron_mtp.checkpoint.convert.dry_run import plan_change

    if args.dry_run:
        return plan_change(plan_dropping(args.source, args.keep), args.target)
    return asdict(drop_depths(args.source, args.target, args.keep, options(args)))


def look(args: argparse.Namespace) -> dict[str, Any]:
    """`convert inspect`."""
    from megatron_mtp.checkpoint.inspecting import inspect

    return inspect(args.source, args.check)


def prove(args: argparse.Namespace) -> dict[str, Any]:
    """`convert verify`."""
    from megatron_mtp.checkpoint.proof.verify import verify

    checks = verify(local_folder(args.source), args.target, args.text, trust_remote_code=args.trust_remote_code)
    ok = all(check.ok for check in checks if check.made)
    return {"checks": [asdict(check) for check in checks], "ok": ok, "compared": all(check.made for check in checks)}


COMMANDS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "hf-to-mcore": hf_to_mcore,
    "mcore-to-hf": mcore_to_hf,
    "inspect": look,
    "verify": prove,
    "attach-mtp": attach,
    "drop-mtp": drop,
}


def options(args: argparse.Namespace) -> Any:
    """How to convert, from the flags."""
    import torch

    from megatron_mtp.checkpoint.convert.importing import Options

    if args.workers < 1:
        raise ValueError(f"--workers: {args.workers} layers at a time are none; give 1 or more.")
    dtype = getattr(args, "dtype", None)  # not every command makes tensors of another type, or shards
    return Options(
        dtype=None if dtype is None else getattr(torch, dtype),
        shard_bytes=size(getattr(args, "max_shard_size", SHARD)),
        workers=args.workers,
        resume=args.resume,
        quiet=args.json or not sys.stderr.isatty(),
    )


def size(text: str) -> int:
    """Bytes of '5GB', '500MB' or a number.

    Raises:
        ValueError: it is none of these.
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    upper = text.upper().strip()
    unit = next((unit for unit in units if upper.endswith(unit)), "")
    number = upper.removesuffix(unit).strip()
    if not number.replace(".", "", 1).isdigit() or float(number) * units.get(unit, 1) < 1:
        raise ValueError(f"--max-shard-size is '{text}'; give a size such as 5GB or 500MB.")
    return int(float(number) * units.get(unit, 1))


def text_of(result: dict[str, Any]) -> str:
    """For people: a line a fact."""
    lines = []
    for check in result.pop("checks", []):
        if not check["made"]:
            lines.append(f"none {check['name']}: {check['witness']}")
            continue
        sign = "ok  " if check["ok"] else "FAIL"
        lines.append(f"{sign} {check['name']}: {check['figure']:.3g}  (witness: {check['witness']})")
    return "\n".join([*lines, *(f"{name}: {_shown(value)}" for name, value in result.items())])


def _shown(value: Any) -> str:
    return "".join(f"\n  {item}" for item in value) if isinstance(value, list) else str(value)


def parse_args(argv: Sequence[str] | None, program: str) -> argparse.Namespace:
    """Parse the command line (None: sys.argv); exits with status 2 on an unknown or malformed flag."""
    return parser(program).parse_args(argv)


def parser(program: str) -> Parser:
    """All commands and flags."""
    form = argparse.RawDescriptionHelpFormatter
    description = (__doc__ or "").split("\n")[0]
    made = Parser(program, description=description, epilog=EXAMPLES, formatter_class=form)
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (line, target) in HELP.items():
        command = commands.add_parser(name, help=line, description=line, epilog=EXAMPLES, formatter_class=form)
        command.add_argument("source", type=Path, metavar="HF" if name == "verify" else "SRC")
        if target:
            command.add_argument("target", type=Path, metavar="MCORE" if name == "verify" else "DST")
        command.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
        if target and name != "verify":
            _writing_flags(command)
        if name in _OWN_FLAGS:
            _OWN_FLAGS[name](command)
    return made


HELP: dict[str, tuple[str, bool]] = {
    "hf-to-mcore": ("A Hugging Face folder to a Megatron distributed checkpoint for any TP, PP, EP or VPP.", True),
    "mcore-to-hf": ("A Megatron checkpoint to a folder for transformers, vLLM and SGLang.", True),
    "inspect": (
        "What a folder or checkpoint holds: family, depths, conventions, whether Megatron can train it.",
        False,
    ),
    "verify": ("Prove that a Hugging Face folder and a Megatron checkpoint are the same model, depths included.", True),
    "attach-mtp": ("Give a Megatron checkpoint without MTP depths some.", True),
    "drop-mtp": ("A Megatron checkpoint without its MTP depths, or with the first of them alone.", True),
}
"""What each command does, and whether it takes a second folder."""


def _writing_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    workers = min(os.cpu_count() or 1, 4)
    add("--workers", type=int, default=workers, metavar="N", help=f"layers at a time (default: {workers})")
    add("--resume", action="store_true", help="go on with what an interrupted conversion has left")
    add("--dry-run", action="store_true", help="say what would be done: names, bytes, disk; read and write no tensor")


def _import_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--dtype", choices=DTYPES, help="type of all floating-point tensors (default: as they are)")


def _attach_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--mtp-num-layers", type=int, required=True, metavar="N", help="depths to attach")
    add("--mtp-init", choices=("random", "last-layer"), default="last-layer", help="default: last-layer")
    add("--seed", type=int, default=1234, help="of --mtp-init random (default: 1234)")


def _drop_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--keep", type=int, default=0, metavar="N", help="depths to keep, the first ones (default: 0)")


def _export_flags(command: argparse.ArgumentParser) -> None:
    _import_flags(command)
    _trust_flag(command)
    add = command.add_argument
    add("--max-shard-size", default=SHARD, metavar="SIZE", help=f"of a safetensors file (default: {SHARD})")
    add("--like", type=Path, metavar="FOLDER", help="take config and tokenizer from this Hugging Face folder")
    add("--family", metavar="NAME", help="model_type to export to (default: that of the source, or the one that fits)")
    add("--tokenizer", type=Path, metavar="FOLDER", help="tokenizer to put into the folder (default: the run's own)")


def _inspect_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--check", action="store_true", help="compare all of a checkpoint with its checksums")


def _trust_flag(command: argparse.ArgumentParser) -> None:
    command.add_argument("--trust-remote-code", action="store_true", help="run the code of a tokenizer that has some")


def _verify_flags(command: argparse.ArgumentParser) -> None:
    _trust_flag(command)
    add = command.add_argument
    add("--text", type=Path, metavar="FILE", help="compare on this text, perplexity included")
    add("--allow-uncompared", action="store_true", help="exit with 0, not 3, where no logits can be compared")


_OWN_FLAGS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "attach-mtp": _attach_flags,
    "drop-mtp": _drop_flags,
    "hf-to-mcore": _import_flags,
    "inspect": _inspect_flags,
    "mcore-to-hf": _export_flags,
    "verify": _verify_flags,
}
