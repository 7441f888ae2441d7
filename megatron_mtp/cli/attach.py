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
from pathlib import Path
from typing import Any

from megatron_mtp.checkpoint.families import trained_forms
from megatron_mtp.checkpoint.hf.hub import local_folder
from megatron_mtp.cli.attach_guard import check_gain
from megatron_mtp.cli.attach_probe import RATE, candidates, keep_table, left_trial
from megatron_mtp.cli.attach_steps import (
    AFTER_CORPUS,
    AFTER_START,
    AFTER_TRAIN,
    OF_THE_FOLDER,
    ON_RANKS,
    STEPS,
    command_of,
    family_of,
)
from megatron_mtp.cli.attach_training import PASSES, SPLIT, is_chat_file
from megatron_mtp.cli.verbs import PROGRAM, module_of
from megatron_mtp.common.errors import INTERRUPTED, Parser, check_counts, did_you_mean, named, sentences
from megatron_mtp.common.files import check_outside, is_inside, remove, written_beside
from megatron_mtp.data.checks import check_split
from megatron_mtp.losses import LOSSES
from megatron_mtp.megatron.runtime import quieten
from megatron_mtp.spec.config import flag_of, loss_parts, number_of
from megatron_mtp.spec.kinds import DRAFTERS, fitted_kind

RECORD = "attach.json"
"""In RUN: the settings of its first start, on which finished steps depend."""
KEPT = "model corpus load mtp_layers unroll mtp_init donor drafter drafter_init loss self_generated".split()
"""Names of these settings."""
LEAST_TEXTS = 25
SET_BY_ATTACH = {
    "--train-iters": "--steps",
    "--train-samples": "--steps and --batch",
    "--mtp-num-layers": "--mtp-layers",
    "--mtp-unroll": "--unroll",
    "--save": "RUN, the third argument,",
}
"""Flags of `train` on which other steps depend, and the flag of attach for each."""

EXAMPLES = """examples:
  # one MTP layer that can draft any number of tokens, 600 steps; all output is in runs/attached
  megatron-mtp attach models/Qwen3-0.6B my_texts

  # three layers with the loss tv on the 8 GPUs of this machine; --micro-batch-size is a flag of train
  megatron-mtp attach models/Qwen3-0.6B my_texts runs/three --mtp-layers 3 --loss tv \\
      --launch 'torchrun --nproc-per-node 8' --batch 64 --micro-batch-size 8

  # the MTP layer unrolled five times in training, for engines that draft five tokens with it
  megatron-mtp attach models/Qwen3-0.6B my_texts runs/five --unroll 5

  # trained on 2,000 continuations that the model generates; --dry-run shows the commands first
  megatron-mtp attach models/Qwen3-0.6B my_texts runs/own --self-generated 2000 --temperature 0.6 --dry-run

  # a fine-tuned model that lost its MTP layers: start from those of its base model
  megatron-mtp attach models/my-glm my_texts runs/grafted --donor zai-org/GLM-4.5-Air

The same command continues after an interruption. Use another RUN for another model, corpus or kind of layers.
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
        _check_flags_of_train(args, program)
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
    for step in STEPS:
        if step == AFTER_CORPUS:
            with sentences(program):
                _check_split(args)
        if step == AFTER_START:
            formless = _warned(args)
        if step == AFTER_TRAIN:
            with sentences(program):
                check_gain(args)
        if formless and step in OF_THE_FOLDER:
            continue
        if status := (_probe(args) if step == "probe" else _step(step, args)):
            return status
    before = "" if args.drafter else f"before: {args.run}/before/metrics.jsonl; "
    print(f"> {before}after: {args.run}/metrics.jsonl")
    print(
        f"> Megatron checkpoint: {args.run}/checkpoint" if formless else f"> Hugging Face folder: {args.run}/exported"
    )
    return 0


def _step(step: str, args: Namespace) -> int:
    """Run a step in a process of its own, unless it is finished; returns its exit status."""
    with sentences(f"{PROGRAM} attach"):
        command = command_of(step, args)
    if command is None:
        return 0
    print(f"> {STEPS[step]}", flush=True)
    launcher = _words(args.launch) if step in ON_RANKS and args.launch else [sys.executable]
    try:
        return subprocess.run([*launcher, "-m", "megatron_mtp", *command]).returncode
    except KeyboardInterrupt:  # the step itself has printed a line
        return INTERRUPTED


def _probe(args: Namespace) -> int:
    """Run every trial of the probe that is left; one that fails is the worst. Returns the exit status."""
    while (trial := left_trial(args)) is not None:
        if (status := _step("probe", args)) == INTERRUPTED:
            return status
        if status or trial.length is None:
            trial.fail()
    keep_table(args)
    return 0


def parser(program: str) -> Parser:
    """The parser of the flags that `train` does not have."""
    made = Parser(
        program,
        description="Add MTP layers or a drafter to a Hugging Face model: train them on the frozen trunk, measure "
        "acceptance before and after, and export the model. All flags of `megatron-mtp train` are accepted as well.",
        epilog=EXAMPLES,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("model", metavar="MODEL", help="Hugging Face model with its tokenizer: a folder or a name on the Hub")
    add("corpus", metavar="CORPUS", help="training text: a file, a folder or a quoted glob; 2 %% is held out")
    run = "folder for all output; default: runs/attached"
    add("run", type=named, nargs="?", default=Path("runs/attached"), metavar="RUN", help=run)
    trunk = "Megatron checkpoint of a trunk too large for one machine; MODEL then needs only config and tokenizer"
    add("--load", type=named, metavar="CHECKPOINT", help=trunk)
    passes = f"how many times the one MTP layer is unrolled in training; default: {PASSES}"
    add("--unroll", type=int, metavar="K", help=passes)
    layers = "attach D MTP layers instead, one for each draft token"
    add("--mtp-layers", "--depths", type=int, metavar="D", help=layers)
    inits = (
        "initialization of the MTP layers (convert attach-mtp), or donor for those of --donor; default: fitted to the "
    )
    inits += "corpus; for chats: last-layer"
    add("--mtp-init", choices=("fitted", "last-layer", "random", "donor"), help=inits)
    donor = "start from the MTP layers of this folder or checkpoint (convert graft)"
    add("--donor", type=named, metavar="FOLDER", help=donor)
    drafter = "train a drafter instead of MTP layers (train --drafter)"
    add("--drafter", choices=DRAFTERS, help=drafter)
    begins = (
        f"initialization of the drafter: {fitted_kind().name} fitted to the corpus (convert fit-drafter), or random "
        "weights; default: fitted; for chats or other drafters: random"
    )
    add("--drafter-init", choices=("fitted", "random"), help=begins)
    add("--steps", type=int, default=600, metavar="N", help="number of training steps; default: 600")
    add("--sequence", type=int, default=512, metavar="S", help="tokens per sequence; default: 512")
    add("--batch", type=int, default=4, metavar="B", help="sequences per step; default: 4")
    rate = f"peak learning rate; default: {RATE}, or the choice of the probe in a long training"
    add("--learning-rate", metavar="LR", help=rate)
    losses = f"--mtp-loss of train: {','.join(_losses())}, or a schedule such as lk:0.7,e2e_tv:0.3; "
    losses += "default: kd, or the choice of the probe; for drafters: their own"
    add("--loss", metavar="NAME", help=losses)
    add("--token-fraction", default="1", metavar="F", help="fraction of positions in the MTP loss; default: 1")
    add("--float32", action="store_true", help="train in float32; default: bfloat16")
    add("--evaluated-batches", default="8", metavar="N", help="batches of held-out text; default: 8")
    patience = "stop after N evaluations without improvement; the best checkpoint is always kept; default: 3"
    add("--patience", default="3", metavar="N", help=patience)
    worse = "export layers even if they draft worse than before the training; mtp_acceptance.json records it"
    add("--allow-worse", action="store_true", help=worse)
    add("--save-every", type=int, metavar="N", help="steps between checkpoints; default: only at the end")
    forms = ", ".join(trained_forms())
    family = f"model_type of the exported folder: {forms}; default: glm4_moe; with --donor: the model's own"
    add("--family", metavar="NAME", help=family)
    prompt = "prompt to draft for at the end; default: held-out text"
    add("--prompt", metavar="TEXT", help=prompt)
    own = made.add_argument_group("self-generated data")
    add = own.add_argument
    add(
        "--self-generated",
        type=int,
        metavar="N",
        help="train on N continuations of the corpus that the model generates",
    )
    server = "generate them with an OpenAI-compatible server that runs MODEL (sample --server): vLLM, SGLang, serve"
    add("--texts-by", metavar="URL", help=server)
    add("--temperature", default="0.7", metavar="T", help="sampling temperature; 0: greedy; default: 0.7")
    add("--max-new-tokens", default="256", metavar="N", help="tokens to generate per prompt, at most; default: 256")
    add("--prompt-tokens", default="32", metavar="N", help="tokens per prompt from a document; default: 32")
    add("--anywhere", action="store_true", help="take prompts from anywhere in a document; default: its beginning")
    add = made.add_argument
    add("--launch", metavar="COMMAND", help="launcher for steps on several ranks: 'torchrun --nproc-per-node 8'")
    add("--only", choices=STEPS, help="run only this step, in this process, for job schedulers")
    add(
        "--trial",
        type=int,
        metavar="I",
        help="with --only probe: run only this candidate, counted from 0, for array jobs",
    )
    add("--overwrite", action="store_true", help="delete the content of RUN and start over")
    add("--dry-run", action="store_true", help="print the commands of all unfinished steps, and run nothing")
    return made


def _check_flags_of_train(args: Namespace, program: str) -> None:
    """Refuse flags that `train` would refuse, or that attach sets itself. Raises ValueError."""
    words = [word.partition("=")[0].replace("_", "-") for word in args.more if word.startswith("--")]
    for word in words:
        if word in SET_BY_ATTACH:
            raise ValueError(f"{word} is set by attach; give {SET_BY_ATTACH[word]} in its place.")
    if not args.more:
        return
    quieten()

    from megatron_mtp.cli.train import full_parser

    of_train = full_parser(program)
    _, unknown = of_train.parse_known_args(args.more)
    if unknown:
        wrong = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        own, all_flags = parser(program)._option_string_actions, of_train._option_string_actions
        advice = did_you_mean(wrong, own) or did_you_mean(wrong, all_flags)
        raise ValueError(f"neither attach nor train has {' '.join(unknown)}{advice or '; see --help of both.'}")


def _set_donor(args: Namespace) -> None:
    """Find the donor, and take as many layers as it has. Raises ValueError where flags contradict each other."""
    if args.donor is None and args.mtp_init == "donor":
        raise ValueError("--mtp-init donor needs --donor MODEL, a model with MTP layers.")
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
    if args.drafter_init == "fitted" and (kind is None or not kind.can_be_fitted or is_chat_file(args.corpus)):
        raise ValueError(
            f"--drafter-init is fitted, which {fitted_kind().called} (--drafter {fitted_kind().name}) on a text alone "
            "can be; give random."
        )
    if kind is not None and kind.fills_blocks and number_of(args.token_fraction) != 1:
        raise ValueError(
            f"--token-fraction was given with --drafter {args.drafter}, whose blocks are --drafter-blocks; give that."
        )
    check_outside(args.run, args.model)
    if args.learning_rate is not None and not 0 < number_of(args.learning_rate) < math.inf:
        raise ValueError(f"--learning-rate is {args.learning_rate}; give a number above 0.")
    if args.loss is not None and not {name for name, _ in loss_parts(args.loss, "--loss")} <= {*_losses()}:
        raise ValueError(f"--loss is '{args.loss}'; choose among {', '.join(_losses())}.")
    if not 0 < number_of(args.token_fraction) <= 1:
        raise ValueError(f"--token-fraction is {args.token_fraction}; give a number above 0, and at most 1.")
    for name in ("evaluated_batches", "patience"):
        if not (value := getattr(args, name)).isdecimal() or int(value) < 1:
            raise ValueError(f"{flag_of(name)} is {value}; give 1 or more.")
    if args.trial is not None and (args.only != "probe" or not 0 <= args.trial < len(candidates(args))):
        raise ValueError(
            f"--trial is {args.trial}; give --only probe with it, and a number from 0 to {len(candidates(args)) - 1}."
        )
    if args.load is not None:
        from megatron_mtp.megatron.checkpoint.iterations import is_checkpoint

        if not is_checkpoint(args.load):
            raise ValueError(f"--load is {args.load}, which is no Megatron checkpoint; give one of the trunk.")
    for flag in ("donor", "mtp_init") if args.load is not None else ():
        if getattr(args, flag) not in (None, "last-layer", "random"):
            raise ValueError(
                f"{flag_of(flag)} was given with --load, whose trunk no machine holds; leave it out, or let convert "
                "make a checkpoint with MTP layers."
            )
    if args.family is not None and args.family not in trained_forms():
        raise ValueError(f"--family is '{args.family}'; give one of {', '.join(trained_forms())}.")
    if args.launch is not None and shutil.which((_words(args.launch) or [""])[0]) is None:
        raise ValueError(f"--launch is '{args.launch}', which begins with no program of this machine; correct it.")


def _losses() -> list[str]:
    """All but mix, whose weights are a flag of train more."""
    return [name for name in LOSSES.names() if name != "mix"]


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"--launch is '{command}', which is no command ({error}); correct it.") from error


def _check_texts(args: Namespace) -> None:
    """Raises ValueError where flags of own texts do not fit."""
    count = args.self_generated
    if count is not None and count < LEAST_TEXTS:
        raise ValueError(f"--self-generated is {count}; give {LEAST_TEXTS} or more: 2 % of the samples are held out.")
    if args.texts_by is not None and count is None:
        raise ValueError("--texts-by was given without --self-generated; give the number of samples with it.")
    if args.mtp_init == "fitted" and is_chat_file(args.corpus):
        raise ValueError("--mtp-init is fitted, and there is no text but conversations; give last-layer or random.")


def _check_run(args: Namespace) -> None:
    """Raises ValueError where RUN was begun with other settings, or --overwrite would remove what is none of ours."""
    file = args.run / RECORD
    other = "--dry-run" if args.dry_run else "--only" if args.only else None
    if args.overwrite and other:
        raise ValueError(f"--overwrite was given with {other}, which removes nothing; leave one of them out.")
    if args.overwrite and args.run.exists() and not file.exists():
        raise ValueError(f"{args.run} has no {RECORD}, so attach did not make it; name another RUN.")
    sources = [Path(path) for path in (args.model, args.corpus, args.load, args.donor) if path]
    if args.overwrite and any(is_inside(path, args.run) for path in sources):
        raise ValueError(f"--overwrite would remove what is read, which lies in {args.run}; name another RUN.")
    if args.overwrite or not file.exists():
        return
    try:
        kept = {"load": None, **json.loads(file.read_text())}  # older releases had no --load
        begun = {name: kept[name] for name in KEPT}
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
    """The settings of `KEPT` as a run keeps them in its file, with absolute paths."""
    paths = {
        name: os.path.abspath(value) for name in ("model", "corpus", "load", "donor") if (value := getattr(args, name))
    }
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


def _only(args: Namespace) -> int:
    """Run the step of --only in this process; steps of a folder that there can be none of are left out.

    Of the probe it is one trial, and the table once all are finished.
    """
    if args.only == AFTER_TRAIN:
        with sentences(f"{PROGRAM} attach"):
            check_gain(args)
    if (args.only in OF_THE_FOLDER and _warned(args)) or (command := command_of(args.only, args)) is None:
        if args.only == "probe" and args.trial is None:
            keep_table(args)
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
        form_of(start, family=family_of(args), tokenizer=args.model)
    except ValueError as error:
        print(
            f"> warning: no Hugging Face folder can hold this model with MTP layers ({error}) They are trained and "
            "draft here as a Megatron checkpoint; export and proof are left out.",
            file=sys.stderr,
            flush=True,
        )
        return True
    return False
