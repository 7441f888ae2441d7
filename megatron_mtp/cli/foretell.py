"""`megatron-mtp foretell`: a checkpoint, an engine and a text in; acceptance by position and its causes out."""

from megatron_mtp.foretell.flags import parser
from megatron_mtp.platform import quieten


def main(arguments: list[str], program: str) -> int:
    """Foretell; bad input ends with one sentence and exit status 2."""
    args = parser(program).parse_args(arguments)
    quieten()

    from megatron_mtp.foretell.command import main as foretell

    return foretell(args, program)
