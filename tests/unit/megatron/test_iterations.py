"""A checkpoint folder: the iteration to resume from after a kill, and the MTP layers in an iteration."""

from pathlib import Path

import pytest

from megatron_mtp.megatron.checkpoint import TRACKER
from megatron_mtp.megatron.checkpoint.iterations import (
    another,
    is_checkpoint,
    iteration_folder,
    named_iteration,
    repair_tracker,
    unnamed_iteration,
)


def folder_with(folder: Path, whole: list[int], half: list[int], tracker: str) -> Path:
    for number in whole + half:
        (folder / f"iter_{number:07d}").mkdir()
    for number in whole:
        (folder / f"iter_{number:07d}" / "metadata.json").write_text("{}")
    (folder / TRACKER).write_text(tracker)
    return folder


def test_an_empty_tracker_names_the_newest_whole_iteration(tmp_path: Path) -> None:
    assert repair_tracker(folder_with(tmp_path, whole=[3, 6], half=[9], tracker="")) == 6
    assert (tmp_path / TRACKER).read_text() == "6"
    assert repair_tracker(tmp_path) is None


def test_the_iteration_of_an_empty_tracker_is_found_without_a_write(tmp_path: Path) -> None:
    assert unnamed_iteration(folder_with(tmp_path, whole=[3, 6], half=[9], tracker="")) == 6
    assert (tmp_path / TRACKER).read_text() == ""


def test_a_tracker_with_an_iteration_is_not_changed(tmp_path: Path) -> None:
    assert repair_tracker(folder_with(tmp_path, whole=[3, 6], half=[], tracker="3\n")) is None
    assert (tmp_path / TRACKER).read_text() == "3\n"


def test_a_folder_without_complete_iterations_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no whole iteration; give another checkpoint"):
        repair_tracker(folder_with(tmp_path, whole=[], half=[3], tracker=""))
    assert (tmp_path / TRACKER).read_text() == ""


def test_a_folder_without_checkpoints_needs_no_repair(tmp_path: Path) -> None:
    assert repair_tracker(tmp_path) is None
    assert repair_tracker(tmp_path / "missing") is None


def test_a_lost_tracker_and_whole_iterations_are_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, whole=[3, 6], half=[9], tracker="9")
    with pytest.raises(ValueError, match=r"cut short.* give another iteration \(whole: 3, 6\)"):
        iteration_folder(folder)
    (folder / TRACKER).unlink()
    assert is_checkpoint(folder)
    with pytest.raises(ValueError, match=rf"lacks the file {TRACKER}.* of a whole one into it \(3, 6\)"):
        named_iteration(folder)
    assert another(folder / "iter_0000006") == "give another iteration (whole: 3)"
    assert another(tmp_path / "alone" / "iter_0000006") == another(tmp_path) == "give another checkpoint"
    (folder / "release").mkdir()
    (folder / "release" / "metadata.json").write_text("{}")
    assert "(whole: 3, release)" in another(folder / "iter_0000006")


def test_a_folder_without_tracker_or_iterations_is_not_a_checkpoint(tmp_path: Path) -> None:
    folder_with(tmp_path, whole=[], half=[9], tracker="")
    assert is_checkpoint(tmp_path)
    (tmp_path / TRACKER).unlink()
    assert not is_checkpoint(tmp_path)
    assert not is_checkpoint(tmp_path / "missing")
