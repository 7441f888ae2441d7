"""`train --dry-run --load`: an empty tracker is read as the run would mend it, and stays as it is."""

import sys
from pathlib import Path

import pytest
from test_hf_form import trained

from megatron_mtp.checkpoint.mcore.iterations import TRACKER, named_iteration
from megatron_mtp.training.dry_run import _tracked

pytestmark = pytest.mark.usefixtures("megatron")


def test_the_newest_iteration_is_read_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = trained(tmp_path / "mcore")
    (source / TRACKER).write_text("")
    before = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    monkeypatch.setattr(sys, "argv", ["train", "--load", str(source)])
    with _tracked(sys.argv):
        load = Path(sys.argv[-1])
        assert named_iteration(load).resolve() == source / "iter_0000001"
    assert not load.exists()
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == before


def test_a_tracker_that_names_one_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "--load", str(trained(tmp_path / "mcore"))])
    with _tracked(sys.argv):
        assert sys.argv == ["train", "--load", str(tmp_path / "mcore")]
