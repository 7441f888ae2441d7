"""The jobs of scripts/slurm on a SLURM cluster of two nodes: a run preempted twice ends like an uninterrupted one.

Optional: `scripts/test_slurm.sh` starts such a cluster on this machine and runs this; otherwise skipped.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import launch
import pytest

STEPS = 150
PATIENCE = 1800
"""Seconds that a job has to do what a test waits for."""


def slurm(*command: str) -> str:
    """Return the output of a SLURM command."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def running() -> bool:
    return shutil.which("sinfo") is not None and subprocess.run(["sinfo"], capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(
    "SLURM_CONF" not in os.environ or not running(),
    reason="no SLURM is running; scripts/test_slurm.sh starts one on this machine and runs this",
)


class Job:
    """A job in the queue, submitted from the checkout as a user would; its run is in a folder of the test."""

    def __init__(self, run: Path, script: str, *arguments: str, options: str = "--nodes=2", **variables: str) -> None:
        self.run = run
        self.output = run.with_name(f"{run.name}-{script}-%a.out")
        environment = {**os.environ, "RUN_DIR": str(run), "VENV": sys.prefix, "STEPS": str(STEPS), **variables}
        submitted = subprocess.run(
            ["sbatch", "--parsable", f"--output={self.output}", *options.split(), script_of(script), *arguments],
            env=environment, cwd=launch.ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        self.number = submitted.stdout.strip()

    def facts(self) -> dict[str, str]:
        """Return SLURM's fields of the job; for an array, those of the first task in its list."""
        return dict(re.findall(r"(\w+)=(\S*)", slurm("scontrol", "show", "job", self.number)))

    def printed(self) -> str:
        outputs = sorted(self.output.parent.glob(self.output.name.replace("%a", "*")))
        return "".join(file.read_text(errors="replace") for file in outputs)

    def wait(self, what: str, happened: Callable[[], bool]) -> None:
        """Wait until it has happened. Raise AssertionError if the job has ended without it."""
        deadline = time.monotonic() + PATIENCE
        while not happened():
            assert not self.ended() or happened(), f"the job ended before {what}:\n{self.printed()[-6000:]}"
            assert time.monotonic() < deadline, f"waited {PATIENCE} s for {what}:\n{self.printed()[-6000:]}"
            time.sleep(0.1)

    def ended(self) -> bool:
        """Return whether neither the job nor a task of its array is in the queue."""
        return slurm("squeue", "--noheader", "--jobs", self.number) == ""

    def finish(self) -> str:
        """Return the job's output after it has succeeded."""
        self.wait("its end", self.ended)
        states = re.findall(r"JobState=(\w+)", slurm("scontrol", "show", "job", self.number))
        assert set(states) == {"COMPLETED"}, f"{states}:\n{self.printed()[-6000:]}"
        return self.printed()

    def steps(self) -> list[int]:
        """Return the training steps in the run's log, in the order in which they ran."""
        log = self.run / "log.txt"
        text = log.read_text(errors="replace") if log.exists() else ""
        return [int(step) for step in re.findall(rf"step (\d+)/{STEPS} \|", text)]

    def stop_by(self, stop: Callable[[], object]) -> int:
        """Stop the job while it trains, wait for the requeue, and start it at once. Return its last step before."""
        before = len(self.steps())
        self.wait("three steps", lambda: len(self.steps()) >= before + 3)
        stop()
        self.wait("the requeue", lambda: self.facts()["JobState"] == "PENDING")
        last = self.steps()[-1]
        self.wait("an empty queue", lambda: slurm("squeue", "--noheader", "--states=R,CG") == "")
        time.sleep(3)  # SLURM refuses a start within a second of the requeue, and by itself waits for two minutes
        slurm("scontrol", "update", f"JobId={self.number}", "StartTime=now")
        return last


def script_of(job: str) -> str:
    return str(launch.ROOT / "scripts" / "slurm" / f"{job}.sbatch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slurm")


@pytest.fixture(scope="module")
def sweep(folder: Path) -> Job:
    """Run an array of two runs, each with a node and two ranks, without interruption."""
    job = Job(
        folder / "sweep", "pretrain", "tiny", options="--nodes=1 --array=0-1",
        SWEEP="SEED=1234 77", RANKS_PER_NODE="2", SAVE_INTERVAL="1000",
    )  # fmt: skip
    job.finish()
    return job


@pytest.fixture(scope="module")
def preempted(sweep: Job, folder: Path) -> Job:
    """Run the first of them on two nodes: SLURM preempts it for another job, then sends the signal of `--signal`."""
    job = Job(folder / "preempted", "pretrain", "tiny", SAVE_INTERVAL="1000")
    first = job.stop_by(lambda: slurm("sbatch", "--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=true"))
    second = job.stop_by(lambda: slurm("scancel", "--signal=USR1", job.number))
    job.finish()
    assert 3 <= first < second < STEPS
    saved = [int(step) for step in re.findall(r"> checkpoint of step (\d+) saved", job.printed())]
    assert saved == [first, second, STEPS]
    return job


def test_a_preempted_run_matches_an_uninterrupted_one(sweep: Job, preempted: Job) -> None:
    assert preempted.facts()["Restarts"] == "2"
    assert preempted.steps() == list(range(1, STEPS + 1)), "every step once"
    whole = launch.learned(sweep.run / "SEED-1234")
    assert len(whole) == STEPS
    assert launch.learned(preempted.run) == whole


def test_a_sweep_has_a_run_for_every_value(sweep: Job) -> None:
    losses = [launch.learned(sweep.run / f"SEED-{seed}")[STEPS]["lm loss"] for seed in (1234, 77)]
    assert losses[0] != losses[1]


def test_a_run_keeps_the_code_and_commands_of_every_start(preempted: Job) -> None:
    job = preempted.run / "jobs" / preempted.number
    assert (job / "code" / "pretrain_gpt.py").exists()
    commands = [(job / f"start-{start}" / "commands").read_text() for start in range(3)]
    assert commands[0] == commands[1] == commands[2]
    assert "--nnodes 2 " in commands[0]
    assert f"{job}/code/pretrain_gpt.py" in commands[0]


def test_a_checkpoint_is_evaluated_and_converted(preempted: Job) -> None:
    evaluation = Job(preempted.run, "evaluate", "tiny", options="--nodes=1")
    conversion = Job(preempted.run, "convert", "tiny", "mcore-to-hf", options="--nodes=1")
    assert "expected accepted length" in evaluation.finish()
    assert "FAIL" not in conversion.finish()
    assert (preempted.run / "exported" / "config.json").exists()


def test_a_cancelled_job_is_not_queued_again(folder: Path) -> None:
    job = Job(folder / "cancelled", "pretrain", "tiny")
    job.wait("its step", lambda: f"{job.number}.0 " in slurm("squeue", "--noheader", "--steps", "--jobs", job.number))
    time.sleep(1)  # time for the first lines of node.sh
    slurm("scancel", job.number)
    job.wait("its end", job.ended)
    assert job.facts()["JobState"] == "CANCELLED"
    assert (job.run / "jobs" / job.number / "start-0" / "stopped").exists(), "its ranks were told to save"
