"""benchmarks/gpu_check.py without a GPU: its parts on the CPU, parts that go wrong, and the page of several runs."""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import fork_server
import psutil
import pytest
from test_benchmarks import KEYS, REPOSITORY

from benchmarks import gpu_check
from benchmarks.gpu import PARTS, Part, drafting, record, suite, training
from benchmarks.gpu.divergence import first_other
from benchmarks.gpu.page import page, records_of
from benchmarks.gpu.part import Setting, finish, start
from benchmarks.harness import Goal
from megatron_mtp.decoding.runner import Runner

SCRIPT = str(REPOSITORY / "benchmarks" / "gpu_check.py")
WITHOUT_DEVICE = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
CASES = {
    name: Part(f"tests.unit.gpu_part_cases:{name}") for name in ("runs", "fails_after_figures", "crashes", "cannot")
}
LONG = {"divergence", "parity", "train_step", "mtp_memory"}
"""Parts whose own commands are tested elsewhere as well: they run in the second tier."""


def check(parts: list[str], forked_python: Path, out: Path) -> dict[str, Any]:
    """The summary of a check on the CPU, in a fork, as are the processes that it starts by `sys.executable`."""
    code = f"import runpy, sys; sys.executable = {str(forked_python)!r}; sys.argv[0] = {SCRIPT!r}; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    flags = ["--device", "cpu", "--quick", "--out", str(out), "--parts", *parts]
    run = fork_server.run([sys.executable, "-c", code, *flags], env=WITHOUT_DEVICE)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    summary: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert summary.keys() == KEYS
    return summary


@pytest.mark.matrix
def test_short_parts_run_on_the_cpu(forked_python: Path, tmp_path: Path) -> None:
    results = check([name for name in PARTS if name not in LONG], forked_python, tmp_path)["results"]
    needs_cuda = {name for name, part in PARTS.items() if part.only_cuda}
    ran = {name for name, result in results.items() if result["status"] == "ran"}
    assert ran == PARTS.keys() - LONG - needs_cuda
    assert {results[name]["why"] for name in needs_cuda} == {"needs a CUDA device"}
    sides = results["graphs"]["results"]["sides"]
    assert [side["K"] for side in sides] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert all(side["as plain"] for side in sides)
    assert sides[-1]["accepted_length"] > 2
    assert "CUDA graphs" in results["graphs"]["not run"]
    for name in ("unit_tests", "megatron_parity"):
        assert results[name]["results"]["tests"] > 1
        assert results[name]["results"]["failed"] == 0
    errors = {(side, dtype): float(error) for side, dtype, error, *_ in results["losses"]["results"]["against float64"]}
    assert max(error for (_, dtype), error in errors.items() if dtype == "float32") < 1e-5
    assert results["profile"]["results"]["microseconds a step"] > 0
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".log"}


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(LONG))
def test_a_long_part_runs_on_the_cpu(name: str, forked_python: Path, tmp_path: Path) -> None:
    result = check([name], forked_python, tmp_path)["results"][name]
    assert result["status"] == "ran", result["why"]
    if name == "parity":
        assert result["results"]["largest distance from the CPU"] == {"device": 0.0}
    if name == "divergence":
        assert [row["texts that part"] for row in result["results"]["rows"][:2]] == [0, 0]


def test_energy_is_counted_over_layers_that_are_not_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, megatron: None
) -> None:
    """On the CPU, with a stand-in for the meter; the depths agree with the trunk nevertheless."""
    runners = []
    monkeypatch.setattr(drafting, "start_meter", lambda: lambda: 10.0)
    monkeypatch.setattr(drafting, "Runner", lambda model: runners.append(Runner(model)) or runners[-1])
    found = drafting.energy(Setting(True, tmp_path, 0.0))
    assert not [name for name, weight in runners[0].model.named_parameters() if not weight.any()]
    (plain, *_, no_draft), (drafted, *_, accepted_length) = (row[1:] for row in found.tables[0].rows)
    assert min(plain, drafted) > 0
    assert (no_draft, accepted_length > 2) == (1.0, True)
    assert found.results["ratio"] == drafted / plain


@pytest.mark.matrix
def test_without_a_device_it_is_skipped_in_one_sentence() -> None:
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=WITHOUT_DEVICE)
    assert run.returncode == 77
    assert run.stdout.count("\n") == 1
    assert "there is no CUDA device here" in run.stdout


@pytest.fixture
def settings(tmp_path: Path, forked_python: Path) -> Namespace:
    """Of a check whose parts are those of gpu_part_cases.py."""
    return Namespace(device="cpu", quick=True, out=tmp_path, limit=60.0)


def test_a_part_that_goes_wrong_loses_no_figures(settings: Namespace) -> None:
    found = {name: gpu_check.run(name, part, settings) for name, part in CASES.items()}
    assert found == {name: record.read(settings.out / f"{name}.json") for name in CASES}
    assert {name: one["status"] for name, one in found.items()} == {
        "runs": "ran",
        "fails_after_figures": "failed",
        "crashes": "failed",
        "cannot": "not run",
    }
    assert found["runs"]["results"] == {"one": 1}
    assert found["runs"]["not run"] == {"half": "there is no other"}
    assert found["fails_after_figures"]["results"] == {"first": 1.5}
    assert found["fails_after_figures"]["why"] == "RuntimeError: out of memory"
    assert "a driver that ends the process" in found["crashes"]["why"]
    assert found["cannot"]["why"] == "it is too hot"
    assert gpu_check.report_of(list(found.values()), on_cpu=True) == 1
    assert gpu_check.report_of([found["runs"], found["cannot"]], on_cpu=False) == 0
    missed = found["runs"] | {"goals": [Goal("one", 2, 1).as_dict()]}
    assert gpu_check.report_of([missed], on_cpu=False) == 1


def test_a_part_that_hangs_keeps_its_figures(settings: Namespace) -> None:
    settings.limit = 4.0
    found = gpu_check.run("hangs", Part("tests.unit.gpu_part_cases:hangs_after_figures"), settings)
    assert (found["status"], found["why"]) == ("killed", "killed after 4 s: at step 7")
    assert found["results"] == {"first": 1.5}


def test_what_a_killed_part_has_started_ends_too(settings: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = settings.out / "python"
    stand_in.write_text("#!/bin/sh\nsleep 600 & echo $!\nwait\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    settings.limit = 0.5
    assert gpu_check.outcome("hangs", CASES["runs"], settings)[0] == "killed after 0 s"
    child = int((settings.out / "hangs.log").read_text())
    deadline = time.monotonic() + 10
    while (is_left := psutil.pid_exists(child) and psutil.Process(child).status() != "zombie") and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert not is_left


def test_a_part_without_its_packages_says_so(settings: Namespace) -> None:
    found = gpu_check.run(
        "runs", Part("tests.unit.gpu_part_cases:runs", ("json", "no_such_module", "xdist_of_nobody")), settings
    )
    assert (found["status"], found["why"]) == ("not run", "needs no_such_module, xdist_of_nobody")
    assert Part("x:y", ("package_of_nobody",)).missing(on_cpu=False) == "needs package_of_nobody"
    assert Part("x:y", only_cuda=True).missing(on_cpu=True) == "needs a CUDA device"
    assert Part("x:y", only_cuda=True).missing(on_cpu=False) is None


def test_every_part_has_a_function() -> None:
    modules = {"losses", "drafting", "divergence", "training", "suite"}
    for part in PARTS.values():
        module, _, name = part.function.partition(":")
        assert module.removeprefix("benchmarks.gpu.") in modules
        assert callable(getattr(sys.modules.get(module) or __import__(module, fromlist=["x"]), name))


def written(folder: Path, name: str, card: str, date: str, **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    machine = {"device": card, "on the CPU": changes.pop("on_cpu", False)}
    record.write(folder, record.begin(name, f"python {name}") | {"hardware": machine, "date": date, **changes})


def test_the_page_is_of_several_runs(tmp_path: Path) -> None:
    table = {"title": "Speed", "header": ["side", "s"], "rows": [["ours", 0.25], ["b", None]]}
    goal = Goal("ratio", 0.5, 1.0).as_dict()
    written(tmp_path / "b", "graphs", "card B", "2030-01-02", status="ran", tables=[table], goals=[goal])
    written(tmp_path / "a", "graphs", "card A", "2030-01-01", status="killed", why="killed after 150 s: x | y")
    written(tmp_path / "a", "losses", "card A", "2030-01-03", status="ran", **{"not run": {"Apex": "not here"}})
    target = tmp_path / "gpu.md"
    assert gpu_check.merge([tmp_path / "b", tmp_path / "a"], target) == 0
    assert not [file for file in tmp_path.iterdir() if file.suffix == ".partial"]
    lines = target.read_text().splitlines()
    rows = [line for line in lines if line.startswith(("| losses |", "| graphs |"))]
    assert [row.split(" | ")[1:3] for row in rows] == [
        ["card A", "2030-01-03"],
        ["card A", "2030-01-01"],
        ["card B", "2030-01-02"],
    ]
    for line in (
        "| ours | 0.25 |",
        "| b | - |",
        "| ratio | 0.5 | <= 1.0 | yes |",
        "Not run: Apex: not here",
        "Outcome: killed: killed after 150 s: x / y.",
        "`python graphs`",
    ):
        assert line in lines
    assert page(records_of([tmp_path / "a"])).count("## ") == 2


def test_a_run_on_a_cpu_makes_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "a", "losses", "a CPU", "2030-01-01", status="ran", on_cpu=True)
    with pytest.raises(ValueError, match="losses of 2030-01-01 ran on a CPU, and the page is about GPUs"):
        gpu_check.merge([tmp_path / "a"], tmp_path / "gpu.md")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="which has no record of a part"):
        gpu_check.merge([tmp_path / "empty"], tmp_path / "gpu.md")
    (tmp_path / "empty" / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="is no record of a part: it lacks command, date"):
        gpu_check.merge([tmp_path / "empty"], tmp_path / "gpu.md")
    assert not (tmp_path / "gpu.md").exists()


def test_a_part_of_another_name_is_refused() -> None:
    assert list(gpu_check.chosen_parts(["losses", "graphs"])) == ["losses", "graphs"]
    assert gpu_check.chosen_parts([]) == PARTS
    with pytest.raises(ValueError, match="--parts names speed; there are losses, graphs"):
        gpu_check.chosen_parts(["speed"])


def side(count: int, graphs: bool, speed: float, speed_up: float) -> dict[str, Any]:
    return {"K": count, "graphs": graphs, "tokens_per_second": speed, "speed_up": speed_up, "as plain": True}


def test_goals_of_graphs() -> None:
    """Drafting is measured against plain decoding that has graphs as well."""
    plain = [side(0, False, 10.0, 1.0), side(0, True, 40.0, 1.0)]
    drafted = [
        side(1, False, 20.0, 2.0),
        side(1, True, 60.0, 1.5),
        side(2, False, 16.0, 1.6),
        side(2, True, 48.0, 1.2),
    ]
    values = [goal.value for goal in drafting.drafting_goals(plain + drafted, graphs=True)]
    assert values == [0, 1.5, 3.0]
    assert len(drafting.drafting_goals(plain + drafted, graphs=False)) == 1


def test_distance_of_two_trainings() -> None:
    ours = {1: dict.fromkeys(training.LOGGED, 1.0), 2: dict.fromkeys(training.LOGGED, 2.0)}
    theirs = {step: {**losses, "mtp_2 loss": losses["mtp_2 loss"] + step / 8} for step, losses in ours.items()}
    assert training.distance(ours, theirs) == 0.25
    theirs[1]["lm loss"] = float("nan")
    assert not Goal("far", training.distance(ours, theirs), 1.0).met
    with pytest.raises(RuntimeError, match="steps"):
        training.distance(ours, {1: ours[1]})


def test_counts_of_a_run_of_tests(tmp_path: Path) -> None:
    cases = ('<testcase classname="t" name="good"/>', '<testcase classname="t" name="bad"><failure/></testcase>')
    cases += ('<testcase classname="t" name="none"><skipped/></testcase>',)
    (tmp_path / "tests.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert suite.counts(tmp_path / "tests.xml") == {"tests": 3, "skipped": 1, "failed": 1, "names": ["t::bad"]}


def test_where_two_texts_part() -> None:
    assert first_other([5, 6, 7], [5, 6, 7]) == 0
    assert first_other([5, 6, 7], [5, 9, 7]) == 2


def test_a_command_that_ends_badly_or_never_is_said(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(RuntimeError, match=r"status 3: .*why"):
        finish(start(["sh", "-c", "echo why; exit 3"], log), log, 60)
    with pytest.raises(RuntimeError, match="killed after"):
        finish(start(["sleep", "600"], log), log, 0.1)
