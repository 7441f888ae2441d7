"""Megatron's training loop, observed: the metrics and the short log receive the arguments of its functions.

The loop has no callbacks. It looks its own functions up by name in its module, so wrappers there see every call; the
functions are rows of `patches.table.LOOP`.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.training import get_args

from megatron_mtp.config import MTPConfig, trained_depths
from megatron_mtp.errors import InputError
from megatron_mtp.model.arguments import trunk_and_depths
from megatron_mtp.patches.patch import Replace, State, installed, state_of, while_replaced
from megatron_mtp.patches.table import CORE, LOOP
from megatron_mtp.training.metrics import Metrics, Step
from megatron_mtp.training.parameter_group import get_mtp_optimizer, mtp_grad_norm
from megatron_mtp.training.short_log import say

Function = Callable[..., Any]


@contextmanager
def observed(metrics: Metrics, shows_checkpoints: bool = False, settings: MTPConfig | None = None) -> Iterator[None]:
    """While this lasts, the metrics receive training steps and the data of evaluations.

    With `settings` that have a learning rate or clip of the MTP layers, optimizers have a parameter group of them.

    Raises:
        InputError: the installed megatron-core cannot be observed in this way.
    """
    wrappers: dict[str, Replace] = {
        "train_step": partial(_steps, metrics),
        "training_log": partial(_logged_steps, metrics),
        "evaluate_and_print_results": partial(_evaluations, metrics),
        # Megatron's count for its log: of every pass of a repeated layer, and not of --mtp-num-layers
        "num_floating_point_operations": lambda count: (
            lambda args, *rest, **named: count(with_passes(args), *rest, **named)
        ),
    }
    if settings is not None and not (settings.mtp_lr is None and settings.mtp_clip_grad is None):
        own: dict[str, Any] = {"lr": settings.mtp_lr, "clip_grad": settings.mtp_clip_grad}
        wrappers["get_megatron_optimizer"] = lambda make: partial(get_mtp_optimizer, make=make, **own)
    if shows_checkpoints:
        wrappers["save_checkpoint_and_time"] = _saves
    if any(state_of(row) is State.NOT_NEEDED for row in LOOP if row.name in wrappers):
        raise InputError(
            f"megatron-core is {installed('megatron-core')}, whose training loop does not call its steps as that of "
            f"{CORE} does; install a version in that range."
        )

    with while_replaced(LOOP, wrappers):
        yield


def _steps(metrics: Metrics, train_step: Function) -> Function:
    def timed(forward_step: Any, data: Any, model: Any, optimizer: Any, *rest: Any, **named: Any) -> Any:
        metrics.begin_step()
        done = train_step(forward_step, data, model, optimizer, *rest, **named)
        metrics.mtp_grad_norm = mtp_grad_norm(optimizer)
        return done

    return timed


def _logged_steps(metrics: Metrics, training_log: Function) -> Function:
    """Called at the end of every step, on all ranks."""

    def logged(losses: Any, sums: Any, learning_rate: float | None, step: int, *rest: Any, **named: Any) -> Any:
        done = training_log(losses, sums, learning_rate, step, *rest, **named)
        is_skipped, own = bool(rest[2]), metrics.mtp_grad_norm
        metrics.end_step(Step(step, learning_rate, rest[3], None if is_skipped else own, is_skipped))
        return done

    return logged


def _evaluations(metrics: Metrics, evaluate_and_print_results: Function) -> Function:
    """Only the prefix of Megatron's own line names the data: 'iteration 9', '... on test set'."""

    def announced(prefix: str, *rest: Any, **named: Any) -> None:
        is_after_run = prefix.endswith(" set")
        metrics.begin_evaluation("test" if prefix.endswith("test set") else "validation", is_after_run)
        evaluate_and_print_results(prefix, *rest, **named)

    return announced


def with_passes(args: Namespace) -> Namespace:
    """The arguments of a model that has a depth for every pass of a repeated layer."""
    passes = trained_depths(args)
    if passes == (args.mtp_num_layers or 0):
        return args
    changes: dict[str, Any] = {"mtp_num_layers": passes}
    if args.hybrid_layer_pattern is not None:
        trunk, depths = trunk_and_depths(args.hybrid_layer_pattern)
        changes["hybrid_layer_pattern"] = "/".join([trunk, *depths[:1] * passes])
    return Namespace(**{**vars(args), **changes})


def _saves(save_checkpoint_and_time: Function) -> Function:
    def shown(step: int, *rest: Any, **named: Any) -> None:
        save_checkpoint_and_time(step, *rest, **named)
        args = get_args()
        if args.rank == 0:
            say(f"> checkpoint of step {step} {'is being written' if args.async_save else 'saved'} to {args.save}")

    return shown
