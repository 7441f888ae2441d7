"""If a rank dies, the whole job ends with a message; after a kill, the same command resumes it."""

import contextlib
import re
import subprocess
import time
from pathlib import Path

import launch
import psutil
import pytest

STEPS, INTERVAL = 60, 20
ENDS_WITHIN = 60
"""Seconds after which ranks waiting for a dead one count as hanging."""


def command(folder: Path, steps: int = STEPS) -> launch.Command:
    return launch.pretrain(
        *f"--train-iters {steps} --save-interval {INTERVAL} --eval-interval 100 --eval-iters 0".split(),
        *f"--log-interval 1 --pipeline-model-parallel-size 2 --save {folder}/saved --load {folder}/saved".split(),
        processes=2,
    )


def steps(log: str) -> list[int]:
    return [int(step) for step in re.findall(rf"step (\d+)/{STEPS} \|", log)]


def wait_for_step(process: subprocess.Popen[bytes], log: Path, step: int) -> None:
    deadline = time.monotonic() + launch.TIMEOUT
    while step not in steps(log.read_text(errors="replace")):
        assert process.poll() is None, f"ended before step {step}:\n{log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.01)


def process_of_rank(launcher: subprocess.Popen[bytes], rank: int) -> psutil.Process:
    workers = psutil.Process(launcher.pid).children()
    return next(worker for worker in workers if worker.environ().get("RANK") == str(rank))


@pytest.mark.matrix
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_job_and_a_restart_resumes(rank: int, tmp_path: Path) -> None:
    log = tmp_path / "killed.log"
    launcher = launch.start_torchrun(command(tmp_path), log)
    wait_for_step(launcher, log, INTERVAL + 2)
    helpers = [helper for worker in psutil.Process(launcher.pid).children() for helper in worker.children(True)]
    assert helpers, "no rank has a process that could outlive it"
    process_of_rank(launcher, rank).kill()
    try:
        assert launcher.wait(ENDS_WITHIN) != 0
    except subprocess.TimeoutExpired:
        launch.kill(launcher)
        pytest.fail(f"the other rank still waited {ENDS_WITHIN} s after rank {rank} was killed")
    assert psutil.wait_procs(helpers, ENDS_WITHIN)[1] == [], "processes that helped to save outlive the job"
    assert "Signal 9 (SIGKILL)" in log.read_text()
    assert steps(log.read_text())[-1] < STEPS, "killed too late: the run was through"

    resumed = launch.run(command(tmp_path), tmp_path / "resumed.log")
    assert steps(resumed) == list(range(INTERVAL + 1, STEPS + 1))


@pytest.mark.matrix
def test_damage_that_one_rank_finds_ends_all_ranks(tmp_path: Path) -> None:
    """The damage is in the second stage's file, which only the second rank reads; the first would wait forever."""
    two_steps = command(tmp_path, steps=2)
    launch.run(two_steps, tmp_path / "saved.log")
    file = tmp_path / "saved" / "iter_0000002" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    log = tmp_path / "damaged.log"
    ranks = launch.start(two_steps, log)
    try:
        assert ranks.wait(ENDS_WITHIN) != 0
    except subprocess.TimeoutExpired:
        pytest.fail(f"all ranks still wait {ENDS_WITHIN} s after one was given a damaged file")
    finally:
        ranks.kill()
    said = [line for line in log.read_text().splitlines() if "__1_0.distcp is damaged: " in line]
    assert len(said) == 1, log.read_text()[-4000:]
    assert "rank 1: error: the checkpoint cannot be loaded into this model: " in said[0]


@pytest.mark.matrix
def test_a_repeated_stop_signal_does_not_fail_a_saved_run(tmp_path: Path) -> None:
    """scripts/slurm/node.sh repeats the signal; ranks killed by a repeated one made torchrun print a traceback."""
    log = tmp_path / "stopped.log"
    running = command(tmp_path)
    launcher = launch.start_torchrun(
        launch.Command(running.script, (*running.arguments, "--exit-signal-handler"), processes=2), log
    )
    wait_for_step(launcher, log, 3)
    ranks = [process_of_rank(launcher, rank) for rank in (0, 1)]
    while launcher.poll() is None:
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.terminate()
        time.sleep(0.01)
    said = log.read_text()
    assert (launcher.returncode, "Traceback" in said, "failed" in said) == (0, False, False), said[-4000:]
    assert f"> checkpoint of step {steps(said)[-1]} saved to" in said
