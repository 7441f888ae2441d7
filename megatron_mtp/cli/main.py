"""`megatron-mtp COMMAND ...`: looks up the command, imports its module and runs it."""

import sys

from megatron_mtp import __version__
from megatron_mtp.cli.verbs import PROGRAM, VERBS, module_of
from megatron_mtp.common.command import open_streams
from megatron_mtp.common.errors import REFUSED, Parser, sentences

EXAMPLES = """examples:
  megatron-mtp doctor
  megatron-mtp preprocess --input my_texts --output-prefix data/corpus
  megatron-mtp train $FLAGS --mtp-num-layers 2 --mtp-metrics-dir runs/mine    # $FLAGS: your Megatron-LM flags
  torchrun --nproc-per-node 8 -m megatron_mtp train $FLAGS --mtp-num-layers 2
  megatron-mtp evaluate --load runs/mine/checkpoint --text my_texts
  megatron-mtp generate --load runs/mine/checkpoint --prompt 'def ' --speculative-config '{"method": "mtp"}'
  megatron-mtp serve --load runs/mine/checkpoint --speculative-config '{"method": "mtp"}'
  megatron-mtp report runs/mine
  megatron-mtp attach models/Qwen3-0.6B my_texts runs/attached
  megatron-mtp convert mcore-to-hf runs/mine/checkpoint exported
  megatron-mtp audit runs/mine/checkpoint exported

megatron-mtp VERB --help lists the flags of a verb, with examples of its own.
"""


OLD_VERBS = {"foretell": "predict"}
"""Names of commands in the previous release, and their present names."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line (None for sys.argv) and return its exit status: 2 for an unknown command.

    Without arguments, prints the list of commands. `help COMMAND` is `COMMAND --help`, `version` is `--version`.
    """
    arguments = spelled_as_flags(sys.argv[1:] if argv is None else argv)
    open_streams()
    with sentences(PROGRAM):
        if not arguments:
            parser().print_help()
            return REFUSED
        known = bool(arguments) and arguments[0] in VERBS  # plugins are searched only for verbs that are not built in
        verb = arguments[0] if known else parser().parse_args(arguments[:1]).verb
    return run(verb, f"{PROGRAM} {verb}", arguments[1:])


def spelled_as_flags(arguments: list[str]) -> list[str]:
    """Return the same request as flags of the parser."""
    match arguments:
        case ["help"]:
            return ["--help"]
        case ["help", verb, *_]:
            return [verb, "--help"]
        case ["version"]:
            return ["--version"]
        case [verb, *others] if verb in OLD_VERBS:
            print(f"{PROGRAM}: {verb} is {OLD_VERBS[verb]} now; the old name works for one release.", file=sys.stderr)
            return [OLD_VERBS[verb], *others]
    return arguments


def run(verb: str, program: str, arguments: list[str]) -> int:
    """Run a command and return its exit status. Ctrl-C and a closed pipe end it without a traceback.

    Args:
        verb: a name in `VERBS`.
        program: name of the command in messages.
        arguments: arguments after the command.
    """
    open_streams()
    with sentences(program):
        module = module_of(verb)  # its tables may reject parts of external packages
    with sentences(program, mistakes=()):  # each verb reports its own ValueErrors
        status: int = module.main(arguments, program)
    return status


def parser() -> Parser:
    """Create the parser of the command; all further arguments belong to the command's own parser."""
    verbs = "\n".join(f"  {name:<12}{verb.line}" for name, verb in VERBS.items())
    made = Parser(
        PROGRAM,
        usage=f"{PROGRAM} VERB ...",
        description=f"Train MTP layers and drafters with Megatron-Core, and draft with them.\n\nverbs:\n{verbs}",
        epilog=EXAMPLES,
    )
    made.add_argument("verb", choices=VERBS, metavar="VERB", help="one of the verbs above")
    made.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    return made
