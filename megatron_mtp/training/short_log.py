"""Console output of a run: a short log on the terminal, the output of Megatron and its libraries in a log file.

    with quiet():                from here on, prints and warnings go to the listing
        keep_listing(folder)     and the listing to a file: megatron.log, or megatron-3.log for rank 3
        say("...")               prints to the terminal

    step 120/560 | lm loss 2.3456 | mtp_1 loss 2.9876 | 12,345 tokens/s | 0:12:34 left | lr 1.00e-03 | 1.2 GiB

Errors stay on stderr. This file imports neither torch nor Megatron at its top, because libraries print their first
warnings during import.
"""

import io
import os
import shutil
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, TextIO, override

from tqdm import tqdm

if TYPE_CHECKING:
    from megatron_mtp.common.acceptance import AcceptanceStats

MOST_HELD = 10_000
"""Most pieces of a listing without a file that are kept in memory."""

SILENCE = 30
"""Seconds after which an evaluation prints its progress, if no terminal shows a bar."""

INTERVALS, LINES = (100, 50, 20, 10, 5, 2, 1), 20
"""Log intervals without --log-interval, and the least number of lines of a run: it uses the largest interval with that
many lines.
"""


class Listing(io.TextIOBase):
    """Replacement of standard output: buffers in memory until the folder of the log file is known.

    Attributes:
        terminal: where `say` prints.
        path: the log file, if there is one.
        last: the last line.
    """

    def __init__(self, terminal: TextIO) -> None:
        self.terminal, self.last = terminal, ""
        self.path: Path | None = None
        self._held: list[str] = []
        self._file: TextIO | None = None

    def keep_in(self, folder: Path) -> Path | None:
        """Write to a file in this folder from now on.

        Return the file, or None if the buffered output cannot be written.
        """
        rank = os.environ.get("RANK", "0")
        self.path = folder / ("megatron.log" if rank == "0" else f"megatron-{rank}.log")
        held, self._held = "".join(self._held), []
        if held:
            self.write(held)
        return self.path

    @override
    def write(self, text: str) -> int:
        """Write text. If the log cannot be written, report it once on the terminal and continue the run."""
        self.last = next((line for line in reversed(text.splitlines()) if line.strip()), self.last)
        if self.path is None:
            self._held.append(text)
            del self._held[:-MOST_HELD]
            return len(text)
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  # open during the run
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            print(f"> {self.path} cannot be written ({error.strerror}); continuing without it", file=self.terminal)
            self.path = self._file = None
        return len(text)

    @override
    def fileno(self) -> int:
        return 1

    @override
    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # full disk, which `write` has reported
                self._file.close()
        super().close()


def say(line: str) -> None:
    """Print to the terminal, even if standard output is a listing."""
    print(line, file=getattr(sys.stdout, "terminal", sys.stdout), flush=True)


def keep_listing(folder: Path | None) -> Path | None:
    """Write the listing of this process, if there is one, to a file in the folder. Return the file."""
    return sys.stdout.keep_in(folder) if isinstance(sys.stdout, Listing) and folder is not None else None


def keep_traceback(error: BaseException) -> Path:
    """Write the traceback to the log file, or to a new temporary file. Return the file."""
    listing = sys.stdout if isinstance(sys.stdout, Listing) else Listing(sys.stdout)
    kept = listing.path or listing.keep_in(folder := Path(mkdtemp(prefix="megatron-mtp-"))) or folder
    listing.write("".join(traceback.format_exception(error)))
    return kept


def last_words() -> str:
    """Return the last line of the listing. Megatron prints a reason before it exits without an exception."""
    return sys.stdout.last.strip() if isinstance(sys.stdout, Listing) else "see its last line above"


# --- the short log ---------------------------------------------------------------------------------------------------


def fitting_interval(steps: int | None) -> int:
    """Return the default of --log-interval for a run of this many steps; Megatron's 100 for long runs."""
    return next((one for one in INTERVALS if steps is None or one * LINES <= steps), 1)


class ShortLog:
    """`Reporter` of training and `evaluate`. `shows_tables` is off if the caller prints them."""

    def __init__(self, shows_tables: bool = True) -> None:
        self._shows_tables = shows_tables
        self._bar: tqdm[Any] | None = None
        self._batches, self._said = 0, 0.0  # of this evaluation; time of the last line about it

    def interval(self, row: dict[str, Any], rates: "dict[str, AcceptanceStats]") -> None:
        """Print a line of training, on the last rank, which has the losses."""
        from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
        from megatron.training import get_args

        args = get_args()
        tokens = get_current_running_global_batch_size() * args.seq_length
        width = shutil.get_terminal_size().columns if sys.__stdout__ is not None and sys.__stdout__.isatty() else None
        say(line_of(row, rates, args.train_iters, tokens, width))

    def evaluated_batch(self) -> None:
        """Advance the progress bar. Its length is unknown if there are several data sets."""
        if self._bar is None:
            from megatron.training import get_args

            args, total = get_args(), None
            if isinstance(args.eval_iters, int):
                at_once = args.eval_micro_batch_size * args.data_parallel_size
                total = args.eval_iters * args.eval_global_batch_size // at_once
            self._bar = tqdm(desc="evaluating", total=total, unit="batch", leave=False, disable=None)
            self._batches, self._said = 0, time.monotonic()
        self._bar.update()
        self._batches += 1
        if self._bar.disable and time.monotonic() - self._said > SILENCE:  # no terminal, such as a log file or a job
            self._said = time.monotonic()
            say(f"> evaluating: {self._batches} {'' if self._bar.total is None else f'of {self._bar.total} '}batches")

    def evaluation(self, row: dict[str, Any], text: str, when: str) -> None:
        """Print the table of an evaluation."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._shows_tables:
            say(f"{row['split']} {when}:\n{text}")


def line_of(
    row: dict[str, Any], rates: "dict[str, AcceptanceStats]", steps: int, tokens: int, width: int | None = None
) -> str:
    """Format a training row as one line, with as many values as fit the width."""
    parts = [f"step {row['iteration']}/{steps}"]
    if "skipped steps" in row:
        parts.append(f"{row['skipped steps']} steps skipped")
    if "left out steps" in row:
        parts.append(f"{row['left out steps']} steps skipped by --iterations-to-skip")
    parts += [f"{name} {value:.4f}" for name, value in row.items() if name.endswith(" loss")]
    for what, stats in rates.items():
        of = "" if what == "mtp" else f"{what} "
        for name, values in (
            ("acceptance", stats.acceptance),
            ("conditional acceptance", stats.conditional_acceptance),
        ):
            parts.append(f"{of}{name} {' '.join(f'{rate:.1%}' for rate in values)}")
    if "step seconds" in row:
        seconds = row["step seconds"]
        left = timedelta(seconds=round(seconds * max(steps - row["iteration"], 0)))
        parts += [f"{tokens / seconds:,.0f} tokens/s", f"{left} left"]
    if "learning rate" in row:
        parts.append(f"lr {row['learning rate']:.2e}")
    if "mtp learning rate" in row:
        parts.append(f"mtp lr {row['mtp learning rate']:.2e}")
    parts += [f"{name} {row[name]:.3g}" for name in ("lambda", "grad norm", "mtp grad norm") if name in row]
    parts += [f"{row[name]:.3g} {name}" for name in ("TFLOP/s/GPU",) if name in row]
    parts += [f"{row[name] / 2**30:.1f} GiB" for name in ("peak memory bytes",) if name in row]
    whole = list(accumulate(parts, lambda line, part: f"{line} | {part}"))
    fitting = [line for line in whole if width is None or len(line) < width]
    return fitting[-1] if fitting else whole[0]
