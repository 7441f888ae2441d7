"""The table of planted faults fits code and tests, and the tool counts correctly on a small tree."""

import subprocess
from pathlib import Path

import plant_faults
import pytest

TABLE = """
[sign]
file = "megatron_mtp/sums.py"
before = "a + b"
after = "a - b"
breaks = "A sum is a difference."
seen_by = ["tests/test_sums.py"]

[bound]
file = "megatron_mtp/sums.py"
before = "a >= b"
after = "a > b"
breaks = "Equal numbers are not in order."
seen_by = ["tests/test_sums.py::test_order"]
"""
SUMS = "def add(a, b):\n    return a + b\n\n\ndef are_falling(a, b):\n    return a >= b\n"
TESTS = """
from megatron_mtp.sums import add, are_falling

def test_order():
    assert are_falling(2, 1)

def test_sum():
    assert add(1, 2) == 3
"""


def test_each_fault_can_be_planted() -> None:
    for fault in plant_faults.read_table():
        text = fault.planted((plant_faults.ROOT / fault.file).read_text())
        compile(text, fault.file, "exec")  # otherwise every test would catch it
        assert fault.before != fault.after, fault.name


def test_each_test_in_seen_by_exists() -> None:
    named = {test for fault in plant_faults.read_table() for test in fault.seen_by}
    parts = [test.split("[")[0].split("::") for test in sorted(named)]
    files = {file: (plant_faults.ROOT / file).read_text() for file, *_ in parts}
    assert [test for file, *tests in parts for test in tests if f"\ndef {test}(" not in files[file]] == []


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a repository of one file with two faults, one of which its tests catch."""
    texts = {"megatron_mtp/sums.py": SUMS, "tests/test_sums.py": TESTS, "tests/planted_faults.toml": TABLE}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    monkeypatch.setattr(plant_faults, "ROOT", tmp_path)
    monkeypatch.setattr(plant_faults, "TABLE", tmp_path / "tests" / "planted_faults.toml")
    monkeypatch.setattr(plant_faults, "RESULTS", tmp_path / "runs" / "planted_faults.jsonl")
    return tmp_path


def test_faults_are_counted_and_a_second_call_resumes(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plant_faults.main([]) == 1
    said = capsys.readouterr().out
    assert "sign: tests/test_sums.py::test_sum, " in said
    assert "bound: NOT SEEN, " in said
    assert said.splitlines()[-1] == "1 of 2 seen (50.0%)"
    assert (tree / "megatron_mtp" / "sums.py").read_text() == SUMS
    assert plant_faults.main([]) == 1
    assert "[1/" not in capsys.readouterr().out
    table = tree / "tests" / "planted_faults.toml"
    table.write_text(TABLE.replace("a > b", "b > a"))
    assert plant_faults.main([]) == 0
    said = capsys.readouterr().out
    assert "[1/1] bound: tests/test_sums.py::test_order, " in said
    assert said.splitlines()[-1] == "2 of 2 seen (100.0%)"


def test_tests_that_fail_without_a_fault_count_nothing(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "megatron_mtp" / "sums.py").write_text(SUMS.replace("return a + b", "return a + b + 1"))
    assert plant_faults.main(["sign"]) == 2
    assert "without a fault the tests do not pass: tests/test_sums.py::test_sum.\n" in capsys.readouterr().err


def test_an_unknown_fault_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert plant_faults.main(["no-such-fault"]) == 2
    assert "no fault of planted_faults.toml has no-such-fault in its name" in capsys.readouterr().err
