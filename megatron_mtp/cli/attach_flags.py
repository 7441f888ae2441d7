"""The flags of `megatron-mtp attach`, and what is refused of them before the first step takes its time."""

import math
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

from megatron_mtp.checkpoint.families import trained_forms
from megatron_mtp.checkpoint.hf.hub import local_folder
from megatron_mtp.cli.attach_probe import RATE, candidates
from megatron_mtp.cli.attach_settings import SET_BY_ATTACH, AttachSettings, names_of
from megatron_mtp.cli.attach_steps import STEPS
from megatron_mtp.cli.attach_training import PASSES, is_chat_file
from megatron_mtp.common.errors import Parser, check_counts, did_you_mean, named
from megatron_mtp.common.files import check_outside
from megatron_mtp.losses import LOSSES
from megatron_mtp.megatron.runtime import quieten
from megatron_mtp.spec.config import flag_of, loss_parts, number_of
from megatron_mtp.spec.kinds import DRAFTERS, fitted_kind

LEAST_TEXTS = 25

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


def given_settings(arguments: list[str], program: str) -> AttachSettings:
    """The settings that a command line gives, unchecked."""
    given, more = parser(program).parse_known_args(arguments)
    given.model = local_folder(given.model)
    return AttachSettings(**vars(given), more=more)


def checked_settings(arguments: list[str], program: str) -> AttachSettings:
    """The settings of a command line whose steps can run. Raises ValueError where one would refuse them."""
    settings = _with_donor(given_settings(arguments, program))
    if not (settings.model / "config.json").is_file():
        raise ValueError(f"{settings.model} has no config.json; give the folder of a Hugging Face model.")
    _check(settings)
    _check_texts(settings)
    return settings


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


def check_flags_of_train(settings: AttachSettings, program: str) -> None:
    """Refuse flags that `train` would refuse, or that attach sets itself. Raises ValueError."""
    for word in names_of(settings.more):
        if word in SET_BY_ATTACH:
            raise ValueError(f"{word} is set by attach; give {SET_BY_ATTACH[word]} in its place.")
    if not settings.more:
        return
    quieten()

    from megatron_mtp.cli.train import full_parser

    of_train = full_parser(program)
    _, unknown = of_train.parse_known_args(settings.more)
    if unknown:
        wrong = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        own, all_flags = parser(program)._option_string_actions, of_train._option_string_actions
        advice = did_you_mean(wrong, own) or did_you_mean(wrong, all_flags)
        raise ValueError(f"neither attach nor train has {' '.join(unknown)}{advice or '; see --help of both.'}")


def _with_donor(settings: AttachSettings) -> AttachSettings:
    """Find the donor, and take as many layers as it has. Raises ValueError where flags contradict each other."""
    if settings.donor is None and settings.mtp_init == "donor":
        raise ValueError("--mtp-init donor needs --donor MODEL, a model with MTP layers.")
    if settings.donor is None:
        return settings
    if settings.mtp_init not in (None, "donor"):
        raise ValueError(f"--donor was given with --mtp-init {settings.mtp_init}; leave one of them out.")
    folder = local_folder(settings.donor)
    quieten()

    from megatron_mtp.checkpoint.convert.graft import open_side

    donor = open_side(folder)
    donor.check_runs()
    if not (depths := donor.depths):
        raise ValueError(f"--donor is {folder}, which has no MTP layers; give a model that has some.")
    if settings.mtp_layers not in (None, depths):
        raise ValueError(f"--mtp-layers is {settings.mtp_layers}, and {folder} has {depths} MTP layers; leave it out.")
    return replace(settings, donor=folder, mtp_layers=depths if depths > 1 else settings.mtp_layers)


def _check(settings: AttachSettings) -> None:
    """Raises ValueError for what a later step would refuse, after those before it have taken their time."""
    check_counts(settings, "mtp_layers", "unroll", "steps", "sequence", "batch", "save_every")
    if settings.unroll is not None and settings.mtp_layers not in (None, 1):
        raise ValueError(
            f"--mtp-layers is {settings.mtp_layers} with --unroll, which trains one layer; leave one of them out."
        )
    for flag in ("--mtp-layers", "--unroll", "--mtp-init", "--donor"):
        if settings.drafter and getattr(settings, flag[2:].replace("-", "_")) is not None:
            raise ValueError(
                f"--drafter {settings.drafter} was given with {flag}, which is of MTP layers; drop one of them."
            )
    kind = None if settings.drafter is None else DRAFTERS[settings.drafter]
    if settings.drafter_init == "fitted" and (kind is None or not kind.can_be_fitted or is_chat_file(settings.corpus)):
        raise ValueError(
            f"--drafter-init is fitted, which {fitted_kind().called} (--drafter {fitted_kind().name}) on a text alone "
            "can be; give random."
        )
    if kind is not None and kind.fills_blocks and number_of(settings.token_fraction) != 1:
        raise ValueError(
            f"--token-fraction was given with --drafter {settings.drafter}, whose blocks are --drafter-blocks; give "
            "that."
        )
    check_outside(settings.run, settings.model)
    if settings.learning_rate is not None and not 0 < number_of(settings.learning_rate) < math.inf:
        raise ValueError(f"--learning-rate is {settings.learning_rate}; give a number above 0.")
    if settings.loss is not None and not {name for name, _ in loss_parts(settings.loss, "--loss")} <= {*_losses()}:
        raise ValueError(f"--loss is '{settings.loss}'; choose among {', '.join(_losses())}.")
    if not 0 < number_of(settings.token_fraction) <= 1:
        raise ValueError(f"--token-fraction is {settings.token_fraction}; give a number above 0, and at most 1.")
    for name in ("evaluated_batches", "patience"):
        if not (value := getattr(settings, name)).isdecimal() or int(value) < 1:
            raise ValueError(f"{flag_of(name)} is {value}; give 1 or more.")
    last = len(candidates(settings)) - 1
    if settings.trial is not None and (settings.only != "probe" or not 0 <= settings.trial <= last):
        raise ValueError(f"--trial is {settings.trial}; give --only probe with it, and a number from 0 to {last}.")
    if settings.load is not None:
        from megatron_mtp.megatron.checkpoint.iterations import is_checkpoint

        if not is_checkpoint(settings.load):
            raise ValueError(f"--load is {settings.load}, which is no Megatron checkpoint; give one of the trunk.")
    for flag in ("donor", "mtp_init") if settings.load is not None else ():
        if getattr(settings, flag) not in (None, "last-layer", "random"):
            raise ValueError(
                f"{flag_of(flag)} was given with --load, whose trunk no machine holds; leave it out, or let convert "
                "make a checkpoint with MTP layers."
            )
    if settings.family is not None and settings.family not in trained_forms():
        raise ValueError(f"--family is '{settings.family}'; give one of {', '.join(trained_forms())}.")
    if settings.launch is not None and shutil.which((words_of_launch(settings.launch) or [""])[0]) is None:
        raise ValueError(f"--launch is '{settings.launch}', which begins with no program of this machine; correct it.")


def _losses() -> list[str]:
    """All but mix, whose weights are a flag of train more."""
    return [name for name in LOSSES.names() if name != "mix"]


def words_of_launch(command: str) -> list[str]:
    """The words of --launch. Raises ValueError where it is no command."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"--launch is '{command}', which is no command ({error}); correct it.") from error


def _check_texts(settings: AttachSettings) -> None:
    """Raises ValueError where flags of own texts do not fit."""
    count = settings.self_generated
    if count is not None and count < LEAST_TEXTS:
        raise ValueError(f"--self-generated is {count}; give {LEAST_TEXTS} or more: 2 % of the samples are held out.")
    if settings.texts_by is not None and count is None:
        raise ValueError("--texts-by was given without --self-generated; give the number of samples with it.")
    if settings.mtp_init == "fitted" and is_chat_file(settings.corpus):
        raise ValueError("--mtp-init is fitted, and there is no text but conversations; give last-layer or random.")
