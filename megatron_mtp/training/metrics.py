"""Losses and acceptance by depth, collected over a run: console table, TensorBoard, W&B, metrics.jsonl.

A run has one `Metrics`, filled by its forward step; there is no global state. Megatron's loop logs the losses to the
console and the writers. This module also keeps them for the file and the short log, together with acceptance, which the
loop does not log.
"""

import json
import resource
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, override

import torch
from megatron.core import mpu
from megatron.training import get_args
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
from megatron.training.utils import is_last_rank
from torch import Tensor

from megatron_mtp.common.acceptance import EXPECTED_LENGTH, RECORD, AcceptanceStats, BySource, record_of
from megatron_mtp.common.files import written_beside
from megatron_mtp.losses.head_objective import Documents
from megatron_mtp.megatron.checkpoint import TRACKER
from megatron_mtp.spec.head import HEADS
from megatron_mtp.spec.kinds import kind_of
from megatron_mtp.training.best_state import BestState
from megatron_mtp.training.documents import gathered, grouped
from megatron_mtp.training.run_files import (
    DOCUMENTS,
    METRICS,
    append,
    drop_rows_after,
    write_documents,
    write_run_record,
)
from megatron_mtp.training.short_log import say

MTP, DRAFTER = HEADS.values()
"""Name prefixes of metrics: of the heads that draft, and of a drafter in addition to MTP layers."""

Rates = dict[str, AcceptanceStats]
"""Acceptance of the heads that draft, and of a drafter in addition to MTP layers: `MTP` and `DRAFTER`, if measured."""

MTP_GRAD_NORM = "mtp grad norm"
"""Norm of the MTP layers' gradients, if they are clipped separately."""

MTP_RATE, LAMBDA = "mtp learning rate", "lambda"
"""Learning rate of the MTP layers, if they have their own; weight of their loss, if it has a schedule."""

THROUGHPUT = "TFLOP/s/GPU"
"""Megatron's operations per second of a step, if --log-throughput is given."""


@dataclass
class LogWindow:
    """Sums since the last report, on the device."""

    losses: dict[str, Tensor] = field(default_factory=dict)
    acceptance: dict[str, Tensor] = field(default_factory=dict)
    documents: dict[str, list[Documents]] = field(default_factory=dict)

    def add(self, report: dict[str, Tensor], counts: dict[str, Tensor], documents: dict[str, Documents]) -> None:
        """Add a step's report: sums and counts by name, and acceptance counts [4, D] if measured."""
        for sums, new in ((self.losses, report), (self.acceptance, counts)):
            for name, each in new.items():
                sums[name] = sums.get(name, 0) + each
        for name, of_documents in documents.items():
            self.documents.setdefault(name, []).append(of_documents)

    @property
    def idle(self) -> list[str]:
        """Return the names of losses without unmasked positions on any rank. Call `reduce` first."""
        return [name for name, sum_and_tokens in self.losses.items() if sum_and_tokens[1] < 0.5]

    def reduce(self) -> tuple[dict[str, float], Rates]:
        """Compute mean losses and rates over all data- and context-parallel ranks of this stage."""
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        losses = {}
        for name, sum_and_tokens in self.losses.items():
            torch.distributed.all_reduce(sum_and_tokens, group=group)
            losses[name] = (sum_and_tokens[0] / sum_and_tokens[1]).item()
        for counts_4D in self.acceptance.values():
            torch.distributed.all_reduce(counts_4D, group=group)
        return losses, {name: stats_of(counts_4D) for name, counts_4D in self.acceptance.items()}


@dataclass(frozen=True)
class Step:
    """A finished training step, as reported by Megatron's loop. The optimizer's values may be missing.

    Attributes:
        mtp: `MTP_GRAD_NORM`, `MTP_RATE` and `LAMBDA`, if they apply.
        is_skipped: whether gradients overflowed.
        operations: floating-point operations of all ranks.
    """

    number: int
    learning_rate: float | None = None
    grad_norm: float | None = None
    mtp: dict[str, float] = field(default_factory=dict)
    is_skipped: bool = False
    operations: float | None = None

    def figures(self) -> dict[str, float]:
        """Return the values by name, as in metrics.jsonl."""
        named = {"learning rate": self.learning_rate, "grad norm": self.grad_norm, **self.mtp}
        return {name: float(value) for name, value in named.items() if value is not None}


class Reporter(Protocol):
    """Shows a run's metrics while it trains. Called only on the last rank."""

    def interval(self, row: dict[str, Any], rates: Rates) -> None:
        """Report the training steps since the last call."""

    def evaluated_batch(self) -> None:
        """Report that a microbatch of an evaluation is done."""

    def evaluation(self, row: dict[str, Any], text: str, when: str) -> None:
        """Report a finished evaluation. `text` is its table, and `when` is 'at step 140' or 'after the run'."""


class PrintedTables(Reporter):
    """Reporter for runs with Megatron's own log: prints what that log lacks."""

    @override
    def interval(self, row: dict[str, Any], rates: Rates) -> None:
        if rates:
            print(table(row, rates), flush=True)
        if MTP_GRAD_NORM in row:
            print(f" {MTP_GRAD_NORM}: {row[MTP_GRAD_NORM]:.3f}", flush=True)

    @override
    def evaluated_batch(self) -> None:
        pass

    @override
    def evaluation(self, row: dict[str, Any], text: str, when: str) -> None:
        if EXPECTED_LENGTH in row:
            print(text, flush=True)


Measure = Callable[[Any, Namespace], dict[str, float]]
"""Function from the model of a run, as Megatron's loop has it, and the arguments to more metrics of an evaluation."""


class Metrics:
    """Collects every microbatch's report and writes metrics: training at each log interval, evaluations at their end.

    Attributes:
        evaluated: row and table of the last evaluation, on the rank that has the values.
        sources: acceptance counts by document and source in the last evaluation, for the MTP layers or each drafter, if
            the data sets name documents.
        validated: expected accepted length of the last evaluation on validation data, on the rank that has it.
        is_validated: whether the state after the last step has been evaluated on validation data; the same on all
            ranks.
        step: number of the last finished step, counted from the start of a resumed run.
        best: best state so far, with --mtp-patience. Recorded values are then of that state.
        unsaved: a clause that explains why the newest state could not be saved.
        has_trained: whether a step is done and the loop has continued with the next one.
        mtp_figures: values of the MTP layers in the last step, where they are separate from the rest.
    """

    def __init__(self, folder: Path | None, reporter: Reporter | None = None, measure: Measure | None = None) -> None:
        self.folder = folder
        self._reporter, self._measure = reporter or PrintedTables(), measure
        self.evaluated: tuple[dict[str, Any], str] | None = None
        self.sources: BySource = {}
        self.best: BestState | None = None
        self.validated: float | None = None
        self.is_validated = False
        self._training = LogWindow()
        self._evaluation = LogWindow()
        self._data, self._sets = "validation", 0  # the evaluated data, and how many of its sets are done
        self._is_after_run = False
        self._began: float | None = None  # start of the current step
        self._seconds: list[float] = []  # steps since the last row, without evaluations and checkpoints in between
        self.unsaved: str | None = None
        self.has_trained = False
        self.mtp_figures: dict[str, float] = {}
        self.step: Step | None = None
        self._skipped = 0  # steps since the last row with overflowing gradients
        self._left_out = 0  # skipped steps since the last row
        self._has_written, self._has_failed = False, False
        self._closing = False
        self._record: dict[str, Any] | None = None  # of the last evaluation, not written yet
        self._idle = set[str]()  # losses already reported as having no tokens

    def add(
        self, report: dict[str, Tensor], counts: dict[str, Tensor], documents: dict[str, Documents] | None = None
    ) -> None:
        """Add a microbatch of training (gradients enabled) or evaluation."""
        if torch.is_grad_enabled():
            self._training.add(report, counts, {})
            return
        self._evaluation.add(report, counts, documents or {})
        if is_last_rank():
            self._reporter.evaluated_batch()

    def begin_step(self) -> None:
        """Called when Megatron's loop begins a training step."""
        self.has_trained = self.step is not None
        self._began = time.perf_counter()

    def end_step(self, step: Step) -> None:
        """Called on every rank when the step is done. Publishes metrics at the end of a log interval."""
        if self._began is not None:
            self._seconds.append(time.perf_counter() - self._began)
        self._began = None
        self.leave_out(step.number - 1)
        self.step, self.is_validated = step, False
        self._skipped += step.is_skipped
        if step.number % get_args().log_interval == 0:
            self._end_interval()

    def leave_out(self, last: int) -> None:
        """Record that the steps after the last finished one, up to this one, were skipped (--iterations-to-skip)."""
        args = get_args()
        first = 1 + (args.iteration if self.step is None else self.step.number)
        if first > last or not args.iterations_to_skip:
            return
        self._left_out += last - first + 1
        if is_last_rank():
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            say(f"> skipping {steps} (--iterations-to-skip)")

    def end_early(self, step: int, cause: str) -> None:
        """Record that the run ends after this step, before its last one."""
        args = get_args()
        if step < args.train_iters and args.rank == 0:
            say(f"> the run ends at step {step} of {args.train_iters}: {cause}")

    def begin_evaluation(self, data: str, is_after_run: bool = False) -> None:
        """Called when an evaluation on 'validation' or 'test' data begins.

        Megatron calls `end_evaluation` without the name.
        """
        self._data, self._sets, self._is_after_run = data, 0, is_after_run
        self.is_validated = data == "validation" and self.step is not None

    def end_evaluation(self, model: Any) -> None:
        """Megatron's `non_loss_data_func`, called on every rank when the evaluation on one data set is done."""
        window, self._evaluation, args = self._evaluation, LogWindow(), get_args()
        split = self._data
        if args.multiple_validation_sets:  # with the suffix of Megatron's own metrics
            split += f"-{args.validation_set_names[self._sets] if args.validation_set_names else self._sets}"
        measures = self._measure is not None and split.startswith("validation") and not self._sets
        self._publish(split, window, self._measure(model, args) if measures and self._measure else {})
        self._sets += 1

    def close(self) -> None:
        """Write the rest of an interval. Megatron has closed its writers by now."""
        self._closing = True
        self._end_interval()
        self._keep_record()

    def _end_interval(self) -> None:
        window, self._training = self._training, LogWindow()
        self._publish("training", window)

    def _publish(self, split: str, window: LogWindow, measured: Mapping[str, float] | None = None) -> None:
        if not window.losses:
            return
        losses, rates = window.reduce()
        self._name_idle(window.idle)
        iteration = get_args().iteration if self.step is None else self.step.number
        figures = {name: value for what, stats in rates.items() for name, value in named(stats, what).items()}
        figures |= measured or {}
        row: dict[str, Any] = {"iteration": iteration, "split": split, **losses, **figures}
        if split != "training":
            row |= conditions_of(get_args(), self._sets)
        if split == "training":
            row |= {} if self.step is None else self.step.figures()
            row |= {"skipped steps": self._skipped} if self._skipped else {}
            row |= {"left out steps": self._left_out} if self._left_out else {}
            row |= {"step seconds": statistics.median(self._seconds)} if self._seconds else {}
            if self._seconds and self.step is not None and self.step.operations is not None:
                row[THROUGHPUT] = self.step.operations / row["step seconds"] / get_args().world_size / 1e12
            # CUDA memory if there is a device, otherwise that of the process
            peak = torch.cuda.max_memory_allocated() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            row["peak memory bytes"] = peak
            self._skipped, self._left_out, self._seconds = 0, 0, []
        self._write(row)
        if is_last_rank() and split == "training":
            self._reporter.interval(row, rates)
        elif is_last_rank():
            lines = [line_of_conditions(row, split, get_args()), table(row, rates)]
            lines += [f"{name}: {value:.3f}" for name, value in (measured or {}).items()]
            self.evaluated = row, "\n".join(lines)
            self._reporter.evaluation(
                *self.evaluated, "after the run" if self._is_after_run else f"at step {iteration}"
            )
        if rates and split != "training":
            documents = {
                what: {number: stats_of(counts_4D) for number, counts_4D in of.items()}
                for what, of in gathered(window.documents).items()
            }
            args = get_args()
            apart: dict[str, BySource] = {what: grouped(of, args) for what, of in documents.items()}
            records = {what: record_of(stats, iteration, split, apart.get(what)) for what, stats in rates.items()}
            record, self.sources = {**records.pop(MTP), **records}, apart.get(MTP, {})
            if split.startswith("validation"):
                self.validated = record[EXPECTED_LENGTH]
            is_best = self.best is None or (split == "validation" and self.best.improves(record[EXPECTED_LENGTH]))
            if is_best and args.mtp_context_lengths is None:  # with context lengths there are no sources to record
                self._record = record
            if self.best is None:
                self._keep_record()
        if self._closing:
            return
        figures |= {name: row[name] for name in (MTP_GRAD_NORM, MTP_RATE, LAMBDA) if name in row}
        if split.startswith("test"):
            figures = losses | figures
        suffix, writer, wandb = "" if split == "training" else f" {split}", get_tensorboard_writer(), get_wandb_writer()
        for name, value in figures.items():  # Megatron's loop does not write these
            if writer:
                writer.add_scalar(name + suffix, value, iteration)
            if wandb and is_last_rank():
                wandb.log({name + suffix: value}, iteration)

    def keep_best(self) -> None:
        """Record that the state of the last evaluation is the best one and has been saved."""
        assert self.best is not None
        self._keep_record()
        self.best.keep()

    def _keep_record(self) -> None:
        """Write the acceptance of the last evaluation next to the checkpoint's iterations, once there are any."""
        args = get_args()
        if self._record is not None:
            self._keep_documents(self._record["iteration"])
        folder = args.load if args.save is None and args.skip_train else args.save
        if self._record is None or folder is None or not is_last_rank() or not (Path(folder) / TRACKER).is_file():
            return
        with self._going_on_without(Path(folder) / RECORD), written_beside(Path(folder) / RECORD) as beside:
            beside.write_text(json.dumps(self._record, indent=2) + "\n")
        self._record = None

    def _keep_documents(self, iteration: int) -> None:
        """Write the counts of an evaluation by document, for comparisons on the same documents."""
        if self.folder is None or not self.sources or not is_last_rank():
            return
        with self._going_on_without(self.folder / DOCUMENTS):
            write_documents(self.folder, iteration, self.sources)

    def _name_idle(self, names: list[str]) -> None:
        """Report once for each loss that it is shown as 0 because no position counts, not because it is learned."""
        new, self._idle = set(names) - self._idle, self._idle | set(names)
        if new and is_last_rank():
            say(
                f"> {', '.join(sorted(new))}: 0 is shown because no position counts; documents may be too short for "
                "this depth, or fully masked"
            )

    def _write(self, row: dict[str, Any]) -> None:
        if self.folder is None or not is_last_rank():
            return
        with self._going_on_without(self.folder / METRICS):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._has_written:
                args = get_args()
                is_evaluated_again = self.step is None and not args.skip_train  # the run had already ended
                drop_rows_after(self.folder / METRICS, args.iteration, is_evaluated_again)
                write_run_record(self.folder, args)
                self._has_written = True
            append(self.folder / METRICS, json.dumps(row) + "\n")

    @contextmanager
    def _going_on_without(self, file: Path) -> Iterator[None]:
        """Report once that a file cannot be written; training continues."""
        try:
            yield
        except OSError as error:
            if not self._has_failed:
                say(f"> {file} cannot be written ({error.strerror}); training continues without it")
            self._has_failed = True


def conditions_of(args: Namespace, number: int = 0) -> dict[str, int]:
    """Return the conditions of an evaluation by their names in metrics.jsonl.

    `number` is the index among several data sets.
    """
    batches = args.eval_iters[number] if isinstance(args.eval_iters, list) else args.eval_iters
    made = {"sequences": batches * args.eval_global_batch_size, "sequence length": args.seq_length}
    blocks = None if args.drafter is None else kind_of(args.drafter).blocks(vars(args))
    return made if blocks is None else {**made, "drafter blocks": min(blocks, args.seq_length)}


def line_of_conditions(row: dict[str, Any], split: str, args: Namespace) -> str:
    """Format the conditions above a table. Results with different sequences, lengths or blocks cannot be compared."""
    said = f"{row['sequences']:,} sequences of {row['sequence length']:,} tokens"
    if "drafter blocks" in row:
        said += f", {row['drafter blocks']:,} blocks of each"
    return f"on {said} ({split}{'' if args.split is None else f' of --split {args.split}'})"


def table(losses: dict[str, float], rates: Rates) -> str:
    """Format the table of an evaluation: loss and acceptance by depth, and tokens per forward pass of the trunk."""
    if not rates:
        return f"loss of the trunk: {losses['lm loss']:.4f}; there are no MTP layers"
    return "\n".join(
        line
        for what, stats in rates.items()
        for line in (*(["the drafter:"] if what == DRAFTER else []), *_lines(losses, stats, what))
    )


def _lines(losses: dict[str, float], rates: AcceptanceStats, what: str) -> list[str]:
    lines = [
        "+-------+------------+------------+------------------------+---------+",
        "| depth |       loss | acceptance | conditional acceptance | overlap |",
        "+-------+------------+------------+------------------------+---------+",
        f"| trunk | {losses['lm loss']:10.4f} |            |                        |         |",
    ]
    of_depths = zip(rates.acceptance, rates.conditional_acceptance, rates.overlap, strict=True)
    for depth, (acceptance, conditional, overlap) in enumerate(of_depths, start=1):
        loss = losses[f"{what}_{depth} loss"]
        lines.append(f"| {depth:5d} | {loss:10.4f} | {acceptance:10.1%} | {conditional:22.1%} | {overlap:7.1%} |")
    return [*lines, lines[0], f"{EXPECTED_LENGTH}: {rates.expected_length:.3f} tokens per target forward"]


# --- figures of acceptance -------------------------------------------------------------------------------------------


def stats_of(counts_4D: Tensor) -> AcceptanceStats:
    """Convert acceptance counts [4, D] (`losses/acceptance.py`) to `AcceptanceStats`, which decoding uses too."""
    offered, reached, accepted = ([int(count) for count in counts] for counts in counts_4D[:3].tolist())
    return AcceptanceStats(
        offered_at=offered, reached_at=reached, accepted_at=accepted, overlap_at=counts_4D[3].tolist()
    )


def named(stats: AcceptanceStats, what: str = MTP) -> dict[str, float]:
    """Name every value as in logs, metrics.jsonl, TensorBoard, W&B and reports."""
    lists = {
        "acceptance": stats.acceptance,
        "conditional acceptance": stats.conditional_acceptance,
        "overlap": stats.overlap,
    }
    figures = {f"{what}_{depth} {name}": rate for name, of in lists.items() for depth, rate in enumerate(of, start=1)}
    return {**figures, expected_length_of(what): stats.expected_length}


def expected_length_of(what: str) -> str:
    """Return the metric name of the expected accepted length. The drafter's name is left out if there is only one."""
    return EXPECTED_LENGTH if what == MTP else f"{what} {EXPECTED_LENGTH}"
