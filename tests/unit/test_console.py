"""What a run prints: ours on the terminal, Megatron's in a file, and the end of it where the run fails."""

import logging
import sys
import warnings
from pathlib import Path

import pytest

from megatron_mtp.training.console import SHOWN_AT_FAILURE, keep_listing, quiet, say


def speak() -> None:
    """As Megatron and its libraries do."""
    print("arguments")
    warnings.warn("experimental", UserWarning, stacklevel=1)
    logging.getLogger("library").warning("deprecated")


def test_the_terminal_has_ours_and_the_log_file_the_rest(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with quiet():
            print("before the folder is known")
            assert keep_listing(tmp_path / "run") == tmp_path / "run" / "megatron.log"
            speak()
            say("step 1/2")
            logging.getLogger("library").error("disk on fire")
    print("after")
    shown = capfd.readouterr()
    assert shown.out == "step 1/2\nafter\n"
    assert shown.err == "ERROR:library:disk on fire\n"
    listed = (tmp_path / "run" / "megatron.log").read_text()
    assert listed.startswith("before the folder is known\narguments\n")
    assert "UserWarning: experimental" in listed
    assert "WARNING:library:deprecated\n" in listed


def test_every_rank_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with quiet():
        keep_listing(tmp_path)
        assert list(tmp_path.iterdir()) == []  # a rank that prints nothing writes nothing
        print("from rank 3")
    assert (tmp_path / "megatron-3.log").read_text() == "from rank 3\n"


def test_verbose_leaves_everything_where_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet(verbose=True):
        print("arguments")
        say("step 1/2")
        assert keep_listing(Path("/nowhere")) is None
    assert capfd.readouterr().out == "arguments\nstep 1/2\n"


@pytest.mark.parametrize("end", [RuntimeError("boom"), SystemExit(1)])
def test_a_run_that_fails_shows_the_end_of_its_listing(
    end: BaseException, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = sys.stdout
    with pytest.raises(type(end)), quiet():  # noqa: PT012
        keep_listing(tmp_path)
        for number in range(100):
            print(f"line {number}")
        raise end
    assert sys.stdout is output
    title, *lines = capfd.readouterr().err.splitlines()
    assert title == f"the last lines of Megatron's listing (all of it: {tmp_path / 'megatron.log'}):"
    assert lines == [f"line {number}" for number in range(100 - SHOWN_AT_FAILURE, 100)]


@pytest.mark.parametrize("status", [0, 2, None])
def test_a_run_that_ends_well_or_with_a_sentence_shows_nothing(
    status: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit), quiet():  # noqa: PT012
        print("arguments")
        sys.exit(status)
    assert capfd.readouterr() == ("", "")


def test_a_log_that_cannot_be_written_is_said_once_and_ends_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with quiet():
        keep_listing(tmp_path / "file")
        print("one")
        print("two")
        say("step 2/2")
    said, step = capfd.readouterr().out.splitlines()
    assert "megatron.log cannot be written" in said
    assert step == "step 2/2"
