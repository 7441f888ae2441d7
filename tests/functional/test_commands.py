"""Whole commands over two processes: they train, evaluate and end well."""

import re
from pathlib import Path

import launch
import pytest


@pytest.mark.parametrize(
    "flags",
    ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--use-distributed-optimizer"],
    ids=["tp2", "pp2", "dp2"],
)
def test_a_run_over_two_processes_trains_and_evaluates(flags: str, tmp_path: Path) -> None:
    run_of_four_steps = "--train-iters 4 --log-interval 1 --eval-interval 2 --eval-iters 1".split()
    log = launch.run(launch.pretrain(*run_of_four_steps, *flags.split(), processes=2), tmp_path / "log")
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+) \|", log)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert log.count("expected accepted length") == 4  # at steps 2 and 4, and in the end on validation and test data


def test_bad_input_over_two_processes_is_said_once(tmp_path: Path) -> None:
    command = launch.pretrain("--mtp-architecture", "diagonal", "--eval-interval", "2", processes=2)
    process = launch.start(command, tmp_path / "log")
    assert process.wait(launch.TIMEOUT) != 0
    assert (tmp_path / "log").read_text().count("error: --mtp-architecture is 'diagonal'") == 1
