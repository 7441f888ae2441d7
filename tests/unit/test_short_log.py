"""The short log: a line by hand, the interval that fits a run, and a bar for evaluations."""

from argparse import Namespace

import pytest

from megatron_mtp.training import short_log
from megatron_mtp.training.acceptance import AcceptanceRates
from megatron_mtp.training.short_log import Pace, ShortLog, fitting_interval, line_of

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
RATES = AcceptanceRates(conditional_acceptance=[0.8, 0.5], overlap=[0.7, 0.4])


def test_a_line_has_step_losses_acceptance_speed_and_time_left() -> None:
    """440 steps of half a second are 3 minutes and 40 seconds; 4,096 tokens in it are 8,192 a second."""
    assert line_of(ROW, RATES, Pace(120, 560, 4096)) == (
        "step 120/560 | lm loss 2.3457 | mtp_1 loss 2.9000 | acceptance 80.0% 40.0% "
        "| conditional acceptance 80.0% 50.0% | 8,192 tokens/s | 0:03:40 left | lr 1.00e-03 | grad norm 0.841"
    )


def test_a_narrow_terminal_gets_what_fits() -> None:
    whole = line_of(ROW, None, Pace(120, 560, 4096))
    for width in (20, 40, 80, 200):
        line = line_of(ROW, None, Pace(120, 560, 4096), width)
        assert whole.startswith(line)
        assert len(line) < width
    assert line_of(ROW, None, Pace(120, 560, 4096), 80).endswith("| 8,192 tokens/s")


def test_skipped_steps_are_said() -> None:
    assert line_of(ROW | {"skipped steps": 3}, None, Pace(120, 560, 4096)).startswith(
        "step 120/560 | 3 steps skipped | lm loss"
    )


@pytest.mark.parametrize(
    ("steps", "interval"),
    [(1, 1), (39, 1), (40, 2), (100, 5), (200, 10), (560, 20), (1999, 50), (2000, 100), (10**6, 100), (None, 100)],
)
def test_a_run_has_twenty_lines_or_more(steps: int | None, interval: int) -> None:
    assert fitting_interval(steps) == interval


def test_an_evaluation_ends_its_bar_and_shows_its_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 batches of 8 sequences, 2 of them in a microbatch of 1 of 2 data-parallel ranks: 8 microbatches each."""
    args = Namespace(eval_iters=4, eval_global_batch_size=8, eval_micro_batch_size=2, data_parallel_size=2)
    monkeypatch.setattr(short_log, "get_args", lambda: args)
    assert short_log._microbatches() == 8
    for shows_tables, shown in ((True, "validation at step 120:\nthe table\n"), (False, "")):
        log = ShortLog(shows_tables)
        log.evaluated_batch()
        log.evaluation({"split": "validation"}, "the table", "at step 120")
        assert capsys.readouterr().out == shown
