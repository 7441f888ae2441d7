"""checkpoint/streaming.py: where the output is while it is made, and which targets are refused before anything is."""

from pathlib import Path

import pytest

from megatron_mtp.checkpoint.streaming import PartialFolder


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_leads_to_the_folder_that_is_made(exists: bool, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    if exists:
        (tmp_path / "disk" / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "folder")
    partial = PartialFolder(tmp_path / "link", {}, False)
    assert partial.path == tmp_path / "disk" / "folder.partial"
    (partial.path / "made").write_text("")
    partial.finish()
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "link").iterdir()] == ["made"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]


def test_an_interrupted_conversion_goes_on_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    PartialFolder(tmp_path / "link", {"a": 1}, False).keep(0, "done")
    assert PartialFolder(tmp_path / "link", {"a": 1}, True).record(0) == "done"


def test_a_mount_point_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    (tmp_path / "disk").mkdir()
    with pytest.raises(ValueError, match=r"is a mount point, .*; name a new folder in it"):
        PartialFolder(tmp_path / "disk", {}, False)
    assert [path.name for path in tmp_path.iterdir()] == ["disk"]
    PartialFolder(tmp_path / "disk" / "inside", {}, False)
