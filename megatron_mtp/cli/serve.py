"""`megatron-mtp serve`: a checkpoint behind OpenAI's HTTP API until a signal ends it."""

from megatron_mtp.platform import quieten
from megatron_mtp.serving.flags import parser


def main(arguments: list[str], program: str) -> int:
    """Serve; bad input ends with one sentence and exit status 2, a bug of the engine with status 1."""
    args = parser(program).parse_args(arguments)
    quieten()

    from megatron_mtp.serving.command import main as serve

    return serve(program, args)
