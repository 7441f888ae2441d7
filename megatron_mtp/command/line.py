"""`megatron-mtp VERB ...`: the table of verbs, and how each is called.

A verb imports its modules when it is called, so `--help` and `report` do not wait for torch. The platform must be
prepared before Megatron is imported.
"""

import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import dataclass

from megatron_mtp import __version__
from megatron_mtp.errors import Parser, open_streams, sentences

PROGRAM = "megatron-mtp"

EXAMPLES = """examples:
  megatron-mtp doctor
  megatron-mtp preprocess --input my_texts --output-prefix data/corpus
  megatron-mtp train <Megatron's flags> --mtp-num-layers 2 --mtp-metrics-dir runs/mine
  torchrun --nproc-per-node 8 -m megatron_mtp train <the same flags>
  megatron-mtp evaluate --load runs/mine/checkpoint --text my_texts
  megatron-mtp generate --load runs/mine/checkpoint --prompt 'def ' --speculative-config '{"method": "mtp"}'
  megatron-mtp serve --load runs/mine/checkpoint --speculative-config '{"method": "mtp"}'
  megatron-mtp report runs/mine
  megatron-mtp attach models/Qwen3-0.6B my_texts runs/attached
  megatron-mtp convert mcore-to-hf runs/mine/checkpoint exported
  megatron-mtp audit runs/mine/checkpoint exported

megatron-mtp VERB --help lists the flags of a verb, with examples of its own.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line (None for sys.argv) and return its exit status: 2 for an unknown verb."""
    arguments = sys.argv[1:] if argv is None else argv
    open_streams()
    with sentences(PROGRAM):
        verb = parser().parse_args(arguments[:1]).verb
    return run(verb, f"{PROGRAM} {verb}", arguments[1:])


def run(verb: str, program: str, arguments: list[str]) -> int:
    """Run a verb and return its exit status; Ctrl-C and a closed pipe end it without a traceback.

    Args:
        verb: a name in `VERBS`.
        program: the name of the command in messages.
        arguments: the arguments after the verb.
    """
    open_streams()
    with sentences(program, mistakes=()):  # each verb turns its own ValueErrors into messages
        return VERBS[verb].run(program, arguments)


def parser() -> Parser:
    """The parser of the verb; all further arguments belong to the verb's own parser."""
    verbs = "\n".join(f"  {name:<12}{verb.line}" for name, verb in VERBS.items())
    made = Parser(
        PROGRAM,
        usage=f"{PROGRAM} VERB ...",
        description=f"Multi-Token Prediction for GPT models trained with Megatron-Core.\n\nverbs:\n{verbs}",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    made.add_argument("verb", choices=VERBS, metavar="VERB", help="one of the verbs above")
    made.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    return made


def _train(program: str, arguments: list[str]) -> int:
    from megatron_mtp.training.console import quiet
    from megatron_mtp.training.flags import parse_run

    given, rest = parse_run(program, arguments)
    if given.dry_run is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a plan is the same on every machine
    with quiet(given.verbose):
        from megatron_mtp.platform import prepare

        on_cpu = prepare()

        from megatron_mtp.training.run import command

        command(program, given, rest, on_cpu)
    return 0


def _evaluate(program: str, arguments: list[str]) -> int:
    from megatron_mtp.command.evaluate import main

    return main(arguments, program)


def _generate(program: str, arguments: list[str]) -> int:
    from megatron_mtp.drafting.flags import parser

    parser(program).parse_args(arguments)  # --help and unknown flags need not wait for torch

    from megatron_mtp.checkpoint.command import quieten

    quieten()

    from megatron_mtp.drafting.command import main

    main([program, *arguments])
    return 0


def _foretell(program: str, arguments: list[str]) -> int:
    from megatron_mtp.foretell.flags import parser

    parser(program).parse_args(arguments)  # --help and unknown flags need not wait for torch

    from megatron_mtp.checkpoint.command import quieten

    quieten()

    from megatron_mtp.foretell.command import main

    return main(arguments, program)


def _tabulate(program: str, arguments: list[str]) -> int:
    from megatron_mtp.foretell.table.flags import parser

    args = parser(program).parse_args(arguments)  # --help and unknown flags need not wait for torch

    from megatron_mtp.checkpoint.command import quieten

    quieten()

    from megatron_mtp.command.tabulate import main

    return main(args, program)


def _convert(program: str, arguments: list[str]) -> int:
    from megatron_mtp.checkpoint.command import main

    return main(arguments, program)


def _preprocess(program: str, arguments: list[str]) -> int:
    from megatron_mtp.data.command import main

    return main(arguments, program)


def _attach(program: str, arguments: list[str]) -> int:
    from megatron_mtp.command.attach import main

    return main(arguments, program)


def _audit(program: str, arguments: list[str]) -> int:
    from megatron_mtp.command.audit import main

    return main(arguments, program)


def _sample(program: str, arguments: list[str]) -> int:
    from megatron_mtp.drafting.own_texts.flags import parser

    args = parser(program).parse_args(arguments)  # --help and unknown flags need not wait for torch

    from megatron_mtp.checkpoint.command import quieten

    quieten()

    from megatron_mtp.drafting.own_texts.command import main

    return main(args, program)


def _serve(program: str, arguments: list[str]) -> int:
    from megatron_mtp.serving.flags import parser

    args = parser(program).parse_args(arguments)  # --help and unknown flags need not wait for torch

    from megatron_mtp.checkpoint.command import quieten

    quieten()

    from megatron_mtp.serving.command import main

    return main(program, args)


def _bench_serve(program: str, arguments: list[str]) -> int:
    from megatron_mtp.serving.bench.command import main

    return main(arguments, program)


def _report(program: str, arguments: list[str]) -> int:
    from megatron_mtp.report.command import main

    return main(arguments, program)


def _doctor(program: str, arguments: list[str]) -> int:
    from megatron_mtp.command.doctor import main

    return main(arguments, program)


def _completion(program: str, arguments: list[str]) -> int:
    from megatron_mtp.command.completion import main

    return main(arguments, program)


@dataclass(frozen=True)
class Verb:
    """One verb.

    Attributes:
        line: its line in `--help`.
        run: runs it, from the name of the command in messages and the arguments; returns the exit status.
    """

    line: str
    run: Callable[[str, list[str]], int]


VERBS = {
    "train": Verb("pretrain a GPT, with Megatron's flags and --mtp-*", _train),
    "convert": Verb("convert between Hugging Face folders and Megatron checkpoints; inspect and verify them", _convert),
    "audit": Verb("show what anyone's checkpoint holds, or what differs between two, and why", _audit),
    "attach": Verb("add depths to a Hugging Face model: train on its frozen trunk, measure, export", _attach),
    "generate": Verb("generate text from a checkpoint, several tokens per forward", _generate),
    "sample": Verb("continue a corpus' prompts by a checkpoint: data to train its depths on", _sample),
    "serve": Verb("answer OpenAI's HTTP API with a checkpoint, many texts at once, each drafting", _serve),
    "bench-serve": Verb("measure a server of OpenAI's API: waiting times, tokens a second, acceptance", _bench_serve),
    "evaluate": Verb("compute loss and acceptance by depth of a checkpoint on a text", _evaluate),
    "foretell": Verb("compute what another engine will accept of a checkpoint's drafts, and why", _foretell),
    "tabulate": Verb("fill a table of acceptance for many checkpoints, here and in engines", _tabulate),
    "report": Verb("make one HTML page from one or several runs", _report),
    "doctor": Verb("show what this machine has, and what missing parts cost", _doctor),
    "preprocess": Verb("turn text into the .bin and .idx that train reads", _preprocess),
    "completion": Verb("print a script that completes verbs and flags in bash or zsh", _completion),
}
