"""`megatron-mtp report RUN_DIR ...`: the folders of runs in, one HTML page out."""

from argparse import Namespace, RawDescriptionHelpFormatter

from megatron_mtp.errors import Parser, named, status_of
from megatron_mtp.report.page import page, write_page
from megatron_mtp.report.runs import read_runs

PAGE = "report.html"

EXAMPLES = """examples:
  # runs/mine/report.html, of the run that --mtp-metrics-dir runs/mine has recorded
  megatron-mtp report runs/mine

  # with the drafts of a generation, token by token
  megatron-mtp generate --load runs/mine/checkpoint --prompt 'def ' --speculative-config '{"method": "mtp"}' \\
      --record runs/mine
  megatron-mtp report runs/mine

  # three runs, one over the other
  megatron-mtp report runs/one runs/two runs/three --output comparison.html
"""


def main(arguments: list[str], program: str) -> int:
    """Write the page; bad input ends with one sentence and exit status 2."""
    args = parser(program).parse_args(arguments)
    return status_of(program, lambda: write(args))


def write(args: Namespace) -> int:
    """Write the page and say where; ValueError for runs that cannot be read."""
    target = args.output or args.runs[0] / PAGE
    write_page(page(read_runs(args.runs)), target)
    print(target)
    return 0


def parser(program: str) -> Parser:
    """All flags."""
    made = Parser(
        program,
        description="One self-contained HTML page of runs: losses, acceptance, costs, hyperparameters, drafts.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("runs", nargs="+", type=named, metavar="RUN_DIR", help="folders that --mtp-metrics-dir has named")
    add("--output", type=named, metavar="FILE", help=f"default: {PAGE} in the first folder")
    return made
