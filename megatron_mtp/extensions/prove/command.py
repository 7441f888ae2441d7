"""`megatron-mtp prove`: tests the MTP of a Megatron with the flags of a launch line, in every layout."""

import json
from argparse import Namespace
from dataclasses import replace

from megatron_mtp.common.command import named, status_of
from megatron_mtp.common.errors import Parser
from megatron_mtp.common.files import write_page

FOUND_WRONG = 1
"""Exit status if a case is wrong, or no case could be judged."""

EXAMPLES = """examples:
  # the installed Megatron-Core; $FLAGS are the flags of your launch line
  megatron-mtp prove -- $FLAGS

  # your fork, all layouts, and a page to pass on
  megatron-mtp prove --megatron /opt/our/Megatron-LM --all --report prove.html -- $FLAGS

  # the MTP layers that this package attaches, in the place of Megatron's own
  megatron-mtp prove --attached --all -- $FLAGS

  # two steps of your own training script, on one process, with mock data
  megatron-mtp prove --megatron /opt/our/Megatron-LM --script /opt/our/Megatron-LM/pretrain_gpt.py -- $FLAGS

  # a step of your own loop, which has written weights, gradients and tokens to a folder
  megatron-mtp prove --grads step -- $FLAGS

  # flags from a YAML file, verdicts as JSON
  megatron-mtp prove --config run.yaml --json
"""


def parser(program: str) -> Parser:
    """Create the parser of the command."""
    made = Parser(
        program,
        usage=f"{program} [--megatron DIR] [--attached] [--all] [--report FILE] [--json] -- LAUNCH LINE",
        description="Check the MTP loss of Megatron's own block, without this package in your run. The model of your "
        "launch line is shrunk and takes one step by Megatron's schedule and DDP, on the CPU over gloo, in every "
        "layout; logged losses and all gradients are compared with arXiv:2412.19437, eq. 21-25, in float64. A wrong "
        "number is explained where a known cause gives it. Exit status 1 where a case is wrong or none could be "
        "judged.",
        epilog=EXAMPLES,
    )
    add = made.add_argument
    add("--megatron", type=named, metavar="DIR", help="checkout of Megatron-LM; default: what Python imports")
    add("--all", action="store_true", help="all layouts and options of the loss, not only those of the launch line")
    add("--attached", action="store_true", help="judge MTP layers of megatron_mtp.attach, not Megatron's own")
    add("--script", type=named, metavar="FILE", help="judge two steps of your own training script, with mock data")
    add(
        "--grads",
        type=named,
        metavar="FOLDER",
        help="judge one step that your own loop has written here (docs/extensions/prove.md), by its flags",
    )
    add("--config", type=named, metavar="FILE", help="YAML file of launch flags; those after -- win")
    add("--seconds", type=float, default=60.0, metavar="S", help="time limit of a case; default: 60")
    add("--report", type=named, metavar="FILE", help="also write an HTML page")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add("line", nargs="*", metavar="FLAG", help="the launch line, after --")
    return made


def main(arguments: list[str], program: str) -> int:
    """Run the checks and print the verdicts. Bad input ends with one sentence and exit status 2."""
    args = parser(program).parse_with_line(arguments)
    return status_of(program, lambda: _print(args))


def _print(args: Namespace) -> int:
    from megatron_mtp.extensions.prove.cases import cases_of
    from megatron_mtp.extensions.prove.grads import proof_of_steps
    from megatron_mtp.extensions.prove.proving import prove
    from megatron_mtp.extensions.prove.report import as_json, as_page, as_text
    from megatron_mtp.extensions.prove.script import proof_of_script
    from megatron_mtp.extensions.prove.shrink import shrink, words_of

    if args.script is not None and (args.grads is not None or args.attached or args.all):
        raise ValueError("--script judges two steps of your script; leave out --grads, --attached and --all.")
    if args.grads is not None and (args.megatron is not None or args.attached or args.all):
        raise ValueError("--grads judges what your loop has written; leave out --megatron, --attached and --all.")
    if not 0 < args.seconds < 1e6:
        raise ValueError(f"--seconds is {args.seconds}; give a number above 0.")
    words = [*(words_of(args.config) if args.config is not None else []), *args.line]
    if not words:
        raise ValueError("there is no launch line; give its flags after --, or a file of them with --config.")
    if args.grads is not None:
        proof = proof_of_steps({f"step of {args.grads}": args.grads}, words)
    elif args.script is not None:
        proof = proof_of_script(args.script, words, args.megatron)
    else:
        tiny = replace(shrink(words), attached=args.attached)
        proof = prove(tiny, *cases_of(tiny, args.all), args.megatron, args.seconds)
    print(json.dumps(as_json(proof)) if args.json else as_text(proof), flush=True)
    if args.report is not None:
        write_page(args.report, as_page(proof), "--report")
    return 0 if proof.is_right else FOUND_WRONG
