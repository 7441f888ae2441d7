"""training/disk.py: space for checkpoints before the first step, and saves that fail on a full disk."""

import errno
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_mtp.common.errors import InputError
from megatron_mtp.megatron.checkpoint import TRACKER
from megatron_mtp.training import disk, run
from megatron_mtp.training.disk import check_room, checkpoint_bytes, gib
from megatron_mtp.training.metrics import Metrics

pytestmark = pytest.mark.usefixtures("megatron")

FULL = OSError(errno.ENOSPC, "No space left on device")


def arguments(folder: Path, **changes: Any) -> Namespace:
    sizes = {"optimizer": "adam", "no_save_optim": None, "save_retain_interval": None, "save_interval": 2}
    run_of = {"iteration": 0, "train_iters": 6, "rank": 0, "world_size": 1, "async_save": False, "mtp_patience": None}
    return Namespace(**{"save": str(folder), **sizes, **run_of, **changes})


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size))


@pytest.mark.parametrize(
    ("changes", "dtype", "of_trained", "of_frozen"),
    [
        ({}, torch.float32, 4 + 8, 4),
        ({}, torch.bfloat16, 2 + 8 + 4, 2),
        ({"optimizer": "sgd"}, torch.bfloat16, 2 + 4 + 4, 2),
        ({"no_save_optim": True}, torch.bfloat16, 2, 2),
    ],
)
def test_a_checkpoint_has_weights_and_the_state_of_what_is_trained(
    changes: dict[str, Any], dtype: torch.dtype, of_trained: int, of_frozen: int, tmp_path: Path
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 16, bias=False)).to(dtype)
    model[1].requires_grad_(False)
    expected = (8 * 4 + 4) * of_trained + 4 * 16 * of_frozen
    assert checkpoint_bytes(arguments(tmp_path, **changes), [model], has_optimizer=True) == expected


def test_a_run_whose_checkpoint_does_not_fit_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(1024, 1024)
    one = checkpoint_bytes(arguments(tmp_path), [model], has_optimizer=True)
    for left, said in (
        (3 * one, ""),
        (3 * one - 1, f"> 3 checkpoints of {gib(one)} will be saved"),
        (one, "> 3 check"),
    ):
        free(monkeypatch, left)
        check_room(arguments(tmp_path, train_iters=5), [model], has_optimizer=True)  # at steps 2, 4 and 5
        assert capsys.readouterr().out.startswith(said)
        assert said or not capsys.readouterr().out
    free(monkeypatch, one - 1)
    with pytest.raises(InputError, match=f"where {gib(one - 1)} are free, and a checkpoint of this run takes"):
        check_room(arguments(tmp_path), [model], has_optimizer=True)
    for place in (None, "msc://bucket/run"):
        check_room(arguments(tmp_path, save=place), [model], has_optimizer=True)


@pytest.fixture
def saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Metrics, list[str]]]:
    """Save at steps 2, 4, ... with these outcomes; return the remaining iterations, and the timers' calls."""
    timed: list[str] = []

    def timer(name: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(
            start=lambda **_: timed.append(f"start {name}"), stop=lambda **_: timed.append(f"stop {name}")
        )

    def made(*ends: BaseException | None, **changes: Any) -> tuple[Metrics, list[str]]:
        metrics, errors = Metrics(None), iter(ends)
        monkeypatch.setattr(run, "get_args", lambda: arguments(tmp_path, **changes))
        monkeypatch.setattr(run, "get_timers", lambda: timer)

        def megatrons(step: int) -> None:
            (tmp_path / f"iter_{step:07d}").mkdir()
            if (error := next(errors)) is not None:
                raise error
            (tmp_path / TRACKER).write_text(str(step))

        save = run._saves(metrics, True, megatrons)
        for number in range(len(ends)):
            save(2 * number + 2)
        return metrics, timed

    return made


def test_a_full_disk_keeps_the_run_and_its_last_complete_checkpoint(
    saves: Callable[..., tuple[Metrics, list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics, timed = saves(None, FULL)
    said = (
        f"the disk of --save {tmp_path} is full: step 4 is not saved, and the last whole checkpoint is that of step 2"
    )
    assert metrics.unsaved == said
    assert capsys.readouterr().out.splitlines()[1] == f"> {said}; the run goes on to its next save"
    assert timed == ["stop save-checkpoint", "start interval-time"]
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000002"]


def test_a_successful_save_clears_the_full_disk_warning(saves: Callable[..., tuple[Metrics, list[str]]]) -> None:
    metrics, _ = saves(FULL, None)
    assert metrics.unsaved is None


@pytest.mark.parametrize(
    ("ends", "changes"), [((None, None, FULL), {}), ((FULL,), {"world_size": 2}), ((FULL,), {"mtp_patience": 3})]
)
def test_a_run_that_cannot_continue_ends_with_a_clear_error(
    ends: tuple[BaseException | None, ...], changes: dict[str, Any], saves: Callable[..., Any], tmp_path: Path
) -> None:
    """Its last save failed; one of several ranks failed; its best state would be lost."""
    with pytest.raises(InputError, match=r"is full: step .* is not saved, .*; free some, and run"):
        saves(*ends, **changes)


def test_other_errors_of_a_save_are_not_taken_for_a_full_disk(
    saves: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 2 * disk.LEFT)
    with pytest.raises(RuntimeError, match="a bug"):
        saves(RuntimeError("a bug"))
    free(monkeypatch, disk.LEFT - 1)  # torch reports a file of an unexpected size
    assert saves(RuntimeError("unexpected pos 704 vs 598"))[0].unsaved is not None
