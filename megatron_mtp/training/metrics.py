"""Losses and acceptance by depth, gathered over a run: console table, TensorBoard, W&B, metrics.jsonl.

One `Metrics` belongs to one run and is handed to its forward step; nothing is kept in a class or module. Losses reach
the console and the writers by themselves (Megatron's loop logs what the loss function reports); here they are kept for
the file and the short log, together with acceptance, which the loop does not know.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core import mpu
from megatron.training import get_args
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
from megatron.training.utils import is_last_rank
from torch import Tensor

from megatron_mtp.files import written_beside
from megatron_mtp.training.acceptance import AcceptanceCounts, AcceptanceRates, acceptance_rates
from megatron_mtp.training.console import say
from megatron_mtp.training.cost import StepClock, peak_memory
from megatron_mtp.training.plot import plot_metrics
from megatron_mtp.training.run_record import write_run_record

FILE = "metrics.jsonl"
PLOT = "metrics.png"


@dataclass
class Window:
    """Sums since the last report, on the device."""

    losses: dict[str, Tensor] = field(default_factory=dict)
    acceptance_4D: Tensor | None = None

    def add(self, report: dict[str, Tensor], acceptance: AcceptanceCounts | None) -> None:
        for name, sum_and_tokens in report.items():
            self.losses[name] = self.losses.get(name, 0) + sum_and_tokens
        if acceptance is not None:
            stacked_4D = acceptance.stacked()
            self.acceptance_4D = stacked_4D if self.acceptance_4D is None else self.acceptance_4D + stacked_4D

    def reduce(self) -> tuple[dict[str, float], AcceptanceRates | None]:
        """Mean losses and rates over all data- and context-parallel ranks of this stage."""
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        losses = {}
        for name, sum_and_tokens in self.losses.items():
            torch.distributed.all_reduce(sum_and_tokens, group=group)
            losses[name] = (sum_and_tokens[0] / sum_and_tokens[1]).item()
        if self.acceptance_4D is None:
            return losses, None
        torch.distributed.all_reduce(self.acceptance_4D, group=group)
        return losses, acceptance_rates(self.acceptance_4D)


@dataclass(frozen=True)
class Step:
    """What Megatron's loop says of a training step that is through; the optimizer's figures may be absent."""

    number: int
    learning_rate: float | None = None
    grad_norm: float | None = None
    is_skipped: bool = False

    def figures(self) -> dict[str, float]:
        named = {"learning rate": self.learning_rate, "grad norm": self.grad_norm}
        return {name: float(value) for name, value in named.items() if value is not None}


class Reporter(Protocol):
    """Shows a run's figures while it goes on; called on the last rank alone."""

    def interval(self, row: dict[str, Any], rates: AcceptanceRates | None) -> None:
        """Training since the last call."""

    def evaluated_batch(self) -> None:
        """A microbatch of an evaluation is through."""

    def evaluation(self, row: dict[str, Any], text: str, when: str) -> None:
        """An evaluation is through; `text` is its table, and `when` 'at step 140' or 'after the run'."""


class PrintedTables:
    """The reporter beside Megatron's own log: what that does not say."""

    def interval(self, row: dict[str, Any], rates: AcceptanceRates | None) -> None:
        if rates is not None:
            print(table(row, rates), flush=True)

    def evaluated_batch(self) -> None:
        pass

    def evaluation(self, row: dict[str, Any], text: str, when: str) -> None:
        if "expected accepted length" in row:
            print(text, flush=True)


class Metrics:
    """Gathers every microbatch's report and writes them out: training each log interval, evaluation at its end.

    Attributes:
        evaluated: the row and the table of the last evaluation, on the rank that has the figures.
    """

    def __init__(self, folder: Path | None, reporter: Reporter | None = None) -> None:
        self.folder = folder
        self._reporter = reporter or PrintedTables()
        self.evaluated: tuple[dict[str, Any], str] | None = None
        self._training = Window()
        self._evaluation = Window()
        self._data, self._sets = "validation", 0  # what is evaluated on, and how many sets of it are through
        self._is_after_run = False
        self._clock = StepClock()
        self._step: Step | None = None  # the last that is through; numbers count from the start of a resumed run
        self._skipped = 0  # steps since the last row, whose gradients overflowed
        self._has_written, self._has_failed = False, False
        self._closing = False

    def add(self, report: dict[str, Tensor], acceptance: AcceptanceCounts | None) -> None:
        """Take in a microbatch, in training (where gradients are recorded) or in evaluation."""
        if torch.is_grad_enabled():
            self._training.add(report, acceptance)
            return
        self._evaluation.add(report, acceptance)
        if is_last_rank():
            self._reporter.evaluated_batch()

    def begin_step(self) -> None:
        """Megatron's loop begins a training step."""
        self._clock.start()

    def end_step(self, step: Step) -> None:
        """The step is through, on every rank; at the end of a log interval its figures are published."""
        self._clock.stop()
        self._step = step
        self._skipped += step.is_skipped
        if step.number % get_args().log_interval == 0:
            self._end_interval()

    def begin_evaluation(self, data: str, is_after_run: bool = False) -> None:
        """On 'validation' or 'test' data, which Megatron does not tell `end_evaluation`; it may be on several sets."""
        self._data, self._sets, self._is_after_run = data, 0, is_after_run

    def end_evaluation(self, model: Any) -> None:
        """Megatron's `non_loss_data_func`, called on every rank when an evaluation on one set is through."""
        window, self._evaluation = self._evaluation, Window()
        self._publish(self._evaluated_set(), window)
        self._sets += 1

    def _evaluated_set(self) -> str:
        """Of several sets with the suffix that Megatron gives to its own figures."""
        args = get_args()
        if not args.multiple_validation_sets:
            return self._data
        return f"{self._data}-{args.validation_set_names[self._sets] if args.validation_set_names else self._sets}"

    def close(self) -> None:
        """Write what is left of an interval, and the plot; Megatron has closed its writers by now."""
        self._closing = True
        self._end_interval()
        if self.folder is not None and is_last_rank() and (self.folder / FILE).exists():
            with self._going_on_without(self.folder / PLOT):
                plot_metrics(self.folder / FILE, self.folder / PLOT)

    def _end_interval(self) -> None:
        window, self._training = self._training, Window()
        self._publish("training", window)

    def _publish(self, split: str, window: Window) -> None:
        if not window.losses:
            return
        losses, rates = window.reduce()
        iteration = get_args().iteration if self._step is None else self._step.number
        row: dict[str, Any] = {"iteration": iteration, "split": split, **losses}
        if rates is not None:
            row |= rates.named()
        if split == "training":
            row |= {**self._step_figures(), **self._clock.read(), "peak memory bytes": peak_memory()}
        self._write(row)
        if is_last_rank():
            self._report(row, rates)
        if rates is not None and not self._closing:
            _log_acceptance(rates, iteration, "" if split == "training" else f" {split}")

    def _step_figures(self) -> dict[str, float]:
        """Of the last step, and how many since the last row were skipped, if any."""
        skipped, self._skipped = self._skipped, 0
        figures = {} if self._step is None else self._step.figures()
        return {**figures, "skipped steps": skipped} if skipped else figures

    def _report(self, row: dict[str, Any], rates: AcceptanceRates | None) -> None:
        if row["split"] == "training":
            self._reporter.interval(row, rates)
            return
        self.evaluated = row, table(row, rates)
        self._reporter.evaluation(
            *self.evaluated, "after the run" if self._is_after_run else f"at step {row['iteration']}"
        )

    def _write(self, row: dict[str, Any]) -> None:
        if self.folder is None or not is_last_rank():
            return
        with self._going_on_without(self.folder / FILE):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._has_written:
                _drop_rows_after(self.folder / FILE, get_args().iteration)
                write_run_record(self.folder, get_args())
                self._has_written = True
            _append(self.folder / FILE, json.dumps(row) + "\n")

    @contextmanager
    def _going_on_without(self, file: Path) -> Iterator[None]:
        """Of a file that cannot be written, say so once; training goes on."""
        try:
            yield
        except OSError as error:
            if not self._has_failed:
                say(f"> {file} cannot be written ({error.strerror}); training goes on without it")
            self._has_failed = True


def _append(file: Path, row: str) -> None:
    """The whole row or nothing, so that the next one does not go on where a full disk has cut it."""
    size = file.stat().st_size if file.exists() else 0
    try:
        with open(file, "a", encoding="utf-8") as output:
            output.write(row)
    except OSError:
        with suppress(OSError):
            os.truncate(file, size)
        raise


def _drop_rows_after(path: Path, iteration: int) -> None:
    """Rows of steps that a resumed run makes again; those of an earlier run, which is not resumed, stay beside."""
    if not path.exists():
        return
    if iteration == 0:
        path.replace(path.with_suffix(".old.jsonl"))
        return
    rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
    with written_beside(path) as beside:
        beside.write_text("".join(row for row in rows if _iteration(row) <= iteration), encoding="utf-8")


def _iteration(row: str) -> float:
    """Of a line of the file; one that a killed run left half-written counts as made again."""
    try:
        return int(json.loads(row)["iteration"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")


def table(losses: dict[str, float], rates: AcceptanceRates | None) -> str:
    """What a person looks at after an evaluation: loss and acceptance by depth, and tokens per target forward."""
    if rates is None:
        return f"loss of the trunk: {losses['lm loss']:.4f}; there are no depths"
    lines = [
        "+-------+------------+------------+------------------------+---------+",
        "| depth |       loss | acceptance | conditional acceptance | overlap |",
        "+-------+------------+------------+------------------------+---------+",
        f"| trunk | {losses['lm loss']:10.4f} |            |                        |         |",
    ]
    of_depths = zip(rates.acceptance, rates.conditional_acceptance, rates.overlap, strict=True)
    for depth, (acceptance, conditional, overlap) in enumerate(of_depths, start=1):
        loss = losses[f"mtp_{depth} loss"]
        lines.append(f"| {depth:5d} | {loss:10.4f} | {acceptance:10.1%} | {conditional:22.1%} | {overlap:7.1%} |")
    lines += [lines[0], f"expected accepted length: {rates.length:.3f} tokens per target forward"]
    return "\n".join(lines)


def _log_acceptance(rates: AcceptanceRates, iteration: int, suffix: str) -> None:
    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    for name, value in rates.named().items():
        if writer:
            writer.add_scalar(name + suffix, value, iteration)
        if wandb and is_last_rank():
            wandb.log({name + suffix: value}, iteration)
