"""Convert checkpoints between Hugging Face and Megatron, look into them, and prove that both are the same model.

It reads the flags, calls `megatron_mtp.checkpoint` and prints what was done. Exit status 2 is a user's mistake;
`verify` exits with 1 for a difference, and with 3 if no logits were compared; `inspect` exits with 1 for what is
damaged in part.
"""

import argparse
import errno
import json
import math
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from megatron_mtp.checkpoint.families import FAMILIES, trained_forms
from megatron_mtp.checkpoint.hf.hub import local_folder
from megatron_mtp.errors import Parser, check_counts, named, sentences, status_of
from megatron_mtp.files import default_workers
from megatron_mtp.runtime import quieten

if TYPE_CHECKING:
    from megatron_mtp.checkpoint.convert.stream import Conversion

EXAMPLES = """examples:
  # a model with MTP, a folder or a name on the Hub, ready for: megatron-mtp train --load checkpoints/glm ...
  megatron-mtp convert hf-to-mcore zai-org/GLM-4.5-Air checkpoints/glm

  # two MTP layers for a trunk that has none; or those of the model that a fine-tuned folder was made from
  megatron-mtp convert attach-mtp checkpoints/qwen checkpoints/qwen-mtp --mtp-num-layers 2
  megatron-mtp convert graft zai-org/GLM-4.5-Air models/my-glm checkpoints/my-glm --text held_out.txt

  # the same layers, drafting only the most frequent tokens of a corpus, which is faster where the vocabulary is large
  megatron-mtp convert draft-vocab checkpoints/mine checkpoints/fast --mtp-draft-vocab-size 4096 --data-path data/corpus

  # a trained checkpoint as a folder that transformers, vLLM and SGLang load with MTP, the trunk in FP8; the proof
  megatron-mtp convert mcore-to-hf runs/mine/checkpoint exported --quantize fp8 --mtp-dtype bfloat16 --text a.txt
  megatron-mtp convert verify exported runs/mine/checkpoint

  # a GPT's checkpoint for training as a hybrid model, which goes on at the same step; and back
  megatron-mtp convert gpt-to-hybrid runs/mine/checkpoint checkpoints/hybrid
  megatron-mtp convert hybrid-to-gpt checkpoints/hybrid checkpoints/gpt

An interrupted conversion leaves DST.partial; the same command with --resume continues it.
"""
DIFFERENT, UNCOMPARED = 1, 3
"""Exit status of `verify`: a difference was found; logits could not be compared."""
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZED = ("fp8", "fp8-channel", "nvfp4")
SHARD = "5GB"
PACKAGE = "megatron_mtp"
MEASURED_TOKENS = 512
"""Largest number of tokens of a sequence in which --text measures acceptance."""
WORKERS, FORMS = default_workers(), ", ".join(trained_forms())


def main(arguments: list[str], program: str = "megatron-mtp convert") -> int:
    """Run one command of `convert`, and return its exit status."""
    with sentences(program):
        args = parser(program).parse_args(arguments)
    advice = "the same command with --resume goes on" if "resume" in args else ""
    return status_of(program, lambda: convert(args), advice=advice)


def convert(args: argparse.Namespace) -> int:
    """Run the command, print what was done, and return the exit status.

    Raises:
        ValueError: a user's mistake, or a file that cannot be written.
    """
    quieten()
    started = time.monotonic()
    try:
        result = COMMANDS[args.command].run(args)
    except OSError as error:
        raise ValueError(sentence(error, args)) from error
    result["seconds"] = round(time.monotonic() - started, 2)
    print(json.dumps(result) if args.json else text_of(result), flush=True)
    if not result.get("ok", True):
        return DIFFERENT
    return 0 if result.get("compared", True) or args.allow_uncompared else UNCOMPARED


def sentence(error: OSError, args: argparse.Namespace) -> str:
    """The operating system's error, with the file and what to do."""
    what = error.filename or getattr(args, "target", "")
    if error.errno == errno.ENOSPC:
        return f"no space is left for {what}; free some, and go on with --resume."
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"{what} cannot be written ({error.strerror}); name another folder."
    return f"{what}: {error.strerror or error}."


def carry_out(plan: "Conversion", args: argparse.Namespace) -> dict[str, Any]:
    """Write what a command has planned, or describe it where --dry-run is given."""
    if args.dry_run:
        return plan.described(args.target)
    done = asdict(plan.write(args.target, options(args)))
    return done | done.pop("notes")


def hf_to_mcore(args: argparse.Namespace) -> dict[str, Any]:
    """`convert hf-to-mcore`."""
    from megatron_mtp.checkpoint.convert.import_hf import plan_import
    from megatron_mtp.checkpoint.inspecting import read_checked

    return carry_out(plan_import(read_checked(local_folder(args.source)), options(args)), args)


def mcore_to_hf(args: argparse.Namespace) -> dict[str, Any]:
    """`convert mcore-to-hf`."""
    from megatron_mtp.checkpoint.convert.export_hf import form_of, plan_export

    _check_text(args)
    form = form_of(args.source, args.like, args.family, args.tokenizer, args.trust_remote_code)
    done = carry_out(plan_export(args.source, args.target, options(args), form), args)
    return done | _acceptances({"before": args.source, "after": args.target}, args.source, args)


def attach(args: argparse.Namespace) -> dict[str, Any]:
    """`convert attach-mtp`."""
    from megatron_mtp.checkpoint.convert.edit import Init, plan_attaching
    from megatron_mtp.checkpoint.convert.fitting import FitData

    if args.mtp_num_layers < 1:
        raise ValueError(f"--mtp-num-layers is {args.mtp_num_layers}; give 1 or more.")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed is {args.seed}; give a whole number from 0 to 2^63 - 1.")
    check_counts(args, "fit_tokens")
    given = {name: value for name in ("data_path", "split", "fit_tokens") if (value := getattr(args, name)) is not None}
    if args.mtp_init != "fitted" and given:
        flag = f"--{next(iter(given)).replace('_', '-')}"
        raise ValueError(f"{flag} is of --mtp-init fitted, and --mtp-init is {args.mtp_init}; leave it out, or fit.")
    if args.mtp_init == "fitted" and not args.data_path:
        raise ValueError("--mtp-init fitted has no text; give --data-path, the prefix of a .bin and .idx.")
    init = Init(args.mtp_init, args.seed, FitData(**given) if given else None)
    return carry_out(plan_attaching(args.source, args.mtp_num_layers, init, options(args).quiet), args)


def drop(args: argparse.Namespace) -> dict[str, Any]:
    """`convert drop-mtp`."""
    from megatron_mtp.checkpoint.convert.edit import plan_dropping

    return carry_out(plan_dropping(args.source, args.keep), args)


def graft(args: argparse.Namespace) -> dict[str, Any]:
    """`convert graft`."""
    from megatron_mtp.checkpoint.convert.graft import plan_graft

    donor, target = local_folder(args.donor), local_folder(args.source)
    _check_text(args)
    done = carry_out(plan_graft(donor, target, options(args), args.trust_remote_code), args)
    return done | _acceptances({"on the donor's trunk": donor, "on the new trunk": args.target}, args.target, args)


def _check_text(args: argparse.Namespace) -> None:
    """Raises ValueError where --text is given and not there."""
    if args.text is not None and not args.text.exists():
        raise ValueError(f"--text is {args.text}, which is not there; give a file or a folder of text.")


def _acceptances(models: dict[str, Path], checkpoint: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What `evaluate` finds on --text for models by name, folders or checkpoints, in sequences that this one takes."""
    from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
    from megatron_mtp.checkpoint.mcore.iterations import is_checkpoint
    from megatron_mtp.checkpoint.mcore.reader import DistReader

    if args.text is None or args.dry_run:
        return {}
    length = min(MEASURED_TOKENS, DistReader(checkpoint).common()["args"].max_position_embeddings)
    found = {}
    with TemporaryDirectory(prefix=f".{args.target.name}-read-", dir=args.target.parent) as folder:
        for number, (name, path) in enumerate(models.items()):
            if not is_checkpoint(path):  # `evaluate` reads checkpoints
                source, path = path, Path(folder) / str(number)
                hf_to_mcore(source, path, options(args))
            found[name] = _acceptance(path, length, args)
    return {"acceptance": found}


def _acceptance(checkpoint: Path, length: int, args: argparse.Namespace) -> dict[str, float]:
    """Acceptance by depth and the expected accepted length, by `evaluate` in a process of its own.

    Raises:
        ValueError: it cannot be measured.
    """
    words = [sys.executable, "-m", PACKAGE, "evaluate", "--load", str(checkpoint), "--text", str(args.text), "--json"]
    words += ["--seq-length", str(length)] + ["--trust-remote-code"] * args.trust_remote_code
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ValueError(f"{args.target} is written, but evaluate ends with status {done.returncode} for {checkpoint}.")
    row = json.loads(done.stdout.splitlines()[-1])
    return {name: value for name, value in row.items() if name.endswith((" acceptance", "accepted length"))}


def limit_drafts(args: argparse.Namespace) -> dict[str, Any]:
    """`convert draft-vocab`."""
    from megatron_mtp.checkpoint.convert.edit import DraftTokens, plan_drafts

    check_counts(args, "mtp_draft_vocab_size")
    wanted = DraftTokens(args.mtp_draft_vocab_size, args.data_path, args.mtp_draft_vocab_file)
    return carry_out(plan_drafts(args.source, wanted), args)


def export_drafter(args: argparse.Namespace) -> dict[str, Any]:
    """`convert drafter-to-hf`."""
    from megatron_mtp.checkpoint.convert.drafters import plan_drafter

    return carry_out(plan_drafter(args.source, options(args)), args)


def attach_drafter(args: argparse.Namespace) -> dict[str, Any]:
    """`convert attach-drafter`."""
    from megatron_mtp.checkpoint.convert.drafters import plan_attaching_drafter

    return carry_out(plan_attaching_drafter(args.source, local_folder(args.drafter)), args)


def change_form(args: argparse.Namespace, to_hybrid: bool) -> dict[str, Any]:
    """`convert gpt-to-hybrid` and `hybrid-to-gpt`."""
    from megatron_mtp.checkpoint.convert.hybrid import plan_migration

    return carry_out(plan_migration(args.source, to_hybrid), args)


def look(args: argparse.Namespace) -> dict[str, Any]:
    """`convert inspect`."""
    from megatron_mtp.checkpoint.inspecting import inspect, names

    found = inspect(args.source, args.check)
    return found | ({"names": names(args.source, rows=args.json)} if args.names else {})


def prove(args: argparse.Namespace) -> dict[str, Any]:
    """`convert verify`."""
    from megatron_mtp.checkpoint.mcore.iterations import is_checkpoint
    from megatron_mtp.checkpoint.verify.verify import verify

    source = local_folder(args.source)
    if is_checkpoint(source):
        from megatron_mtp.checkpoint.verify.forms import verify_forms

        if args.text is not None:
            raise ValueError(f"--text is {args.text}, but {source} is no Hugging Face folder; leave --text out.")
        checks = verify_forms(source, args.target)
    else:
        checks = verify(source, args.target, args.text, trust_remote_code=args.trust_remote_code)
    ok = all(check.ok for check in checks if check.made)
    return {"checks": [asdict(check) for check in checks], "ok": ok, "compared": all(check.made for check in checks)}


def options(args: argparse.Namespace) -> Any:
    """The `Options` of a conversion, from the flags; raises ValueError where one is out of range."""
    import torch

    from megatron_mtp.checkpoint.convert.quantizing import Quantize
    from megatron_mtp.checkpoint.convert.stream import Options

    if args.workers < 1:
        raise ValueError(f"--workers: {args.workers} layers at a time are none; give 1 or more.")
    dtype = getattr(args, "dtype", None)  # not every command has this flag, or --max-shard-size
    return Options(
        dtype=None if dtype is None else getattr(torch, dtype),
        shard_bytes=size(getattr(args, "max_shard_size", SHARD)),
        workers=args.workers,
        resume=args.resume,
        quiet=args.json or not sys.stderr.isatty(),
        quantize=Quantize(getattr(args, "quantize", None), getattr(args, "mtp_dtype", None)),
    )


def size(text: str) -> int:
    """Bytes of '5GB', '500MB' or a number.

    Raises:
        ValueError: it is none of these.
    """
    match = re.fullmatch(r"(\d+\.?\d*)\s*([KMG]I?B)?", text.strip().upper())
    unit = match[2] or "" if match else ""
    power = "KMG".find(unit[:1]) + 1 if unit else 0
    count = float(match[1]) * (1024 if "I" in unit else 1000) ** power if match else 0
    if not 1 <= count < math.inf:
        raise ValueError(f"--max-shard-size is '{text}'; give a size such as 5GB or 500MB.")
    return int(count)


def text_of(result: dict[str, Any]) -> str:
    """The result for people: a line per fact."""
    lines = []
    for check in result.pop("checks", []):
        sign = "none" if not check["made"] else "ok  " if check["ok"] else "FAIL"
        found = f"{check['figure']:.3g}  (witness: {check['witness']})" if check["made"] else check["witness"]
        lines.append(f"{sign} {check['name']}: {found}")
    return "\n".join([*lines, *(f"{name}: {_shown(value)}" for name, value in result.items())])


def _shown(value: Any) -> str:
    if isinstance(value, dict) and all(isinstance(row, dict) for row in value.values()):
        inner = {name: ", ".join(f"{one} {figure:.4g}" for one, figure in row.items()) for name, row in value.items()}
        value = [f"{name}: {row}" for name, row in inner.items()]
    return "".join(f"\n  {item}" for item in value) if isinstance(value, list) else str(value)


@dataclass(frozen=True)
class Command:
    """One command of `convert`.

    Attributes:
        run: does it; returns what to print, by name.
        line: what it does, for `--help`.
        operands: its positional arguments, and their names in `--help`.
        flags: its flags, with the arguments of `add_argument`.
    """

    run: Callable[[argparse.Namespace], dict[str, Any]]
    line: str
    operands: dict[str, str]
    flags: dict[str, dict[str, Any]]


def _value(help: str, metavar: str | None = None, **settings: Any) -> dict[str, Any]:
    return {"help": help, "metavar": metavar, **settings}


def _switch(help: str) -> dict[str, Any]:
    return {"help": help, "action": "store_true"}


JSON = {"--json": _switch("print one JSON object instead of lines")}
WRITES = {
    "--workers": _value(f"layers converted at a time (default: {WORKERS})", "N", type=int, default=WORKERS),
    "--resume": _switch("continue an interrupted conversion"),
    "--dry-run": _switch("print what would be done (names, bytes, disk space) and write nothing"),
}
DTYPE = {"--dtype": _value("type of the floating-point tensors written (default: as stored)", choices=DTYPES)}
TRUSTS = {"--trust-remote-code": _switch("run the Python code of the tokenizer folder")}
EXPORTS = {
    "--max-shard-size": _value(f"largest safetensors file (default: {SHARD})", "SIZE", default=SHARD),
    "--like": _value("take config and tokenizer from this Hugging Face folder", "FOLDER", type=named),
    "--family": _value(f"model_type of the folder: {FORMS} (default: as imported, or the one that fits)", "NAME"),
    "--tokenizer": _value("tokenizer to copy into the folder (default: the run's own)", "FOLDER", type=named),
    "--quantize": _value("form of the trunk's projections (default: whole)", choices=QUANTIZED),
    "--mtp-dtype": _value("form of those of the MTP layers (default: whole)", choices=("bfloat16", *QUANTIZED)),
    "--text": _value("evaluate the acceptance on this text before and after", "PATH", type=named),
}
INSPECTS = {
    "--check": _switch("read the whole checkpoint and compare it with its checksums"),
    "--names": _switch("list the name and shape of every tensor on both sides"),
}
VERIFIES = {
    "--text": _value("compare logits and perplexity on this text, not on random tokens", "FILE", type=named),
    "--allow-uncompared": _switch("exit with 0, not 3, if no logits can be compared"),
}
ATTACHES = {
    "--mtp-num-layers": _value("number of MTP layers to attach", "N", type=int, required=True),
    "--mtp-init": _value(
        "copy the trunk's last layer, the same with eh_proj fitted to text, or draw weights (default: last-layer)",
        choices=("last-layer", "fitted", "random"),
        default="last-layer",
    ),
    "--seed": _value("of random weights, and of the text for fitted (default: 1234)", type=int, default=1234),
    "--data-path": _value("of fitted: the .bin and .idx of megatron-mtp preprocess", "PREFIX"),
    "--split": _value("of fitted: parts of the corpus, as in train (default: 98,2,0)", "W,W,W"),
    "--fit-tokens": _value("of fitted: tokens to fit on (default: 64 for each hidden unit)", "N", type=int),
}
DROPS = {"--keep": _value("keep the first N MTP layers (default: 0)", "N", type=int, default=0)}
GRAFTS = {
    "--text": _value("measure the acceptance of donor and graft on this text, as evaluate does", "PATH", type=named)
}
DRAFTS = {
    "--mtp-draft-vocab-size": _value("draft the N most frequent tokens of --data-path", "N", type=int),
    "--data-path": _value("the .bin and .idx of megatron-mtp preprocess", "PREFIX"),
    "--mtp-draft-vocab-file": _value("draft the tokens in this file, one id per line", "FILE", type=named),
}

IN_OUT = {"source": "SRC", "target": "DST"}
COMMANDS = {
    "hf-to-mcore": Command(
        hf_to_mcore,
        "Convert a Hugging Face folder to a Megatron distributed checkpoint, which any TP, PP, EP or VPP loads.",
        IN_OUT,
        WRITES | DTYPE,
    ),
    "mcore-to-hf": Command(
        mcore_to_hf,
        "Convert a Megatron checkpoint to a folder that transformers, vLLM and SGLang load.",
        IN_OUT,
        WRITES | DTYPE | TRUSTS | EXPORTS,
    ),
    "inspect": Command(
        look,
        "Show what a folder or checkpoint holds: family, MTP layers, conventions, and whether Megatron can train it.",
        {"source": "SRC"},
        INSPECTS,
    ),
    "verify": Command(
        prove,
        "Prove that a Hugging Face folder and a Megatron checkpoint, or a GPT checkpoint and its hybrid form, are the "
        "same model, MTP layers included.",
        {"source": "HF|MCORE", "target": "MCORE"},
        TRUSTS | VERIFIES,
    ),
    "attach-mtp": Command(
        attach, "Copy a Megatron checkpoint that has no MTP layers, and add some.", IN_OUT, WRITES | ATTACHES
    ),
    "drop-mtp": Command(
        drop, "Copy a Megatron checkpoint without its MTP layers, or with the first few.", IN_OUT, WRITES | DROPS
    ),
    "graft": Command(
        graft,
        "Write a Megatron checkpoint of a trunk that was trained further, with the MTP layers of the model that it was "
        "made from; both are Hugging Face folders or Megatron checkpoints.",
        {"donor": "DONOR", "source": "TARGET", "target": "OUT"},
        WRITES | TRUSTS | GRAFTS,
    ),
    "draft-vocab": Command(
        limit_drafts,
        "Copy a Megatron checkpoint, and let its MTP layers draft only some tokens, which is faster.",
        IN_OUT,
        WRITES | DRAFTS,
    ),
    "drafter-to-hf": Command(
        export_drafter,
        "Write the EAGLE-3 drafter of a Megatron checkpoint as a folder that vLLM and SGLang load beside the trunk's.",
        IN_OUT,
        WRITES | DTYPE,
    ),
    "attach-drafter": Command(
        attach_drafter,
        "Copy a Megatron checkpoint without its MTP layers, and add the EAGLE-3 drafter of a folder.",
        {"source": "SRC", "drafter": "DRAFTER", "target": "DST"},
        WRITES,
    ),
    "gpt-to-hybrid": Command(
        partial(change_form, to_hybrid=True),
        "Write a GPT checkpoint as one of a hybrid model (--hybrid-layer-pattern), optimizer and MTP layers included.",
        IN_OUT,
        WRITES,
    ),
    "hybrid-to-gpt": Command(
        partial(change_form, to_hybrid=False),
        "Write a checkpoint of a hybrid model whose layers are a GPT's as a GPT's, optimizer and MTP layers included.",
        IN_OUT,
        WRITES,
    ),
}


def parser(program: str) -> Parser:
    """The parser of all commands and flags; it exits with status 2 on an unknown or malformed flag."""
    names = textwrap.fill(", ".join(sorted(FAMILIES)), 100, initial_indent="  ", subsequent_indent="  ")
    made = Parser(
        program,
        description=f"{(__doc__ or '').splitlines()[0]}\n\nmodel_types that convert:\n{names}",
        epilog=EXAMPLES,
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.line, description=command.line, epilog=EXAMPLES)
        for dest, metavar in command.operands.items():
            own.add_argument(dest, type=named, metavar=metavar)
        for flag, settings in (JSON | command.flags).items():
            own.add_argument(flag, **settings)
    return made
