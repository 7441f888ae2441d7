"""Megatron's arguments for a converted model: what `--use-checkpoint-args` finds, and what builds the model."""

import sys
from argparse import Namespace

from megatron.training.arguments import parse_args

from megatron_mtp.checkpoint.families.flags import Untrainable
from megatron_mtp.checkpoint.plan import HFModel


def flags_of(model: HFModel) -> tuple[list[str] | None, str | None]:
    """Megatron's flags of a model, or None and the reason why Megatron cannot run it."""
    if model.family.flags is None:
        return None, model.family.untrainable
    try:
        return model.family.flags(model.config, model.layout), None
    except Untrainable as reason:
        return None, str(reason)


def megatron_arguments(model: HFModel) -> Namespace:
    """The arguments that a checkpoint of this model keeps; without a model to build, its sizes alone."""
    flags, _ = flags_of(model)
    if flags is None:
        return Namespace(mtp_num_layers=model.layout.depths or None, megatron_mtp_untrainable=True)
    return parsed(flags, model.config.integer("vocab_size"))


def parsed(flags: list[str], vocabulary: int) -> Namespace:
    """Flags through Megatron's own parser; the vocabulary is padded as Megatron does for one tensor-parallel rank."""
    argv, sys.argv = sys.argv, ["megatron", *flags]
    try:
        args = parse_args()
    finally:
        sys.argv = argv
    multiple = args.make_vocab_size_divisible_by
    args.padded_vocab_size = -(-vocabulary // multiple) * multiple
    args.add_bias_linear = (
        not args.disable_bias_linear if hasattr(args, "disable_bias_linear") else args.add_bias_linear
    )
    return args
