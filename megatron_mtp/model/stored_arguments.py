"""Arguments of a checkpoint, completed or changed for a model in one process."""

from argparse import Namespace
from typing import Any

from megatron.training import arguments as megatrons

from megatron_mtp.megatron.model_arguments import MODEL_ARGUMENTS
from megatron_mtp.megatron.parser import CUDA, arguments_without
from megatron_mtp.megatron.parsing import parse_flags
from megatron_mtp.megatron.patterns import without_stages
from megatron_mtp.model.arguments import as_mtp_layers, trunk_spec
from megatron_mtp.spec.head import NO_DRAFTER, HeadSpec, drafted_steps, has_both


def completed(stored: Namespace) -> Namespace:
    """Complete a checkpoint's arguments to all of Megatron's, for one process without TE."""
    args = parse_flags("--micro-batch-size 1 --train-iters 1 --lr 1e-4 --eval-interval 1000".split())
    for name, value in arguments_without(CUDA).items():
        setattr(args, name, value)
    for name in MODEL_ARGUMENTS:
        if getattr(stored, name, None) is not None:
            setattr(args, name, getattr(stored, name))
    if args.hybrid_layer_pattern is not None:
        args.hybrid_layer_pattern = without_stages(args.hybrid_layer_pattern)
    megatrons.validate_args(args)  # call through the module, because a patch may have replaced it
    return args


def alone(args: Namespace, is_drafter: bool) -> Namespace:
    """Return the arguments of a model that drafts with only one of two: the drafter or the MTP layers."""
    if not has_both(args):
        return args
    changes = as_mtp_layers(drafted_steps(args), args) if is_drafter else NO_DRAFTER
    return Namespace(**{**vars(args), **changes})


def stored_with(drafter: HeadSpec, args: Namespace) -> dict[str, Any]:
    """Return the arguments of a checkpoint whose only draft module is a drafter, on the trunk of these arguments."""
    return drafter.arguments(trunk_spec(args)) | as_mtp_layers(drafter.drafts, args)
