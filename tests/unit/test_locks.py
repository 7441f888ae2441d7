"""data/locks.py: a second process is kept out and told who is in; a killed holder leaves no lock."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_mtp.checkpoint.convert.streaming import PartialFolder
from megatron_mtp.data.command import main as preprocess
from megatron_mtp.data.locks import one_writer


@contextmanager
def another_writer(output: Path) -> Iterator[int]:
    """A process that holds the lock of an output; killed at the end."""
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


def test_a_second_process_is_told_who_writes(tmp_path: Path) -> None:
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


def test_a_living_conversion_is_not_taken_for_an_interrupted_one(tmp_path: Path) -> None:
    PartialFolder(tmp_path / "out", {"a": 1}, resume=False).release()
    for resume in (False, True):
        with another_writer(tmp_path / "out"), pytest.raises(ValueError, match="is being written by process"):
            PartialFolder(tmp_path / "out", {"a": 1}, resume)
    assert (tmp_path / "out.partial").is_dir()


def test_two_runs_on_one_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("some words " * 100)
    words = ["--input", str(tmp_path / "text.txt"), "--output-prefix", str(tmp_path / "data"), "--vocab-size", "260"]
    with another_writer(tmp_path / "data") as child:
        assert preprocess(words) == 2
        assert f"data' is being written by process {child} on" in capsys.readouterr().err
    assert not list(tmp_path.glob("data-tokenizer")), "nothing is made beside the one that writes"
    assert preprocess([*words, "--workers", "1"]) == 0
    assert not (tmp_path / "data.lock").exists()
