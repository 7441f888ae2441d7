"""A reader follows a training step through few files."""

import json
from pathlib import Path

import launch

MOST = 10
"""Files whose code runs between a batch and the gradients of its losses."""

OF_THE_MACHINE = {"cpu.py", "model/portable.py"}
"""They stand for CUDA and Transformer Engine, and do not run where these are."""


def test_a_step_runs_code_of_few_files(tmp_path: Path) -> None:
    flags = (*launch.TINY_RUN, *"--train-iters 3 --eval-iters 0 --eval-interval 100".split())
    printed = launch.run(launch.python("tests/functional/step_worker.py", *flags), tmp_path / "log")
    files = set(json.loads(printed.split("FILES ")[1].split("\n")[0]))
    assert "losses/linear_cross_entropy.py" in files
    assert len(files - OF_THE_MACHINE) <= MOST, sorted(files)
