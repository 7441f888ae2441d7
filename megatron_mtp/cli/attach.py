"""`megatron-mtp attach MODEL CORPUS RUN`: train MTP layers for a Hugging Face model on its frozen trunk.

Every step is a `megatron-mtp` command in its own process. Finished steps are not repeated, so the same command
continues after an interruption.
"""

import shlex
import subprocess
import sys
from pathlib import Path

from megatron_mtp.checkpoint.families import trained_forms
from megatron_mtp.checkpoint.hf.hub import local_folder
from megatron_mtp.cli.attach_checks import check_flags_of_train, checked
from megatron_mtp.cli.attach_probe import RATE, keep_table, left_trial
from megatron_mtp.cli.attach_recipe import recipe_words
from megatron_mtp.cli.attach_record import check_run, keep_settings
from megatron_mtp.cli.attach_settings import AttachSettings, offered_losses, words_of_launch
from megatron_mtp.cli.attach_steps import STEPS, Step, family_of
from megatron_mtp.cli.attach_training import PASSES
from megatron_mtp.cli.verbs import PROGRAM, module_of
from megatron_mtp.common.command import named
from megatron_mtp.common.errors import INTERRUPTED, Parser, sentences
from megatron_mtp.megatron.runtime import quieten
from megatron_mtp.spec.kinds import DRAFTERS, fitted_kind
from megatron_mtp.training.recipe import names

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
    """Run all steps, or the one of --only. Return 0, or the exit status of the step that failed."""
    with sentences(program):
        settings = checked(given_settings(arguments, program))
        check_run(settings)
        check_flags_of_train(settings, parser(program))
    if settings.dry_run:
        for step in STEPS.values():
            if settings.only in (None, step.name):
                command = step.left_command(settings)
                print(f"> {step.makes}: {'finished' if command is None else shlex.join([PROGRAM, *command])}")
        return 0
    with sentences(program):
        keep_settings(settings)
    if settings.only is not None:
        return _only(STEPS[settings.only], settings)
    formless = False
    for step in STEPS.values():
        with sentences(program):
            step.check(settings)
        if formless and step.of_the_folder:
            continue
        if status := (_probe(settings) if step.name == "probe" else _run(step, settings)):
            return status
        if step.name == "start":
            formless = _warned(settings)
    before = "" if settings.drafter else f"before: {settings.run}/before/metrics.jsonl; "
    print(f"> {before}after: {settings.run}/metrics.jsonl")
    print(
        f"> Megatron checkpoint: {settings.run}/checkpoint"
        if formless
        else f"> Hugging Face folder: {settings.run}/exported"
    )
    return 0


def given_settings(arguments: list[str], program: str) -> AttachSettings:
    """Parse the settings of a command line without checking them."""
    own = parser(program)
    given, more = own.parse_known_args(arguments)
    if given.recipe is not None:
        given, more = own.parse_known_args([*recipe_words(given.recipe, own, arguments), *arguments])
    given.model = local_folder(given.model)
    return AttachSettings(**vars(given), more=more)


def parser(program: str) -> Parser:
    """Create the parser of the flags that `train` does not have."""
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
    recipe = "settings that others train by: " + ", ".join(names()) + " (megatron-mtp recipes); other flags win"
    add("--recipe", metavar="NAME", help=recipe)
    add("--steps", type=int, default=600, metavar="N", help="number of training steps; default: 600")
    add("--sequence", type=int, default=512, metavar="S", help="tokens per sequence; default: 512")
    add("--batch", type=int, default=4, metavar="B", help="sequences per step; default: 4")
    rate = f"peak learning rate; default: {RATE}, or the choice of the probe in a long training"
    add("--learning-rate", metavar="LR", help=rate)
    losses = f"--mtp-loss of train: {','.join(offered_losses())}, or a schedule such as lk:0.7,e2e_tv:0.3; "
    losses += "default: kd, or the choice of the probe; for drafters: their own"
    add("--loss", metavar="NAME", help=losses)
    add("--token-fraction", default="1", metavar="F", help="fraction of positions in the MTP loss; default: 1")
    add(
        "--float32",
        action="store_true",
        help="train in float32; default: bfloat16, which is slow on a CPU without bfloat16 products",
    )
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


def _run(step: Step, settings: AttachSettings) -> int:
    """Run a step in its own process, unless it is finished. Return its exit status."""
    with sentences(f"{PROGRAM} attach"):
        command = step.left_command(settings)
        if command is None:
            return 0
        step.prepare(settings)
    print(f"> {step.makes}", flush=True)
    launcher = words_of_launch(settings.launch) if step.on_ranks and settings.launch else [sys.executable]
    try:
        return subprocess.run([*launcher, "-m", "megatron_mtp", *command]).returncode
    except KeyboardInterrupt:  # the step has already printed a message
        return INTERRUPTED


def _probe(settings: AttachSettings) -> int:
    """Run every remaining trial of the probe; a trial that fails ranks last. Return the exit status."""
    while (trial := left_trial(settings)) is not None:
        if (status := _run(STEPS["probe"], settings)) == INTERRUPTED:
            return status
        if status or trial.length is None:
            trial.fail()
    keep_table(settings)
    return 0


def _only(step: Step, settings: AttachSettings) -> int:
    """Run the step of --only in this process; skip steps that do not apply to the folder.

    Of the probe it is one trial, and the table once all are finished.
    """
    if step.name == "export":
        with sentences(f"{PROGRAM} attach"):
            step.check(settings)
    if (step.of_the_folder and _warned(settings)) or (command := step.left_command(settings)) is None:
        if step.name == "probe" and settings.trial is None:
            keep_table(settings)
        return 0
    step.prepare(settings)
    verb, *arguments = command
    status: int = module_of(verb).main(arguments, f"{PROGRAM} {verb}")
    if step.name == "start" and not status:
        _warned(settings)
    return status


def _warned(settings: AttachSettings) -> bool:
    """Return whether the attached model has no Hugging Face form, and print a warning before the training."""
    start = settings.run / "start"
    if settings.drafter or not start.is_dir():
        return False

    quieten()

    from megatron_mtp.checkpoint.convert.hf_form import form_of

    try:
        form_of(start, family=family_of(settings), tokenizer=settings.model)
    except ValueError as error:
        print(
            f"> warning: no Hugging Face folder can hold this model with MTP layers ({error}) They are trained and "
            "draft here as a Megatron checkpoint; export and verification are skipped.",
            file=sys.stderr,
            flush=True,
        )
        return True
    return False
