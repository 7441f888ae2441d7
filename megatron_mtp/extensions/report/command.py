"""`megatron-mtp report RUN_DIR ...`: render the folders of runs as one HTML page."""

from argparse import Namespace

from megatron_mtp.common.command import from_extra, named, status_of
from megatron_mtp.common.errors import Parser
from megatron_mtp.common.files import write_page

PAGE = "report.html"

EXAMPLES = """examples:
  # write runs/mine/report.html for a run with --mtp-metrics-dir runs/mine
  megatron-mtp report runs/mine

  # with the drafts of one generation, token by token
  megatron-mtp generate --load runs/mine/checkpoint --prompt 'def ' --speculative-config '{"method": "mtp"}' \\
      --record runs/mine
  megatron-mtp report runs/mine

  # three runs in the same charts
  megatron-mtp report runs/one runs/two runs/three --output comparison.html
"""


def parser(program: str) -> Parser:
    """Create the parser of the command."""
    made = Parser(
        program,
        description="Render losses, acceptance, costs, settings and drafts of runs as one self-contained HTML page.",
        epilog=EXAMPLES,
    )
    add = made.add_argument
    add("runs", nargs="+", type=named, metavar="RUN_DIR", help="folders given to --mtp-metrics-dir")
    add("--output", type=named, metavar="FILE", help=f"output file; default: {PAGE} in the first folder")
    return made


def main(arguments: list[str], program: str) -> int:
    """Write the page. Invalid input ends with one sentence and exit status 2."""
    args = parser(program).parse_args(arguments)
    return status_of(program, lambda: write(args))


def write(args: Namespace) -> int:
    """Write the page and print its path. Raise ValueError if runs cannot be read, or without the extra `report`."""
    with from_extra("report", "the page", "plotly", "pydantic"):
        from megatron_mtp.extensions.report.page import page
        from megatron_mtp.extensions.report.runs import read_runs
    text, target = page(read_runs(args.runs)), args.output or args.runs[0] / PAGE
    write_page(target, text, "--output")
    print(target)
    return 0
