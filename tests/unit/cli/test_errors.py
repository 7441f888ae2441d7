"""Every verb ends the same way: a sentence and status 2, a line and 130, silence and 141, or a bug's traceback."""

import errno
import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path

import pytest

from megatron_mtp.cli import main as cli
from megatron_mtp.cli.terminal import OF_OTHER_ENGINES
from megatron_mtp.cli.train import full_parser
from megatron_mtp.cli.train import parser as train_parser
from megatron_mtp.cli.verbs import VERBS, module_of
from megatron_mtp.common import errors
from megatron_mtp.common.command import from_extra, status_of
from megatron_mtp.common.errors import InputError, Parser, add_foreign_flags, fail, flags_meant, sentences
from megatron_mtp.megatron.checkpoint.iterations import iteration_folder
from megatron_mtp.training.flags import OF_OTHER_TRAINERS

FULL = OSError(errno.ENOSPC, "No space left on device", "runs/x")


def ended(error: BaseException, capsys: pytest.CaptureFixture[str], **settings: object) -> tuple[int, str]:
    """Return status and stderr of a program that raises this."""

    def work() -> int:
        raise error

    return status_of("x", work, **settings), capsys.readouterr().err  # type: ignore[arg-type]


def test_an_import_that_fails_names_its_extra_and_other_failures_stay_bugs() -> None:
    says = r"^the server needs no_such, which is not installed; run: pip install 'megatron-mtp\[serve\]'\.$"
    with pytest.raises(ValueError, match=says), from_extra("serve", "the server", "no_such"):
        import_module("no_such")
    with pytest.raises(ModuleNotFoundError, match="no_other"), from_extra("serve", "the server", "no_such"):
        import_module("no_other")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("--a is 1;\n give 2."), 2, "x: error: --a is 1; give 2.\n"),
        (FULL, 2, "x: error: no space is left on the disk for 'runs/x'; free some, and run the command again.\n"),
        (PermissionError(errno.EACCES, "Permission denied", "y"), 2, "'y' cannot be used (Permission denied)"),
        (MemoryError(), 2, "not enough memory"),
        (
            UnicodeEncodeError("ascii", "a\xe9", 1, 2, "ordinal not in range(128)"),
            2,
            "x: error: the output is in ascii, which has no '\\xe9'; set PYTHONIOENCODING=utf-8, or unset it.\n",
        ),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), 2, "you tried 9 bytes"),
        (KeyboardInterrupt(), 130, "x: interrupted\n"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_exceptions_give_the_right_status_and_message(
    error: BaseException,
    status: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    found, printed = ended(error, capsys)
    assert found == status
    assert said in printed
    assert printed.count("\n") == (0 if status == 141 else 1)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), AssertionError("a bug"), OSError("without a number")])
def test_a_bug_keeps_its_traceback(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(type(error)):
        ended(error, capsys)


def test_in_training_a_plain_value_error_is_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="shape"):
        ended(ValueError("a shape"), capsys, mistakes=InputError)
    assert ended(InputError("--lr"), capsys, mistakes=InputError) == (2, "x: error: --lr\n")


def test_ctrl_c_prints_how_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(KeyboardInterrupt(), capsys, advice="add --resume")[1] == "x: interrupted; add --resume\n"


@pytest.mark.parametrize("verb", VERBS)
def test_ctrl_c_ends_every_verb_with_one_line(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(arguments: list[str], program: str) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(module_of(verb), "main", interrupted)
    with pytest.raises(SystemExit) as end:
        cli.main([verb])
    assert end.value.code == 130
    assert capsys.readouterr().err == f"megatron-mtp {verb}: interrupted\n"


def test_other_ranks_let_the_first_report_the_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    with pytest.raises(SystemExit):
        fail("x", "no file.")
    assert waited == [errors.SPOKEN_AFTER]
    assert capsys.readouterr().err == "x: rank 3: error: no file.\n"


def test_an_unknown_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        Parser("x").parse_args(["--no-such-flag"])
    assert end.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("x: error: ")
    assert "--no-such-flag" in said
    assert "--help" in said


def test_a_flag_may_have_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    """As in other engines; values keep theirs, and unknown flags keep their spelling."""
    parser = Parser("x")
    parser.add_argument("--speculative-config")
    parser.add_subparsers(dest="verb").add_parser("y").add_argument("--max-running")
    found = parser.parse_args(["--speculative_config", "a_b", "y", "--max_running=c_d"])
    assert (found.speculative_config, found.max_running) == ("a_b", "c_d")
    with pytest.raises(SystemExit):
        parser.parse_args(["--no_such_flag"])
    assert "arguments: --no_such_flag" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("trian", "train"),
        ("eval", "evaluate"),
        ("doctor --jsn", "--json"),
        ("train --mtp_num_layers 1 --mtp_num_layers=2", "--mtp-num-layers"),
        ("train --tensor-parallel-size 2", "--tensor-model-parallel-size"),
        ("train --micro_batchsize 2 --mtp_los ce", "--micro-batch-size and --mtp-loss"),
        ("train --dry_rn 8", "--dry-run"),
        ("train --lr-decay-style cosin", "cosine"),
        ("convert hf_to_mcore a b", "hf-to-mcore"),
        ("convert hf-to-mcore a b --dytpe x", "--dtype"),
        ("convert hf-to-mcore a b --speculative-config x", None),
    ],
)
def test_an_unknown_word_gets_a_suggestion(line: str, meant: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Verbs, commands, flags and values; a command's flags are separate."""
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    assert end.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    asked = re.search(r"; did you mean (.*)\? \(--help lists the flags\)$", said)
    assert (asked and asked[1]) == meant


def test_flags_of_other_programs_get_ours_as_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    """One with no similar spelling, and an unknown one with a close match."""
    parser = Parser("x")
    parser.add_argument("--mine")
    parser.add_argument("--other")
    add_foreign_flags(parser, {"--far-away": "--mine, a number"})
    with pytest.raises(SystemExit):
        parser.parse_args(["--far_away=3", "--othr", "3"])
    said = capsys.readouterr().err
    assert "; in the place of --far_away give --mine, a number; did you mean --other?" in said
    assert flags_meant(["--far-away"], ArgumentParser()) == ""


@pytest.mark.usefixtures("megatron")
def test_mtp_flags_are_in_the_help_and_flags_of_trainers_map_to_ours() -> None:
    known = full_parser("train")._option_string_actions
    of_mtp = {flag for flag in known if flag.startswith("--mtp-")} - {
        "--mtp-standalone",
        "--mtp-hybrid-override-pattern",
    }
    assert of_mtp <= train_parser("train")._option_string_actions.keys()
    assert not OF_OTHER_TRAINERS.keys() & known.keys()
    for here in OF_OTHER_TRAINERS.values():
        assert {word.rstrip(",") for word in here.split() if word.startswith("--")} <= known.keys(), here


@pytest.mark.parametrize("verb", ["generate", "serve"])
def test_flags_of_other_engines_get_an_existing_flag_as_suggestion(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = module_of(verb).parser(verb)
    foreign, known = parser._registries[errors.FOREIGN], parser._option_string_actions
    assert OF_OTHER_ENGINES.keys() < foreign.keys()
    assert not foreign.keys() & known.keys()
    for flag, here in foreign.items():
        named = {word.rstrip(",") for word in here.split() if word.startswith("--")} - {"--nproc-per-node"}
        assert named <= known.keys(), here
        with pytest.raises(SystemExit):
            parser.parse_args(["--load", "x", flag, "3"])
        assert f"in the place of {flag} give {here}" in capsys.readouterr().err


SERVERS = {
    "--tensor-parallel-size": "torchrun",
    "--tp": "torchrun",
    "--max-num-seqs": "--max-running",
    "--max-running-requests": "--max-running",
    "--gpu-memory-utilization": "--cache-gib",
    "--mem-fraction-static": "--cache-gib",
    "--kv-cache-memory-bytes": "--cache-gib",
    "--context-length": "--max-model-len",
    "--model": "--load",
    "--model-path": "--load",
    "--speculative-algorithm": "--speculative-config",
}


@pytest.mark.parametrize("flag", SERVERS)
def test_serve_suggests_its_flag_for_one_of_vllm_or_sglang(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--load", "x", flag, "3"])
    assert f"in the place of {flag} give {SERVERS[flag]}" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["generate", "serve", "sample"])
def test_a_hugging_face_folder_is_named_before_anything_is_imported(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        module_of(verb).parser(verb).parse_args(["--load", str(tmp_path)])
    assert (
        "is a Hugging Face folder; give the checkpoint that megatron-mtp convert hf-to-mcore" in capsys.readouterr().err
    )
    with pytest.raises(ValueError, match=r"a Hugging Face folder; .* megatron-mtp convert hf-to-mcore"):
        iteration_folder(tmp_path)


def test_a_closed_output_pipe_gives_no_traceback() -> None:
    """As with `| head`: neither a traceback nor Python's own message about a failed flush."""
    code = "from megatron_mtp.common.errors import sentences\nwith sentences('x'): print('y')"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_only_the_first_rank_says_that_it_was_interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit), sentences("x"):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_verb_that_is_started_without_a_standard_stream(closed: str) -> None:
    """Neither a traceback, nor a file that reuses the stream's descriptor and so receives the output."""
    code = (
        "import sys; from megatron_mtp.cli import main as cli; status = cli.main(['audit', '/', '--text', '/'])\n"
        "sys.exit(0 if status == 2 and open('/dev/null').fileno() > 2 else 1)"
    )
    done = subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["audit", ""],
        ["audit", "x", ""],
        ["convert", "inspect", ""],
        ["convert", "hf-to-mcore", "x", ""],
        ["attach", "", "x"],
        ["attach", "x", "y", ""],
    ],
)
def test_an_empty_path_is_not_the_working_directory(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main(command)
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert "empty; give a" in capsys.readouterr().err
