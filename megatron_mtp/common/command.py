"""What every command does around its work: streams, an exit status, optional packages, checks of arguments."""

import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_mtp.common.errors import Mistakes, sentences


def named(text: str) -> Path:
    """Convert an argument to a path, for argparse's `type=`. Unlike `Path`, it rejects an empty string.

    Raises:
        ArgumentTypeError: the argument is empty, for example an unset variable in a script.
    """
    if not text:
        raise ArgumentTypeError("it is empty; give a path")
    return Path(text)


def open_streams() -> None:
    """Open the null device for standard streams that were closed at startup (`>&-`).

    Otherwise the next opened file would get the stream's number, and a library's prints would end up in a checkpoint.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115  # stays open


def status_of(program: str, work: Callable[[], int], mistakes: Mistakes = ValueError, advice: str = "") -> int:
    """Run `work` and return its exit status, with errors handled by `sentences`."""
    try:
        with sentences(program, mistakes, advice):
            return work()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)


@contextmanager
def from_extra(extra: str, what: str, *modules: str) -> Iterator[None]:
    """Wrap imports that need an optional extra of pyproject.toml.

    Args:
        extra: name of the extra.
        what: the feature that needs it.
        modules: top-level modules that the extra installs.

    Raises:
        ValueError: a module is not installed; the message has the install command.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in modules:
            raise
        raise ValueError(
            f"{what} needs {error.name}, which is not installed; run: pip install 'megatron-mtp[{extra}]'."
        ) from error


def check_counts(args: object, *names: str) -> None:
    """Raise ValueError if a flag that counts something is below 1."""
    for name in names:
        if (number := getattr(args, name)) is not None and number < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {number}; give 1 or more.")
