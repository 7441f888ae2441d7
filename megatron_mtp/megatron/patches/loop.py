"""Functions of Megatron that a run wraps to observe its training loop (`training/run.py`), as rows of a table."""

import inspect
from types import FunctionType
from typing import Any, cast

from megatron_mtp.megatron.patches.patch import CORE, ISSUES, NONE, PULLS, Function, Patch, Probe


def has_no_callbacks(_: Any) -> bool:
    """Return whether `pretrain()` takes no callbacks, so runs can be observed only through its functions' arguments."""
    from megatron.training import training

    return not any("callback" in name for name in inspect.signature(training.pretrain).parameters)


def called_by_name(*first: str) -> Probe:
    """Return a probe: does Megatron's loop call the function by its name in the module, with these first arguments?"""

    def probe(function: Function) -> bool | None:
        if tuple(inspect.signature(function).parameters)[: len(first)] != first:
            return None
        return any(function.__name__ in caller.__code__.co_names for caller in _functions_of_loop())

    return probe


def _functions_of_loop() -> list[FunctionType]:
    from megatron.training import training

    functions = [inspect.unwrap(one) for one in vars(training).values() if inspect.isfunction(one)]
    return [cast(FunctionType, one) for one in functions if one.__module__ == training.__name__]


def unobserved(*first: str) -> Probe:
    """Return a probe: are there no callbacks, and does the loop call the function as in `called_by_name`?"""
    by_name = called_by_name(*first)
    return lambda function: by_name(function) if has_no_callbacks(function) else False


def _of_loop(name: str, reason: str, probe: Probe) -> Patch:
    return Patch(f"megatron.training.training:{name}", reason, f"callbacks: {PULLS}/5610", CORE, probe)


LOOP = (
    _of_loop(
        "train_step",
        "The loop has no callback for the beginning of a step.",
        unobserved(),
    ),
    _of_loop(
        "training_log",
        "The loop has no callback for the figures of a step.",
        unobserved(
            "loss_dict",
            "total_loss_dict",
            "learning_rate",
            "iteration",
            "loss_scale",
            "report_memory_flag",
            "skipped_iter",
            "grad_norm",
        ),
    ),
    _of_loop(
        "evaluate_and_print_results",
        "The loop has no callback for evaluations and their data.",
        unobserved("prefix"),
    ),
    _of_loop(
        "save_checkpoint_and_time",
        "The loop has no callback for saved checkpoints.",
        unobserved("iteration"),
    ),
    _of_loop(
        "checkpoint_and_decide_exit",
        "The loop has no callback that saves a state for its evaluation, or ends the run.",
        unobserved(
            "model",
            "optimizer",
            "opt_param_scheduler",
            "iteration",
            "num_floating_point_operations_so_far",
            "checkpointing_context",
            "train_data_iterator",
        ),
    ),
    Patch(
        "megatron.training.training:get_megatron_optimizer",
        "The loop's optimizer has no parameter group of the MTP layers.",
        f"{ISSUES}/1263",
        CORE,
        called_by_name(),
    ),
    Patch(
        "megatron.training.training:num_floating_point_operations",
        "The log counts --mtp-num-layers of a repeated layer, and not its passes of --mtp-unroll.",
        NONE,
        CORE,
        called_by_name(),
    ),
    Patch(
        "megatron.core.dist_checkpointing:save",
        "The tokenizer belongs in a checkpoint, and Megatron calls nothing before a save.",
        f"callbacks: {PULLS}/5610",
        CORE,
        has_no_callbacks,
    ),
)
"""Rows whose replacements each run makes at its start and reverts at its end."""
