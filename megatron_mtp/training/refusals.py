"""Megatron's refusals as one sentence each: failed assertions over flags; data, checkpoints and disks that fail.

Two contexts: `megatrons_refusals` around Megatron's parsing and validation, `refusals_of_a_run` around its
`pretrain()`, in which a ValueError may also be a bug. Bugs keep their traceback: errors of our own code, and Megatron's
errors in training itself.
"""

import linecache
import re
import shutil
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megatron.training import get_args
from torch.distributed.checkpoint.api import CheckpointException

from megatron_mtp.checkpoint.mcore.integrity import root_of
from megatron_mtp.errors import InputError
from megatron_mtp.training.console import Listing
from megatron_mtp.training.hooks import Function, wrapped

REFUSALS = (
    AssertionError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    NotImplementedError,
    ZeroDivisionError,
    ImportError,
)
"""What Megatron raises over flags that it does not take."""

DIVERGED = "the loss or a gradient is NaN or infinite; give a smaller --lr, or look for what the text has at this step."


@contextmanager
def megatrons_refusals() -> Iterator[None]:
    """Turn what Megatron raises over flags into a ValueError of one sentence.

    Raises:
        ValueError: with Megatron's own message; where it has none, the condition that does not hold.
    """
    try:
        yield
    except SystemExit as end:
        if end.code is None:  # Megatron has printed why, among its other lines
            raise ValueError(f"Megatron refuses these flags{last_words()}") from None
        raise
    except REFUSALS as error:
        raise ValueError(f"Megatron refuses these flags: {reason(error)}") from error


@contextmanager
def refusals_of_a_run() -> Iterator[None]:
    """Turn errors of Megatron's `pretrain()` over flags, data, checkpoints and disks into InputErrors."""
    with wrapped({name: partial(_refusing, name) for name in PHASES}):
        yield


def _refusing(name: str, function: Function) -> Function:
    """A function of `PHASES`, whose refusals are InputErrors."""
    kinds, said = PHASES[name]

    def refusing(*arguments: Any, **named: Any) -> Any:
        if name == "save_checkpoint" and get_args().save is None:
            raise InputError(DIVERGED)  # without --save there is no other reason to save
        try:
            return function(*arguments, **named)
        except InputError:
            raise
        except SystemExit as end:
            if end.code is None:
                raise InputError(f"{said.format(**vars(get_args()))}{last_words()}") from None
            raise
        except kinds as error:
            if isinstance(error, OSError) or (_is_ours(error) and not isinstance(error, ValueError)):
                raise
            free = _free_space(Path(get_args().save)) if name == "save_checkpoint" else ""
            raise InputError(f"{said.format(**vars(get_args()))}: {reason(error)}{_advice(error)}{free}") from error

    return refusing


FAILURES = (Exception, CheckpointException)
"""Errors over files; torch's CheckpointException has the errors of all ranks, and is no Exception."""

PHASES: dict[str, tuple[tuple[type[BaseException], ...], str]] = {
    "initialize_megatron": (REFUSALS, "Megatron refuses these flags"),
    "setup_model_and_optimizer": (REFUSALS, "Megatron refuses these flags"),
    "load_checkpoint": (FAILURES, "the checkpoint cannot be loaded into this model"),
    "build_train_valid_test_data_iterators": ((Exception,), "the data sets cannot be built"),
    "save_checkpoint": (FAILURES, "no checkpoint can be saved to --save {save}"),
}
"""Functions of Megatron's training loop, their errors over input, and the start of the sentence, with {} for a flag's
value."""

PACKAGE = Path(__file__).parents[1]

ADVICE = {
    "OptimizerParamScheduler": "Give the schedule of the run that saved it, or --override-opt-param-scheduler to take "
    "that of the flags.",
    "not in state dict": "Give the flags that it was trained with, or --no-load-optim if only its optimizer differs.",
}
"""What to do, by a part of Megatron's message that is in it."""


@contextmanager
def refusal_of_diverged(args: Namespace) -> Iterator[None]:
    """Turn Megatron's RuntimeError over a NaN loss, with --rerun-mode disabled, into an InputError."""
    try:
        yield
    except RuntimeError as error:
        if args.rerun_mode != "disabled":
            raise
        raise InputError(DIVERGED) from error


def _free_space(folder: Path) -> str:
    """The free space: on a full disk Megatron and torch report a file of an unexpected size."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return f" {shutil.disk_usage(there).free / 2**20:.1f} MiB are free there."


def _is_ours(error: BaseException) -> bool:
    """Whether it was raised by the package, not by what it calls."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Path(frame.filename).is_relative_to(PACKAGE)


def _advice(error: BaseException) -> str:
    return next((f" {advice}" for part, advice in ADVICE.items() if part in str(error)), "")


def last_words() -> str:
    """The line that Megatron has printed before it ended the program without an exception."""
    said = sys.stdout.end() if isinstance(sys.stdout, Listing) else ""
    return f": {said.splitlines()[-1]}" if said else "; its last line above says why."


def reason(error: BaseException) -> str:
    """Megatron's message on one line; without one, the condition of an assertion or the kind of the error."""
    error = root_of(error)
    message = " ".join(str(error).split())[:400].rstrip(".")
    if isinstance(error, AssertionError) and not message:
        return f"{_condition(error)} does not hold."
    if isinstance(error, KeyError) or not message:
        return f"{type(error).__name__} {message}."
    return f"{message}."


def _condition(error: BaseException) -> str:
    """Of the `assert` that raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    first, last = frame.lineno or 1, frame.end_lineno or frame.lineno or 1
    source = " ".join(linecache.getline(frame.filename, line).strip() for line in range(first, last + 1))
    return re.sub(r"^assert\s+", "", source)
