"""The flags of `megatron-mtp train`: ours, parsed without importing Megatron, and all of them."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import fields
from types import MethodType

from megatron_mtp.config import MTPConfig, add_yarn_arguments
from megatron_mtp.errors import Parser, sentences
from megatron_mtp.losses import LOSSES, listing

DESCRIPTION = """Pretrain a GPT with MTP depths on Megatron's training loop.

These are the flags of this project. All of Megatron-LM's pretrain_gpt.py are taken as well; --help-megatron lists them.
Those that most runs need:

  model      --num-layers --hidden-size --ffn-hidden-size --num-attention-heads --seq-length --max-position-embeddings
             --position-embedding-type --normalization --swiglu --untie-embeddings-and-output-weights
  depths     --mtp-num-layers --mtp-loss-scaling-factor --mtp-use-repeated-layer --mtp-detach-heads
  training   --micro-batch-size --global-batch-size --train-iters --lr --lr-decay-style --lr-warmup-iters --bf16
  data       --data-path --split --tokenizer-type --tokenizer-model
  run        --save --save-interval --load --eval-interval --eval-iters --log-interval --tensorboard-dir
  layout     --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
             --expert-model-parallel-size --sequence-parallel --use-distributed-optimizer"""

EXAMPLES = """examples:
  # two depths, one process (without a CUDA device: on the CPU)
  megatron-mtp train --num-layers 4 --hidden-size 192 --num-attention-heads 6 --seq-length 256 \\
      --max-position-embeddings 256 --position-embedding-type rope --micro-batch-size 8 --train-iters 100 --lr 1e-3 \\
      --data-path DATA --tokenizer-type HuggingFaceTokenizer --tokenizer-model DATA-tokenizer --mtp-num-layers 2

  # the same over two pipeline stages
  torchrun --nproc-per-node 2 -m megatron_mtp train ... --pipeline-model-parallel-size 2 --mtp-num-layers 2

  # flags from a file, one of them overridden; what a job of 64 ranks would hold, without starting it
  megatron-mtp train --config run.yaml --lr 2e-3
  megatron-mtp train --config run.yaml --dry-run 64

  # depths for a model that has none
  megatron-mtp train ... --load CHECKPOINT --save NEW --mtp-num-layers 2 --mtp-init last-layer
"""


def add_mtp_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Megatron's `extra_args_provider`: one flag for every field of `MTPConfig`."""
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.error = MethodType(Parser.error, parser)  # type: ignore[method-assign]  # Megatron's usage is 900 lines
    _repair_help(parser)
    group = parser.add_argument_group("multi-token prediction (megatron-mtp)")
    for field in fields(MTPConfig):
        flag, described = "--" + field.name.replace("_", "-"), {**field.metadata}
        if field.name == "mtp_loss":
            described["metavar"] = "{" + ",".join(LOSSES.names()) + "}"
        names = [flag, described.pop("alias")] if "alias" in described else [flag]
        group.add_argument(*names, dest=field.name, default=field.default, **described)
    return add_yarn_arguments(parser)


def add_run_arguments(parser: ArgumentParser) -> ArgumentParser:
    """The flags that act before Megatron's parser, and are not passed on to it."""
    group = parser.add_argument_group("the run (megatron-mtp)")
    group.add_argument(
        "--verbose",
        action="store_true",
        help="Show all that Megatron prints. Default: a short log, and the rest in megatron.log in --mtp-metrics-dir "
        "or --save.",
    )
    group.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of flags, such as 'num-layers: 4'; sections may group them. The command line's flags win.",
    )
    group.add_argument(
        "--dry-run",
        nargs="?",
        type=int,
        const=0,
        metavar="RANKS",
        help="Print the plan of a job of so many ranks and end: flags, layout, parameters, memory, tokens of a step. "
        "Needs no GPU. Default: the fewest ranks that the layout takes.",
    )
    group.add_argument("--list-losses", action="store_true", help="Say what each --mtp-loss is, and end.")
    group.add_argument("--help-megatron", action="store_true", help="List Megatron's flags as well, and end.")
    return parser


def help_parser(program: str) -> ArgumentParser:
    """What `--help` shows: our flags, and which of Megatron's most runs need."""
    made = Parser(program, usage=f"{program} [flags]", description=DESCRIPTION)
    return add_mtp_arguments(add_run_arguments(made))


def parse_run(program: str, arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """The flags of the run, and the rest for Megatron's parser.

    `--help` and `--list-losses` end the process here, before Megatron is imported.
    """
    if {"-h", "--help"} & set(arguments):
        help_parser(program).parse_args(["--help"])
    parser = Parser(program, add_help=False, allow_abbrev=False)
    given, rest = add_run_arguments(parser).parse_known_args(arguments)
    if given.list_losses:
        with sentences(program):
            print(listing())
        parser.exit()
    return given, rest


def all_parser(program: str) -> ArgumentParser:
    """A parser with Megatron's flags too; call `platform.prepare` before."""
    from megatron.training.arguments import add_megatron_arguments

    return add_run_arguments(add_mtp_arguments(add_megatron_arguments(ArgumentParser(program))))


def _repair_help(parser: ArgumentParser) -> None:
    """Escape the percent sign in a help text of megatron-core 0.19, at which `--help` fails."""
    for action in parser._actions:
        try:
            (action.help or "") % vars(action)
        except (ValueError, TypeError, KeyError):
            action.help = str(action.help).replace("%", "%%")
