"""`megatron-mtp attach MODEL CORPUS RUN`: MTP layers for a Hugging Face model, trained on its frozen trunk.

Every step is a verb of this command line, in a process of its own. A finished step is not repeated, so the same command
continues after an interruption.
"""

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_mtp.acceptance import EXPECTED_LENGTH
from megatron_mtp.acceptance import RECORD as ACCEPTANCE
from megatron_mtp.checkpoint.families import trained_forms
from megatron_mtp.checkpoint.hf.hub import local_folder
from megatron_mtp.cli.verbs import PROGRAM, module_of
from megatron_mtp.config import flag_of, number_of
from megatron_mtp.data.chat import is_chat
from megatron_mtp.data.checks import check_split
from megatron_mtp.drafters import DRAFTERS, FITTED
from megatron_mtp.errors import INTERRUPTED, Parser, check_counts, named, sentences
from megatron_mtp.files import check_outside, is_inside, remove, written_beside
from megatron_mtp.losses import LOSSES
from megatron_mtp.runtime import quieten
from megatron_mtp.training.flags import CHAT_FLAGS
from megatron_mtp.training.run_files import read_rows

RECORD = "attach.json"
"""In RUN: the settings of its first start, on which finished steps depend."""
KEPT = "model corpus mtp_layers unroll mtp_init donor drafter drafter_init loss self_generated".split()
"""Names of these settings."""
TRACKER = "latest_checkpointed_iteration.txt"
STEPS = {
    "corpus": "the corpus",
    "trunk": "the trunk in Megatron's form",
    "start": "the MTP layers",
    "sample": "the model's own texts",
    "before": "loss and acceptance before the training",
    "train": "the training",
    "export": "the Hugging Face folder",
    "verify": "the proof that folder and checkpoint are the same model",
    "draft": "drafting",
}
"""The steps in their order, and their names in the output."""
ON_RANKS, OF_THE_FOLDER = ("before", "train"), ("export", "verify")
AFTER_CORPUS, AFTER_START, AFTER_TRAIN = "trunk", "sample", "export"
"""The steps before which it is known how many documents there are, what the attached model is, and what it learned."""
OF_CHATS = [flag_of(name) for name in CHAT_FLAGS]
"""Flags of `train` that say how chats are tokenized: they are the corpus's, and not the training's."""
SPLIT = "98,2,0"
LEAST_TEXTS = 25
DEVIATIONS = 2
"""Standard errors by which the expected accepted length may fall in training."""
PASSES = 2
"""Default of --unroll: the best number that docs/losses.md has measured."""

EXAMPLES = """examples:
  # one MTP layer, which drafts as often as it is asked to; 600 steps; all output is in runs/attached
  megatron-mtp attach models/Qwen3-0.6B my_texts

  # three layers with the loss tv on the 8 GPUs of this machine; --micro-batch-size is a flag of train
  megatron-mtp attach models/Qwen3-0.6B my_texts runs/three --mtp-layers 3 --loss tv \\
      --launch 'torchrun --nproc-per-node 8' --batch 64 --micro-batch-size 8

  # the layer is trained as five passes of itself, as engines run it that draft five tokens
  megatron-mtp attach models/Qwen3-0.6B my_texts runs/five --unroll 5

  # trained on 2,000 continuations of the corpus' documents by the model itself; what would be run, first
  megatron-mtp attach models/Qwen3-0.6B my_texts runs/own --self-generated 2000 --temperature 0.6 --dry-run

  # a fine-tuned model that has lost its MTP layers: those of the model that it was made from, trained on
  megatron-mtp attach models/my-glm my_texts runs/grafted --donor zai-org/GLM-4.5-Air

The same command continues after an interruption. For another model, corpus or kind of layers, name another RUN.
"""


def main(arguments: list[str], program: str) -> int:
    """Run all steps, or the one of --only; returns 0, or the exit status of the step that failed."""
    args, more = parser(program).parse_known_args(arguments)
    args.more = more
    with sentences(program):
        args.model = local_folder(args.model)
        _set_donor(args)
        if not (args.model / "config.json").is_file():
            raise ValueError(f"{args.model} has no config.json; give the folder of a Hugging Face model.")
        _check(args)
        _check_texts(args)
        _check_run(args)
    if args.dry_run:
        for step, line in STEPS.items():
            if args.only in (None, step):
                command = command_of(step, args)
                print(f"> {line}: {'finished' if command is None else shlex.join([PROGRAM, *command])}")
        return 0
    with sentences(program):
        _keep_settings(args)
    if args.only is not None:
        return _only(args)
    formless = None
    for step, line in STEPS.items():
        if step == AFTER_CORPUS:
            with sentences(program):
                _check_split(args)
        if step == AFTER_START:
            formless = _warned(args)
        if step == AFTER_TRAIN:
            with sentences(program):
                _check_gain(args)
        if (formless and step in OF_THE_FOLDER) or (command := command_of(step, args)) is None:
            continue
        print(f"> {line}", flush=True)
        launcher = _words(args.launch) if step in ON_RANKS and args.launch else [sys.executable]
        try:
            status = subprocess.run([*launcher, "-m", "megatron_mtp", *command]).returncode
        except KeyboardInterrupt:  # the step itself has printed a line
            return INTERRUPTED
        if status:
            return status
    before = "" if args.drafter else f"before: {args.run}/before/metrics.jsonl; "
    print(f"> {before}after: {args.run}/metrics.jsonl")
    print(
        f"> Megatron checkpoint: {args.run}/checkpoint" if formless else f"> Hugging Face folder: {args.run}/exported"
    )
    return 0


def parser(program: str) -> Parser:
    """The parser of the flags that `train` does not have."""
    made = Parser(
        program,
        description="Add MTP layers to a Hugging Face model: attach them, train them on the frozen trunk, measure "
        "acceptance before and after, and export the model. Flags of `megatron-mtp train` may follow.",
        epilog=EXAMPLES,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("model", metavar="MODEL", help="folder of a Hugging Face model with its tokenizer, or a name on the Hub")
    add("corpus", metavar="CORPUS", help="text to train on: a file, a folder or a quoted glob; 2 %% of it is held out")
    run = "folder for all output; default: runs/attached"
    add("run", type=named, nargs="?", default=Path("runs/attached"), metavar="RUN", help=run)
    passes = f"attach one MTP layer, and train it as K passes of itself, as it is run to draft; default: {PASSES}"
    add("--unroll", type=int, metavar="K", help=passes)
    layers = "attach D MTP layers in its place, each for a token of its own"
    add("--mtp-layers", "--depths", type=int, metavar="D", help=layers)
    inits = "how layers begin: made by convert attach-mtp, or those of --donor; default: fitted to the corpus, "
    inits += "last-layer for conversations"
    add("--mtp-init", choices=("fitted", "last-layer", "random", "donor"), help=inits)
    donor = "graft the MTP layers of this folder or checkpoint (convert graft), and train them on"
    add("--donor", type=named, metavar="FOLDER", help=donor)
    drafter = "train a drafter in the place of MTP layers (train --drafter); steps of MTP layers are left out"
    add("--drafter", choices=DRAFTERS, help=drafter)
    begins = (
        f"how it begins: {FITTED.name} fitted to the corpus (convert fit-drafter), or random weights, as others do; "
    )
    begins += "default: fitted, random for conversations"
    add("--drafter-init", choices=("fitted", "random"), help=begins)
    add("--steps", type=int, default=600, metavar="N", help="number of training steps; default: 600")
    add("--sequence", type=int, default=512, metavar="S", help="tokens per sequence; default: 512")
    add("--batch", type=int, default=4, metavar="B", help="sequences per step; default: 4")
    add("--learning-rate", default="5e-4", metavar="LR", help="learning rate after the warm-up; default: 5e-4")
    losses = [name for name in LOSSES.names() if name != "mix"]  # which has weights, and so two flags of train
    add("--loss", choices=losses, help="the layers' --mtp-loss of train; default: kd, a drafter's own of --drafter")
    add("--token-fraction", default="1", metavar="F", help="part of the positions in the layers' loss; default: 1")
    add("--float32", action="store_true", help="train in float32; default: bfloat16")
    add("--evaluated-batches", default="8", metavar="N", help="batches of held-out text; default: 8")
    worse = "export layers that draft worse than before the training; mtp_acceptance.json then says so"
    add("--allow-worse", action="store_true", help=worse)
    add("--save-every", type=int, metavar="N", help="steps between checkpoints; default: only at the end")
    forms = ", ".join(trained_forms())
    family = f"of the exported folder: {forms}; default: glm4_moe, with --donor the model's own"
    add("--family", metavar="NAME", help=family)
    add("--prompt", default="The state of the union is", metavar="TEXT", help="prompt for the drafting at the end")
    own = made.add_argument_group("the model's own texts")
    add = own.add_argument
    add("--self-generated", type=int, metavar="N", help="train on N continuations of the corpus by the model itself")
    server = "let an OpenAI-compatible server that runs MODEL write them (sample --server): vLLM, SGLang, serve"
    add("--texts-by", metavar="URL", help=server)
    add("--temperature", default="0.7", metavar="T", help="of these texts; 0 is greedy; default: 0.7")
    add("--max-new-tokens", default="256", metavar="N", help="of each, at most; default: 256")
    add("--prompt-tokens", default="32", metavar="N", help="tokens of a document that are continued; default: 32")
    add("--anywhere", action="store_true", help="continue pieces from anywhere in documents; default: beginnings")
    add = made.add_argument
    add("--launch", metavar="COMMAND", help="starts the ranks of a training: 'torchrun --nproc-per-node 8'")
    add("--only", choices=STEPS, help="run only this step, in this process; for job schedulers")
    add("--overwrite", action="store_true", help="remove what is in RUN, and begin it anew")
    add("--dry-run", action="store_true", help="print the command of every step that is not finished, and run none")
    return made


def _set_donor(args: Namespace) -> None:
    """Find the donor, and take as many layers as it has. Raises ValueError where flags contradict each other."""
    if args.donor is None and args.mtp_init == "donor":
        raise ValueError("--mtp-init is donor, and there is none; give --donor, a model that has MTP layers.")
    if args.donor is None:
        return
    if args.mtp_init not in (None, "donor"):
        raise ValueError(f"--donor was given with --mtp-init {args.mtp_init}; leave one of them out.")
    args.donor = local_folder(args.donor)
    quieten()

    from megatron_mtp.checkpoint.convert.graft import open_side

    donor = open_side(args.donor)
    donor.check_runs()
    if not (depths := donor.depths):
        raise ValueError(f"--donor is {args.donor}, which has no MTP layers; give a model that has some.")
    if args.mtp_layers not in (None, depths):
        raise ValueError(f"--mtp-layers is {args.mtp_layers}, and {args.donor} has {depths} MTP layers; leave it out.")
    args.mtp_layers = depths if depths > 1 else args.mtp_layers


def _check(args: Namespace) -> None:
    """Raises ValueError for what a later step would refuse, after those before it have taken their time."""
    check_counts(args, "mtp_layers", "unroll", "steps", "sequence", "batch", "save_every")
    if args.unroll is not None and args.mtp_layers not in (None, 1):
        raise ValueError(
            f"--mtp-layers is {args.mtp_layers} with --unroll, which trains one layer; leave one of them out."
        )
    for flag in ("--mtp-layers", "--unroll", "--mtp-init", "--donor"):
        if args.drafter and getattr(args, flag[2:].replace("-", "_")) is not None:
            raise ValueError(
                f"--drafter {args.drafter} was given with {flag}, which is of MTP layers; drop one of them."
            )
    kind = DRAFTERS.get(args.drafter)
    if args.drafter_init == "fitted" and (kind is None or not kind.can_be_fitted or _is_chat(args.corpus)):
        raise ValueError(
            f"--drafter-init is fitted, which {FITTED.called} (--drafter {FITTED.name}) on a text alone can be; give "
            "random."
        )
    if kind is not None and kind.fills_blocks and number_of(args.token_fraction) != 1:
        raise ValueError(
            f"--token-fraction was given with --drafter {args.drafter}, whose blocks are --drafter-blocks; give that."
        )
    check_outside(args.run, args.model)
    if not 0 < number_of(args.learning_rate) < math.inf:
        raise ValueError(f"--learning-rate is {args.learning_rate}; give a number above 0.")
    if not 0 < number_of(args.token_fraction) <= 1:
        raise ValueError(f"--token-fraction is {args.token_fraction}; give a number above 0, and at most 1.")
    if not args.evaluated_batches.isdecimal() or int(args.evaluated_batches) < 1:
        raise ValueError(f"--evaluated-batches is {args.evaluated_batches}; give 1 or more.")
    if args.family is not None and args.family not in trained_forms():
        raise ValueError(f"--family is '{args.family}'; give one of {', '.join(trained_forms())}.")
    if args.launch is not None and shutil.which((_words(args.launch) or [""])[0]) is None:
        raise ValueError(f"--launch is '{args.launch}', which begins with no program of this machine; correct it.")


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"--launch is '{command}', which is no command ({error}); correct it.") from error


def _check_texts(args: Namespace) -> None:
    """Raises ValueError where flags of own texts do not fit."""
    count = args.self_generated
    if count is not None and count < LEAST_TEXTS:
        raise ValueError(f"--self-generated is {count}; give {LEAST_TEXTS} or more: 2 % of the texts are held out.")
    if args.texts_by is not None and count is None:
        raise ValueError("--texts-by was given without --self-generated; give the number of texts with it.")
    if args.mtp_init == "fitted" and _is_chat(args.corpus):
        raise ValueError("--mtp-init is fitted, and there is no text but conversations; give last-layer or random.")


def _check_run(args: Namespace) -> None:
    """Raises ValueError where RUN was begun with other settings, or --overwrite would remove what is none of ours."""
    file = args.run / RECORD
    other = "--dry-run" if args.dry_run else "--only" if args.only else None
    if args.overwrite and other:
        raise ValueError(f"--overwrite was given with {other}, which removes nothing; leave one of them out.")
    if args.overwrite and args.run.exists() and not file.exists():
        raise ValueError(f"{args.run} has no {RECORD}, so attach did not make it; name another RUN.")
    sources = [Path(path) for path in (args.model, args.corpus, args.donor) if path]
    if args.overwrite and any(is_inside(path, args.run) for path in sources):
        raise ValueError(f"--overwrite would remove what is read, which lies in {args.run}; name another RUN.")
    if args.overwrite or not file.exists():
        return
    try:
        begun = {name: json.loads(file.read_text())[name] for name in KEPT}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error!r}); name another RUN, or give --overwrite.") from error
    given = _settings(args)
    others = [_written(name, begun[name]) for name in KEPT if begun[name] != given[name]]
    if others:
        raise ValueError(
            f"{args.run} was begun with {', '.join(others)}; give the same to go on, name another RUN, or give "
            "--overwrite to begin it anew."
        )


def _keep_settings(args: Namespace) -> None:
    """Write them at the first start of a RUN, of which --overwrite removes everything before."""
    if args.overwrite:
        remove(args.run)
    if not (args.run / RECORD).exists():
        args.run.mkdir(parents=True, exist_ok=True)
        with written_beside(args.run / RECORD, shared=True) as beside:
            beside.write_text(json.dumps(_settings(args), indent=1))


def _settings(args: Namespace) -> dict[str, Any]:
    """Those of KEPT as they stand in a file; paths are absolute."""
    paths = {name: os.path.abspath(value) for name in ("model", "corpus", "donor") if (value := getattr(args, name))}
    return {name: getattr(args, name) for name in KEPT} | paths


def _written(name: str, value: Any) -> str:
    flag = name.upper() if name in ("model", "corpus") else flag_of(name)
    return f"no {flag}" if value is None else f"{flag} {value}"


def _check_split(args: Namespace) -> None:
    """Raises ValueError where the corpus has too few documents to hold some out, before anything is fitted to it."""
    prefix, overridden = f"{args.run}/data/corpus", {word.partition("=")[0] for word in args.more}
    is_trained_on = args.self_generated is None and not {"--data-path", "--split"} & overridden
    if is_trained_on and Path(f"{prefix}.idx").exists():
        check_split([prefix], SPLIT)


def _check_gain(args: Namespace) -> None:
    """Raises ValueError where the layers draft worse than those that they began as; else notes both in the record."""
    record = args.run / "checkpoint" / ACCEPTANCE
    begun, trained = _accepted(args.run / "before"), _accepted(args.run)
    if args.drafter or begun is None or trained is None or not record.is_file():  # a new drafter begins from nothing
        return
    error = DEVIATIONS * _error_of(trained, args)
    is_worse = sum(trained) < sum(begun) - error
    if is_worse and not args.allow_worse:
        origin = "those of --donor" if args.donor else "at their start"
        raise ValueError(
            f"the MTP layers draft worse than {origin}: {1 + sum(trained):.3f} tokens a forward on held-out text, and "
            f"{1 + sum(begun):.3f} before the training (error {error:.3f}), so they are not exported; train them in "
            "another RUN with a lower --learning-rate, another --loss or other text, or give --allow-worse."
        )
    start = {"donor": _settings(args)["donor"], EXPECTED_LENGTH: 1 + sum(begun), "error": error, "is worse": is_worse}
    with written_beside(record) as beside:
        beside.write_text(json.dumps(json.loads(record.read_text()) | {"before": start}, indent=2))


def _accepted(folder: Path) -> list[float] | None:
    """Acceptance by position of a folder's last step, by its first evaluation there; None without one.

    Every run evaluates the same batches first. A second evaluation, after the training, goes on to others.
    """
    with suppress(ValueError):
        rows = [row for row in read_rows(folder) if EXPECTED_LENGTH in row]
        first = next((row for row in rows if row["iteration"] == rows[-1]["iteration"]), {})
        places = [f"mtp_{place} acceptance" for place in range(1, 99)]
        return [float(first[name]) for name in places if name in first] or None
    return None


def _error_of(acceptance: list[float], args: Namespace) -> float:
    """Standard error of the sum of the rates over the held-out tokens."""
    tokens = int(args.evaluated_batches) * args.batch * args.sequence
    return math.sqrt(sum(rate * (1 - rate) for rate in acceptance) / tokens)


def _only(args: Namespace) -> int:
    """Run the step of --only in this process; steps of a folder that there can be none of are left out."""
    if args.only == AFTER_TRAIN:
        with sentences(f"{PROGRAM} attach"):
            _check_gain(args)
    if (args.only in OF_THE_FOLDER and _warned(args)) or (command := command_of(args.only, args)) is None:
        return 0
    verb, *arguments = command
    status: int = module_of(verb).main(arguments, f"{PROGRAM} {verb}")
    if args.only == "start" and not status:
        _warned(args)
    return status


def _warned(args: Namespace) -> bool:
    """Return whether the attached model has no Hugging Face form, and print that before the training."""
    start = args.run / "start"
    if args.drafter or not start.is_dir():
        return False

    quieten()

    from megatron_mtp.checkpoint.convert.export_hf import form_of

    try:
        form_of(start, family=_family(args), tokenizer=args.model)
    except ValueError as error:
        print(
            f"> warning: no Hugging Face folder can hold this model with MTP layers ({error}) They are trained and "
            "draft here as a Megatron checkpoint; export and proof are left out.",
            file=sys.stderr,
            flush=True,
        )
        return True
    return False


def command_of(step: str, args: Namespace) -> list[str] | None:
    """A step's verb and arguments, from the flags; None if it is finished, or not needed."""
    run, saved, start = args.run, args.run / "checkpoint", args.run / "start"
    data, chat = run / "data" / "corpus", _is_chat(args.corpus)
    match step:
        case "corpus" if args.self_generated is None or not chat:  # of chats, `sample` takes the prompts
            source = "--chat" if chat else "--input"
            paths = ["--tokenizer", str(args.model), "--output-prefix", str(data)]
            return ["preprocess", source, args.corpus, *paths, *(word for word in args.more if word in OF_CHATS)]
        case "trunk" if not (run / "trunk").is_dir() and args.donor is None:
            lost = ["--trunk-only"] if _has_lost_depths(args.model) else []
            return ["convert", "hf-to-mcore", str(args.model), f"{run}/trunk", *lost, "--resume"]
        case "start" if _fits_drafter(args) and not start.is_dir():
            return _fit(args)
        case "start" | "before" | "verify" if args.drafter:
            return None
        case "start" if not start.is_dir() and args.donor is not None:
            return ["convert", "graft", str(args.donor), str(args.model), str(start), "--resume"]
        case "start" if not start.is_dir():
            init = args.mtp_init or ("last-layer" if chat else "fitted")
            flags = ["--mtp-num-layers", str(args.mtp_layers or 1), "--mtp-init", init]
            flags += ["--data-path", str(data)] if init == "fitted" else []
            return ["convert", "attach-mtp", f"{run}/trunk", str(start), *flags, "--resume"]
        case "sample" if args.self_generated is not None:
            return _sample(args)
        case "before":
            file = run / "before" / "metrics.jsonl"
            if file.exists() and file.stat().st_size:  # a killed run may leave it empty
                return None
            flags = ["--skip-train", "--eval-interval", "1", "--load", str(start), "--finetune"]
            return ["train", *_training(args), *flags, "--mtp-metrics-dir", f"{run}/before"]
        case "train":
            begin = f"{run}/trunk" if args.drafter and not _fits_drafter(args) else str(start)
            load = ["--load", str(saved)] if (saved / TRACKER).exists() else ["--load", begin, "--finetune"]
            intervals = f"--save-interval {args.save_every or args.steps} --eval-interval {args.steps}".split()
            return ["train", *_training(args), *load, *intervals, "--save", str(saved), "--mtp-metrics-dir", str(run)]
        case "export":
            target, written = run / "exported", run / "exported" / "config.json"
            if written.exists() and written.stat().st_mtime >= (saved / TRACKER).stat().st_mtime:
                return None
            if target.is_dir() and not args.dry_run:
                shutil.rmtree(target)
            if args.drafter:
                return ["convert", "drafter-to-hf", str(saved), str(target)]
            family = [] if _family(args) is None else ["--family", str(_family(args))]
            flags = [*family, "--tokenizer", str(args.model), "--resume"]
            return ["convert", "mcore-to-hf", str(saved), str(target), *flags]
        case "verify":  # it prints which logits are not compared, and why
            return ["convert", "verify", f"{run}/exported", str(saved), "--allow-uncompared"]
        case "draft":
            repeated = {"method": "mtp_eagle", "num_speculative_tokens": _passes(args)}
            config = json.dumps(repeated if _passes(args) else {"method": args.drafter or "mtp"})
            flags = ["--speculative-config", config, "--compare", "--prompt", args.prompt, "--max-new-tokens", "96"]
            return ["generate", "--load", str(saved), *flags]
    return None


def _has_lost_depths(model: Path) -> bool:
    """True if the model's config counts MTP layers that are not there; new ones are trained in their place."""
    quieten()

    from megatron_mtp.checkpoint.convert.plan import has_lost_depths

    with suppress(ValueError):  # `convert` says what is wrong
        return has_lost_depths(model)
    return False


def _sample(args: Namespace) -> list[str]:
    """The verb that makes the model's own texts, from prompts of the corpus."""
    flags = ["--tokenizer", str(args.model)]
    if args.texts_by:
        flags += ["--server", args.texts_by]
    else:
        flags += ["--load", f"{args.run}/{'start' if args.donor else 'trunk'}"]
        flags += ["--dtype", "float32" if args.float32 and "--bf16" not in args.more else "bfloat16"]
    flags += ["--chat", args.corpus] if _is_chat(args.corpus) else ["--data-path", f"{args.run}/data/corpus"]
    flags += ["--anywhere"] if args.anywhere else []
    flags += ["--texts", str(args.self_generated), "--temperature", args.temperature]
    flags += ["--max-new-tokens", args.max_new_tokens, "--prompt-tokens", args.prompt_tokens]
    return ["sample", *flags, "--output-prefix", _trained_on(args)]


def _fits_drafter(args: Namespace) -> bool:
    init = args.drafter_init or ("random" if _is_chat(args.corpus) else "fitted")
    return args.drafter is not None and DRAFTERS[args.drafter].can_be_fitted and init == "fitted"


def _fit(args: Namespace) -> list[str]:
    shared = _words_of(args.more, "--drafter-layers", "--mtp-draft-vocab-size", "--mtp-draft-vocab-file")
    folders = [f"{args.run}/trunk", f"{args.run}/start"]
    return ["convert", "fit-drafter", *folders, "--data-path", f"{args.run}/data/corpus", *shared, "--resume"]


def _words_of(more: list[str], *flags: str) -> list[str]:
    """These flags among others, with their values."""
    named = [next((word for word in reversed(more[: at + 1]) if word.startswith("--")), "") for at in range(len(more))]
    return [word for word, flag in zip(more, named, strict=True) if flag in flags]


def _trained_on(args: Namespace) -> str:
    return f"{args.run}/data/{'corpus' if args.self_generated is None else 'own'}"


def _is_chat(corpus: str) -> bool:
    """True if it is a file of conversations."""
    if not corpus.endswith(".jsonl") or not Path(corpus).is_file():
        return False
    with open(corpus, encoding="utf-8", errors="replace") as file:
        line = next((line for line in file if line.strip()), "")
    try:
        return is_chat(json.loads(line))
    except (ValueError, TypeError):
        return False


def _training(args: Namespace) -> list[str]:
    """The flags of every training and evaluation; flags of the command line come later and override them."""
    passes = _passes(args)
    repeated = "" if passes is None else f"--mtp-use-repeated-layer --mtp-unroll {passes} "
    trained = f"--mtp-num-layers {args.mtp_layers or 1} {repeated}--mtp-train-only --mtp-loss-scaling-factor 1"
    if args.drafter:
        trained = f"--drafter {args.drafter}"
    loss = args.loss or (None if args.drafter else "kd")
    flags = (
        f"--use-checkpoint-args {trained} {f'--mtp-loss {loss} ' if loss else ''}"
        f"--mtp-token-fraction {args.token_fraction} "
        f"--seq-length {args.sequence} --micro-batch-size {args.batch} --global-batch-size {args.batch} "
        f"--train-iters {args.steps} --lr {args.learning_rate} --min-lr 1e-5 --lr-decay-style cosine "
        f"--lr-warmup-iters {args.steps // 20 + 1} "
        "--clip-grad 1.0 --weight-decay 0.01 --adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0 "
        f"--split {SPLIT} --eval-iters {args.evaluated_batches} --no-create-attention-mask-in-dataloader "
        "--tokenizer-type HuggingFaceTokenizer"
    )
    paths = ["--data-path", _trained_on(args), "--tokenizer-model", str(args.model)]
    more = [word for word in args.more if word not in OF_CHATS]
    return [*flags.split(), *paths, *([] if args.float32 else ["--bf16"]), *more]


def _passes(args: Namespace) -> int | None:
    """Passes of one MTP layer; None for layers that have one pass each, and for a drafter."""
    return args.unroll or (PASSES if args.mtp_layers is None and args.drafter is None else None)


def _family(args: Namespace) -> str | None:
    """The family of the exported folder; None for the model's own, or the one that fits."""
    return args.family or (None if args.donor is not None else "glm4_moe")
