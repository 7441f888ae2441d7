"""benchmarks/gpu_check.py without a GPU: all its parts on the CPU, its page, and what it does with parts that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fork_server
import pytest
from test_benchmarks import KEYS, REPOSITORY

from benchmarks import gpu_check, gpu_parts
from benchmarks.gpu_parts import Found, NotRunError, Setting, Table
from benchmarks.harness import Goal

SCRIPT = str(REPOSITORY / "benchmarks" / "gpu_check.py")
WITHOUT_DEVICE = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def test_every_part_runs_on_the_cpu(forked_python: Path) -> None:
    """In a fork, as are the processes that it starts by `sys.executable`."""
    code = f"import runpy, sys; sys.executable = {str(forked_python)!r}; sys.argv[0] = {SCRIPT!r}; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    run = fork_server.run([sys.executable, "-c", code, "--device", "cpu", "--quick"], env=WITHOUT_DEVICE)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    summary = json.loads(run.stdout.splitlines()[-1])
    assert summary.keys() == KEYS
    assert summary["results"].keys() == {"drafting", "losses", "parity", "unit_tests", "not run"}
    assert {"train_step", "mtp_memory", "drafting: CUDA graphs"} <= summary["results"]["not run"].keys()
    sides = summary["results"]["drafting"]["sides"]
    assert [side["K"] for side in sides] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert all(side["as plain"] for side in sides)
    assert sides[-1]["accepted_length"] > 2
    assert summary["results"]["parity"]["largest distance from the CPU"] == {"device": 0.0}
    assert summary["results"]["unit_tests"]["tests"] > 10


def test_without_a_device_it_is_skipped_in_one_sentence() -> None:
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=WITHOUT_DEVICE)
    assert run.returncode == 77
    assert run.stdout.count("\n") == 1
    assert "there is no CUDA device here" in run.stdout


def test_a_part_that_fails_does_not_keep_the_next_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Setting) -> Found:
        raise RuntimeError("out of memory")

    def cannot(_: Setting) -> Found:
        raise NotRunError("it is too hot")

    def runs(_: Setting) -> Found:
        return Found({"one": 1}, not_run={"half": "there is no other"})

    monkeypatch.setattr(gpu_parts, "PARTS", {"a": fails, "b": cannot, "c": runs})
    found, not_run = gpu_check.run_parts(["a", "b", "c"], quick=True)
    assert found["a"].results == {"error": "RuntimeError: out of memory"}
    assert found["c"].results == {"one": 1}
    assert not_run == {"b": "it is too hot", "c: half": "there is no other"}
    monkeypatch.setattr(gpu_check, "SECONDS", -1)
    assert gpu_check.run_parts(["c"], quick=True) == ({}, {"c": "the -1 s were over"})


def test_the_page_has_tables_goals_and_what_did_not_run(tmp_path: Path) -> None:
    tables = [Table("Speed", ("side", "s"), [("ours", 0.25), ("b", None)])]
    found = [Found({}, tables=tables), Found({"error": "no memory"})]
    text = gpu_check.page({"device": "a card"}, found, [Goal("ratio", 0.5, 1.0)], {"Apex": "not here"})
    gpu_check.write_page(tmp_path / "gpu.md", text)
    lines = (tmp_path / "gpu.md").read_text().splitlines()
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.md"]
    for line in (
        "- device: a card",
        "| ours | 0.25 |",
        "| b | - |",
        "| ratio | 0.5 | <= 1.0 | yes |",
        "- Apex: not here",
    ):
        assert line in lines
    assert "Failed: no memory" in lines


def side(count: int, graphs: bool, speed: float, speed_up: float) -> dict[str, Any]:
    return {"K": count, "graphs": graphs, "tokens_per_second": speed, "speed_up": speed_up, "as plain": True}


def test_goals_of_graphs() -> None:
    """Drafting is measured against plain decoding that has graphs as well."""
    plain = [side(0, False, 10.0, 1.0), side(0, True, 40.0, 1.0)]
    drafting = [
        side(1, False, 20.0, 2.0),
        side(1, True, 60.0, 1.5),
        side(2, False, 16.0, 1.6),
        side(2, True, 48.0, 1.2),
    ]
    values = [goal.value for goal in gpu_parts.drafting_goals(plain + drafting, graphs=True)]
    assert values == [0, 1.5, 3.0]
    assert len(gpu_parts.drafting_goals(plain + drafting, graphs=False)) == 1


def test_distance_of_two_trainings() -> None:
    ours = {1: dict.fromkeys(gpu_parts.LOGGED, 1.0), 2: dict.fromkeys(gpu_parts.LOGGED, 2.0)}
    theirs = {step: {**losses, "mtp_2 loss": losses["mtp_2 loss"] + step / 8} for step, losses in ours.items()}
    assert gpu_parts.distance(ours, theirs) == 0.25
    theirs[1]["lm loss"] = float("nan")
    assert not Goal("far", gpu_parts.distance(ours, theirs), 1.0).met
    with pytest.raises(RuntimeError, match="steps"):
        gpu_parts.distance(ours, {1: ours[1]})


def test_counts_of_a_run_of_tests(tmp_path: Path) -> None:
    cases = ('<testcase classname="t" name="good"/>', '<testcase classname="t" name="bad"><failure/></testcase>')
    cases += ('<testcase classname="t" name="none"><skipped/></testcase>',)
    (tmp_path / "tests.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert gpu_parts.counts(tmp_path / "tests.xml") == {"tests": 3, "skipped": 1, "failed": 1, "names": ["t::bad"]}


def test_a_command_that_ends_badly_or_never_is_said(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(RuntimeError, match=r"status 3: .*why"):
        gpu_parts.finish(gpu_parts.start(["sh", "-c", "echo why; exit 3"], log), log, 60)
    with pytest.raises(RuntimeError, match="killed after"):
        gpu_parts.finish(gpu_parts.start(["sleep", "600"], log), log, 0.1)
