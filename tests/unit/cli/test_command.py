"""One command line: verbs run the same code as the scripts, doctor reports what is installed, shells can complete."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import fork_server
import pytest

from megatron_mtp import __version__
from megatron_mtp.cli import doctor
from megatron_mtp.cli import main as cli
from megatron_mtp.cli.doctor import Component
from megatron_mtp.cli.verbs import VERBS, Verb, module_of

ROOT = Path(__file__).parents[3]


def printed(*arguments: str) -> subprocess.CompletedProcess[str]:
    return fork_server.run([sys.executable, "-m", "megatron_mtp", *arguments])


def test_every_verb_is_listed_and_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {verb} " in shown for verb in VERBS)
    for verb in VERBS:
        text = module_of(verb).parser(f"megatron-mtp {verb}").format_help()
        assert "examples:" in text
        assert f"megatron-mtp {verb}" in text.split("examples:")[1]


def test_a_verb_that_does_not_exist_ends_with_status_2_and_names_those_that_do() -> None:
    done = printed("trian")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "megatron-mtp: error: " in done.stderr
    assert "'train'" in done.stderr


HEAVY = "torch megatron transformers"
"""Modules that take seconds to import."""
OF_THE_SERVER = "fastapi starlette uvicorn prometheus_client"
"""Packages that the extra `serve` installs."""


@pytest.mark.parametrize(
    ("words", "status", "shown"),
    [
        ([], 2, "preprocess"),
        (["help"], 0, "preprocess"),
        (["help", "generate"], 0, "--speculative-config"),
        (["version"], 0, __version__),
    ],
)
def test_common_first_commands_print_help(
    words: list[str], status: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = cli.main(words)
    except SystemExit as end:
        ended = int(end.code or 0)
    said = capsys.readouterr()
    assert (ended, said.err) == (status, "")
    assert shown in said.out


def test_help_does_not_wait_for_heavy_imports() -> None:
    """All verbs in one process; an import of an earlier verb would show up for later ones too."""
    code = f"""
import sys
from megatron_mtp.cli import main as cli
from megatron_mtp.cli.verbs import VERBS
for arguments in [[], *([verb] for verb in VERBS), *(["convert", name] for name in ("hf-to-mcore", "verify"))]:
    try:
        cli.main([*arguments, "--help"])
    except SystemExit as end:
        assert end.code == 0, arguments
    heavy = sorted(set({f"{HEAVY} {OF_THE_SERVER}".split()}) & sys.modules.keys())
    assert not heavy, (arguments, heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(VERBS) + 3


@pytest.mark.matrix
def test_only_serve_needs_the_server_packages() -> None:
    """A new process imports every module of the core except the server's; `serve` then names what to install."""
    code = f"""
import sys
from importlib import import_module
from pkgutil import walk_packages

sys.modules |= dict.fromkeys({OF_THE_SERVER.split()})  # None: their import fails
import megatron_mtp
from megatron_mtp.megatron.runtime import prepare

prepare()
for _, name, _ in walk_packages(megatron_mtp.__path__, "megatron_mtp."):
    if not name.startswith(("megatron_mtp.server.", "megatron_mtp.extensions.", "megatron_mtp.__main__")):
        import_module(name)
from megatron_mtp.cli import main as cli
sys.exit(cli.main(["serve", "--load", "no_checkpoint"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    says = "the server needs uvicorn, which is not installed; run: pip install 'megatron-mtp[serve]'."
    assert done.stderr.splitlines()[-1:] == [f"megatron-mtp serve: error: {says}"], done.stderr
    assert done.returncode == 2


def test_the_console_script_is_this_command_line() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="megatron-mtp")
    assert script.value == "megatron_mtp.cli.main:main"


def test_a_tool_script_and_its_verb_are_the_same_command(capsys: pytest.CaptureFixture[str]) -> None:
    for door, verb in (("tools/checkpoint/convert.py", "convert"), ("tools/data/preprocess.py", "preprocess")):
        by_door = fork_server.run([sys.executable, str(ROOT / door)])
        with pytest.raises(SystemExit) as end:
            cli.main([verb])
        assert end.value.code == by_door.returncode == 2
        said = [text.splitlines()[-1].split(": error: ")[1] for text in (by_door.stderr, capsys.readouterr().err)]
        assert said[0] == said[1]


def test_another_package_adds_a_verb(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(
        "from argparse import ArgumentParser\n"
        "from megatron_mtp.cli.verbs import Verb\n"
        "HELLO = Verb('greet', 'outside')\n"
        "def parser(program):\n"
        "    return ArgumentParser(program)\n"
        "def main(arguments, program):\n"
        "    print(program, *arguments)\n"
        "    return 5\n"
    )
    (tmp_path / "outside-1.0.dist-info").mkdir()
    (tmp_path / "outside-1.0.dist-info/METADATA").write_text("Name: outside\nVersion: 1.0\n")
    (tmp_path / "outside-1.0.dist-info/entry_points.txt").write_text("[megatron_mtp.verbs]\nhello = outside:HELLO\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "megatron_mtp"]
    run: Callable[..., subprocess.CompletedProcess[str]] = partial(
        subprocess.run, env=environment, capture_output=True, text=True
    )
    assert "\n  hello       greet\n" in run([*command, "--help"]).stdout
    done = run([*command, "hello", "--you"])
    assert (done.returncode, done.stdout, done.stderr) == (5, "megatron-mtp hello --you\n", "")


# --- doctor ----------------------------------------------------------------------------------------------------------


def checks(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, object]]]:
    status = cli.main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["can_train"] == (status == 0)
    return status, {check["name"]: check for check in told["checks"]}


def test_the_doctor_finds_what_the_tests_run_with(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = checks(capsys)
    assert status == 0
    assert found["megatron-core"]["found"] == importlib.metadata.version("megatron-core")
    assert found["megatron-core"]["says"] == "supported is <0.20,>=0.19"
    assert {"Python", "torch", "CUDA device", "NCCL", "gloo", "Transformer Engine", "Apex", "Triton", "g++"} <= set(
        found
    )
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("training can run here\n")


def test_a_version_out_of_range_is_named_and_is_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = doctor._installed
    monkeypatch.setattr(doctor, "_installed", lambda name: "0.18.1" if name == "megatron-core" else version(name))
    status, found = checks(capsys)
    assert status == 1
    assert not found["megatron-core"]["ok"]
    assert cli.main(["doctor"]) == 1
    assert "training cannot run here; missing: megatron-core" in capsys.readouterr().out


def test_doctor_fails_without_gloo_or_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_gloo = SimpleNamespace(is_nccl_available=lambda: True, is_gloo_available=lambda: False)
    cuda = SimpleNamespace(is_available=lambda: False)
    monkeypatch.setattr(doctor, "_torch", lambda: SimpleNamespace(cuda=cuda, distributed=no_gloo))
    assert checks(capsys)[0] == 1
    monkeypatch.setattr(doctor, "_torch", lambda: None)
    monkeypatch.setattr(doctor, "_installed", lambda name: None if name == "torch" else "1")
    assert checks(capsys)[0] == 1


def test_another_package_can_add_an_examination_to_doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stars.py").write_text("def main(arguments, program):\n    print(program, *arguments)\n    return 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "EXAMINATIONS", {"stars": Verb("count them", "stars")})
    assert cli.main(["doctor", "--stars", "--json"]) == 5
    assert capsys.readouterr().out == "megatron-mtp doctor --json\n"
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    assert re.search(r"--stars +count them", capsys.readouterr().out)


@pytest.mark.parametrize(("folder", "found"), [("optimizers", "built here"), ("lib", None)])
def test_doctor_recognizes_only_nvidias_apex(
    folder: str, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apex" / folder).mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, "_installed", lambda _: None)
    apex: Component = doctor._apex()
    assert apex.found == found
    assert ("another project" in apex.says) == (found is None)
