"""Megatron's arguments for a converted model: `--use-checkpoint-args` restores them, and they build the model."""

from argparse import Namespace

from megatron_mtp.checkpoint.convert.passes import set_passes
from megatron_mtp.checkpoint.convert.plan import HFModel
from megatron_mtp.checkpoint.families.flags import UntrainableError
from megatron_mtp.model.arguments import parsed


def flags_of(model: HFModel) -> tuple[list[str] | None, str | None]:
    """Megatron's flags for a model and None, or None and the reason why Megatron cannot run it."""
    if model.family.flags is None:
        return None, model.family.untrainable
    try:
        return model.family.flags(model.config, model.layout), None
    except UntrainableError as reason:
        return None, str(reason)


def depth_flags_of(model: HFModel) -> list[str] | None:
    """Megatron's flags for the depths of a model whose trunk it cannot run; None if it cannot run the depths either.

    Without depths there are no flags: transformers runs all of such a model.
    """
    depths = model.family.depths
    if model.family.untrainable is not None and not model.layout.depths:
        return []
    try:
        return None if depths is None or depths.flags is None else depths.flags(model.config, model.layout)
    except UntrainableError:
        return None


def megatron_arguments(model: HFModel) -> Namespace:
    """The arguments that a checkpoint of this model stores.

    If Megatron cannot run the model, these are `mtp_num_layers` and the reason, `megatron_mtp_untrainable`.
    """
    flags, reason = flags_of(model)
    if flags is None:
        return Namespace(mtp_num_layers=model.layout.depths or None, megatron_mtp_untrainable=reason)
    args = parsed(flags, model.config.integer("vocab_size"))
    set_passes(args, model.config)
    return args
