"""`megatron-mtp completion SHELL`: a script that completes verbs, flags and choices, made from the parsers."""

import contextlib
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable

import shtab

from megatron_mtp.command.line import VERBS
from megatron_mtp.errors import Parser
from megatron_mtp.platform import prepare

SHELLS = ("bash", "zsh")

EXAMPLES = """examples:
  megatron-mtp completion bash > ~/.local/share/bash-completion/completions/megatron-mtp
  megatron-mtp completion zsh > ~/.zfunc/_megatron-mtp    # with ~/.zfunc in fpath
"""


def main(arguments: list[str], program: str) -> int:
    """Print the script; arguments as in `attach.main`."""
    args = parser(program).parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr):  # importing Megatron may print
        script = shtab.complete(whole(program.split()[0]), args.shell)
    print(script)
    return 0


def parser(program: str) -> ArgumentParser:
    """The parser of the one argument."""
    made = Parser(
        program,
        description="Print a script that completes verbs and flags; write it to where the shell finds it.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    made.add_argument("shell", choices=SHELLS, help="the shell")
    return made


def whole(program: str) -> ArgumentParser:
    """One parser of all verbs, for tools that read parsers; the verbs parse with their own."""
    made = ArgumentParser(program)
    verbs = made.add_subparsers(metavar="VERB")
    for verb, makers in PARSERS.items():
        parsers = [make(f"{program} {verb}") for make in makers]
        line = VERBS[verb].line
        verbs.add_parser(verb, help=line, parents=parsers, add_help=False, conflict_handler="resolve")
    return made


def _train(program: str) -> ArgumentParser:
    prepare()
    from megatron_mtp.training.flags import all_parser

    return all_parser(program)


def _evaluate(program: str) -> ArgumentParser:
    from megatron_mtp.command.evaluate import parser

    return parser(program)


def _generate(program: str) -> ArgumentParser:
    from megatron_mtp.drafting.flags import parser

    return parser(program)


def _sample(program: str) -> ArgumentParser:
    from megatron_mtp.drafting.own_texts.flags import parser

    return parser(program)


def _serve(program: str) -> ArgumentParser:
    from megatron_mtp.serving.flags import parser

    return parser(program)


def _bench_serve(program: str) -> ArgumentParser:
    from megatron_mtp.serving.bench.flags import parser

    return parser(program)


def _convert(program: str) -> ArgumentParser:
    from megatron_mtp.checkpoint.command import parser

    return parser(program)


def _audit(program: str) -> ArgumentParser:
    from megatron_mtp.command.audit import parser

    return parser(program)


def _preprocess(program: str) -> ArgumentParser:
    from megatron_mtp.data.command import parser

    return parser(program)


def _foretell(program: str) -> ArgumentParser:
    from megatron_mtp.foretell.flags import parser

    return parser(program)


def _tabulate(program: str) -> ArgumentParser:
    from megatron_mtp.foretell.table.flags import parser

    return parser(program)


def _attach(program: str) -> ArgumentParser:
    from megatron_mtp.command.attach import parser

    return parser(program)


def _report(program: str) -> ArgumentParser:
    from megatron_mtp.report.command import parser

    return parser(program)


def _doctor(program: str) -> ArgumentParser:
    from megatron_mtp.command.doctor import parser

    return parser(program)


PARSERS: dict[str, tuple[Callable[[str], ArgumentParser], ...]] = {
    "train": (_train,),
    "convert": (_convert,),
    "audit": (_audit,),
    "generate": (_generate,),
    "sample": (_sample,),
    "serve": (_serve,),
    "bench-serve": (_bench_serve,),
    "evaluate": (_train, _evaluate),
    "foretell": (_foretell,),
    "tabulate": (_tabulate,),
    "attach": (_train, _attach),
    "report": (_report,),
    "doctor": (_doctor,),
    "preprocess": (_preprocess,),
    "completion": (parser,),
}
"""The parsers that make up each verb's flags."""
