"""`megatron-mtp train`: pretraining on Megatron's loop, with Megatron's flags and ours."""

import os
from argparse import ArgumentParser

from megatron_mtp.platform import prepare
from megatron_mtp.training.flags import all_parser, help_parser, parse_run
from megatron_mtp.training.short_log import quiet


def main(arguments: list[str], program: str) -> int:
    """Train; bad input ends with one sentence and exit status 2."""
    given, rest = parse_run(program, arguments)
    if given.dry_run is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a plan is the same on every machine
    with quiet(given.verbose):
        on_cpu = prepare()

        from megatron_mtp.training.run import command

        command(program, given, rest, on_cpu)
    return 0


def parser(program: str) -> ArgumentParser:
    """Our flags."""
    return help_parser(program)


def full_parser(program: str) -> ArgumentParser:
    """All flags, those of Megatron included."""
    prepare()
    return all_parser(program)
