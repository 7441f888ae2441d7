"""Whole commands: a run that is stopped or killed, and resumed, ends bit-identical to an uninterrupted one.

Its losses change after the second step, so that it stops or is killed in the second phase.
"""

import json
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

TRACKER = "latest_checkpointed_iteration.txt"
STEPS, HALF, FIRST = 6, 3, 2
SCHEDULE = ("--mtp-loss", "ce:0.34,e2e_tv:0.66")


@dataclass(frozen=True)
class Run:
    """A training run of six steps with dropout, so that a lost random state would show, and a parameter group of the
    MTP layers; it saves every third step.
    """

    folder: Path
    flags: tuple[str, ...] = ()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def saved_step(self) -> str:
        return (self.checkpoints / TRACKER).read_text()

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def copy(self, folder: Path) -> "Run":
        return Run(shutil.copytree(self.folder, folder), self.flags)

    def command(self, *flags: str) -> launch.Command:
        return launch.pretrain(
            *f"--train-iters {STEPS} --save-interval {HALF} --eval-interval 100 --eval-iters 0".split(),
            *"--log-interval 1 --attention-dropout 0.1 --hidden-dropout 0.1 --mtp-lr 2e-3 --mtp-clip-grad 0.5".split(),
            *("--save", str(self.checkpoints), "--load", str(self.checkpoints)),
            *("--mtp-metrics-dir", str(self.folder), *self.flags, *flags),
        )

    def run(self) -> str:
        return launch.run(self.command(), self.log)

    def checkpoint(self) -> dict[str, Any]:
        """Return every tensor of the last checkpoint: weights and optimizer state."""
        file = self.folder / "whole.pt"
        dcp_to_torch_save(self.checkpoints / f"iter_{STEPS:07d}", file)
        return dict(_tensors(torch.load(file, weights_only=False)))


def _tensors(state: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        return [(name, state)]
    if not isinstance(state, dict):
        return []
    return [pair for key, value in state.items() for pair in _tensors(value, f"{name}.{key}")]


def printed_steps(log: str) -> list[int]:
    """Return the steps that a command printed."""
    return [int(step) for step in re.findall(rf"step (\d+)/{STEPS} \|", log)]


def assert_same_end(run: Run, uninterrupted: Run) -> None:
    """Do not compare the printed losses: Megatron's second line after a start is the mean of two steps (0.19.2)."""
    assert launch.learned(run.folder) == launch.learned(uninterrupted.folder)
    assert all("mtp grad norm" in row for row in launch.learned(run.folder).values())
    ours, theirs = run.checkpoint(), uninterrupted.checkpoint()
    assert len(theirs) > 40
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)] == []


@pytest.fixture(
    scope="module",
    params=[(), *(pytest.param(("--optimizer", name), marks=pytest.mark.matrix) for name in ("muon", "sgd"))],
    ids=["adam", "muon", "sgd"],
)
def uninterrupted_and_stopped(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, Run]:
    """Return a whole run, and one that stopped after the third step, run in parallel, since each uses one core."""
    flags = (*SCHEDULE, *request.param)
    whole, half = (Run(tmp_path_factory.mktemp(name), flags) for name in ("uninterrupted", "stopped"))
    of_whole = launch.start(whole.command(), whole.log)
    of_half = launch.start(half.command("--exit-interval", str(HALF)), half.log)
    assert printed_steps(launch.finish(of_whole, whole.log)) == [1, 2, 3, 4, 5, 6]
    assert printed_steps(launch.finish(of_half, half.log)) == [1, 2, 3]
    return whole, half


def test_a_stopped_run_resumes_to_the_same_bits(uninterrupted_and_stopped: tuple[Run, Run], tmp_path: Path) -> None:
    uninterrupted, stopped = uninterrupted_and_stopped
    assert stopped.saved_step == str(HALF)
    run = stopped.copy(tmp_path / "resumed")
    assert printed_steps(run.run()) == [4, 5, 6]
    assert_same_end(run, uninterrupted)


def test_a_loss_schedule_equals_resuming_with_the_next_loss(
    uninterrupted_and_stopped: tuple[Run, Run], tmp_path: Path
) -> None:
    uninterrupted, _ = uninterrupted_and_stopped
    said = [line for line in uninterrupted.log.read_text().splitlines() if "--mtp-loss is" in line]
    assert said == ["> from step 1 on --mtp-loss is ce", "> from step 3 on --mtp-loss is e2e_tv"]
    run = Run(tmp_path, uninterrupted.flags)
    launch.run(run.command("--mtp-loss", "ce", "--exit-interval", str(FIRST)), run.log)
    assert run.saved_step == str(FIRST)
    assert printed_steps(launch.run(run.command("--mtp-loss", "e2e_tv"), run.log)) == [3, 4, 5, 6]
    assert_same_end(run, uninterrupted)


def test_a_run_killed_while_it_saves_resumes_from_the_checkpoint_before(
    uninterrupted_and_stopped: tuple[Run, Run], tmp_path: Path
) -> None:
    uninterrupted, stopped = uninterrupted_and_stopped
    run = stopped.copy(tmp_path / "killed")
    half_written = run.checkpoints / f"iter_{STEPS:07d}"
    process = launch.start(run.command(), run.log)
    while process.poll() is None and not half_written.exists():
        time.sleep(0.001)
    process.kill()
    assert half_written.exists()
    assert run.saved_step == str(HALF), "killed too late: the save was through"
    for file in half_written.iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    (half_written / "__0_0.distcp").write_bytes(b"half a file")
    assert printed_steps(run.run()) == [4, 5, 6]
    assert run.saved_step == str(STEPS)
    assert_same_end(run, uninterrupted)


BEST = "--train-iters 24 --eval-interval 4 --eval-iters 2 --mtp-patience 9 --save-interval 24 --lr 3e-2".split()


@pytest.mark.matrix
@pytest.mark.parametrize("moment", ["the save of a better state", "its name in best.json"])
def test_a_run_killed_around_a_better_state_keeps_the_best_one(moment: str, tmp_path: Path) -> None:
    """Every fourth step is evaluated, and most evaluations improve on earlier ones."""
    never, killed = Run(tmp_path / "never", (*BEST,)), Run(tmp_path / "killed", (*BEST,))
    never.folder.mkdir()
    never.run()
    best = json.loads((never.checkpoints / "best.json").read_text())
    saves = sorted(int(step) for step in re.findall(r"checkpoint of step (\d+) saved", never.log.read_text()))
    assert len(saves) >= 3, f"states were saved at {saves}"
    killed.folder.mkdir()
    file = killed.checkpoints / (f"iter_{saves[2]:07d}" if "save" in moment else "best.json.partial")
    process = launch.start(killed.command(), killed.log)
    while process.poll() is None and not (file.exists() and (killed.checkpoints / "best.json").exists()):
        time.sleep(0.0002)
    process.kill()
    named = json.loads((killed.checkpoints / "best.json").read_text())["iteration"]
    assert (killed.checkpoints / f"iter_{named:07d}" / "metadata.json").exists()
    killed.run()
    assert json.loads((killed.checkpoints / "best.json").read_text()) == best
    assert killed.saved_step == never.saved_step == str(best["iteration"])
    assert launch.learned(killed.folder) == launch.learned(never.folder)
