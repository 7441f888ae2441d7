"""`megatron-mtp sample`: a checkpoint and prompts in, a corpus of the model's own texts out."""

from megatron_mtp.drafting.own_texts.flags import parser
from megatron_mtp.platform import quieten


def main(arguments: list[str], program: str) -> int:
    """Sample; bad input ends with one sentence and exit status 2."""
    args = parser(program).parse_args(arguments)
    quieten()

    from megatron_mtp.drafting.own_texts.command import main as sample

    return sample(args, program)
