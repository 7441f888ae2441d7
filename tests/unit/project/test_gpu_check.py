"""benchmarks/gpu_check.py without a GPU: its parts on the CPU, failing runs, and the page of several runs."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import fork_server
import psutil
import pytest
from benchmark_lines import KEYS, REPOSITORY
from documents import parse
from gpu_part_cases import CASES

from benchmarks import gpu_check
from benchmarks.gpu import PARTS, SHORT, drafting, record, suite, training
from benchmarks.gpu.divergence import first_other
from benchmarks.gpu.issue import block
from benchmarks.gpu.lines import Lines
from benchmarks.gpu.page import page, records_of
from benchmarks.gpu.part import Command, Setting
from benchmarks.harness import Goal
from megatron_mtp.decoding.runner import Runner

SCRIPT = str(REPOSITORY / "benchmarks" / "gpu_check.py")
WITHOUT_DEVICE = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
SMALL = ["te_parity_2", "replays", "serve"]
"""Parts of the first tier, in addition to those of a short run: one that needs a device, decoding, a server."""
OF_TESTS = "unit_engine"
"""One of the parts that run unit tests; they differ only in file names."""


def check(*flags: str | Path, before: str = "pass") -> "subprocess.CompletedProcess[str]":
    """Run a check in a fork, after some code."""
    code = f"import runpy, sys; sys.path.insert(0, {str(fork_server.ROOT / 'tests' / 'support')!r}); {before}; "
    code += f"sys.argv[0] = {SCRIPT!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    return fork_server.run([sys.executable, "-c", code, *map(str, flags)], env=WITHOUT_DEVICE)


OF_CASES = "from benchmarks.gpu import PARTS; PARTS.clear(); from gpu_part_cases import CASES; PARTS |= CASES"


def results_of(parts: list[str], out: Path) -> dict[str, Any]:
    """Return the results of parts that all succeed."""
    run = check("--device", "cpu", "--quick", "--out", out, "--pack", out / "all.tgz", "--parts", *parts)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    summary: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert summary.keys() == KEYS
    results: dict[str, Any] = summary["results"]
    assert list(results) == record.parts_of(out, "ended")
    needs_cuda = {name for name in parts if PARTS[name].only_cuda}
    assert {name: result["status"] for name, result in results.items()} == {
        name: "not run" if name in needs_cuda else "ran" for name in parts
    }
    assert {results[name]["why"] for name in needs_cuda} <= {"needs a CUDA device"}
    with tarfile.open(out / "all.tgz") as packed:
        assert {f"{name}.json" for name in parts} < set(packed.getnames())
        assert {Path(name).suffix for name in packed.getnames()} == {".json", ".log", ""}
    ready = [each for each in record.events(out) if each["what"] == "ready"]
    assert [(each["line"], each["threads"], each["commands"]) for each in ready] == [("cpu", 1, "forks")]
    return results


def test_small_parts_run_on_the_cpu(tmp_path: Path) -> None:
    results = results_of(SMALL, tmp_path)
    accepted = [row["tokens a forward"] for row in results["replays"]["results"]["rows"]]
    assert accepted[:2] == [1.0, 1.0]
    assert min(accepted[2:]) > 1.5
    assert "CUDA graphs" in results["replays"]["not run"]
    assert results["serve"]["results"] == {"texts": 4, "other texts": 0}


def block_in(printed: str) -> list[str]:
    """Return the lines of the only fenced block."""
    before, fenced, after = printed.split("```")
    assert before.endswith("paste this block into an issue:\n\n")
    assert after.count("\n") <= 2  # at most the line of JSON comes after it
    kind, *lines = fenced.splitlines()
    assert kind == "text"
    return lines


@pytest.mark.matrix
def test_a_short_run_ends_with_a_block_for_an_issue(tmp_path: Path) -> None:
    run = check("--device", "cpu", "--quick", "--short", "--out", tmp_path)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    chosen = [name for name, part in PARTS.items() if part.short]
    assert chosen == ["parity_2", "first_step", "train_step"]
    summary = json.loads(run.stdout.splitlines()[-1])
    assert summary["results"].keys() == {*chosen}
    assert summary["results"]["parity_2"]["results"]["largest distance from the CPU"] == {"device": 0.0}
    lines = block_in(run.stdout)
    assert lines[:2] == [
        "gpu_check of megatron-mtp: 3 passed, 0 failed, 0 skipped",
        "This was a try, whose figures mean nothing.",
    ]
    said = " ".join(" ".join(lines).split())
    assert f" card {summary['hardware']['device']} versions python {summary['versions']['python']}, torch " in said
    for name in ("triton", "megatron-core", "transformer-engine", "megatron-mtp"):
        assert f", {name} {summary['versions'][name] or 'not installed'}" in said
    assert f" command scripts/gpu_check.sh --device cpu --quick --short --out {tmp_path} passed " in said
    assert [line.split()[1] for line in lines if line.startswith("passed")] == chosen
    measured = [line.split(maxsplit=1) for line in lines[lines.index("") :] if " <= " in line]
    assert [(name, goal.partition(": ")[0].removeprefix("UNMET ")) for name, goal in measured] == [
        ("parity_2", "parity_2"),
        ("first_step", "first_step"),
        ("first_step", "first_step"),
        ("train_step", "gpt, ours / Megatron's own MTP, D=1"),
    ]


@pytest.mark.matrix
def test_all_parts_run_on_the_cpu(tmp_path: Path) -> None:
    results = results_of([name for name in PARTS if name == OF_TESTS or not name.startswith("unit_")], tmp_path)
    sides = results["graphs"]["results"]["sides"]
    assert [side["K"] for side in sides] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert all(side["as plain"] for side in sides)
    assert sides[-1]["accepted_length"] > 2
    assert results[OF_TESTS]["results"]["tests"] > 1
    assert results[OF_TESTS]["results"]["failed"] == 0
    for name in ("parity_1", "packed", "experts", "recompute", "kd", "eagle3", "dflash"):
        assert results[name]["results"]["largest distance from the CPU"] == {"device": 0.0}
    errors = {(side, dtype): float(error) for side, dtype, error, *_ in results["losses"]["results"]["against float64"]}
    assert max(error for (_, dtype), error in errors.items() if dtype == "float32") < 1e-5
    assert results["profile"]["results"]["microseconds a step"] > 0
    assert [row["texts that part"] for row in results["divergence"]["results"]["rows"][:2]] == [0, 0]


def test_unit_tests_of_a_part_are_there() -> None:
    named = " ".join(part.given["names"] for name, part in PARTS.items() if name.startswith("unit_"))
    files = [next((REPOSITORY / "tests/unit").rglob(f"test_{name}.py")) for name in named.split()]
    assert len(files) > 30
    assert [file.name for file in files if not file.exists()] == []


def test_energy_is_counted_over_layers_that_are_not_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, megatron: None
) -> None:
    """On the CPU, with a stand-in meter; the MTP layers still agree with the trunk."""
    runners = []
    monkeypatch.setattr(drafting, "start_meter", lambda: lambda: 10.0)
    monkeypatch.setattr(drafting, "Runner", lambda model: runners.append(Runner(model)) or runners[-1])
    found = drafting.energy(Setting("energy", True, tmp_path, 0.0, Lines("", "cpu")))
    assert not [name for name, weight in runners[0].model.named_parameters() if not weight.any()]
    (plain, *_, no_draft), (drafted, *_, accepted_length) = (row[1:] for row in found.tables[0].rows)
    assert min(plain, drafted) > 0
    assert (no_draft, accepted_length > 2) == (1.0, True)
    assert found.results["ratio"] == drafted / plain


@pytest.mark.parametrize("verb", [[], ["start"]])
def test_without_a_device_the_check_is_skipped_with_one_line(verb: list[str], tmp_path: Path) -> None:
    run = check(*verb, "--out", tmp_path / "out")
    assert run.returncode == 77
    assert run.stdout.count("\n") == 1
    assert "there is no CUDA device here" in run.stdout
    assert not (tmp_path / "out").exists()


def gone(pid: int) -> bool:
    """Return whether the process ends, possibly after a moment."""
    deadline = time.monotonic() + 20
    while (left := psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie") and time.monotonic() < deadline:
        time.sleep(0.05)
    return not left


def test_a_failing_part_keeps_its_figures(tmp_path: Path) -> None:
    run = check("--device", "cpu", "--out", tmp_path, before=OF_CASES)
    assert run.returncode == 1, run.stderr
    found = {name: record.read(tmp_path / f"{name}.json") for name in CASES}
    assert {name: one["status"] for name, one in found.items()} == {
        "runs": "ran",
        "fails_after_figures": "failed",
        "crashes": "failed",
        "cannot": "not run",
        "lacks": "not run",
        "needs_cuda": "not run",
        "commands": "ran",
        "shortens": "ran",
        "hangs": "killed",
        "last": "ran",
    }
    assert found["runs"]["results"] == {"one": 1}
    assert found["runs"]["not run"] == {"half": "there is no other"}
    assert found["fails_after_figures"]["results"] == found["hangs"]["results"] == {"first": 1.5}
    assert found["fails_after_figures"]["why"] == "RuntimeError: out of memory"
    assert found["crashes"]["why"] == "ended by signal 6: a driver that ends the process"
    assert found["cannot"]["why"] == "it is too hot"
    assert found["lacks"]["why"] == "needs no_such_module: it is not installed"
    assert found["commands"]["results"] == {"printed": "forked\n"}
    child = int((tmp_path / "hangs.log").read_text())
    assert found["hangs"]["why"] == f"killed after 4 s: {child}"
    assert gone(child)
    told = [(each["what"], each["part"]) for each in record.events(tmp_path) if "part" in each][-4:]
    assert told == [("begins", "hangs"), ("ended", "hangs"), ("begins", "last"), ("ended", "last")]
    lines = block_in(run.stdout)
    assert lines[0] == "gpu_check of megatron-mtp: 4 passed, 3 failed, 3 skipped"
    outcomes = {line.split()[1]: line.split(maxsplit=2)[::2] for line in lines if line.startswith(("failed", "skip"))}
    assert outcomes == {
        "fails_after_figures": ["failed", "RuntimeError: out of memory"],
        "crashes": ["failed", "ended by signal 6: a driver that ends the process"],
        "cannot": ["skipped", "it is too hot"],
        "lacks": ["skipped", "needs no_such_module: it is not installed"],
        "needs_cuda": ["skipped", "needs a CUDA device"],
        "hangs": ["failed", f"killed after 4 s: {child}"],
    }
    assert [line.split(maxsplit=1) for line in lines[-4:]] == [
        ["runs", "one: 1 <= 1"],
        ["fails_after_figures", "first: 1.5 <= 2.0"],
        ["hangs", "first: 1.5 <= 2.0"],
        ["last", "one: 1 <= 1"],
    ]


def test_a_run_continues_between_follows_and_keeps_its_results_when_killed(tmp_path: Path) -> None:
    """`hangs` takes long; the parts before it have finished."""
    long = f"{OF_CASES}; from dataclasses import replace; PARTS['hangs'] = replace(PARTS['hangs'], seconds=600)"
    flags = "--device cpu --parts runs hangs last --out".split()
    started = check("start", *flags, tmp_path, before=long)
    process = int(started.stdout.split()[2])
    while not ((tmp_path / "hangs.json").exists() and record.read(tmp_path / "hangs.json")["results"]):
        assert psutil.pid_exists(process), (tmp_path / "run.log").read_text()
        time.sleep(0.05)
    first = check("follow", "--out", tmp_path, "--seconds", "0", "--pack", tmp_path / "packed.tgz")
    assert "```" not in first.stdout
    said = [line.split()[1:3] for line in first.stdout.splitlines()]
    parts = [words for words in said if words[0] in ("begins", "ended")]
    assert parts == [["begins", "runs"], ["ended", "runs"], ["begins", "hangs"]]
    assert first.returncode == 0
    assert check("start", *flags, tmp_path, before=long).stderr.endswith(
        "a run goes on; follow it, or give another folder.\n"
    )
    child = int((tmp_path / "hangs.log").read_text())
    os.kill(process, signal.SIGKILL)
    assert gone(child)
    second = check("follow", "--out", tmp_path, "--pack", tmp_path / "packed.tgz")
    assert second.returncode == 1
    assert [re.sub(r"^\S+  |seconds \S+  ", "", line) for line in second.stdout.splitlines()[:2]] == [
        "ended  hangs  killed  (the run was ended from outside)  first: 1.5 <= 2.0",
        "failed  (the run was ended from outside)",
    ]
    with tarfile.open(tmp_path / "packed.tgz") as packed:
        hung = json.load(packed.extractfile("hangs.json"))
        assert (hung["status"], hung["results"]) == ("killed", {"first": 1.5})
        assert json.load(packed.extractfile("runs.json"))["status"] == "ran"
    assert not [file for file in tmp_path.iterdir() if file.is_dir() or file.name == "last.json"]
    lines = block_in(second.stdout)
    assert [line for line in lines if line.startswith(("passed", "failed", "skipped"))][1:] == [
        "failed    hangs           the run was ended from outside",
        "skipped   last            the run ended before it",
        "failed    the run         the run was ended from outside",
    ]
    assert block_in(check("follow", "--out", tmp_path).stdout) == lines


def test_a_process_that_cannot_import_says_so(tmp_path: Path) -> None:
    broken = f"{OF_CASES}; import fork_server; fork_server.import_all = lambda: 1 / 0"
    run = check("--device", "cpu", "--parts", "runs", "--out", tmp_path, before=broken)
    assert run.returncode == 1
    assert "line failed  line cpu  (ZeroDivisionError: division by zero)" in run.stdout
    assert record.read(tmp_path / "runs.json")["why"].startswith("not started, see cpu.log")
    assert "ZeroDivisionError" in (tmp_path / "cpu.log").read_text()


@pytest.mark.matrix
def test_a_process_that_has_started_cuda_does_not_fork_its_parts(tmp_path: Path) -> None:
    touched = "from benchmarks.gpu import lines, run; lines.touches_cuda = lambda: True"
    run = check("--device", "cpu", "--quick", "--parts", "replays", "--out", tmp_path, before=touched)
    assert run.returncode == 0, run.stdout
    assert "commands new processes, since an import has started CUDA" in run.stdout
    assert record.read(tmp_path / "replays.json")["status"] == "ran"


def test_a_run_whose_minutes_have_passed_leaves_parts_out(tmp_path: Path) -> None:
    run = check("--device", "cpu", "--minutes", "0", "--parts", "runs", "--out", tmp_path, before=OF_CASES)
    assert run.returncode == 0, run.stdout
    assert record.read(tmp_path / "runs.json")["why"] == "no time was left"


def test_a_short_run_has_its_own_parts_limits_and_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu_check.list_parts(gpu_check.chosen_parts([], True), True)
    listed = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert listed[0] == ["parity_2", "together", "60", "s"]
    assert len(listed) == 3
    run = check("--device", "cpu", "--short", "--out", tmp_path, before=OF_CASES)
    results = json.loads(run.stdout.splitlines()[-1])["results"]
    assert {name: one["results"] for name, one in results.items()} == {"shortens": {"quick": False, "short": True}}
    without_time = f"{OF_CASES}; from benchmarks import gpu; gpu.SHORT = 0.0"
    late = check("--device", "cpu", "--short", "--out", tmp_path, before=without_time)
    assert "skipped   shortens        no time was left" in block_in(late.stdout)
    with pytest.raises(SystemExit):
        gpu_check.parse(["--short", "--parts", "losses"])
    assert "argument --parts: not allowed with argument --short" in capsys.readouterr().err


def test_the_limits_of_a_short_run_add_up_to_less_than_four_minutes() -> None:
    short = [part for part in PARTS.values() if part.short]
    imports, together = 110, max(part.short for part in short if not part.alone)
    assert imports + together + sum(part.short for part in short if part.alone) <= SHORT < 240
    assert all(part.short < part.seconds for part in short)


def test_a_short_run_reduces_the_benchmark_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def reports(_: Setting, name: str, words: list[Any]) -> str:
        asked.append(words[1:])
        return json.dumps({"results": {}, "goals": [], "tables": []})

    monkeypatch.setattr(Setting, "run", reports)
    for quick, short in ((False, False), (False, True), (True, True)):
        setting = Setting("train_step", quick, tmp_path, 0.0, Lines("", "cpu"), short=short)
        training.benchmark(setting, **PARTS["train_step"].given)
    assert [" ".join(words) for words in asked] == [
        "--depths 1 2 --repeats 15",
        "--depths 1 --repeats 5",
        "--quick --depths 1",
    ]
    assert all("short" in part.given for part in PARTS.values() if part.short and "script" in part.given)


def test_a_first_step_is_judged_by_its_loss_and_gradient_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"D=1": {"megatron-mtp": [2.02, 1.0], "Megatron": [2.0, 1.25]}}
    timed = {"results": {training.FIRST: first}, "goals": [Goal("time", 2, 1).as_dict()], "tables": []}
    monkeypatch.setattr(Setting, "run", lambda *_: json.dumps(timed))
    setting = Setting("first_step", False, tmp_path, 0.0, Lines("", "cpu"))
    found = training.first_step(setting, **PARTS["first_step"].given)
    assert [(goal.value, goal.met) for goal in found.goals] == [
        (pytest.approx(0.01), True),
        (pytest.approx(0.2), False),
    ]
    assert found.results == {training.FIRST: first}


def test_following_without_a_run_is_rejected(tmp_path: Path) -> None:
    run = check("follow", "--out", tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    (said,) = run.stderr.splitlines()
    assert said.startswith(f"gpu_check: error: --out is {tmp_path}, ")
    assert "; give the folder" in said


def test_a_missed_goal_is_a_failure_unless_it_was_missed_on_a_cpu(tmp_path: Path) -> None:
    record.event(tmp_path, "all ended")
    missed = {"status": "ran", "goals": [Goal("one", 2, 1).as_dict()], "hardware": {"on the CPU": False}}
    assert gpu_check.status_of(tmp_path, [missed]) == 1
    assert gpu_check.status_of(tmp_path, [missed | {"hardware": {"on the CPU": True}}]) == 0
    assert gpu_check.status_of(tmp_path, [missed | {"goals": [], "status": "killed"}]) == 1


def test_a_block_names_the_card_and_a_goal_that_it_missed(tmp_path: Path) -> None:
    record.event(tmp_path, "starts", parts="one", command="scripts/gpu_check.sh")
    machine = {"device": "a card", "driver": "580.65.06", "CUDA": "13.0", "on the CPU": False}
    given = {"status": "ran", "goals": [Goal("time `a` step", 2, 1).as_dict()], "hardware": machine}
    record.end(tmp_path, record.begin("one", "") | given)
    lines = block_in(block(tmp_path))
    assert "card      a card, driver 580.65.06, CUDA 13.0" in lines
    assert "failed    one             a goal was missed, see below" in lines
    assert lines[-1] == "one             UNMET time 'a' step: 2 <= 1"
    assert "This was a try, whose figures mean nothing." not in lines


def test_every_part_has_a_function_that_takes_what_it_is_given() -> None:
    for name, part in PARTS.items():
        module, _, function = part.function.partition(":")
        inspect.signature(getattr(__import__(module, fromlist=["x"]), function)).bind(None, **part.given)
        for test in part.given.get("names", "").split():
            assert any((REPOSITORY / "tests/unit").rglob(f"test_{test}.py")), f"{name}: {test}"


def test_every_training_has_flags_that_parse() -> None:
    """Those for FP8 and Transformer Engine are only used on a GPU."""
    for part in PARTS.values():
        given = {key: value for key, value in part.given.items() if "script" not in part.given}
        flags = [given.get(key, "") for key in ("flags", "device_flags", "drafter")]
        if "recipe" in given:
            flags.append(f"--fp8-recipe {given['recipe']} --fp8-format {given['form']}")
        parse("megatron-mtp", "train", *" ".join([training.TRAINED, training.GATHERED, *flags]).split())


def test_timed_parts_come_last() -> None:
    kinds = [part.alone for part in PARTS.values()]
    assert kinds == sorted(kinds)


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
    assert lines[lines.index(rows[-1]) + 2].startswith("Without a record: `parity_2`, ")
    headings = [line for line in page(records_of([tmp_path / "a"])).splitlines() if line.startswith("## ")]
    assert headings[-3:] == ["## Parts", "## losses", "## graphs"]


def test_a_run_on_a_cpu_makes_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "a", "losses", "a CPU", "2030-01-01", status="ran", on_cpu=True)
    with pytest.raises(ValueError, match="of 2030-01-01 ran on a CPU, and the page is about GPUs"):
        gpu_check.merge([tmp_path / "a"], tmp_path / "gpu.md")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="which has no record of a part"):
        gpu_check.merge([tmp_path / "empty"], tmp_path / "gpu.md")
    (tmp_path / "empty" / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a record of a part: it lacks command, date"):
        gpu_check.merge([tmp_path / "empty"], tmp_path / "gpu.md")
    assert not (tmp_path / "gpu.md").exists()


def test_the_page_has_every_part_as_a_record_or_as_one_that_has_not_run() -> None:
    parts = (REPOSITORY / "docs/explanation/evidence_gpu.md").read_text().split("## Parts\n")[1]
    rows, never = parts.split("| --- | --- | --- | --- | --- |\n", 1)[1].split("\n\n")[:2]
    ran = {row.split(" | ")[0].removeprefix("| ") for row in rows.splitlines()}
    assert ran == {name for name in PARTS if f"\n## {name}\n" in parts}
    assert ran | set(re.findall(r"`(\w+)`", never)) == set(PARTS)


def test_a_part_of_another_name_is_refused() -> None:
    assert gpu_check.chosen_parts(["graphs", "losses"], False) == ["losses", "graphs"]
    assert gpu_check.chosen_parts([], False) == list(PARTS)
    with pytest.raises(ValueError, match="--parts names speed; there are parity_2, te_parity_2"):
        gpu_check.chosen_parts(["speed"], False)


def test_the_list_has_a_line_for_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_check.list_parts(list(PARTS), False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PARTS)
    assert lines[0].split()[1:] == ["together", "150", "s", "local", "parity", "depths=2"]


def side(count: int, graphs: bool, speed: float, speed_up: float) -> dict[str, Any]:
    return {"K": count, "graphs": graphs, "tokens_per_second": speed, "speed_up": speed_up, "as plain": True}


def test_graph_goals_compare_with_plain_decoding_with_graphs() -> None:
    """Drafting is compared with plain decoding that also has graphs."""
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


def test_training_distance_is_the_largest_loss_difference() -> None:
    ours = {step: dict.fromkeys(("lm loss", "mtp_1 loss", "mtp_2 loss"), float(step)) for step in (1, 2)}
    theirs = {step: {**losses, "mtp_2 loss": losses["mtp_2 loss"] + step / 8} for step, losses in ours.items()}
    assert training.distance(ours, theirs) == 0.25
    theirs[1]["lm loss"] = float("nan")
    assert not Goal("far", training.distance(ours, theirs), 1.0).met
    with pytest.raises(RuntimeError, match="steps"):
        training.distance(ours, {1: ours[1]})


def test_counts_are_read_from_a_junit_report(tmp_path: Path) -> None:
    cases = ('<testcase classname="t" name="good"/>', '<testcase classname="t" name="bad"><failure/></testcase>')
    cases += ('<testcase classname="t" name="none"><skipped/></testcase>',)
    (tmp_path / "tests.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert suite.counts(tmp_path / "tests.xml") == {"tests": 3, "skipped": 1, "failed": 1, "names": ["t::bad"]}


def test_first_other_finds_the_first_different_token() -> None:
    assert first_other([5, 6, 7], [5, 6, 7]) == 0
    assert first_other([5, 6, 7], [5, 9, 7]) == 2


def test_a_command_that_fails_or_hangs_is_reported(tmp_path: Path) -> None:
    def started(code: str) -> Command:
        with open(tmp_path / "log", "wb") as log:
            words = [sys.executable, "-c", code]
            return Command(fork_server.start(words, stdout=log, stderr=subprocess.STDOUT), tmp_path / "log")

    with pytest.raises(RuntimeError, match=r"status 3: .*why"):
        started("print('why'); exit(3)").printed(60)
    with pytest.raises(RuntimeError, match="killed after"):
        started("import time; time.sleep(600)").printed(0.1)
