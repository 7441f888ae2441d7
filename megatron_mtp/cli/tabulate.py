"""`megatron-mtp tabulate`: checkpoints and a text in; a table of acceptance out, row by row."""

from megatron_mtp.foretell.table.flags import parser
from megatron_mtp.platform import quieten


def main(arguments: list[str], program: str) -> int:
    """Fill the table; bad input ends with one sentence and exit status 2."""
    args = parser(program).parse_args(arguments)
    quieten()

    from megatron_mtp.cli.tabulating import main as tabulate

    return tabulate(args, program)
