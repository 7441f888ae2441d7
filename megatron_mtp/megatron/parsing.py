"""A command line read by Megatron's parser, outside of a run."""

import sys
from argparse import Namespace

from megatron_mtp.megatron.parser import add_yarn_arguments


def parsed(flags: list[str], vocabulary: int) -> Namespace:
    """Parse flags with Megatron's parser. The vocabulary is padded as for one tensor-parallel rank."""
    args = parse_flags(flags)
    multiple = args.make_vocab_size_divisible_by
    args.padded_vocab_size = -(-vocabulary // multiple) * multiple
    return args


def parse_flags(flags: list[str]) -> Namespace:
    """Parse flags with Megatron's parser, which only reads `sys.argv`."""
    from megatron.training.arguments import parse_args  # imported here, because --help lists flags without Megatron

    argv, sys.argv = sys.argv, ["megatron", *flags]
    try:
        return parse_args(add_yarn_arguments)
    finally:
        sys.argv = argv
