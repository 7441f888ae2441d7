"""Whole commands over several processes: they train, evaluate and end well."""

import re
from pathlib import Path

import launch
import pytest

RUNS = {
    "pp2-vpp2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"),
    "pp3-mtp-stage": (
        3,
        "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Ett|mm|L --eod-mask-loss",
    ),
    "dp2": (2, "--use-distributed-optimizer"),
    "cp2": (2, "--context-parallel-size 2"),
    "tp2-packed": (2, "--tensor-model-parallel-size 2 --dataloader-inter-document-masking"),
    "pp3-documents": (3, "--pipeline-model-parallel-size 3 --num-layers 3 --reset-attention-mask --eod-mask-loss"),
}


@pytest.mark.parametrize(("processes", "flags"), RUNS.values(), ids=RUNS.keys())
def test_a_run_over_several_processes_trains_and_evaluates(processes: int, flags: str, tmp_path: Path) -> None:
    run_of_four_steps = "--train-iters 4 --log-interval 1 --eval-interval 2 --eval-iters 1".split()
    log = launch.run(launch.pretrain(*run_of_four_steps, *flags.split(), processes=processes), tmp_path / "log")
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+) \|", log)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert log.count("expected accepted length") == 4  # at steps 2 and 4, and in the end on validation and test data


def test_bad_input_over_two_processes_is_said_once(tmp_path: Path) -> None:
    command = launch.pretrain("--mtp-architecture", "diagonal", "--eval-interval", "2", processes=2)
    process = launch.start(command, tmp_path / "log")
    assert process.wait(launch.TIMEOUT) != 0
    assert (tmp_path / "log").read_text().count("error: --mtp-architecture is 'diagonal'") == 1


def test_depths_are_trained_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    """examples/own_loop.py on a checkpoint of a run."""
    launch.run(
        launch.pretrain(
            *"--train-iters 2 --eval-interval 2 --eval-iters 1 --save-interval 2".split(),
            "--save",
            str(tmp_path / "run"),
        ),
        tmp_path / "log",
    )
    printed = launch.run(launch.python("examples/own_loop.py", str(tmp_path / "run"), "3"), tmp_path / "loop")
    losses = [float(line.split()[4].rstrip(",")) for line in printed.splitlines() if line.startswith("step ")]
    assert len(losses) == 3
    assert losses[2] < losses[0]
