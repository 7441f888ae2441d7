"""What a run prints: our lines on the terminal, the thousand lines of Megatron and its libraries in a log file.

    with quiet():                from here on, prints and warnings go to the listing
        keep_listing(folder)     which is a file from here on: megatron.log, or megatron-3.log of rank 3
        say("...")               and this goes to the terminal

Errors stay on stderr. A run that fails also shows the end of its listing there, since Megatron prints its reason before
it exits. This file does not import torch: libraries print their first warnings while they are imported.
"""

import io
import logging
import os
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO, override

from megatron_mtp.errors import INTERRUPTED, REFUSED, UNREAD

SHOWN_AT_FAILURE = 20
"""Lines of the listing."""

QUIET_LIBRARIES = {"TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Variables that silence what libraries print by themselves, unless the user has set them."""


class Listing(io.TextIOBase):
    """Replaces standard output: a log file once its folder is known, and the last lines in memory.

    Attributes:
        terminal: where `say` prints.
        path: the log file, if there is one.
    """

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal
        self.path: Path | None = None
        self._file: TextIO | None = None
        self._waiting: list[str] | None = []  # what was printed before the folder was known
        self._last: deque[str] = deque(maxlen=SHOWN_AT_FAILURE)

    def keep_in(self, folder: Path | None) -> None:
        """Write to a file in this folder from now on; without one, forget all but the last lines."""
        waiting, self._waiting = "".join(self._waiting or []), None
        if folder is None:
            return
        rank = os.environ.get("RANK", "0")
        self.path = folder / ("megatron.log" if rank == "0" else f"megatron-{rank}.log")
        if waiting:
            self._to_file(waiting)

    @override
    def write(self, text: str) -> int:
        self._last.extend(line for line in text.splitlines() if line.strip())
        if self._waiting is not None:
            self._waiting.append(text)
        elif self.path is not None:
            self._to_file(text)
        return len(text)

    @override
    def flush(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # a full disk: `write` has reported it
                self._file.flush()

    @override
    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()
        super().close()

    @override
    def fileno(self) -> int:
        return 1

    def end(self) -> str:
        """The last lines, for a run that failed."""
        return "\n".join(self._last)

    def _to_file(self, text: str) -> None:
        """A log that cannot be written does not end the run: one line on the terminal reports it."""
        assert self.path is not None
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  # as long as the run
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            print(f"> {self.path} cannot be written ({error.strerror}); going on without it", file=self.terminal)
            self.path = None


def say(line: str) -> None:
    """Print to the terminal, also where standard output is a listing."""
    print(line, file=getattr(sys.stdout, "terminal", sys.stdout), flush=True)


def keep_listing(folder: Path | None) -> Path | None:
    """Write the listing of this process, if it has one, to a file in the folder; returns the file."""
    if not isinstance(sys.stdout, Listing):
        return None
    sys.stdout.keep_in(folder)
    return sys.stdout.path


@contextmanager
def quiet(verbose: bool = False, notes: TextIO | None = None) -> Iterator[TextIO]:
    """Send what libraries print to the listing, unless `verbose`; if the run fails, show the end of the listing.

    Yields standard output as it was. `say` prints to `notes`, or there if it is None.
    """
    if verbose:
        yield sys.stdout
        return
    for name, value in QUIET_LIBRARIES.items():
        os.environ.setdefault(name, value)
    with _own_terminal() as terminal:
        listing = Listing(notes or terminal)
        with _replaced(listing):
            try:
                yield terminal
            except SystemExit as end:
                if end.code not in (None, 0, REFUSED, INTERRUPTED, UNREAD):  # after these a sentence is on stderr
                    _show_end(listing)
                raise
            except Exception:
                _show_end(listing)
                raise


@contextmanager
def _own_terminal() -> Iterator[TextIO]:
    """Standard output as a file of ours; what C++ libraries and child processes write to descriptor 1 is dropped."""
    sys.stdout.flush()
    try:
        is_real = sys.stdout.fileno() == 1
    except (OSError, ValueError):  # a test's, or one without a descriptor
        is_real = False
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
    """Standard output, warnings and log records below ERROR go to the listing; log records of errors to stderr."""
    output, show, root = sys.stdout, warnings.showwarning, logging.getLogger()
    handlers, level = list(root.handlers), root.level
    errors, others = logging.StreamHandler(sys.stderr), logging.StreamHandler(listing)
    errors.setLevel(logging.ERROR)
    others.addFilter(lambda record: record.levelno < logging.ERROR)
    form = logging.Formatter("%(levelname)s:%(name)s:%(message)s")
    for handler in (errors, others):
        handler.setFormatter(form)

    sys.stdout = listing
    root.handlers = [errors, others]
    root.setLevel(logging.INFO)  # which is Megatron's default
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        sys.stdout, warnings.showwarning, root.handlers = output, show, handlers
        root.setLevel(level)
        listing.close()


def _show_end(listing: Listing) -> None:
    if not (said := listing.end()):
        return
    where = f" (all of it: {listing.path})" if listing.path is not None else " (--verbose shows all of it)"
    print(f"the last lines of Megatron's listing{where}:\n{said}", file=sys.stderr, flush=True)
