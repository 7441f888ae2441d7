"""Optimizer parameter groups: a separate learning rate, gradient norm and clip for MTP layers; schedules at a resume.

    optimizer = get_mtp_optimizer(config, model_chunks, lr=1e-4, clip_grad=1.0)
    optimizer.step()
    mtp_grad_norm(optimizer)

The learning rate is one of Megatron's parameter group overrides. Megatron's main gradient norm excludes parameters
whose `grad_norm_group` is "mtp" (it sets that with --mtp-detach-heads) but clips them like the rest; here they have
their own clip.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamGroupOverride,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import GRAD_NORM_GROUP_ATTR, MTP_GRAD_NORM_GROUP
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate

from megatron_mtp.spec.head import is_head, module_of

_IS_MTP = ParamWithNamePredicate("mtp", lambda _, name: any(map(is_head, name.split("."))))


def _is_of(head: str) -> ParamWithNamePredicate:
    """Return a predicate for the parameters of an attached head, by the head's name."""
    return ParamWithNamePredicate(head, lambda _, name: module_of(head) in name.split("."))


def get_mtp_optimizer(
    config: OptimizerConfig,
    model_chunks: list[torch.nn.Module],
    *given: Any,
    lr: float | Mapping[str, float] | None = None,
    clip_grad: float | None = None,
    make: Callable[..., Any] = get_megatron_optimizer,
    **settings: Any,
) -> Any:
    """Call Megatron's `get_megatron_optimizer` with a parameter group for the MTP layers.

    Args:
        config: Megatron's optimizer settings.
        model_chunks: this rank's model chunks, as for Megatron's function.
        given, settings: other arguments of Megatron's function.
        lr: peak learning rate of the MTP layers; their minimum is scaled in proportion. None for the config's. For
            attached heads, optionally a dictionary by head name.
        clip_grad: clip of the MTP layers' own gradient norm, 0 for no clipping; the config's clip then applies to all
            other parameters. None for a common norm and clip.
        make: Megatron's function, or another with the same interface.

    Raises:
        ValueError: `clip_grad` is set, and the config has no clipping.
    """
    if lr is not None:
        overrides = settings.get("config_overrides")
        overrides = get_standard_config_overrides(config) if overrides is None else overrides
        rates = {_is_of(head): rate for head, rate in lr.items()} if isinstance(lr, Mapping) else {_IS_MTP: lr}
        own = {
            ParamKey(with_name_predicate=these): ParamGroupOverride(
                max_lr=rate, min_lr=lowest_rate(rate, config.lr, config.min_lr)
            )
            for these, rate in rates.items()
        }
        settings["config_overrides"] = {**overrides, **own}
    if clip_grad is None:
        return make(config, model_chunks, *given, **settings)
    if not config.clip_grad:
        raise ValueError(
            f"the clip of the MTP layers' gradient norm is {clip_grad}, and --clip-grad 0 computes no norms; give "
            "--clip-grad a number above 0."
        )
    for chunk in model_chunks:
        for name, parameter in chunk.named_parameters():
            if _IS_MTP(parameter, name):
                setattr(parameter, GRAD_NORM_GROUP_ATTR, MTP_GRAD_NORM_GROUP)
    optimizer = make(config, model_chunks, *given, **settings)
    _clip_apart(optimizer, clip_grad)
    return optimizer


def lowest_rate(own: float, lr: float | None, min_lr: float | None) -> float:
    """Return the minimum learning rate for a peak learning rate, in proportion to the config's."""
    return (min_lr or 0.0) * own / lr if lr else 0.0


def mtp_grad_norm(optimizer: Any) -> float | None:
    """Return the gradient norm of the MTP layers in the last step, before clipping.

    None if it is part of the main norm.
    """
    norms = getattr(optimizer, "mtp_grad_norms", None) or getattr(optimizer, "grad_norms_by_group", {})
    norm = norms.get(MTP_GRAD_NORM_GROUP)
    return None if norm is None else float(norm)


def _clip_apart(optimizer: Any, clip_grad: float) -> None:
    """Let the optimizer clip the MTP layers separately when it computes the norms of its groups.

    Megatron's step leaves a group alone whose norm it is not given.
    """
    compute = optimizer._compute_grad_norms_by_group

    def clipped() -> dict[str, float]:
        norms = compute()
        optimizer.mtp_grad_norms = dict(norms)
        norm = norms.pop(MTP_GRAD_NORM_GROUP, None)
        for each in optimizer.chained_optimizers if clip_grad and norm is not None else ():
            parameters = [one for one in each.get_parameters() if hasattr(one, GRAD_NORM_GROUP_ATTR)]
            if parameters:
                is_apart = each.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, clip_grad, norm, use_decoupled_grad=is_apart)
        return norms

    optimizer._compute_grad_norms_by_group = clipped


# --- the schedule of the flags ---------------------------------------------------------------------------------------

SCHEDULE = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Values of a parameter group that the schedule reads instead of its own."""
STRUCTURE = ("optimizer", "wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""Further fields by which Megatron matches the groups of a checkpoint to those of a run."""


def keep_schedule(optimizer: Any) -> None:
    """Make an optimizer keep its schedule when it loads a checkpoint, for --override-opt-param-scheduler.

    Megatron's would use the checkpoint's learning rates, or find no group with the rate of the flags.
    """
    for each in optimizer.chained_optimizers:
        each.load_state_dict = partial(_load_state, each, each.load_state_dict)


def _load_state(optimizer: Any, load: Callable[[Any], None], state: dict[str, Any]) -> None:
    own = [{name: group[name] for name in SCHEDULE if name in group} for group in optimizer.param_groups]
    schedules = defaultdict[Any, list[dict[str, Any]]](list)  # of groups that differ only in their schedule, in order
    for group, schedule in zip(optimizer.param_groups, own, strict=True):
        schedules[tuple(map(group.get, STRUCTURE))].append(schedule)
    for group in state.get("optimizer", state).get("param_groups", ()):
        if same := schedules[tuple(map(group.get, STRUCTURE))]:
            group.update(same.pop(0))
    load(state)
    for group, schedule in zip(optimizer.param_groups, own, strict=True):
        group.update(schedule)
