"""Send the output of Megatron and its libraries to a listing, and keep the terminal for `say`.

This file imports neither torch nor Megatron, because libraries print their first warnings during import.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from megatron_mtp.training.short_log import Listing


@contextmanager
def quiet(verbose: bool = False, notes: TextIO | None = None) -> Iterator[TextIO]:
    """Send the output of libraries to the listing, unless `verbose`.

    Yields the original standard output. `say` prints to `notes`, or to standard output if `notes` is None.
    """
    if verbose:
        yield sys.stdout
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with _own_terminal() as terminal, _replaced(Listing(notes or terminal)):
        yield terminal


@contextmanager
def _own_terminal() -> Iterator[TextIO]:
    """Return a private copy of standard output.

    What C++ libraries and child processes write to descriptor 1 is dropped.
    """
    sys.stdout.flush()
    is_real = False
    with suppress(OSError, ValueError):  # stdout of a test, or one without a descriptor
        is_real = sys.stdout.fileno() == 1
    if not is_real:
        yield sys.stdout
        return
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    terminal = os.fdopen(kept, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    try:
        yield terminal
    finally:
        terminal.flush()
        os.dup2(kept, 1)
        terminal.close()


@contextmanager
def _replaced(listing: Listing) -> Iterator[None]:
    """Send standard output, warnings and log records below ERROR to the full log, and errors to stderr."""
    output, show, root = sys.stdout, warnings.showwarning, logging.getLogger()
    handlers, level = list(root.handlers), root.level
    errors, others = logging.StreamHandler(sys.stderr), logging.StreamHandler(listing)
    errors.setLevel(logging.ERROR)
    others.addFilter(lambda record: record.levelno < logging.ERROR)
    for handler in (errors, others):
        handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s:%(message)s"))
    sys.stdout, root.handlers = listing, [errors, others]
    root.setLevel(logging.INFO)  # Megatron's default
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        sys.stdout, warnings.showwarning, root.handlers = output, show, handlers
        root.setLevel(level)
        listing.close()
