"""Kills during saves, at chosen moments; `test_killed_training.py` kills at random."""

import os
import signal
import time
from argparse import Namespace
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_mtp.megatron.checkpoint import KEPT_TOKENIZER
from megatron_mtp.megatron.patches.saving import end_with_parent
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.training.metrics import Metrics
from megatron_mtp.training.run import observed


@pytest.mark.usefixtures("megatron")
def test_an_iteration_being_saved_again_is_not_marked_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save() -> None:
        tensor = torch.ones(3)
        dist_checkpointing.save({"a": ShardedTensor.from_rank_offsets("a", tensor)}, str(tmp_path))

    save()
    assert (tmp_path / "metadata.json").exists()

    def cut(*_: object, **__: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(FileSystemWriterAsync, "prepare_write_data", cut)
    with pytest.raises(InterruptedError):
        save()
    assert not (tmp_path / "metadata.json").exists()


@pytest.mark.usefixtures("megatron")
def test_a_run_saves_its_tokenizer_beside_the_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, iteration = tmp_path / "given", tmp_path / "saved" / "iter_0000001"
    given.mkdir()
    iteration.mkdir(parents=True)
    (given / "tokenizer.json").write_text("{}")
    args = Namespace(tokenizer_model=str(given), tokenizer_type="HuggingFaceTokenizer")
    monkeypatch.setattr("megatron_mtp.training.run.get_args", lambda: args)
    with observed(Metrics(None), settings=MTPConfig()):
        dist_checkpointing.save({"a": ShardedTensor.from_rank_offsets("a", torch.ones(3))}, str(iteration))
    assert (iteration / "metadata.json").exists()
    assert (iteration.parent / KEPT_TOKENIZER / "tokenizer.json").read_text() == "{}"


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
