"""The short log of a run: a line for every log interval, a table for every evaluation, a line for every checkpoint.

    step 120/560 | lm loss 2.3456 | mtp_1 loss 2.9876 | 12,345 tokens/s | 0:12:34 left | lr 1.00e-03 | grad norm 0.841

Megatron's own log goes to the listing (`console.py`). The last rank, which has the losses, writes the short log.
"""

import shutil
import sys
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any, override

from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
from megatron.training import get_args
from tqdm import tqdm

from megatron_mtp.training.acceptance import AcceptanceRates
from megatron_mtp.training.console import say
from megatron_mtp.training.metrics import Reporter

INTERVALS = (100, 50, 20, 10, 5, 2, 1)
LINES = 20
"""Without --log-interval, a run of at least so many steps has at least so many lines."""


def fitting_interval(steps: int | None) -> int:
    """The default of --log-interval for a run of so many steps; 100, which is Megatron's, where it is long."""
    return next((one for one in INTERVALS if steps is None or one * LINES <= steps), 1)


@dataclass(frozen=True)
class Pace:
    """Progress of a run: steps done, all steps, and tokens of a step."""

    done: int
    steps: int
    tokens: int


class ShortLog(Reporter):
    """The reporter of training and of `evaluate` on a terminal; `shows_tables` is off where the caller prints them."""

    def __init__(self, shows_tables: bool = True) -> None:
        self._shows_tables = shows_tables
        self._bar: tqdm[Any] | None = None

    @override
    def interval(self, row: dict[str, Any], rates: AcceptanceRates | None) -> None:
        args = get_args()
        pace = Pace(row["iteration"], args.train_iters, get_current_running_global_batch_size() * args.seq_length)
        width = shutil.get_terminal_size().columns if sys.__stdout__ is not None and sys.__stdout__.isatty() else None
        say(line_of(row, rates, pace, width))

    @override
    def evaluated_batch(self) -> None:
        if self._bar is None:
            self._bar = tqdm(desc="evaluating", total=_microbatches(), unit="batch", leave=False, disable=None)
        self._bar.update()

    @override
    def evaluation(self, row: dict[str, Any], text: str, when: str) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._shows_tables:
            say(f"{row['split']} {when}:\n{text}")


def line_of(row: dict[str, Any], rates: AcceptanceRates | None, pace: Pace, width: int | None = None) -> str:
    """A training row as one line; parts that do not fit the terminal's width are left out from the right."""
    parts = [f"step {pace.done}/{pace.steps}", *_losses(row)]
    if rates is not None:
        parts.append(f"acceptance {_percent(rates.acceptance)}")
        parts.append(f"conditional acceptance {_percent(rates.conditional_acceptance)}")
    if "step seconds" in row:
        seconds = row["step seconds"]
        left = timedelta(seconds=round(seconds * max(pace.steps - pace.done, 0)))
        parts += [f"{pace.tokens / seconds:,.0f} tokens/s", f"{left} left"]
    if "learning rate" in row:
        parts.append(f"lr {row['learning rate']:.2e}")
    if "skipped steps" in row:
        parts.insert(1, f"{row['skipped steps']} steps skipped")
    if "grad norm" in row:
        parts.append(f"grad norm {row['grad norm']:.3g}")
    whole = list(accumulate(parts, lambda line, part: f"{line} | {part}"))
    fitting = [line for line in whole if width is None or len(line) < width]
    return fitting[-1] if fitting else whole[0]


def _percent(rates: list[float]) -> str:
    return " ".join(f"{rate:.1%}" for rate in rates)


def _losses(row: dict[str, Any]) -> list[str]:
    return [f"{name} {value:.4f}" for name, value in row.items() if name.endswith(" loss")]


def _microbatches() -> int | None:
    """Of one evaluation on this rank; unknown where several sets are evaluated on."""
    args = get_args()
    if not isinstance(args.eval_iters, int):
        return None
    return int(args.eval_iters * args.eval_global_batch_size // (args.eval_micro_batch_size * args.data_parallel_size))
