"""`megatron-mtp attach MODEL CORPUS RUN`: depths for a Hugging Face model, trained on its frozen trunk.

Every step is a verb of this command line, in a process of its own. A finished step is not repeated, so the same command
continues after an interruption.
"""

import math
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_mtp.checkpoint.families import trained_forms
from megatron_mtp.checkpoint.hf.hub import local_folder
from megatron_mtp.config import number_of
from megatron_mtp.errors import Parser, sentences

TRACKER = "latest_checkpointed_iteration.txt"

EXAMPLES = """examples:
  # two depths, 600 steps; all output is in runs/attached
  megatron-mtp attach models/Qwen3-0.6B my_texts

  # three depths with the loss tv on the 8 GPUs of this machine; --micro-batch-size is a flag of train
  megatron-mtp attach models/Qwen3-0.6B my_texts runs/three --depths 3 --loss tv \\
      --launch 'torchrun --nproc-per-node 8' --batch 64 --micro-batch-size 8

The same command continues after an interruption.
"""


def main(arguments: list[str], program: str) -> int:
    """Run all steps, or the one of --only.

    Args:
        arguments: the arguments after the verb.
        program: the name of the command in messages.

    Returns:
        0, or the exit status of the step that failed.
    """
    args, more = parser(program).parse_known_args(arguments)
    args.more = more
    with sentences(program):
        args.model = local_folder(args.model)
        if not (args.model / "config.json").is_file():
            raise ValueError(f"{args.model} has no config.json; give the folder of a Hugging Face model.")
        _check(args)
    if args.only is not None:
        return _in_this_process(STEPS[args.only], args)
    for step in STEPS.values():
        if (command := step.command(args)) is None:
            continue
        print(f"> {step.line}", flush=True)
        if status := _in_own_process(step, command, args):
            return status
    print(f"> before: {args.run}/before/metrics.jsonl; after: {args.run}/metrics.jsonl and metrics.png")
    print(f"> Hugging Face folder: {args.run}/exported")
    return 0


def parser(program: str) -> Parser:
    """The parser of the flags that `train` does not have."""
    made = Parser(
        program,
        description="Add MTP depths to a Hugging Face model: attach them, train them on the frozen trunk, measure "
        "acceptance before and after, and export the model. Flags of `megatron-mtp train` may follow.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("model", metavar="MODEL", help="folder of a Hugging Face model with its tokenizer, or a name on the Hub")
    add("corpus", metavar="CORPUS", help="text to train on: a file, a folder or a quoted glob; 2 %% of it is held out")
    run = "folder for all output; default: runs/attached"
    add("run", type=Path, nargs="?", default=Path("runs/attached"), metavar="RUN", help=run)
    add("--depths", type=int, default=2, metavar="D", help="number of depths to attach; default: 2")
    add("--steps", type=int, default=600, metavar="N", help="number of training steps; default: 600")
    add("--sequence", type=int, default=512, metavar="S", help="tokens per sequence; default: 512")
    add("--batch", type=int, default=4, metavar="B", help="sequences per step; default: 4")
    add("--learning-rate", default="5e-4", metavar="LR", help="learning rate after the warm-up; default: 5e-4")
    losses = ("kd", "tv", "nla", "lk", "e2e_tv", "ce")
    add("--loss", choices=losses, default="kd", help="the depths' --mtp-loss of train; default: kd")
    add("--token-fraction", default="1", metavar="F", help="part of the positions in the depths' loss; default: 1")
    add("--float32", action="store_true", help="train in float32; default: bfloat16")
    add("--evaluated-batches", default="8", metavar="N", help="batches of held-out text; default: 8")
    add("--save-every", type=int, metavar="N", help="steps between checkpoints; default: only at the end")
    forms = ", ".join(trained_forms())
    add("--family", default="glm4_moe", metavar="NAME", help=f"of the exported folder: {forms}; default: glm4_moe")
    add("--prompt", default="The state of the union is", metavar="TEXT", help="prompt for the drafting at the end")
    add("--launch", metavar="COMMAND", help="starts the ranks of a training: 'torchrun --nproc-per-node 8'")
    add("--only", choices=STEPS, help="run only this step, in this process; for job schedulers")
    return made


def _check(args: Namespace) -> None:
    """Raises ValueError for what a later step would refuse, after those before it have taken their time."""
    for name in ("depths", "steps", "sequence", "batch", "save_every"):
        if (number := getattr(args, name)) is not None and number < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {number}; give 1 or more.")
    if not 0 < number_of(args.learning_rate) < math.inf:
        raise ValueError(f"--learning-rate is {args.learning_rate}; give a number above 0.")
    if not 0 < number_of(args.token_fraction) <= 1:
        raise ValueError(f"--token-fraction is {args.token_fraction}; give a number above 0, and at most 1.")
    if not args.evaluated_batches.isdecimal() or int(args.evaluated_batches) < 1:
        raise ValueError(f"--evaluated-batches is {args.evaluated_batches}; give 1 or more.")
    if args.family not in trained_forms():
        raise ValueError(f"--family is '{args.family}'; give one of {', '.join(trained_forms())}.")
    if args.launch is not None and shutil.which((_words(args.launch) or [""])[0]) is None:
        raise ValueError(f"--launch is '{args.launch}', which begins with no program of this machine; correct it.")


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"--launch is '{command}', which is no command ({error}); correct it.") from error


def _in_this_process(step: "Step", args: Namespace) -> int:
    from megatron_mtp.command.line import PROGRAM, run

    if (command := step.command(args)) is None:
        return 0
    verb, *arguments = command
    return run(verb, f"{PROGRAM} {verb}", arguments)


def _in_own_process(step: "Step", command: list[str], args: Namespace) -> int:
    """Run a step in one process, or in the ranks that --launch starts; on Ctrl-C the step itself prints a line."""
    launcher = _words(args.launch) if step.on_ranks and args.launch else [sys.executable]
    try:
        return subprocess.run([*launcher, "-m", "megatron_mtp", *command]).returncode
    except KeyboardInterrupt:
        return 130


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        line: its name in the output.
        command: the verb and its arguments, from the flags; None if the step is finished.
        on_ranks: whether it runs on all ranks.
    """

    line: str
    command: Callable[[Namespace], list[str] | None]
    on_ranks: bool = False


def _corpus(args: Namespace) -> list[str]:
    flags = ["--input", args.corpus, "--tokenizer", str(args.model), "--output-prefix", _data(args)]
    return ["preprocess", *flags]


def _data(args: Namespace) -> str:
    return str(args.run / "data" / "corpus")


def _trunk(args: Namespace) -> list[str] | None:
    target = args.run / "trunk"
    return None if target.is_dir() else ["convert", "hf-to-mcore", str(args.model), str(target), "--resume"]


def _start(args: Namespace) -> list[str] | None:
    target = args.run / "start"
    if target.is_dir():
        return None
    depths = ["--mtp-num-layers", str(args.depths), "--mtp-init", "last-layer"]
    return ["convert", "attach-mtp", str(args.run / "trunk"), str(target), *depths, "--resume"]


def _before(args: Namespace) -> list[str] | None:
    folder = args.run / "before"
    if (folder / "metrics.jsonl").exists():
        return None
    flags = f"--skip-train --eval-interval 1 --load {args.run}/start --finetune --mtp-metrics-dir {folder}"
    return ["train", *_training(args), *flags.split()]


def _train(args: Namespace) -> list[str]:
    saved = args.run / "checkpoint"
    load = ["--load", str(saved)] if (saved / TRACKER).exists() else ["--load", str(args.run / "start"), "--finetune"]
    intervals = f"--save-interval {args.save_every or args.steps} --eval-interval {args.steps}"
    folders = ["--save", str(saved), "--mtp-metrics-dir", str(args.run)]
    return ["train", *_training(args), *load, *intervals.split(), *folders]


def _training(args: Namespace) -> list[str]:
    """The flags of every training and evaluation; flags of the command line come later and override them."""
    flags = (
        f"--use-checkpoint-args --mtp-num-layers {args.depths} --mtp-train-only --mtp-loss {args.loss} "
        f"--mtp-loss-scaling-factor 1 --mtp-token-fraction {args.token_fraction} --seq-length {args.sequence} "
        f"--micro-batch-size {args.batch} --global-batch-size {args.batch} --train-iters {args.steps} "
        f"--lr {args.learning_rate} --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters {args.steps // 20 + 1} "
        "--clip-grad 1.0 --weight-decay 0.01 --adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0 "
        f"--split 98,2,0 --eval-iters {args.evaluated_batches} --no-create-attention-mask-in-dataloader "
        "--tokenizer-type HuggingFaceTokenizer"
    )
    paths = ["--data-path", _data(args), "--tokenizer-model", str(args.model)]
    return [*flags.split(), *paths, *([] if args.float32 else ["--bf16"]), *args.more]


def _export(args: Namespace) -> list[str] | None:
    saved, target = args.run / "checkpoint", args.run / "exported"
    if not _is_older(target / "config.json", saved / TRACKER):
        return None
    if target.is_dir():
        shutil.rmtree(target)
    flags = ["--family", args.family, "--tokenizer", str(args.model), "--resume"]
    return ["convert", "mcore-to-hf", str(saved), str(target), *flags]


def _is_older(file: Path, than: Path) -> bool:
    return not file.exists() or file.stat().st_mtime < than.stat().st_mtime


def _verify(args: Namespace) -> list[str]:
    folders = [str(args.run / "exported"), str(args.run / "checkpoint")]
    return ["convert", "verify", *folders, "--allow-uncompared"]  # it prints which logits are not compared, and why


def _draft(args: Namespace) -> list[str]:
    method = ["--speculative-config", '{"method": "mtp"}', "--compare"]
    prompt = ["--prompt", args.prompt, "--max-new-tokens", "96"]
    return ["generate", "--load", str(args.run / "checkpoint"), *prompt, *method]


STEPS = {
    "corpus": Step("the corpus", _corpus),
    "trunk": Step("the trunk in Megatron's form", _trunk),
    "start": Step("the depths, as copies of the last layer", _start),
    "before": Step("loss and acceptance before the training", _before, on_ranks=True),
    "train": Step("the training", _train, on_ranks=True),
    "export": Step("the Hugging Face folder", _export),
    "verify": Step("the proof that folder and checkpoint are the same model", _verify),
    "draft": Step("drafting", _draft),
}
