"""How tests are collected and which of them run: conftest.py, .ci/run."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import fork_server
import pytest
from on_device import CONSTRUCTORS, OnDevice
from tiers import tiered
from torch import Tensor

ROOT = fork_server.ROOT
CI = ROOT / ".ci" / "run"


def test_no_two_files_have_the_same_name() -> None:
    """tests/support is imported by file name, and pytest identifies test files by theirs."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_the_map_of_what_tests_share_has_every_module() -> None:
    folder = ROOT / "tests" / "support"
    rows = re.findall(r"^\| `(\w+)` \| .+ \|$", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == sorted(path.stem for path in folder.glob("*.py"))


def test_on_a_device_tensors_of_tests_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that name a device, nor those that other files create."""
    moved: list[Tensor] = []
    monkeypatch.setattr(Tensor, "cuda", lambda made: moved.append(made) or made)
    create = OnDevice().__torch_function__  # called as torch does; without a GPU, wrappers of cpu.py are in between
    (ones,) = (one for one in CONSTRUCTORS if one.__name__ == "ones")
    weight = create(ones, (), (2,), {"requires_grad": True})
    create(ones, (), (2,), {"device": "cpu"})
    exec(compile("create(ones, (), (2,))", "another.py", "exec"))
    assert len(moved) == 1
    assert weight.requires_grad
    assert weight.is_leaf


LONGEST_PATTERN = 60
"""Longest part of a message in a test. Whole sentences are in golden/sentences.txt, which a command rewrites."""

OF_REFUSALS = ("error: ", "; give ")
"""Words that identify a compared text as an error message."""


def spelled_out(source: str) -> list[str]:
    """Return error messages that a test spells out beyond the facts, in `match=` or with `==`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "match":
            found.append(literal(node.value))
        elif isinstance(node, ast.Compare) and any(isinstance(one, ast.Eq) for one in node.ops):
            sides = map(literal, (node.left, *node.comparators))
            found += [side for side in sides if any(word in side for word in OF_REFUSALS)]
    return [said for said in found if len(said) > LONGEST_PATTERN]


def literal(node: ast.expr) -> str:
    """Return the text of a string in the source, without interpolated values."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(one.value) for one in parts if isinstance(one, ast.Constant))


def test_tests_match_only_the_facts_of_messages() -> None:
    """Flag, value and remedy, not the words around them."""
    sources = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    assert {name: found for name, source in sources.items() if (found := spelled_out(source))} == {}


def test_the_check_sees_a_planted_sentence() -> None:
    words = "--drafter-mask-token is {}, and the vocabulary has 64 tokens; give one of those"
    assert spelled_out(f"raises(ValueError, match='{words}')") == [words]
    assert spelled_out(f"raises(ValueError, match=f'{words.format('{id}')}')") == [words.format("")]
    assert spelled_out(f"assert said == '{words}'") == [words]
    assert spelled_out("raises(ValueError, match='--drafter-mask-token is 64.*; give')") == []


def test_the_longest_files_exist(pytestconfig: pytest.Config) -> None:
    tiers = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    there = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert [name for name in tiers.LONGEST if f"test_{name}" not in there] == []


CASES = """
import pytest

@pytest.mark.matrix
@pytest.mark.parametrize("number", range(3))
def test_of_the_matrix(number):
    pass

def test_of_the_first_tier():
    pass
"""


@pytest.fixture
def two_tiers(tmp_path: Path) -> Path:
    for name in ("conftest.py", "support/put_back.py", "support/quicker.py"):
        (tmp_path / Path(name).name).write_text((ROOT / "tests" / name).read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = matrix\n")
    (tmp_path / "test_cases.py").write_text(CASES)
    return tmp_path


def summary(folder: Path, *flags: str) -> str:
    """Return what pytest printed after the tests."""
    without = "-p no:cacheprovider -p no:hypothesispytest -p no:anyio".split()
    printed = fork_server.run([sys.executable, "-m", "pytest", *without, "--strict-markers", *flags], cwd=folder).stdout
    return printed.split("[100%]")[1]


@pytest.mark.parametrize("workers", tiered(["0", "2"], ("0",)))
def test_cases_of_the_matrix_are_left_out_and_counted(workers: str, two_tiers: Path) -> None:
    said = summary(two_tiers, "-n", workers)
    assert said.count("3 cases marked `matrix` were left out; --all runs them as well") == 1
    assert "= 1 passed, 3 deselected" in said.splitlines()[-1]


@pytest.mark.matrix
def test_one_file_is_run_without_workers(two_tiers: Path) -> None:
    (two_tiers / "pytest.ini").write_text("[pytest]\nmarkers = matrix\naddopts = --numprocesses 2\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    counts = [
        fork_server.run([*command, *given], cwd=two_tiers).stdout.count("2 workers")
        for given in (["test_cases.py::test_of_the_first_tier"], ["test_cases.py", "-n", "2"], ["."])
    ]
    assert counts[0] == 0
    assert min(counts[1:]) > 0


def test_all_cases_run_with_all(two_tiers: Path) -> None:
    said = summary(two_tiers, "-n", "0", "--all")
    assert "left out" not in said
    assert "= 4 passed" in said.splitlines()[-1]


LEAVING = """
import os, random, signal, sys

import pytest
import torch
from megatron.core import num_microbatches_calculator
from megatron.training import global_vars

def found():
    return (
        os.getcwd(), os.environ.get("LEFT"), os.environ["HOME"], [*sys.argv], torch.get_default_dtype(),
        global_vars._GLOBAL_ARGS, num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR,
        signal.getsignal(signal.SIGTERM), random.random(), torch.rand(1).item(),
    )

random.seed(0)
torch.manual_seed(0)
FIRST = found()

@pytest.fixture(scope="module", autouse=True)
def of_the_file():
    os.environ["OF_THE_FILE"] = "1"

@pytest.mark.parametrize("number", range(2))
def test_it_changes_all(number):
    assert found() == FIRST
    assert os.environ["OF_THE_FILE"] == "1"
    os.chdir("/")
    os.environ |= {"LEFT": "1", "HOME": "/"}
    sys.argv.append("more")
    torch.set_default_dtype(torch.float64)
    global_vars._GLOBAL_ARGS = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR = 1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""
LATER = """
import os

def test_a_file_leaves_nothing_either():
    assert not {"LEFT", "OF_THE_FILE"} & os.environ.keys()
"""


def test_tests_and_files_leave_no_state_behind(two_tiers: Path) -> None:
    (two_tiers / "test_cases.py").write_text(LEAVING)
    (two_tiers / "test_later.py").write_text(LATER)
    assert "= 3 passed" in summary(two_tiers, "-n", "0")


def git(folder: Path, *words: str) -> str:
    names = "-c user.name=me -c user.email=me@here".split()
    return subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Create a repository of one commit, whose tests only print how they were called."""
    texts = {".ci/run": CI.read_text(), "README.md": ""}
    for name in ("test.sh", "test_stacks.sh"):
        texts[f"scripts/{name}"] = f'echo "{name} $*"\n'
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "--initial-branch", "main")
    commit(tmp_path, "README.md")
    return tmp_path


def commit(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "a") as file:
        file.write("more\n")
    git(folder, "add", "--all")
    git(folder, "commit", "--message", name)


def ci(folder: Path, *arguments: str) -> list[str]:
    """Return why and how the tests were called."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["bash", ".ci/run", *arguments], cwd=folder, env=environment, check=True, capture_output=True, text=True
    )
    return [line.strip() for line in done.stdout.splitlines()]


PLATFORM = "megatron_mtp/megatron/cpu.py"
WHOLE = ["test_stacks.sh --install megatron_bridge", "test.sh --all"]


def test_ci_runs_all_without_a_commit_to_compare_with(clone: Path) -> None:
    assert ci(clone) == ["ci: --all: the clone has no commit to compare with", *WHOLE]
    assert ci(clone, "no-such-commit")[1:] == WHOLE


def test_ci_compares_with_the_commit_before_or_where_the_branch_left_main(clone: Path) -> None:
    commit(clone, PLATFORM)
    said, *called = ci(clone)
    assert said.startswith(f"ci: --all: {PLATFORM} changed since ")
    assert called == WHOLE
    commit(clone, "README.md")
    said, *called = ci(clone)
    assert said.startswith("ci: the first tier: nothing that the matrix is about changed since ")
    assert called == ["test.sh"]
    assert ci(clone, "HEAD~2")[1:] == WHOLE
    git(clone, "checkout", "-b", "branch")
    commit(clone, PLATFORM)
    commit(clone, "README.md")
    assert ci(clone)[1:] == WHOLE


def test_files_that_ci_looks_for_exist() -> None:
    (pattern,) = re.findall(r"^matrix='(.*)'$", CI.read_text(), re.MULTILINE)
    folders = (ROOT / "megatron_mtp", ROOT / "tests")
    files = [ROOT / "constraints.txt", *(path for folder in folders for path in folder.rglob("*.py"))]
    found = [str(path.relative_to(ROOT)) for path in files if re.match(pattern, str(path.relative_to(ROOT)))]
    of_package = ("megatron/cpu", "megatron/patches/__init__", "model/mtp", "data/batch")
    of_tests = ("fork_server", "layouts", "layout_jobs", "launch", "records")
    wanted = {f"megatron_mtp/{name}.py" for name in of_package} | {f"tests/support/{name}.py" for name in of_tests}
    assert wanted | {"constraints.txt"} <= set(found)


def test_a_folder_without_megatron_is_refused_before_anything_runs(tmp_path: Path) -> None:
    asked = ["bash", str(ROOT / "scripts/test.sh"), "--newest", "--megatron", str(tmp_path)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "which has no megatron/core; name a checkout of Megatron-LM" in done.stderr


def test_both_files_of_constraints_pin_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[\[>=<]", one)[0] for one in project["dependencies"]}
    for name in ("constraints.txt", "constraints-newest.txt"):
        pinned = {line.split("==")[0] for line in (ROOT / name).read_text().splitlines()[1:]}
        assert needed <= pinned, name
