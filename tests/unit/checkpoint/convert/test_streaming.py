"""Where a conversion writes its output, and which targets are rejected before any work."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_mtp.checkpoint.convert.partial_folder import RECORDS, PartialFolder
from megatron_mtp.checkpoint.convert.stream import Budget, Entry, Group, _write_part, run_parts


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_leads_to_the_folder_that_is_made(exists: bool, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    if exists:
        (tmp_path / "disk" / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "folder")
    partial = PartialFolder(tmp_path / "link", tmp_path / "source", {}, False)
    assert partial.path == tmp_path / "disk" / "folder.partial"
    (partial.path / "made").write_text("")
    partial.finish()
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "link").iterdir()] == ["made"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]


def test_an_interrupted_conversion_resumes_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    PartialFolder(tmp_path / "link", tmp_path / "source", {"a": 1}, False).keep(0, "done")
    assert PartialFolder(tmp_path / "link", tmp_path / "source", {"a": 1}, True).record(0) == "done"


def test_a_mount_point_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    (tmp_path / "disk").mkdir()
    with pytest.raises(ValueError, match=r"is a mount point, .*; name a new folder in it"):
        PartialFolder(tmp_path / "disk", tmp_path / "source", {}, False)
    assert [path.name for path in tmp_path.iterdir()] == ["disk"]
    PartialFolder(tmp_path / "disk" / "inside", tmp_path / "source", {}, False)


def test_a_link_to_itself_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    for name, says in (("loop", "is a link that leads to itself; name"), ("file", "is a file; name a new folder")):
        with pytest.raises(ValueError, match=says):
            PartialFolder(tmp_path / name, tmp_path / "source", {}, False)


def test_a_part_with_a_truncated_file_is_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three parts that an interrupted run has recorded, one lost its last bytes to a power failure."""
    made: list[int] = []

    def parts(partial: PartialFolder) -> list[tuple[int, Callable[[Callable[[int], None]], int]]]:
        def writer(part: int) -> Callable[[Callable[[int], None]], int]:
            def write(_: Callable[[int], None]) -> int:
                made.append(part)
                (partial.path / str(part)).write_text("whole")
                return part

            return write

        return [(1, writer(part)) for part in range(3)]

    def run(resume: bool) -> list[int]:
        partial = PartialFolder(tmp_path / "out", tmp_path / "source", {}, resume)
        return run_parts(
            partial, parts(partial), 1, True, lambda part: (partial.path / str(part)).read_text() == "whole"
        )

    assert run(resume=False) == made == [0, 1, 2]
    made.clear()
    (tmp_path / "out.partial" / "1").write_text("who")
    assert run(resume=True) == [0, 1, 2]
    assert made == [1]
    assert "part 1 of " in capsys.readouterr().err


def test_an_empty_record_counts_as_missing(tmp_path: Path) -> None:
    partial = PartialFolder(tmp_path / "out", tmp_path / "source", {}, False)
    partial.keep(0, "done")
    (partial.path / RECORDS / "0.json").write_text("")
    assert partial.record(0) is None


def test_every_tensor_of_a_group_is_looked_at_for_nan() -> None:
    """A rule may create several: the numbers that Megatron computes with, and the originals."""
    entries = [Entry([name], (2,), torch.float32) for name in "abc"]
    group = Group(entries, 24, lambda: [torch.ones(2), torch.tensor([1.0, torch.nan]), torch.tensor([-torch.inf, 1.0])])
    files: Any = SimpleNamespace(write=lambda _, made: [entry.keys[0] for entry, _ in made])
    record = _write_part(files, 0, [group], Budget(), lambda _: None)
    assert record == {"files": ["a", "b", "c"], "not finite": ["b", "c"]}
