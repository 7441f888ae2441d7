"""A run's metrics reach the table, the file and the plot, each counted once."""

import errno
import json
import signal
import sys
from argparse import Namespace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_mtp.common.acceptance import RECORD, AcceptanceStats
from megatron_mtp.common.record import read_record
from megatron_mtp.megatron.checkpoint import TRACKER
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.training import metrics as metrics_module
from megatron_mtp.training import run, run_files
from megatron_mtp.training.contexts import MOST_CONTEXTS
from megatron_mtp.training.metrics import Metrics, Step, table
from megatron_mtp.training.read_runs import read_rows
from megatron_mtp.training.run import _evaluations
from megatron_mtp.training.run_files import write_run_record


@pytest.fixture
def args(megatron: None, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    args = Namespace(
        mtp_context_lengths=None,
        iteration=0,
        log_interval=2,
        train_iters=4,
        multiple_validation_sets=False,
        validation_set_names=None,
        save=None,
        load=None,
        skip_train=False,
        split="90,8,2",
        eval_iters=3,
        eval_global_batch_size=4,
        seq_length=16,
        drafter=None,
        drafter_blocks=None,
        iterations_to_skip=[],
        world_size=2,
        rank=0,
    )
    monkeypatch.setattr(metrics_module, "get_args", lambda: args)
    return args


def counts(valid: list[float], reached: list[float], accepted: list[float]) -> torch.Tensor:
    return torch.tensor([valid, reached, accepted, [0.0] * len(valid)])


def report(total: float, tokens: float) -> dict[str, torch.Tensor]:
    return {"lm loss": torch.tensor([total, tokens]), "mtp_1 loss": torch.tensor([2 * total, tokens])}


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / run_files.METRICS).read_text().splitlines()]


def train(metrics: Metrics, args: Namespace, first: int, last: int) -> None:
    """Run steps `first` .. `last` with two microbatches each; step n has a mean loss of n."""
    for step in range(first, last + 1):
        metrics.begin_step()
        metrics.add(report(4.0 * step, 4), {})
        metrics.add(report(2.0 * step, 2), {})
        metrics.end_step(Step(step, learning_rate=0.5**step, grad_norm=1.0 * step))


def test_training_rows_average_an_interval_by_tokens(args: Namespace, tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    train(metrics, args, 1, 4)
    metrics.close()
    assert [(row["iteration"], row["lm loss"], row["mtp_1 loss"]) for row in rows(tmp_path)] == [
        (2, 1.5, 3.0),
        (4, 3.5, 7.0),
    ]


def test_evaluation_adds_counts_before_it_divides(
    args: Namespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = Metrics(tmp_path)
    with torch.no_grad():
        metrics.add(report(2.0, 2), {"mtp": counts([10], [10], [1])})
        metrics.add(report(4.0, 1), {"mtp": counts([90], [90], [89])})
        metrics.end_evaluation(model=None)
    (row,) = rows(tmp_path)
    assert row["split"] == "validation"
    assert row["lm loss"] == 2.0
    assert row["mtp_1 acceptance"] == row["mtp_1 conditional acceptance"] == pytest.approx(0.9)
    assert row["expected accepted length"] == pytest.approx(1.9)
    assert "1.900 tokens per target forward" in capsys.readouterr().out


def test_documents_of_all_microbatches_count(args: Namespace) -> None:
    """Context 'to 4' of document 3, in both of two microbatches."""
    args.mtp_context_lengths = [4]
    metrics = Metrics(None)
    with torch.no_grad():
        for offered in (2.0, 5.0):
            made = counts([offered], [offered], [1.0])
            metrics.add(report(1.0, 1), {"mtp": made.clone()}, {"mtp": (torch.tensor([3 * MOST_CONTEXTS]), made[None])})
        metrics.end_evaluation(model=None)
    assert metrics.sources["to 4"][3 * MOST_CONTEXTS].offered_at == [7]


def evaluate(metrics: Metrics, data: str, sets: int) -> None:
    metrics.begin_evaluation(data)
    for _ in range(sets):
        with torch.no_grad():
            metrics.add(report(1.0, 1), {"mtp": counts([2], [2], [1])})
            metrics.end_evaluation(model=None)


@pytest.mark.parametrize(
    ("sets", "names", "splits"),
    [
        (1, None, ["validation", "validation", "test"]),
        (2, None, ["validation-0", "validation-1", "validation-0", "validation-1", "test-0", "test-1"]),
        (2, ["a", "b"], ["validation-a", "validation-b", "validation-a", "validation-b", "test-a", "test-b"]),
    ],
)
def test_evaluations_name_their_data(
    sets: int,
    names: list[str] | None,
    splits: list[str],
    args: Namespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice on validation data, and on test data, whose losses Megatron would write under validation's names."""
    writer = Writer()
    monkeypatch.setattr(metrics_module, "get_tensorboard_writer", lambda: writer)
    args.multiple_validation_sets, args.validation_set_names = sets > 1, names
    metrics = Metrics(tmp_path)
    for data in ("validation", "validation", "test"):
        evaluate(metrics, data, sets)
    assert [row["split"] for row in rows(tmp_path)] == splits
    assert metrics.evaluated is not None
    assert metrics.evaluated[0]["split"] == splits[-1]
    losses = {f"{name} {split}" for name in ("lm loss", "mtp_1 loss") for split in splits if split.startswith("test")}
    assert {name for name, _ in writer.written} == {f"{name} {split}" for name in RATES for split in splits} | losses


def test_a_step_has_one_evaluation_of_each_name(
    args: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop evaluates steps 2 and 4; then Megatron evaluates step 4 on other batches, then on test data."""
    writer, metrics = Writer(), Metrics(tmp_path)
    monkeypatch.setattr(metrics_module, "get_tensorboard_writer", lambda: writer)

    def megatrons(prefix: str, step: int, write_to_tensorboard: bool = True) -> None:
        with torch.no_grad():
            metrics.add(report(1.0, 1), {"mtp": counts([2], [2], [1])})
        if write_to_tensorboard:
            writer.add_scalar("lm loss validation", 1.0, step)  # whatever the data
        metrics.end_evaluation(model=None)

    evaluate_and_print_results = _evaluations(metrics, megatrons)
    for last in (2, 4):
        train(metrics, args, last - 1, last)
        evaluate_and_print_results(f"iteration {last}", last, write_to_tensorboard=True)
    for data in ("validation", "test"):
        evaluate_and_print_results(f"iteration 4 on {data} set", 4, write_to_tensorboard=True)
    metrics.close()
    splits = [(2, "training"), (2, "validation"), (4, "training"), (4, "validation"), (4, "test")]
    assert [(row["iteration"], row["split"]) for row in rows(tmp_path)] == splits
    assert len(writer.written) == len(set(writer.written))
    assert {("lm loss validation", 4), ("lm loss test", 4)} < set(writer.written)

    args.iteration = 4  # the same command again: no step is left, and the final evaluation runs
    again = Metrics(tmp_path)
    evaluate(again, "validation", 1)
    again.close()
    assert [(row["iteration"], row["split"]) for row in rows(tmp_path)] == [*splits[:3], (4, "validation")]


def test_a_run_whose_last_step_is_not_evaluated_is_evaluated_after_it(args: Namespace, tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    evaluate_and_print_results = _evaluations(metrics, lambda prefix: metrics.end_evaluation(None))
    train(metrics, args, 1, 2)
    evaluate_and_print_results("iteration 2")
    assert metrics.is_validated
    train(metrics, args, 3, 3)
    assert not metrics.is_validated
    evaluate_and_print_results("iteration 3 on validation set")
    assert metrics.is_validated


@pytest.mark.parametrize("is_training", [True, False])
def test_the_last_evaluation_is_recorded_beside_a_checkpoint(
    is_training: bool, args: Namespace, tmp_path: Path
) -> None:
    """If there is one; `evaluate`, which does not train, records it next to the checkpoint that it reads."""
    args.save, args.load, args.skip_train = (tmp_path, None, False) if is_training else (None, tmp_path, True)
    metrics = Metrics(None)
    evaluate(metrics, "validation", 1)
    assert read_record(tmp_path) is None
    (tmp_path / TRACKER).write_text("4")
    metrics.close()
    rates = metrics.evaluated[0] if metrics.evaluated else {}
    assert read_record(tmp_path) == [min(rates["mtp_1 acceptance"], rates["mtp_1 overlap"])]
    assert json.loads((tmp_path / RECORD).read_text())["data"] == "validation"


RATES = ("mtp_1 acceptance", "mtp_1 conditional acceptance", "mtp_1 overlap", "expected accepted length")


class Writer:
    """A minimal TensorBoard writer."""

    def __init__(self) -> None:
        self.written: list[tuple[str, int]] = []

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.written.append((name, iteration))


def test_training_rows_say_what_a_step_cost(args: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1, 3 and 2 s; time between them, such as an evaluation of 100 s, belongs to none."""
    now = iter([0.0, 1.0, 2.0, 5.0, 5.0, 7.0, 107.0, 108.0])
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    args.log_interval = 3
    metrics = Metrics(tmp_path)
    train(metrics, args, 1, 3)
    with torch.no_grad():
        metrics.add(report(1.0, 1), {})
    metrics.end_evaluation(model=None)
    train(metrics, args, 4, 4)
    metrics.close()
    first, evaluation, last = rows(tmp_path)
    assert (first["step seconds"], last["step seconds"]) == (2.0, 1.0)
    assert (first["learning rate"], first["grad norm"]) == (0.125, 3.0)
    assert 2**20 < first["peak memory bytes"] <= last["peak memory bytes"]
    assert "step seconds" not in evaluation
    assert metrics.evaluated is not None
    assert metrics.evaluated[0] == evaluation


def test_steps_that_are_left_out_are_named_and_counted(
    args: Namespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps 2, 3 and the last of 6: the loop skips them silently."""
    args.iterations_to_skip, args.train_iters = [2, 3, 6], 6
    metrics = Metrics(tmp_path)
    train(metrics, args, 1, 1)
    train(metrics, args, 4, 5)
    metrics.leave_out(args.train_iters)
    metrics.close()
    said = [line for line in capsys.readouterr().out.splitlines() if "--iterations-to-skip" in line]
    assert said == [f"> skipping {steps} (--iterations-to-skip)" for steps in ("steps 2 to 3", "step 6")]
    assert [(row["iteration"], row["left out steps"]) for row in rows(tmp_path)] == [(4, 2), (5, 1)]


@pytest.mark.parametrize(
    ("flags", "step", "cause"),
    [
        ({"exit_interval": 2}, 2, "--exit-interval 2"),
        ({"exit_interval": 2, "exit_duration_in_mins": 5}, 3, "--exit-duration-in-mins 5"),
        ({"exit_signal_handler": True, "exit_interval": 2}, 3, "SIGTERM, by --exit-signal-handler"),
        ({"phase_transition_iterations": [3]}, 3, "--phase-transition-iterations 3"),
        ({"exit_interval": 4}, 4, None),  # the last step too
    ],
)
def test_a_run_that_ends_early_prints_the_reason(
    flags: dict[str, Any],
    step: int,
    cause: str | None,
    args: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    off = {"exit_interval": None, "exit_duration_in_mins": None, "exit_signal_handler": False}
    vars(args).update({**off, "phase_transition_iterations": None, "exit_signal": signal.SIGTERM, **flags})
    monkeypatch.setattr(run, "get_args", lambda: args)
    monkeypatch.setattr(run, "get_signal_handler", lambda: SimpleNamespace(signals_received=lambda: [0, 1]))
    assert run._ends(Metrics(None), lambda *_: True)(None, None, None, step, 0, {}, None)
    assert capsys.readouterr().out == ("" if cause is None else f"> the run ends at step {step} of 4: {cause}\n")
    assert not run._ends(Metrics(None), lambda *_: False)(None, None, None, step, 0, {}, None)
    assert capsys.readouterr().out == ""


def test_figures_of_the_mtp_layers_that_vary_and_the_throughput_are_in_a_row(
    args: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A separate rate with a proportional minimum, and lambda halfway from 0.4 to 0.2; 6 TFLOP on 2 ranks in 1.5 s."""
    args.lr, args.min_lr, args.curr_iteration, args.mtp_loss_scaling_factor = 1e-3, 1e-4, 5, 0.4
    schedule = SimpleNamespace(get_lr=lambda group: (group["max_lr"] + group["min_lr"]) / 2)
    settings = MTPConfig(mtp_lr=1e-2, mtp_loss_schedule="cosine", mtp_loss_schedule_steps=10, mtp_loss_final_factor=0.2)
    figures = run._mtp_figures(args, settings, schedule)
    assert figures == {"mtp learning rate": pytest.approx(5.5e-3), "lambda": pytest.approx(0.3)}
    assert run._mtp_figures(args, MTPConfig(), schedule) == {}
    writer, metrics, now = Writer(), Metrics(tmp_path), iter([0.0, 1.5])
    monkeypatch.setattr(metrics_module, "get_tensorboard_writer", lambda: writer)
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    metrics.begin_step()
    metrics.add(report(1.0, 1), {})
    metrics.end_step(Step(2, 1e-3, 1.0, figures, operations=6e12))
    (row,) = rows(tmp_path)
    assert {name: row[name] for name in figures} == figures
    assert row["TFLOP/s/GPU"] == pytest.approx(2.0)
    assert {("mtp learning rate", 2), ("lambda", 2)} <= set(writer.written)


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / run_files.RECORD).read_text())


def test_how_a_run_was_started_is_recorded(
    args: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "--lr", "1e-3"])
    args.lr, args.params_dtype = 1e-3, torch.bfloat16
    write_run_record(tmp_path, args)
    (start,) = record(tmp_path)["starts"]
    assert start["command"] == ["train", "--lr", "1e-3"]
    assert datetime.fromisoformat(start["date"]).utcoffset() is not None
    assert set(start["versions"]) == {"megatron-mtp", "megatron-core", "torch"}
    assert (
        "+" not in start["versions"]["megatron-core"]
    )  # Megatron's __version__ takes it from any enclosing repository
    assert record(tmp_path)["arguments"] == {**vars(args), "params_dtype": "torch.bfloat16"}
    args.iteration = 2
    write_run_record(tmp_path, args)
    assert [start["iteration"] for start in record(tmp_path)["starts"]] == [0, 2]
    args.iteration = 0
    write_run_record(tmp_path, args)
    assert [start["iteration"] for start in record(tmp_path)["starts"]] == [0]
    for damaged in ("", "[]", '{"starts": 3}', '{"starts": [9', '{"starts": "abc"}', "[" * 100_000):
        args.iteration = 2
        (tmp_path / run_files.RECORD).write_text(damaged)
        write_run_record(tmp_path, args)
        assert len(record(tmp_path)["starts"]) == 1
    write_run_record(tmp_path / "nowhere", args)
    assert "cannot be written (No such file or directory); the run continues without it" in capsys.readouterr().out


def test_a_resumed_run_does_not_count_steps_twice(args: Namespace, tmp_path: Path) -> None:
    first = Metrics(tmp_path)
    train(first, args, 1, 4)
    first.close()
    with open(tmp_path / run_files.METRICS, "a") as file:
        file.write('{"iteration": 5, "spl')  # killed here
    args.iteration = 2
    resumed = Metrics(tmp_path)
    train(resumed, args, 3, 4)
    resumed.close()
    assert [row["iteration"] for row in rows(tmp_path)] == [2, 4]


def test_a_new_run_keeps_the_old_file_beside(args: Namespace, tmp_path: Path) -> None:
    for _ in range(2):
        metrics = Metrics(tmp_path)
        train(metrics, args, 1, 2)
        metrics.close()
    assert len(rows(tmp_path)) == 1
    assert (tmp_path / "metrics.old.jsonl").exists()


def test_a_depth_without_a_position_is_named_once(
    args: Namespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = torch.tensor([0.0, 1e-20])
    metrics = Metrics(tmp_path)
    for step in range(1, 5):
        metrics.begin_step()
        metrics.add({**report(4.0, 4), "mtp_2 loss": nothing.clone()}, {})
        metrics.end_step(Step(step))
    metrics.close()
    assert capsys.readouterr().out.count("> mtp_2 loss: 0 is shown because no position counts; documents may be") == 1
    assert [row["mtp_2 loss"] for row in rows(tmp_path)] == [0.0, 0.0]


def test_two_runs_in_one_process_do_not_see_each_other(args: Namespace, tmp_path: Path) -> None:
    one, other = Metrics(tmp_path / "one"), Metrics(tmp_path / "other")
    train(one, args, 1, 2)
    other.close()
    one.close()
    assert not (tmp_path / "other").exists()
    assert [row["lm loss"] for row in rows(tmp_path / "one")] == [1.5]


@pytest.mark.parametrize(
    ("changes", "blocks", "line"),
    [
        ({}, None, "on 12 sequences of 16 tokens (validation of --split 90,8,2)"),
        ({"split": None, "eval_iters": [300, 2]}, None, "on 1,200 sequences of 16 tokens (validation)"),
        ({"drafter": "eagle3"}, None, "on 12 sequences of 16 tokens (validation of --split 90,8,2)"),
        ({"drafter": "dflash", "split": None}, 16, "on 12 sequences of 16 tokens, 16 blocks of each (validation)"),
        (
            {"drafter": "dspark", "drafter_blocks": 8, "split": None},
            8,
            "on 12 sequences of 16 tokens, 8 blocks of each (validation)",
        ),
    ],
)
def test_an_evaluation_has_its_conditions_in_its_row_and_above_its_table(
    changes: dict[str, Any], blocks: int | None, line: str, args: Namespace, tmp_path: Path
) -> None:
    vars(args).update(changes)
    metrics = Metrics(tmp_path)
    evaluate(metrics, "validation", 1)
    assert metrics.evaluated is not None
    assert metrics.evaluated[1].splitlines()[0] == line
    (row,) = rows(tmp_path)
    named = row["sequences"], row["sequence length"], row.get("drafter blocks")
    assert named == (1200 if "1,200" in line else 12, 16, blocks)
    assert read_rows(tmp_path) == [row]


def test_table_multiplies_the_conditional_rates() -> None:
    text = table(
        {"lm loss": 2.5, "mtp_1 loss": 3.0, "mtp_2 loss": 3.5},
        {"mtp": AcceptanceStats(accepted_at=[8, 4], reached_at=[10, 8], offered_at=[10, 10], overlap_at=[7.0, 4.0])},
    )
    assert "| depth |       loss | acceptance | conditional acceptance | overlap |" in text
    assert "|     1 |     3.0000 |      80.0% |                  80.0% |   70.0% |" in text
    assert "|     2 |     3.5000 |      40.0% |                  50.0% |   40.0% |" in text
    assert "2.200 tokens per target forward" in text


def test_a_full_disk_does_not_end_a_run(
    args: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is reported once, and a partial write is undone, so that later rows are complete."""
    metrics, space = Metrics(tmp_path), [5]
    train(metrics, args, 1, 2)

    class Full:
        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def write(self, text: str) -> None:
            with (tmp_path / run_files.METRICS).open("a") as file:
                file.write(text[: space[0]])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_files, "open", lambda *_, **__: Full(), raising=False)
    train(metrics, args, 3, 6)
    monkeypatch.undo()
    monkeypatch.setattr(metrics_module, "get_args", lambda: args)
    train(metrics, args, 7, 8)
    assert [row["iteration"] for row in rows(tmp_path)] == [2, 8]
    assert capsys.readouterr().out.count("metrics.jsonl cannot be written (No space left on device)") == 1


DAMAGED_ROWS = (
    b"\xff\xfe",
    b"\0" * 8,
    b"[1]",
    b"[" * 100_000,
    b'{"iteration": 1',
    b'{"iteration": 1}',
    b'{"iteration": "x", "split": "training"}',
    b'{"iteration": NaN, "split": "training"}',
    b'{"iteration": 1e999, "split": "training"}',
    b'{"iteration": 1, "split": 3}',
    b'{"iteration": 1, "split": "trainin"}',
    b'{"iteration": 1, "split": "validation", "lm loss": "x"}',
    b'{"iteration": 1, "split": "validation", "mtp_1 loss": ' + b"9" * 5000 + b"}",
)


@pytest.mark.parametrize("damaged", DAMAGED_ROWS, ids=lambda row: ascii(row[:40]))
def test_a_damaged_row_does_not_end_a_resumed_run(damaged: bytes, args: Namespace, tmp_path: Path) -> None:
    whole = b'{"iteration": 1, "split": "training", "lm loss": 1.0}'
    (tmp_path / run_files.METRICS).write_bytes(damaged + b"\n" + whole)  # a kill has cut off its line ending
    args.iteration = 1
    resumed = Metrics(tmp_path)
    train(resumed, args, 2, 4)
    resumed.close()
    assert [row["iteration"] for row in rows(tmp_path)] == [1, 2, 4]
