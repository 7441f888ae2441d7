"""files.py: outputs are complete or absent; a second writer is rejected, and a killed one leaves no lock."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_mtp.checkpoint.convert.partial_folder import PartialFolder
from megatron_mtp.cli.preprocess import main as preprocess
from megatron_mtp.common.files import written_beside
from megatron_mtp.common.outputs import check_outside, one_writer


@contextmanager
def another_writer(output: Path) -> Iterator[int]:
    """Run a process that holds the lock of an output; it is killed at the end."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with one_writer(output, "held"):
            os.write(write, b"held")
            signal.pause()
    assert os.read(read, 4) == b"held"
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


def test_a_second_writer_gets_the_id_of_the_first(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with (
        another_writer(output) as child,
        pytest.raises(ValueError, match=rf"^out is being written by process {child} on \S+; wait"),
        one_writer(output, "out"),
    ):
        pass
    assert (tmp_path / "out.lock").exists(), "the holder was killed, and leaves its file"
    with one_writer(output, "out"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_files_is_not_one_that_another_process_writes() -> None:
    with (
        pytest.raises(ValueError, match=r"^out cannot be written: /proc takes no files"),
        one_writer(Path("/proc/out"), "out"),
    ):
        pass


def test_a_running_conversion_is_not_treated_as_interrupted(tmp_path: Path) -> None:
    PartialFolder(tmp_path / "out", tmp_path / "source", {"a": 1}, resume=False).release()
    for resume in (False, True):
        with another_writer(tmp_path / "out"), pytest.raises(ValueError, match="is being written by process"):
            PartialFolder(tmp_path / "out", tmp_path / "source", {"a": 1}, resume)
    assert (tmp_path / "out.partial").is_dir()


def test_a_second_run_on_one_output_prefix_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("some words " * 100)
    words = ["--input", str(tmp_path / "text.txt"), "--output-prefix", str(tmp_path / "data"), "--vocab-size", "260"]
    with another_writer(tmp_path / "data") as child:
        assert preprocess(words) == 2
        assert f"data' is being written by process {child} on" in capsys.readouterr().err
    assert not list(tmp_path.glob("data-tokenizer")), "nothing is made beside the one that writes"
    assert preprocess([*words, "--workers", "1"]) == 0
    assert not (tmp_path / "data.lock").exists()


def test_an_output_is_replaced_only_when_the_block_ends(tmp_path: Path) -> None:
    file, folder = tmp_path / "out.json", tmp_path / "out"
    for text in ("first", "second"):
        with written_beside(file) as beside_file, written_beside(folder) as beside_folder:
            beside_file.write_text(text)
            beside_folder.mkdir()
            (beside_folder / text).write_text(text)
            assert (file.read_text() if file.exists() else "first") == "first"
            assert not (folder / "second").exists()
    assert file.read_text() == "second"
    assert [path.name for path in folder.iterdir()] == ["second"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.json"]


def test_a_block_that_fails_leaves_the_older_output_alone(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_text("older")

    def fail() -> None:
        with written_beside(target) as beside:
            beside.write_text("new")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail()
    assert target.read_text() == "older"
    assert list(tmp_path.iterdir()) == [target]


def test_files_left_by_a_killed_run_are_not_in_the_output(tmp_path: Path) -> None:
    left = tmp_path / "out.partial"
    left.mkdir()
    (left / "of the killed run").write_text("")
    with written_beside(tmp_path / "out") as beside:
        assert beside == left
        beside.mkdir()
    assert list((tmp_path / "out").iterdir()) == []
    assert not left.exists()


def test_processes_that_share_a_target_have_a_file_each(tmp_path: Path) -> None:
    with written_beside(tmp_path / "out", shared=True) as beside:
        assert beside.name == f"out.{os.getpid()}.partial"
        beside.write_text("whole")
    assert (tmp_path / "out").read_text() == "whole"


@pytest.mark.parametrize("path", ["", ".", "/", "..", "a/.."])
def test_a_path_that_names_no_file_is_a_folder(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with pytest.raises(IsADirectoryError) as error, written_beside(Path(path)):
        pass
    assert error.value.filename == str(Path(path))
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


def test_an_output_inside_its_source_is_refused_through_links_too(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    (tmp_path / "in").symlink_to(source / "inner")
    (tmp_path / "other").symlink_to(source)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    outside = ("out", "source", "source.partial", "loop/out", "sources/out")
    for path in outside:
        check_outside(tmp_path / path, source, tmp_path / "other")
    for path in ("source/out", "source/not/there", "in/out", "in", "other/out", "out/../source/out"):
        for read in (source, tmp_path / "other"):
            with pytest.raises(ValueError, match=r"is inside .*, which it is made from; name a place"):
                check_outside(tmp_path / path, tmp_path / "out", read)
