"""Probe of `megatron-mtp attach`: choose a learning rate and a loss by successive halving, within a budget of steps.

Everything besides the training may cost at most 15 % of its steps, where a batch of an evaluation counts as one step.
The evaluations before, during and after training get up to half of that, but at least three batches. The rest is for
the probe: every candidate is trained for R steps from scratch, the better half again for 2R, and the best of that round
by expected accepted length on held-out text is used. If R would be below 50, there is no probe and the defaults are
used; the same applies if flags leave nothing to choose.

RUN/probe has a folder for every trial, and RUN/probe.json the table. Finished trials are not repeated.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_mtp.cli.attach_settings import AttachSettings
from megatron_mtp.cli.attach_training import TrainingChoice, beginning, training_of
from megatron_mtp.common.acceptance import EXPECTED_LENGTH
from megatron_mtp.common.files import written_beside
from megatron_mtp.training.read_runs import read_rows
from megatron_mtp.training.run_files import METRICS

SHARE = 0.15
"""Fraction of the training's steps that probe and regression check may take together."""
LEAST_STEPS, MOST_EVALUATIONS = 50, 10
RATE, RATES = "5e-4", ("5e-4", "1.5e-3", "1.5e-4")
LOSS, LOSSES = "kd", ("kd", "lk")
"""The default, and the losses that the probe chooses from."""
TABLE, TRIALS = "probe.json", "probe"


@dataclass(frozen=True)
class ProbeBudget:
    """Steps of a training, and batches of its evaluations.

    Attributes:
        interval: steps between evaluations during training.
        guard: batches of all evaluations for the training.
        rounds: rounds of the probe: trials, and steps of each; empty without a probe.
        evaluated: batches of a trial's evaluation.
    """

    interval: int
    guard: int
    rounds: tuple[tuple[int, int], ...]
    evaluated: int

    @property
    def probe(self) -> int:
        """Steps and batches of the probe."""
        return sum(trials * (steps + self.evaluated) for trials, steps in self.rounds)


def budget_of(settings: AttachSettings) -> ProbeBudget:
    """Compute the budget of a run by the rule above."""
    batches, most = int(settings.evaluated_batches), int(SHARE * settings.steps)
    evaluations = min(max(most // (2 * batches) - 2, 1), MOST_EVALUATIONS)
    interval = -(-settings.steps // evaluations)
    guard = (settings.steps // interval + 2) * batches
    count, evaluated = len(candidates(settings)), max(batches // 2, 1)
    shares = [(count, 1), (-(-count // 2), 2)] if count > 2 else [(count, 1)]
    left = most - guard - evaluated * sum(trials for trials, _ in shares)
    steps = left // sum(trials * share for trials, share in shares)
    is_probed = count > 1 and steps >= LEAST_STEPS
    return ProbeBudget(
        interval, guard, tuple((trials, share * steps) for trials, share in shares if is_probed), evaluated
    )


def default(settings: AttachSettings) -> TrainingChoice:
    """Return the settings without a probe."""
    return candidates(settings)[0]


def candidates(settings: AttachSettings) -> list[TrainingChoice]:
    """Return the candidates for everything that flags do not set. The first one is the default."""
    rates = RATES if settings.learning_rate is None else (settings.learning_rate,)
    losses = LOSSES if settings.loss is None and not settings.drafter else (settings.loss,)
    return [TrainingChoice(rate, loss) for loss in losses for rate in rates]


@dataclass(frozen=True)
class Trial:
    """A candidate, trained for a number of steps."""

    choice: TrainingChoice
    steps: int
    folder: Path

    def command(self, settings: AttachSettings, batches: int) -> list[str]:
        """Return the command and its arguments."""
        once = f"--eval-iters {batches} --eval-interval {self.steps + 1}".split()  # evaluate only after the last step
        load = ["--load", beginning(settings), "--finetune", "--mtp-metrics-dir", str(self.folder)]
        return ["train", *training_of(settings, self.choice, self.steps), *once, *load]

    @property
    def length(self) -> float | None:
        """Return the expected accepted length after it; None if it is not finished, 0 if it failed."""
        with suppress(ValueError):
            rows = [row for row in read_rows(self.folder) if row["split"] == "validation"]
            return next((float(row[EXPECTED_LENGTH]) for row in rows if EXPECTED_LENGTH in row), None)
        return None

    def fail(self) -> None:
        """Record that it failed: its loss diverged, or it ran out of memory."""
        self.folder.mkdir(parents=True, exist_ok=True)
        row = {"iteration": self.steps, "split": "validation", EXPECTED_LENGTH: 0.0}
        with written_beside(self.folder / METRICS) as beside:
            beside.write_text(json.dumps(row) + "\n")


def rounds(settings: AttachSettings) -> Iterator[list[Trial]]:
    """Return the trials of every round whose previous trials are finished."""
    chosen = candidates(settings)
    for count, steps in budget_of(settings).rounds:
        folders = (settings.run / TRIALS / f"{each.loss or 'own'}-{each.rate}-{steps}" for each in chosen[:count])
        trials = [Trial(each, steps, folder) for each, folder in zip(chosen, folders, strict=False)]
        yield trials
        if any(trial.length is None for trial in trials):
            return
        chosen = [trial.choice for trial in sorted(trials, key=lambda trial: -(trial.length or 0))]


def left_trial(settings: AttachSettings) -> Trial | None:
    """Return the next trial to run, or the one of --trial; None if all are finished."""
    trials = [trial for each in rounds(settings) for trial in each]
    if settings.trial is not None:
        trials = trials[settings.trial : settings.trial + 1] if settings.trial < len(candidates(settings)) else []
    return next((trial for trial in trials if trial.length is None), None)


def choice(settings: AttachSettings) -> TrainingChoice:
    """Return the best trial of the last round; the default without a finished probe."""
    *_, last = [[], *rounds(settings)]
    finished = [trial for trial in last if trial.length]
    return max(finished, key=lambda trial: trial.length or 0).choice if finished else default(settings)


def keep_table(settings: AttachSettings) -> dict[str, Any] | None:
    """Write and print the table of a finished probe, and return it; None without a probe."""
    trials = [trial for each in rounds(settings) for trial in each]
    if not trials:
        return None
    chosen, budget = choice(settings), budget_of(settings)
    rows = [{**trial.choice._asdict(), "steps": trial.steps, EXPECTED_LENGTH: trial.length} for trial in trials]
    spent = {"probe": budget.probe, "guard": budget.guard, "training": settings.steps}
    table = {"trials": rows, "chosen": chosen._asdict(), "steps and evaluated batches": spent}
    with written_beside(settings.run / TABLE) as beside:
        beside.write_text(json.dumps(table, indent=2))
    print("  learning rate   loss   steps   expected accepted length")
    for trial in trials:
        mark = ">" if trial.choice == chosen else " "
        print(f"{mark} {trial.choice.rate:>13}   {trial.choice.loss or '':4} {trial.steps:7}   {trial.length or 0:.3f}")
    return table
