"""`megatron-mtp train`: pretraining with Megatron's training loop, with Megatron's flags and ours."""

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from megatron_mtp.cli.verbs import VERBS, module_of
from megatron_mtp.common.errors import Parser, sentences
from megatron_mtp.losses.table import listing
from megatron_mtp.megatron.runtime import prepare
from megatron_mtp.training import recipe
from megatron_mtp.training.config_file import flags_of, named_flags, without_unset
from megatron_mtp.training.flags import add_mtp_arguments, all_parser
from megatron_mtp.training.quiet import quiet
from megatron_mtp.training.short_log import say

DESCRIPTION = """Train a model with MTP layers or a drafter on Megatron's training loop.

These are the flags of this project. All flags of Megatron-LM's pretrain_gpt.py work too; --help-megatron lists them.
Those that most runs need:

  model      --num-layers --hidden-size --ffn-hidden-size --num-attention-heads --seq-length --max-position-embeddings
             --position-embedding-type --normalization --swiglu --untie-embeddings-and-output-weights
  MTP        --mtp-num-layers --mtp-loss-scaling-factor --mtp-use-repeated-layer --mtp-detach-heads
  training   --micro-batch-size --global-batch-size --train-iters --lr --lr-decay-style --lr-warmup-iters --bf16
  data       --data-path --split --tokenizer-type --tokenizer-model
  run        --save --save-interval --load --eval-interval --eval-iters --log-interval --tensorboard-dir
  layout     --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
             --expert-model-parallel-size --sequence-parallel --use-distributed-optimizer"""

EXAMPLES = """examples:
  # two MTP layers, one process (without a CUDA device: on the CPU)
  megatron-mtp train --num-layers 4 --hidden-size 192 --num-attention-heads 6 --seq-length 256 \\
      --max-position-embeddings 256 --position-embedding-type rope --micro-batch-size 8 --train-iters 100 --lr 1e-3 \\
      --eval-interval 100 --data-path data/corpus --tokenizer-type HuggingFaceTokenizer \\
      --tokenizer-model data/corpus-tokenizer --mtp-num-layers 2

  # two pipeline stages; $FLAGS are your Megatron-LM flags
  torchrun --nproc-per-node 2 -m megatron_mtp train $FLAGS --pipeline-model-parallel-size 2 --mtp-num-layers 2

  # flags from a file, one of them overridden; then a plan of the job on 64 ranks, without starting it
  megatron-mtp train --config run.yaml --lr 2e-3
  megatron-mtp train --config run.yaml --dry-run 64

  # MTP layers for a model without any; $TRAINING are your batch, schedule and data flags
  megatron-mtp train $TRAINING --use-checkpoint-args --load checkpoints/trunk --finetune --save runs/mine/checkpoint \\
      --mtp-num-layers 2 --mtp-init last-layer
"""


MEGATRONS: dict[str, tuple[str | None, str]] = {
    "--mtp-num-layers": (
        "N",
        "Number of MTP layers, each of which predicts one token further ahead; 0 turns them off. Default: none.",
    ),
    "--mtp-loss-scaling-factor": (
        "X",
        "Lambda, the weight of the MTP loss, which is the mean over all MTP layers. Default: 0.1.",
    ),
    "--mtp-use-repeated-layer": (
        None,
        "Use the same MTP layer for every draft token. Default: one layer per draft token.",
    ),
    "--mtp-detach-heads": (None, "Let the MTP loss train only the MTP layers. Default: the trunk as well."),
}
"""Megatron's own flags for MTP layers, which are in its parser: metavar (None for a switch) and help."""


def main(arguments: list[str], program: str) -> int:
    """Train. Invalid input ends with one sentence and exit status 2."""
    given, rest = parse_run(program, arguments)
    if given.dry_run is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a plan must not depend on this machine
    with quiet(given.verbose):
        on_cpu = prepare()

        if given.help_megatron:
            say(full_parser(program).format_help())
            return 0
        argv = with_file(program, given, rest)
        if given.dry_run is None:
            from megatron_mtp.cli.live_drafts import LiveDrafts
            from megatron_mtp.training.run import main as train

            train(argv, on_cpu, measure=LiveDrafts())
            return 0
        from megatron_mtp.training.startup import explained

        with explained(program):
            if "plan" not in VERBS:
                raise ValueError("--dry-run needs the verb 'plan', which is not installed; reinstall megatron-mtp.")
            say(module_of("plan").of_job(argv, given.dry_run))
    return 0


def parser(program: str) -> ArgumentParser:
    """Create the parser of our flags; its description names the Megatron flags that most runs need."""
    made = add_run_arguments(Parser(program, usage=f"{program} [flags]", description=DESCRIPTION, epilog=EXAMPLES))
    group = made.add_argument_group("multi-token prediction (Megatron-LM)")
    for flag, (metavar, what) in MEGATRONS.items():
        if metavar is None:
            group.add_argument(flag, help=what, action="store_true")
        else:
            group.add_argument(flag, help=what, metavar=metavar)
    return add_mtp_arguments(made)


def full_parser(program: str) -> ArgumentParser:
    """Create the parser of our flags and Megatron's."""
    prepare()
    made = add_run_arguments(all_parser(program))
    made.formatter_class, made.epilog = RawDescriptionHelpFormatter, EXAMPLES
    return made


def add_run_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags that act before Megatron's parser and are not passed on to it."""
    add = parser.add_argument_group("the run (megatron-mtp)").add_argument
    verbose = "Print all of Megatron's output. Default: a short log, and megatron.log in --mtp-metrics-dir or --save."
    add("--verbose", action="store_true", help=verbose)
    add(
        "--recipe",
        metavar="NAME",
        help="Flags that others train by: " + ", ".join(recipe.names()) + " (megatron-mtp "
        "recipes). Flags of --config and of the command line win.",
    )
    file = "YAML file of flags, such as 'num-layers: 4', optionally in sections. Flags on the command line win."
    add("--config", metavar="FILE", help=file)
    plan = "Print flags, layout, parameters, memory and tokens per step for RANKS ranks, and exit; needs no GPU. "
    plan += "Default: the fewest ranks for the layout."
    add("--dry-run", nargs="?", type=int, const=0, metavar="RANKS", help=plan)
    add("--list-losses", action="store_true", help="Explain each --mtp-loss and exit.")
    add("--help-megatron", action="store_true", help="List Megatron's flags as well and exit.")
    return parser


def parse_run(program: str, arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Parse the flags of the run, and return the rest for Megatron's parser.

    `--help` and `--list-losses` end the process here, before Megatron is imported.
    """
    if {"-h", "--help"} & set(arguments):
        parser(program).parse_args(["--help"])
    own = Parser(program, add_help=False, allow_abbrev=False)
    given, rest = add_run_arguments(own).parse_known_args(arguments)
    if given.list_losses:
        with sentences(program):
            print(listing())
        own.exit()
    return given, rest


def with_file(program: str, given: Namespace, rest: list[str]) -> list[str]:
    """Build `sys.argv` for Megatron's parser from --recipe, --config and the command line.

    Later ones take precedence.
    """
    from megatron_mtp.training.startup import explained

    with explained(program):
        flags = full_parser(program)
        words = [] if given.config is None else flags_of(Path(given.config), flags)
        if given.recipe is not None:
            words = [*_of_recipe(given.recipe, named_flags([*words, *rest], flags)), *words]
        if any(word.split("=")[0] == "--yaml-cfg" for word in (*words, *rest)):
            raise ValueError("--yaml-cfg takes the place of all flags, those of the MTP layers too; give --config.")
        words, rest = without_unset(words, rest, flags)
        flags.parse_args([*words, *rest])  # checked here, where a typo in a flag of `train` gets a suggestion
    sys.argv = [program, *words, *rest]
    return sys.argv


def _of_recipe(name: str, given: set[str]) -> list[str]:
    """Return the words that a recipe adds to a command line with these flags, and print them."""
    chosen = recipe.read(name)
    if os.environ.get("RANK", "0") == "0":
        for line in chosen.lines(given):
            say(f"> {line}")
    return recipe.words_of(chosen.left(given))
