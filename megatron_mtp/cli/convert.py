"""Convert checkpoints between Hugging Face and Megatron; inspect, edit and verify them.

Parses flags, calls `megatron_mtp.checkpoint` and prints what was done. Exit status 2 is a user error. `verify`, also as
a flag, exits with 1 for a difference and 3 if no logits were compared; `inspect` exits with 1 for partial damage, and
`--dry-run` with 1 if the disk is too small.
"""

import json
import textwrap
import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_mtp.checkpoint.families import FAMILIES, trained_forms
from megatron_mtp.checkpoint.hf.hub import local_folder
from megatron_mtp.cli.convert_plans import SHARD, options, plan_of
from megatron_mtp.cli.convert_text import acceptances, measurable_tokens
from megatron_mtp.common.command import named, status_of
from megatron_mtp.common.errors import Parser, sentences
from megatron_mtp.common.files import default_workers
from megatron_mtp.megatron.runtime import quieten
from megatron_mtp.spec.kinds import DRAFTERS, fitted_kind

EXAMPLES = """examples:
  # a model with MTP layers, from a folder or the Hub, for megatron-mtp train --load checkpoints/glm ...
  megatron-mtp convert hf-to-mcore zai-org/GLM-4.5-Air checkpoints/glm

  # add two MTP layers to a trunk; or reuse those of a fine-tuned model's base model
  megatron-mtp convert attach-mtp checkpoints/qwen checkpoints/qwen-mtp --mtp-num-layers 2
  megatron-mtp convert graft zai-org/GLM-4.5-Air models/my-glm checkpoints/my-glm --text held_out.txt

  # draft only the most frequent tokens of a corpus, which is faster with a large vocabulary
  megatron-mtp convert draft-vocab checkpoints/mine checkpoints/fast --mtp-draft-vocab-size 4096 --data-path data/corpus

  # export a trained checkpoint with MTP layers for transformers, vLLM and SGLang, and verify it
  megatron-mtp convert mcore-to-hf runs/mine/checkpoint exported --verify

  # the trunk in FP8, with the acceptance before and after
  megatron-mtp convert mcore-to-hf runs/mine/checkpoint exported-fp8 --quantize fp8 --mtp-dtype bfloat16 --text a.txt

  # a GPT checkpoint as a hybrid one, to continue training at the same step; and back
  megatron-mtp convert gpt-to-hybrid runs/mine/checkpoint checkpoints/hybrid
  megatron-mtp convert hybrid-to-gpt checkpoints/hybrid checkpoints/gpt

An interrupted conversion leaves DST.partial; the same command with --resume continues it.
"""
DIFFERENT, UNCOMPARED = 1, 3
"""Exit statuses: a difference or damage was found, or a plan does not fit; logits could not be compared."""
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZED = ("fp8", "fp8-channel", "nvfp4")
WORKERS, FORMS = default_workers(), ", ".join(trained_forms())


def main(arguments: list[str], program: str = "megatron-mtp convert") -> int:
    """Run one `convert` subcommand, print what was done, and return its exit status."""
    with sentences(program):
        args = parser(program).parse_args(arguments)
    advice = "the same command with --resume goes on" if "resume" in args else ""
    return status_of(program, lambda: convert(args), advice=advice)


def convert(args: Namespace) -> int:
    """Run the subcommand, print what was done, and return the exit status. Raise ValueError for a user error."""
    quieten()
    started = time.monotonic()
    try:
        result = {"inspect": look, "verify": prove}.get(args.command, write)(args)
    except OSError as error:
        if error.errno is None:
            raise ValueError(f"{getattr(args, 'target', args.source)}: {error}.") from error
        error.filename = error.filename or getattr(args, "target", None)
        raise
    result["seconds"] = round(time.monotonic() - started, 2)
    print(json.dumps(result) if args.json else text_of(result), flush=True)
    free = result.get("bytes free")
    if not result.get("ok", True) or (free is not None and free <= result["bytes written"]):
        return DIFFERENT
    return 0 if result.get("compared", True) or getattr(args, "allow_uncompared", False) else UNCOMPARED


def write(args: Namespace) -> dict[str, Any]:
    """Write the planned output, or describe it with --dry-run."""
    text, graft = getattr(args, "text", None), args.command == "graft"
    if text is not None and not text.exists():
        raise ValueError(f"--text is {text}, which is not there; give a file or a folder of text.")
    how = options(args)
    plan = plan_of(args, how)
    length = 0
    if text is not None:
        models = [local_folder(args.donor), local_folder(args.source)] if graft else [args.source]
        length = measurable_tokens(args, models)
    if args.dry_run:
        return plan.described(args.target)
    done = plan.write(args.target, how)
    if getattr(args, "verify", False):
        imports = args.command == "hf-to-mcore"
        folder, checkpoint = (local_folder(args.source), args.target) if imports else (args.target, args.source)
        done |= proof(folder, checkpoint, trust_remote_code=getattr(args, "trust_remote_code", False))
    if text is not None and graft:
        sides = {"on the donor's trunk": local_folder(args.donor), "on the new trunk": args.target}
        done["acceptance"] = acceptances(sides, args.target, length, args)
    elif text is not None:
        done["acceptance"] = acceptances({"before": args.source, "after": args.target}, args.source, length, args)
    return done


def look(args: Namespace) -> dict[str, Any]:
    """Run `convert inspect`."""
    from megatron_mtp.checkpoint.inspecting import inspect, names

    found = inspect(args.source, args.check)
    return found | ({"names": names(args.source, rows=args.json)} if args.names else {})


def prove(args: Namespace) -> dict[str, Any]:
    """Run `convert verify`."""
    return proof(
        local_folder(args.source), args.target, args.text, args.drafter_layer_ids_count, args.trust_remote_code
    )


def proof(
    source: Path,
    checkpoint: Path,
    text: Path | None = None,
    layer_ids_count: str | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Verify that a source (model folder, drafter folder or another checkpoint) is the same model as a checkpoint.

    Raises:
        ValueError: a text was given for something other than a model folder, or one side cannot be read.
    """
    from megatron_mtp.checkpoint.hf.folder import drafter_kind
    from megatron_mtp.checkpoint.verify.forms import verify_forms
    from megatron_mtp.checkpoint.verify.verify import verify
    from megatron_mtp.megatron.checkpoint.iterations import is_checkpoint

    drafts = drafter_kind(source) is not None
    if text is not None and (drafts or is_checkpoint(source)):
        raise ValueError(f"--text is {text}, but {source} is not a model's folder; leave --text out.")
    if drafts:
        from megatron_mtp.checkpoint.verify.drafters import verify_drafter

        checks = verify_drafter(source, checkpoint, count=layer_ids_count)
    elif is_checkpoint(source):
        checks = verify_forms(source, checkpoint)
    else:
        checks = verify(source, checkpoint, text, trust_remote_code=trust_remote_code)
    ok = all(check.ok for check in checks if check.made)
    return {"checks": [asdict(check) for check in checks], "ok": ok, "compared": all(check.made for check in checks)}


def text_of(result: dict[str, Any]) -> str:
    """Format the result as text, one line per fact."""
    lines = []
    for check in result.pop("checks", []):
        sign = "none" if not check["made"] else "ok  " if check["ok"] else "FAIL"
        found = f"{check['figure']:.3g}  (reference: {check['witness']})" if check["made"] else check["witness"]
        lines.append(f"{sign} {check['name']}: {found}")
    return "\n".join([*lines, *(f"{name}: {_shown(value)}" for name, value in result.items())])


def _shown(value: Any) -> str:
    if isinstance(value, dict) and all(isinstance(row, dict) for row in value.values()):
        inner = {name: ", ".join(f"{one} {figure:.4g}" for one, figure in row.items()) for name, row in value.items()}
        value = [f"{name}: {row}" for name, row in inner.items()]
    return "".join(f"\n  {item}" for item in value) if isinstance(value, list) else str(value)


@dataclass(frozen=True)
class Command:
    """A subcommand of `convert`: its line in `--help`, its positional arguments and their names, its flags."""

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
    "--dry-run": _switch("print what would be done (names, bytes, disk space), and write nothing"),
}
DTYPE = {"--dtype": _value("data type of floating-point tensors in the output (default: as stored)", choices=DTYPES)}
TRUSTS = {"--trust-remote-code": _switch("run the Python code of the tokenizer folder")}
PROVES = {"--verify": _switch("then verify that both are the same model, with the exit status of verify")}
IMPORTS = {"--trunk-only": _switch("convert only the trunk, without the folder's MTP layers, even if they are missing")}
EXPORTS = {
    "--max-shard-size": _value(f"largest safetensors file (default: {SHARD})", "SIZE", default=SHARD),
    "--like": _value(
        "Hugging Face folder to take config, tokenizer and missing towers from",
        "FOLDER",
        type=named,
    ),
    "--family": _value(f"model_type of the folder: {FORMS} (default: as imported, or the one that fits)", "NAME"),
    "--tokenizer": _value("tokenizer to copy into the folder (default: the run's own)", "FOLDER", type=named),
    "--quantize": _value("quantization of the trunk's projections (default: not quantized)", choices=QUANTIZED),
    "--mtp-dtype": _value(
        "quantization of the MTP layers' projections (default: not quantized)", choices=("bfloat16", *QUANTIZED)
    ),
    "--text": _value("measure acceptance on this text before and after", "PATH", type=named),
}
INSPECTS = {
    "--check": _switch("read the whole checkpoint and check its checksums"),
    "--names": _switch("list the name and shape of every tensor on both sides"),
}
VERIFIES = {
    "--text": _value("compare logits and perplexity on this text instead of random tokens", "FILE", type=named),
    "--allow-uncompared": _switch("exit with status 0 instead of 3 if no logits can be compared"),
}
COUNTS_LAYERS = {
    "--drafter-layer-ids-count": _value(
        "meaning of layer ids in a drafter's config: layer outputs counted from 0, or states after that many layers "
        "(default: as in engines)",
        choices=("outputs", "states"),
    )
}
BEGINS = {
    "--as-kind": _value(
        "kind of the new drafter, which starts from the folder's weights, as dspark from DFlash; others are random "
        "(default: the folder's kind)",
        "KIND",
        choices=tuple(DRAFTERS),
    )
}
ATTACHES = {
    "--mtp-num-layers": _value("number of MTP layers to attach", "N", type=int, required=True),
    "--mtp-init": _value(
        "a copy of the trunk's last layer, the same with eh_proj fitted to text, or random (default: last-layer)",
        choices=("last-layer", "fitted", "random"),
        default="last-layer",
    ),
    "--seed": _value("seed for random weights and for the text of fitted (default: 1234)", type=int, default=1234),
    "--data-path": _value("for fitted: corpus made by preprocess", "PREFIX"),
    "--split": _value("for fitted: split of the corpus, as in train (default: 98,2,0)", "W,W,W"),
    "--fit-tokens": _value("for fitted: tokens to fit on (default: 64 per hidden unit)", "N", type=int),
}
DROPS = {"--keep": _value("keep the first N MTP layers (default: 0)", "N", type=int, default=0)}
GRAFTS = {"--text": _value("measure acceptance of donor and result on this text", "PATH", type=named)}
DRAFTS = {
    "--mtp-draft-vocab-size": _value("draft only the N most frequent tokens of --data-path", "N", type=int),
    "--data-path": _value("corpus made by preprocess", "PREFIX"),
    "--mtp-draft-vocab-file": _value("draft only the tokens in this file, one id per line", "FILE", type=named),
}
FITS = {
    **DRAFTS,
    "--data-path": _value("corpus to fit on, made by preprocess", "PREFIX", required=True),
    "--split": _value("split of the corpus, as in train (default: 98,2,0)", "W,W,W", default="98,2,0"),
    "--fit-tokens": _value("tokens to fit on (default: 64 per hidden unit)", "N", type=int),
    "--drafter-layers": _value(
        "trunk layers that the drafter reads (default: 2, L / 2, L - 3)", "N", type=int, nargs=3
    ),
    "--seed": ATTACHES["--seed"],
}

IN_OUT = {"source": "SRC", "target": "DST"}
COMMANDS = {
    "hf-to-mcore": Command(
        "Convert a Hugging Face folder to a Megatron checkpoint that loads under any parallel layout.",
        IN_OUT,
        WRITES | DTYPE | PROVES | IMPORTS,
    ),
    "mcore-to-hf": Command(
        "Convert a Megatron checkpoint to a Hugging Face folder for transformers, vLLM and SGLang.",
        IN_OUT,
        WRITES | DTYPE | TRUSTS | PROVES | EXPORTS,
    ),
    "inspect": Command(
        "Describe a folder or checkpoint: family, MTP layers, conventions, and whether Megatron can train it.",
        {"source": "SRC"},
        INSPECTS,
    ),
    "verify": Command(
        "Verify that a Hugging Face folder and a Megatron checkpoint, or a GPT checkpoint and its hybrid form, are the "
        "same model or drafter, MTP layers included.",
        {"source": "HF|MCORE", "target": "MCORE"},
        TRUSTS | VERIFIES | COUNTS_LAYERS,
    ),
    "attach-mtp": Command("Copy a Megatron checkpoint and add MTP layers.", IN_OUT, WRITES | ATTACHES),
    "drop-mtp": Command(
        "Copy a Megatron checkpoint without its MTP layers, or with only the first N.", IN_OUT, WRITES | DROPS
    ),
    "graft": Command(
        "Write a Megatron checkpoint of a fine-tuned model with the MTP layers of its base model. Both may be Hugging "
        "Face folders or Megatron checkpoints.",
        {"donor": "DONOR", "source": "TARGET", "target": "OUT"},
        WRITES | DTYPE | TRUSTS | GRAFTS,
    ),
    "draft-vocab": Command(
        "Copy a Megatron checkpoint with a smaller draft vocabulary, which drafts faster.",
        IN_OUT,
        WRITES | DRAFTS,
    ),
    "drafter-to-hf": Command(
        "Export the drafter of a Megatron checkpoint as a Hugging Face folder for other engines.",
        IN_OUT,
        WRITES | DTYPE,
    ),
    "attach-drafter": Command(
        f"Copy a Megatron checkpoint with the drafter of a folder ({', '.join(DRAFTERS)}) instead of its MTP layers.",
        {"source": "SRC", "drafter": "DRAFTER", "target": "DST"},
        WRITES | COUNTS_LAYERS | BEGINS,
    ),
    "fit-drafter": Command(
        f"Copy a Megatron checkpoint with {fitted_kind().called} fitted to text instead of its MTP layers.",
        IN_OUT,
        WRITES | FITS,
    ),
    "gpt-to-hybrid": Command(
        "Convert a GPT checkpoint to a hybrid one (--hybrid-layer-pattern), optimizer and MTP layers included.",
        IN_OUT,
        WRITES,
    ),
    "hybrid-to-gpt": Command(
        "Convert a hybrid checkpoint with only GPT layers to a GPT one, optimizer and MTP layers included.",
        IN_OUT,
        WRITES,
    ),
}


def parser(program: str) -> Parser:
    """Create the parser of all subcommands and flags. It exits with status 2 on an unknown or malformed flag."""
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
