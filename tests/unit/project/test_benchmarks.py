"""benchmarks/: the harness on numbers that can be checked by hand, and one --quick run of every benchmark."""

import json
import sys
from argparse import ArgumentTypeError, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import fork_server
import pytest
import torch
from benchmark_lines import KEYS, REPOSITORY
from tiers import tiered

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks import harness, head_life, latency, recipes
from benchmarks.harness import Goal, compare, interleave, rounds


@pytest.mark.parametrize(
    ("value", "op", "met"),
    [(1.05, "<=", True), (1.051, "<=", False), (1.05, ">=", True), (1.0, ">=", False), (None, "<=", False)],
)
def test_goals_compare_values_with_their_operator(value: float | None, op: str, met: bool) -> None:
    goal = Goal("ratio at D=1", value, 1.05, op)
    assert goal.as_dict() == {"what": "ratio at D=1", "value": value, "goal": 1.05, "op": op, "met": met}


def test_a_goal_with_another_operator_is_refused() -> None:
    with pytest.raises(ValueError, match="'<'; choose one of <=, >="):
        Goal("ratio", 1.0, 1.05, "<")


def test_sides_take_turns_in_going_first() -> None:
    assert list(rounds(["a", "b"], 3)) == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert list(rounds(["a", "b", "c"], 3)) == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


def test_interleave_times_every_round_but_those_of_the_warm_up() -> None:
    ran: list[str] = []
    sides = {name: lambda name=name: ran.append(name) for name in "ab"}
    spent = interleave(sides, repeats=3, warm_up=1, synchronize=lambda: ran.append("."))
    assert "".join(ran) == ".a..b." + ".b..a." + ".a..b." + ".b..a."
    assert {name: len(values) for name, values in spent.items()} == {"a": 3, "b": 3}
    assert all(one.wall > 0 and one.cpu >= 0 for values in spent.values() for one in values)


def test_compare_gives_the_ratio_of_medians_and_the_ratios_by_round() -> None:
    comparison = compare([2.0, 4.0, 6.0], [1.0, 2.0, 2.0])  # ratios per round: 2, 2, 3
    assert comparison == harness.Comparison(ratio=2.0, paired_ratio=2.0, paired_quartiles=(2.0, 2.5))
    assert compare([3.0], [2.0]) == harness.Comparison(1.5, 1.5, (1.5, 1.5))


def test_compare_ignores_load_on_both_sides_of_a_round() -> None:
    comparison = compare([1.0, 1.0, 9.0, 9.0], [1.0, 1.0, 9.0, 9.0])
    assert comparison.paired_quartiles == (1.0, 1.0)


def two_tensors_at_once() -> None:
    torch.ones(2**20) + torch.ones(2**20)  # 4 MiB each, and 4 for the sum


def two_tensors_in_turn() -> None:
    for _ in range(2):
        torch.ones(2**20)


def test_the_allocated_peak_counts_what_is_held_together() -> None:
    assert harness.allocated_peak(two_tensors_at_once, on_cpu=True) == 12.0
    assert harness.allocated_peak(two_tensors_in_turn, on_cpu=True) == 4.0


def test_a_report_ends_with_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    goals = [Goal("ratio at D=1", 1.5, 1.05), Goal("ratio at D=2", 1.0, 1.05)]
    table = harness.Table("Speed", ("side", "s"), [("ours", 0.25), ("theirs", None)])
    found = harness.Found({"D=1": 1.5}, goals, [table], {"half": "there is no other"})
    harness.report("name", {"device": "machine"}, found)
    *words, last = capsys.readouterr().out.splitlines()
    assert json.loads(last).keys() == KEYS
    assert json.loads(last)["tables"] == [
        {"title": "Speed", "header": ["side", "s"], "rows": [["ours", 0.25], ["theirs", None]]}
    ]
    assert {"Speed", "  side     s", "  ours  0.25", "not run: half: there is no other"} <= set(words)
    assert table.markdown() == ["| side | s |", "| --- | --- |", "| ours | 0.25 |", "| theirs | - |"]
    assert "UNMET ratio at D=1: 1.5 <= 1.05" in words
    assert "ratio at D=2: 1 <= 1.05" in words
    assert harness.Found.of(json.loads(last)).goals == goals


@pytest.mark.parametrize(
    ("about", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root)", "580.65.06"),
        ("another driver", None),
    ],
)
def test_the_driver_says_its_version(about: str, version: str | None, tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert harness.driver_version(file) is None
    file.write_text(f"{about}\nGCC version:  gcc 13.3.0  (Ubuntu)\n")
    assert harness.driver_version(file) == version


def test_a_verb_runs_in_a_fork_and_its_failure_shows_what_it_printed() -> None:
    code = "from benchmarks import verbs; print('said', verbs.run('--version')); verbs.run('no-such-verb')"
    run = fork_server.run([sys.executable, "-c", code], cwd=REPOSITORY)
    assert run.returncode == 1
    assert run.stdout.startswith("said megatron-mtp ")
    assert "VerbError: megatron-mtp no-such-verb ended with status 2:" in run.stderr
    assert "invalid choice: 'no-such-verb'" in run.stderr


SMOKE = {
    "train_step": ["--depths", "1"],
    "train_step --model attached": ["--depths", "1"],
    "train_step --model hybrid": ["--depths", "1"],
    "train_step --model dspark": [],
    "mtp_memory": ["--tokens", "16", "128"],
    "depth_cost": [],
    "decoding": ["--dtype", "float32", "--model", "small"],
    "serving": [],
    "joint": [],
    "latency": [],
    "convert": ["--folder", "FOLDER"],
    "audit": ["--folder", "FOLDER"],
    "shift": [],
    "long_text": [],
    "head_life": [],
    "healing": [],
    "recipes": [],
    "ring": [],
    "state_cache": [],
    "windows": [],
}
"""Flags in addition to --quick. test_gpu_check.py runs gpu_check.py."""


def test_every_benchmark_is_run() -> None:
    programs = {path.stem for path in (REPOSITORY / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert programs == {*(case.split()[0] for case in SMOKE), "gpu_check"}


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("case", tiered(SMOKE, ("train_step",)))
def test_a_benchmark_runs_and_ends_with_its_report(case: str, tmp_path: Path) -> None:
    name, *chosen = case.split()
    flags = ["--quick", *chosen, *(str(tmp_path / "work") if flag == "FOLDER" else flag for flag in SMOKE[case])]
    run = fork_server.run([sys.executable, str(REPOSITORY / "benchmarks" / f"{name}.py"), *flags])
    assert run.returncode == 0, run.stderr
    summary: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert summary.keys() == KEYS
    assert summary["benchmark"] == name
    assert summary["command"].endswith(f"{name}.py {' '.join(flags)}")
    assert summary["results"]
    assert summary["goals"]
    assert all(isinstance(goal["value"], float) for goal in summary["goals"])


def test_latency_is_computed_from_the_first_and_last_token() -> None:
    """Five tokens, the first after 1 s and the last after 3 s: half a second between tokens."""
    assert latency.Answer(1.0, 3.0, 5).figures() == (1000.0, 500.0, 3.0, pytest.approx(5 / 3))
    assert latency.Answer(1.0, 1.0, 1).figures()[1] == 0
    with pytest.raises(SystemExit, match="--server is missing; give the URL of a server"):
        latency.latency(Namespace(quick=False, server=None))


def test_a_finished_trial_is_kept_and_an_interrupted_one_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, left_by_the_cut = head_life.Trial("dense", "same", "good", 4), []

    def run_trial(_: Path, folder: Path, *__: Any) -> dict[str, Any]:
        left_by_the_cut.append(folder.exists())
        folder.mkdir(parents=True)
        if len(left_by_the_cut) == 1:
            raise KeyboardInterrupt
        return {"gain": 0.5}

    monkeypatch.setattr(head_life, "run_trial", run_trial)
    texts: Any = {"same": None}
    with pytest.raises(KeyboardInterrupt):
        head_life.finished(tmp_path, trial, texts)
    assert [head_life.finished(tmp_path, trial, texts) for _ in range(2)] == [{"gain": 0.5}] * 2
    assert left_by_the_cut == [False, False]
    assert not (tmp_path / "runs" / trial.name).exists()


def test_a_trunk_is_one_of_the_table_or_the_folder_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert head_life.Trunk.parse("deep") == ("deep", None)
    assert head_life.Trunk.parse(f"small={tmp_path}") == ("small", tmp_path)
    for wrong in ("small", "small=", f"small={tmp_path}/none", f"deep={tmp_path}"):
        with pytest.raises(ArgumentTypeError, match="give dense, deep, experts, or another name, = and the folder"):
            head_life.Trunk.parse(wrong)


def test_attach_trains_the_layer_of_a_given_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`attach` trains in bfloat16 and saves halfway; the trials find the model next to the checkpoint."""
    ran: list[tuple[object, ...]] = []
    monkeypatch.setattr(head_life, "run", lambda *words: ran.append(words))
    texts = head_life.Texts(tmp_path / "same.jsonl", tmp_path, tmp_path)
    (tmp_path / "small").mkdir()
    for _ in range(2):  # the second call finds everything finished
        head_life.attach_layer(tmp_path / "small", tmp_path, 8, texts, ("--batch", "4"))
    assert [words[-1] for words in ran] == ["corpus", "trunk", "start", "train"]
    assert "--bf16 --batch 4 --steps 8 --save-every 4" in " ".join(map(str, ran[0]))
    assert (tmp_path / "small" / "hf").resolve() == tmp_path


def records(recipe: str, *seeds: tuple[int, ...]) -> recipes.Records:
    """Return a cell for each seed, whose documents have a hundred one-token drafts, of which so many are accepted."""
    counts = [[{"accepted_at": [one], "reached_at": [100], "offered_at": [100]} for one in of] for of in seeds]
    return {
        recipes.Cell(recipe, "dense", "same", 64, seed): {"documents": {str(n): each for n, each in enumerate(of)}}
        for seed, of in enumerate(counts)
    }


@pytest.mark.parametrize(
    ("better", "holds", "gain"),
    [
        ([(60, 62) * 10], "holds", 0.1),
        ([(40, 42) * 10], "contradicted", -0.1),
        ([(50, 53, 54, 47) * 5], "undecided", 0.0),
        ([(60, 62) * 10] * 2, "holds", 0.1),
        ([(60, 62) * 10, (42, 40) * 10], "undecided", 0.0),  # the seeds differ by more than the documents
    ],
)
def test_an_order_is_decided_beyond_two_standard_errors(better: list[tuple[int, ...]], holds: str, gain: float) -> None:
    of = records("ce", *[(50, 52) * 10] * len(better)) | records("kd", *better)
    found = recipes.order_of("ce", "kd", "a paper", of)
    assert (found["holds"], found["gain"]) == (holds, pytest.approx(gain, abs=1e-9))
    assert recipes.order_of("ce", "kd", "a paper", {})["holds"] == "undecided"


def test_an_order_pairs_the_cells_of_a_seed_however_they_are_listed() -> None:
    """Regression: cells were paired as listed, so the difference between seeds counted as an error."""
    worse, better = records("ce", (50, 52) * 10, (10, 12) * 10), records("kd", (60, 62) * 10, (20, 22) * 10)
    found = recipes.order_of("ce", "kd", "a paper", worse | dict(reversed(better.items())))
    assert found == recipes.order_of("ce", "kd", "a paper", worse | better)
    assert found["holds"] == "holds"


def test_ranks_use_only_conditions_shared_by_all_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "RECIPES", {"ce": "", "kd": ""})
    found = records("ce", (80, 82)) | records("kd", (60, 62))
    found |= {replace(cell, trunk="hybrid"): each for cell, each in records("kd", (10, 12)).items()}
    table = recipes.ranks_table(
        {cell: each | {"tau_real": 1.5} for cell, each in found.items()},
        {"dense": ("dense", "same", 64), "hybrid": ("hybrid", "same", 64)},
    )
    first, second = table.rows
    assert first[1:3] == ("ce", pytest.approx(1.81))
    assert first[-1] is None
    assert second[1:3] == ("kd", pytest.approx(1.61))
    assert second[-1] == pytest.approx(1.11)
    assert first[3] is None  # a single seed has no error


def test_longer_sequences_are_compared_with_those_of_the_training() -> None:
    lengths = {recipes.AS_TRAINED: 1.5, recipes.EXPECTED_LENGTH: 1.2}
    longer = {recipes.Cell("kd", "windowed", "same", 16384, seed): lengths for seed in range(2)}
    table = recipes.long_table(records("kd", (60, 62)) | longer)
    assert table.rows == [("kd", 1.5, 1.2, 0.8, 0.0)]
    one = recipes.long_table({cell: found for cell, found in longer.items() if cell.seed == 0})
    assert one.rows == [("kd", 1.5, 1.2, 0.8, None)]


def test_a_finished_cell_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []

    def _trained(bench: recipes.Bench, cell: recipes.Cell) -> dict[str, Any]:
        trained.append(cell.recipe)
        if cell.recipe == "ce":
            raise recipes.VerbError("train ended with status 2:\nit lacks a flag")
        return {"documents": {"7": {"accepted_at": [1], "reached_at": [2], "offered_at": [2]}}}

    monkeypatch.setattr(recipes.Bench, "_trained", _trained)
    monkeypatch.setattr(recipes, "make_texts", lambda *_: {})
    cells = [recipes.Cell(recipe, "dense", "same", 64, seed) for recipe in ("ce", "kd") for seed in range(2)]
    for _ in range(2):  # the second call as after an interruption
        bench = recipes.Bench(tmp_path, None, 4, 24)
        found = {cell: bench.record(cell) for cell in cells}
    assert trained == ["ce", "ce", "kd", "kd", "ce", "ce"]  # failures are retried
    assert found[cells[0]] == {"failed": "it lacks a flag"}
    (stats,) = recipes.documents_of({cell: found[cell] for cell in cells[2:]}).values()
    assert (stats.accepted_at, stats.reached_at) == ([2], [4])  # over both seeds
