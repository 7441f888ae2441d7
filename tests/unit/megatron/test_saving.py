"""Kills during saves, at chosen moments; `test_killed_training.py` kills at random."""

import os
import signal
import time
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_mtp.megatron.patches.saving import end_with_parent


@pytest.mark.usefixtures("megatron")
def test_an_iteration_that_is_saved_again_does_not_say_meanwhile_that_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[Path] = []
    monkeypatch.setattr("megatron_mtp.megatron.patches.saving.BEFORE_SAVES", [prepared.append])

    def save() -> None:
        tensor = torch.ones(3)
        dist_checkpointing.save({"a": ShardedTensor.from_rank_offsets("a", tensor)}, str(tmp_path))

    save()
    assert (tmp_path / "metadata.json").exists()
    assert prepared == [tmp_path.parent]

    def cut(*_: object, **__: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(FileSystemWriterAsync, "prepare_write_data", cut)
    with pytest.raises(InterruptedError):
        save()
    assert not (tmp_path / "metadata.json").exists()


def hold(pid: object) -> None:
    """Run a rank that has a helper, and report its process id."""
    helper = get_context("fork").Process(target=help_, args=(os.getpid(),))
    helper.start()
    pid.value = helper.pid  # type: ignore[attr-defined]
    time.sleep(60)


def help_(parent: int) -> None:
    end_with_parent(parent)
    time.sleep(60)


def test_a_helper_ends_with_the_rank_that_started_it() -> None:
    context = get_context("fork")
    pid = context.Value("i", 0)
    rank = context.Process(target=hold, args=(pid,))
    rank.start()
    while not pid.value:
        time.sleep(0.01)
    helper = psutil.Process(pid.value)
    os.kill(rank.pid or 0, signal.SIGKILL)
    rank.join()
    psutil.wait_procs([helper], timeout=20)
    assert not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE
