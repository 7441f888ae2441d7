"""What a run prints: our lines to the terminal, Megatron's to a file."""

import logging
import warnings
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.training import short_log
from megatron_mtp.training.quiet import quiet
from megatron_mtp.training.short_log import ShortLog, fitting_interval, keep_listing, line_of, say

ROW = {
    "iteration": 120,
    "split": "training",
    "lm loss": 2.34567,
    "mtp_1 loss": 2.9,
    "learning rate": 0.001,
    "grad norm": 0.8412,
    "step seconds": 0.5,
    "peak memory bytes": 2**30,
}
RATES = {"mtp": AcceptanceStats(accepted_at=[8, 4], reached_at=[10, 8], offered_at=[10, 10], overlap_at=[7.0, 4.0])}


def test_a_line_has_step_losses_acceptance_speed_and_time_left() -> None:
    """440 steps of half a second are 3 minutes and 40 seconds; 4,096 tokens per step are 8,192 per second."""
    assert line_of(ROW, RATES, 560, 4096) == (
        "step 120/560 | lm loss 2.3457 | mtp_1 loss 2.9000 | acceptance 80.0% 40.0% "
        "| conditional acceptance 80.0% 50.0% | 8,192 tokens/s | 0:03:40 left | lr 1.00e-03 | grad norm 0.841 | 1.0 GiB"
    )
    last = line_of(ROW | {"iteration": 560, "step seconds": 2.0}, {}, 560, 4096)
    assert "| 2,048 tokens/s | 0:00:00 left |" in last
    more = {"mtp learning rate": 0.01, "lambda": 0.3, "mtp grad norm": 2.0, "TFLOP/s/GPU": 123.4}
    assert line_of(ROW | more, {}, 560, 4096).endswith(
        "| lr 1.00e-03 | mtp lr 1.00e-02 | lambda 0.3 | grad norm 0.841 | mtp grad norm 2 | 123 TFLOP/s/GPU | 1.0 GiB"
    )


def test_a_narrow_terminal_gets_what_fits() -> None:
    whole = line_of(ROW, {}, 560, 4096)
    for width in (20, 40, 80, 200):
        line = line_of(ROW, {}, 560, 4096, width)
        assert whole.startswith(line)
        assert len(line) < width
    assert line_of(ROW, {}, 560, 4096, 80).endswith("| 8,192 tokens/s")


def test_skipped_steps_are_printed() -> None:
    skipped = {"skipped steps": 3, "left out steps": 2}
    begins = "step 120/560 | 3 steps skipped | 2 steps skipped by --iterations-to-skip | lm loss"
    assert line_of(ROW | skipped, {}, 560, 4096).startswith(begins)


@pytest.mark.parametrize(
    ("steps", "interval"),
    [(1, 1), (39, 1), (40, 2), (100, 5), (200, 10), (560, 20), (1999, 50), (2000, 100), (10**6, 100), (None, 100)],
)
def test_a_run_has_twenty_lines_or_more(steps: int | None, interval: int) -> None:
    assert fitting_interval(steps) == interval


def test_an_evaluation_ends_its_progress_bar_and_prints_its_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 batches of 8 sequences, 2 per microbatch on each of 2 data-parallel ranks: 2 microbatches each, 8 in total."""
    args = Namespace(eval_iters=4, eval_global_batch_size=8, eval_micro_batch_size=2, data_parallel_size=2)
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    for shows_tables, shown in ((True, "validation at step 120:\nthe table\n"), (False, "")):
        log = ShortLog(shows_tables)
        log.evaluated_batch()
        assert log._bar is not None
        assert log._bar.total == 8
        log.evaluation({"split": "validation"}, "the table", "at step 120")
        assert capsys.readouterr().out == shown


def test_an_evaluation_without_a_terminal_prints_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 20 s: a line if more than half a minute has passed since the last one."""
    args = Namespace(eval_iters=5, eval_global_batch_size=1, eval_micro_batch_size=1, data_parallel_size=1)
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    now = iter(range(0, 1000, 20))
    monkeypatch.setattr(short_log, "time", Namespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(short_log, "SILENCE", 30)
    log = ShortLog()
    for _ in range(5):
        log.evaluated_batch()
    assert [line for line in capsys.readouterr().out.splitlines() if "evaluating" in line] == [
        "> evaluating: 2 of 5 batches",
        "> evaluating: 4 of 5 batches",
    ]


# --- the listing -----------------------------------------------------------------------------------------------------


def speak() -> None:
    """Print like Megatron and its libraries."""
    print("arguments")
    warnings.warn("experimental", UserWarning, stacklevel=1)
    logging.getLogger("library").warning("deprecated")


def test_the_terminal_shows_our_lines_and_the_log_file_the_rest(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with quiet():
            print("before the folder is known")
            assert keep_listing(tmp_path / "run") == tmp_path / "run" / "megatron.log"
            speak()
            say("step 1/2")
            logging.getLogger("library").error("disk on fire")
    print("after")
    shown = capfd.readouterr()
    assert shown.out == "step 1/2\nafter\n"
    assert shown.err == "ERROR:library:disk on fire\n"
    listed = (tmp_path / "run" / "megatron.log").read_text()
    assert listed.startswith("before the folder is known\narguments\n")
    assert "UserWarning: experimental" in listed
    assert "WARNING:library:deprecated\n" in listed


def test_every_rank_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with quiet():
        keep_listing(tmp_path)
        assert list(tmp_path.iterdir()) == []  # a rank that prints nothing writes nothing
        print("from rank 3")
    assert (tmp_path / "megatron-3.log").read_text() == "from rank 3\n"


def test_verbose_leaves_everything_where_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet(verbose=True):
        print("arguments")
        say("step 1/2")
        assert keep_listing(Path("/nowhere")) is None
    assert capfd.readouterr().out == "arguments\nstep 1/2\n"


def test_an_unwritable_log_is_reported_once_and_ends_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with quiet():
        keep_listing(tmp_path / "file")
        print("one")
        print("two")
        say("step 2/2")
    said, step = capfd.readouterr().out.splitlines()
    assert "megatron.log cannot be written" in said
    assert step == "step 2/2"


def test_a_listing_without_a_file_keeps_what_is_newer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(short_log, "MOST_HELD", 2)
    with quiet():
        print("old")
        print("new")  # the word and the line ending
        keep_listing(tmp_path)
    assert (tmp_path / "megatron.log").read_text() == "new\n"
