"""`megatron-mtp generate`: a checkpoint and prompts in, texts and their cost out."""

from megatron_mtp.drafting.flags import parser
from megatron_mtp.platform import quieten


def main(arguments: list[str], program: str) -> int:
    """Generate; bad input ends with one sentence and exit status 2."""
    args = parser(program).parse_args(arguments)
    quieten()

    from megatron_mtp.drafting.command import main as generate

    generate(args, program)
    return 0
