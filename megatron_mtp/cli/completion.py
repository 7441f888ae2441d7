"""`megatron-mtp completion SHELL`: a script that completes verbs, flags and choices, made from the parsers."""

import contextlib
import sys
from argparse import ArgumentParser

import shtab

from megatron_mtp.cli.verbs import VERBS, parser_of
from megatron_mtp.errors import Parser

SHELLS = ("bash", "zsh")

EXAMPLES = """examples:
  megatron-mtp completion bash > ~/.local/share/bash-completion/completions/megatron-mtp
  megatron-mtp completion zsh > ~/.zfunc/_megatron-mtp    # with ~/.zfunc in fpath
"""


def main(arguments: list[str], program: str) -> int:
    """Print the script."""
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
    )
    made.add_argument("shell", choices=SHELLS, help="the shell")
    return made


def whole(program: str) -> ArgumentParser:
    """One parser of all verbs, for tools that read parsers; the verbs parse with their own."""
    made = ArgumentParser(program)
    verbs = made.add_subparsers(metavar="VERB")
    for verb, row in VERBS.items():
        own = parser_of(verb, program)
        verbs.add_parser(verb, help=row.line, parents=[own], add_help=False, conflict_handler="resolve")
    return made
