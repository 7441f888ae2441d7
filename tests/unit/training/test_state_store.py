"""Cached states on disk: complete ones can be read, incomplete ones do not count, other runs' are rejected."""

import os
import shutil
import signal
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_mtp.training import state_store
from megatron_mtp.training.row_keys import rows_of
from megatron_mtp.training.state_store import CALLED, HIDDEN, StateStore, column_of

IDENTITY: Mapping[str, object] = dict.fromkeys(CALLED, "some")


def states(number: int) -> Tensor:
    return torch.full((4, 3), float(number), dtype=torch.bfloat16)


def key(number: int) -> bytes:
    return bytes([number] * 16)


def test_rows_are_read_by_another_process_column_by_column(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "states", IDENTITY)
    store.add(key(1), {HIDDEN: states(1)})
    store.add(key(2), {HIDDEN: states(2), column_of(5): states(25)})
    assert torch.equal(store.read(key(2), column_of(5)), states(25))  # before it is written to disk
    store.write()
    other = StateStore(tmp_path / "states", IDENTITY)
    assert len(other) == 2
    assert torch.equal(other.read(key(1), HIDDEN), states(1))
    assert torch.equal(other.read(key(2), column_of(5)), states(25))
    assert other.missing([key(1), key(2)], [HIDDEN, column_of(5)])
    assert not other.missing([key(1), key(2)], [HIDDEN])
    other.add(key(1), {HIDDEN: states(9), column_of(5): states(15)})  # a column that it lacks
    other.write()
    store.refresh()
    assert torch.equal(store.read(key(1), HIDDEN), states(1))
    assert torch.equal(store.read(key(1), column_of(5)), states(15))


def test_a_shard_is_written_when_enough_rows_are_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_store, "SHARD", 3 * states(0).nbytes)
    store = StateStore(tmp_path, IDENTITY)
    found = []
    for number in range(7):
        store.add(key(number), {HIDDEN: states(number)})
        found.append(len([*tmp_path.glob("*.safetensors")]))
    assert found == [0, 0, 1, 1, 1, 2, 2]
    assert all(torch.equal(store.read(key(number), HIDDEN), states(number)) for number in range(7))


def write_and_die(folder: Path) -> None:
    """Write two complete rows, and a third whose shard is complete except for its name."""
    store = StateStore(folder, IDENTITY)
    for number in range(3):
        if number == 2:
            os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        store.add(key(number), {HIDDEN: states(number)})
        store.write()


def test_a_killed_process_loses_no_finished_shard_and_leaves_no_other(tmp_path: Path) -> None:
    process = get_context("fork").Process(target=write_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len([*tmp_path.glob("*.partial")]) == 1
    store = StateStore(tmp_path, IDENTITY)
    assert [store.has(key(number), HIDDEN) for number in range(3)] == [True, True, False]


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    store = StateStore(tmp_path, IDENTITY)
    store.add(key(1), {HIDDEN: states(1)})
    store.write()
    (file,) = tmp_path.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ValueError, match=rf"^--mtp-state-cache: '{file}' is damaged \(.*\); remove it\.$"):
        StateStore(tmp_path, IDENTITY)


@pytest.mark.parametrize("name", CALLED)
def test_rows_of_another_trunk_or_dataset_are_rejected(name: str, tmp_path: Path) -> None:
    StateStore(tmp_path, IDENTITY)
    with pytest.raises(ValueError, match=f"states are of {CALLED[name]} \\(some, here other\\); name another"):
        StateStore(tmp_path, {**IDENTITY, name: "other"})


def test_free_disk_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=12_000_000_000))
    store = StateStore(tmp_path, IDENTITY)
    store.add(key(1), {HIDDEN: states(1)})
    assert store.check_room(13, 10**9) == 12 * 10**9
    with pytest.raises(ValueError, match=r"needs 38\.0 GB, and 12\.0 GB are free; free some, name"):
        store.check_room(39, 10**9)


def test_a_row_key_covers_everything_that_its_states_depend_on() -> None:
    def keys(resets: bool = False, **changes: Tensor) -> list[bytes]:
        positions = torch.arange(4).expand(2, 4)
        batch = {"tokens": torch.arange(8).view(2, 4), "position_ids": positions, "labels": None, "cu_seqlens": None}
        return rows_of({**batch, **changes}, resets).keys

    first, second = keys()
    assert first != second
    assert keys(labels=torch.zeros(2, 4)) == [first, second]
    assert keys(tokens=torch.arange(8).view(2, 4).flip(0)) == [second, first]
    others = [
        keys(tokens=torch.tensor([[0, 1, 2, 4], [4, 5, 6, 7]]))[0],
        keys(position_ids=torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]]))[0],
        keys(cu_seqlens=torch.tensor([[0, 2, 4], [0, 4, 4]]))[0],
        keys(resets=True)[0],
    ]
    assert len({first, *others}) == 5
