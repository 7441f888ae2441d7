"""benchmarks/: the harness with numbers that a person can check, and one smoke run of the step's benchmark."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import fork_server
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from tiers import tiered

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import decoding, gain, harness, objectives
from benchmarks.agreeing import agreeing_model
from benchmarks.first_token import Waits
from benchmarks.harness import Goal, Peak, compare, interleave, rounds
from megatron_mtp.checkpoint.mcore.iterations import TRACKER
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.model.build import join_world

REPOSITORY = Path(__file__).parents[2]
KEYS = {"benchmark", "command", "hardware", "versions", "results", "goals"}


@pytest.mark.parametrize(
    ("value", "op", "met"),
    [(1.05, "<=", True), (1.051, "<=", False), (1.05, ">=", True), (1.0, ">=", False), (None, "<=", False)],
)
def test_a_goal_is_met_or_not(value: float | None, op: str, met: bool) -> None:
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
    comparison = compare([2.0, 4.0, 6.0], [1.0, 2.0, 2.0])  # by round 2, 2, 3
    assert comparison == harness.Comparison(ratio=2.0, paired_ratio=2.0, paired_quartiles=(2.0, 2.5))
    assert compare([3.0], [2.0]) == harness.Comparison(1.5, 1.5, (1.5, 1.5))


def test_compare_is_not_moved_by_a_load_that_meets_both_sides_of_a_round() -> None:
    comparison = compare([1.0, 1.0, 9.0, 9.0], [1.0, 1.0, 9.0, 9.0])
    assert comparison.paired_quartiles == (1.0, 1.0)


def two_tensors_at_once() -> None:
    torch.ones(2**20) + torch.ones(2**20)  # 4 MiB each, and 4 for the sum


def two_tensors_in_turn() -> None:
    for _ in range(2):
        torch.ones(2**20)


def test_the_allocated_peak_counts_what_is_held_together() -> None:
    assert harness.allocated_peak(two_tensors_at_once, on_cpu=True) == Peak(12.0)
    assert harness.allocated_peak(two_tensors_in_turn, on_cpu=True) == Peak(4.0)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux keeps the high-water mark here")
def test_the_resident_peak_is_that_of_the_step() -> None:
    peak = harness.resident_peak(lambda: torch.ones(2**24), on_cpu=True)  # 64 MiB
    assert peak.mib is None or 60 <= peak.mib < 80


def test_a_machine_without_a_resident_peak_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/proc/self/clear_refs")

    monkeypatch.setattr(Path, "write_text", refuse)
    peak = harness.resident_peak(lambda: None, on_cpu=True)
    assert peak.mib is None
    assert "Permission denied: '/proc/self/clear_refs'" in str(peak.why)


def test_the_cpu_is_called_as_the_kernel_calls_it(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 2.0: GHz\nmodel name\t: other\n")
    assert harness.cpu_name(tmp_path / "cpuinfo") == "Some CPU @ 2.0: GHz"
    assert harness.cpu_name(tmp_path / "none")


def test_versions_name_what_is_measured_and_what_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "PACKAGES", ("torch", "no-such-package"))
    assert harness.versions() | {"python": "", "torch": ""} == {"python": "", "torch": "", "no-such-package": None}


def test_a_table_is_flush_right() -> None:
    assert harness.table(("side", "s"), [("ours", 0.25), ("b", None)]) == (
        "side      s\n----  -----\nours  0.250\n   b      -"
    )


def test_a_report_ends_with_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    goals = [Goal("ratio at D=1", 1.5, 1.05), Goal("ratio at D=2", 1.0, 1.05)]
    harness.report("name", {"device": "machine"}, {"D=1": 1.5}, goals, ["a table"])
    *words, last = capsys.readouterr().out.splitlines()
    assert json.loads(last).keys() == KEYS
    assert "a table" in words
    assert "UNMET  ratio at D=1: 1.500 <= 1.05" in words
    assert "met    ratio at D=2: 1.000 <= 1.05" in words


def summary_of(script: str, *flags: str) -> dict[str, Any]:
    """The last line of a benchmark's smoke run."""
    command = [sys.executable, str(REPOSITORY / "benchmarks" / script), "--quick", *flags]
    run = fork_server.run(command)
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout.splitlines()[-1])
    assert summary.keys() == KEYS
    assert summary["command"].endswith(f"{script} --quick{''.join(f' {flag}' for flag in flags)}")
    return summary


def test_train_step_runs_and_ends_with_its_report() -> None:
    summary = summary_of("train_step.py", "--depths", "1")
    assert summary["benchmark"] == "train_step"
    result = summary["results"]["D=1"]
    assert result["first_step"]["megatron-mtp"] == pytest.approx(result["first_step"]["Megatron"], rel=1e-3)
    assert result["allocated_peak"].keys() == result["resident_peak"].keys() == {"megatron-mtp", "Megatron"}
    (goal,) = summary["goals"]
    assert (goal["value"], goal["goal"], goal["op"]) == (result["ratio"], 1.05, "<=")


def test_mtp_memory_runs_and_ends_with_its_report() -> None:
    summary = summary_of("mtp_memory.py", "--tokens", "16", "128")
    assert summary["benchmark"] == "mtp_memory"
    few, many = (summary["results"][f"{tokens} x 1024"] for tokens in (16, 128))
    figures = [
        figure
        for each in (few, many)
        for figure in (*each["ratios alone"].values(), each["marginal ratio"], each["step ratio"])
    ]
    assert [goal["value"] for goal in summary["goals"]] == figures
    assert [goal["goal"] for goal in summary["goals"]] == [1.0, 1.0, 1.0, 1.0, 0.25, 0.25, 0.25, 1.0]
    assert {goal["op"] for goal in summary["goals"]} == {"<="}
    assert few["ratios alone"].keys() == {"fp32", "bf16"}


def test_mtp_memory_refuses_tokens_that_its_sequences_cannot_share() -> None:
    run = fork_server.run([sys.executable, str(REPOSITORY / "benchmarks/mtp_memory.py"), "--quick", "--tokens", "17"])
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].endswith("--tokens is [17]; give multiples of 2, the sequences of a step.")


def test_depth_cost_runs_and_ends_with_its_report() -> None:
    summary = summary_of("depth_cost.py", "--depths", "1")
    assert summary["benchmark"] == "depth_cost"
    (goal,) = summary["goals"]
    assert (goal["value"], goal["goal"], goal["op"]) == (summary["results"]["D=1"]["ratio"], 1.05, "<=")
    arithmetic = (2 * 32**2 + 17 * 32**2 + 32 * 256) / (17 * 32**2 + 32 * 256)  # a sequence is as long as H here
    assert summary["results"]["D=1"]["arithmetic"] == pytest.approx(arithmetic, abs=1e-4)


def test_loss_costs_compares_the_coupled_loss_with_that_of_one_depth() -> None:
    summary = summary_of("loss_costs.py", "--losses", "tv", "e2e_tv", "kd")
    results = summary["results"]
    assert [goal["value"] for goal in summary["goals"]] == [
        results["e2e_tv"]["time ratio"],
        results["e2e_tv"]["memory ratio"],
    ]
    assert {(goal["goal"], goal["op"]) for goal in summary["goals"]} == {(1.2, "<=")}
    assert results["tv"]["MiB"] > 0
    assert results["tv"]["memory ratio"] == 1


def test_loss_costs_refuses_losses_without_the_two_that_are_compared() -> None:
    run = fork_server.run([sys.executable, str(REPOSITORY / "benchmarks/loss_costs.py"), "--losses", "tv"])
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].endswith("--losses lacks e2e_tv; give tv and e2e_tv, which are compared.")


def test_hybrid_runs_and_ends_with_its_report() -> None:
    summary = summary_of("hybrid.py")
    assert summary["benchmark"] == "hybrid"
    trained, decoded = summary["results"]["train"], summary["results"]["decode"]
    for name, result in trained.items():
        first = result["first_step"]
        assert first["megatron-mtp"] == pytest.approx(first["Megatron"], rel=1e-3), name
    values = [trained["D=1"]["ratio"], trained["D=2"]["ratio"], decoded["ratio"]]
    assert [goal["value"] for goal in summary["goals"]] == pytest.approx(values, abs=1e-4)
    assert [(goal["goal"], goal["op"]) for goal in summary["goals"]] == [(1.0, "<="), (1.0, "<="), (1.1, "<=")]


def test_train_only_runs_and_ends_with_its_report() -> None:
    summary = summary_of("train_only.py")
    assert summary["benchmark"] == "train_only"
    results = summary["results"]
    assert 0 < results["MiB"]["depths alone"] < results["MiB"]["joint"]
    assert [goal["value"] for goal in summary["goals"]] == [results["time ratio"], results["memory ratio"]]
    assert [(goal["goal"], goal["op"]) for goal in summary["goals"]] == [(0.6, "<="), (0.6, "<=")]


def test_losses_compares_runs_that_have_finished(tmp_path: Path) -> None:
    for loss, rate in {"ce": 0.5, "kd": 0.525, "tv": 0.54}.items():
        row = {
            "split": "validation",
            "lm loss": 2.0,
            "mtp_1 loss": 2.0,
            "mtp_1 conditional acceptance": rate,
            "mtp_1 overlap": rate,
        }
        (tmp_path / "quick" / loss).mkdir(parents=True)
        rows = [{"iteration": 3, **row}, {"iteration": 3, "split": "training"}]
        (tmp_path / "quick" / loss / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    summary = summary_of("losses.py", "--checkpoint", str(tmp_path), "--run", str(tmp_path))
    assert summary["results"]["points"]["kd"] == {"mtp_1 conditional acceptance": 52.5, "mtp_1 overlap": 52.5}
    assert [(goal["value"], goal["met"]) for goal in summary["goals"]] == [(4.0, True), (4.0, True)]


def test_gain_times_both_sides_and_compares_their_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Depths that agree with the trunk are accepted whole; drafts that change a text end the benchmark."""
    join_world()
    runner = Runner(agreeing_model(layers=1, hidden=128, vocabulary=64, depths=1, noise=0.0))
    monkeypatch.setattr(gain, "load_runner", lambda *_, **__: runner)
    wanted = gain.parse(["--quick", "--checkpoint", ".", "--counts", "1,3"])
    found = gain.gains("float32", [[1, 2, 3], [4, 5, 6]], wanted)
    assert {side: one["same_texts"] for side, one in found.items()} == {"plain": 2, "K=1": 2, "K=3": 2}
    assert found["plain"]["accepted_length"] == 1 < found["K=1"]["accepted_length"] < found["K=3"]["accepted_length"]
    other = iter([1, 1, 1, 2])

    def parts(*_: object) -> gain.Generated:
        return gain.Generated([[next(other)]], gain.AcceptanceStats())

    monkeypatch.setattr(gain, "generate", parts)
    with pytest.raises(SystemExit, match="ours must not"):
        gain.gains("float32", [[1]], gain.parse(["--quick", "--checkpoint", ".", "--counts", "1"]))


def test_inits_compares_runs_that_have_finished(tmp_path: Path) -> None:
    for start, init in enumerate(("random", "last-layer", "fitted"), 1):
        for loss, more in {"kd": 0.5, "lk": 0.25}.items():
            folder = tmp_path / "quick" / init / loss
            folder.mkdir(parents=True)
            row = {"iteration": 3, "split": "validation", "expected accepted length": start + more}
            (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        (tmp_path / "quick" / init / "start").mkdir()
        (tmp_path / "quick" / init / "before.json").write_text(json.dumps({"expected accepted length": start}))
    summary = summary_of("inits.py", "--checkpoint", str(tmp_path), "--out", str(tmp_path), "--losses", "kd,lk")
    lengths = summary["results"]["expected accepted length"]
    assert lengths["lk"] == {"random": 1.25, "last-layer": 2.25, "fitted": 3.25}
    assert [goal["value"] for goal in summary["goals"]] == [3 / 2, 3.5 / 2.5, 3.25 / 2.25]


def test_objectives_compares_runs_that_have_finished(tmp_path: Path) -> None:
    """The best of all against kd, plain and single; and the engine's lengths against those that training expects."""
    kept = tmp_path / "quick"
    kept.mkdir()
    shared = {"checkpoint": str(tmp_path), "steps": 3, "passes": 5, "batch": 8, "seq_length": 256, "lr": "1e-3"}
    shared |= {"counts": [1, 2, 3, 4, 5], "token_fraction": "1", "prompts": 2, "new_tokens": 12}
    for variant, loss, factor in (
        ("plain", "kd", 1.0),
        ("plain", "tv", 0.9),
        ("both", "kd", 1.02),
        ("both", "tv", 1.2),
        ("single", "kd", 0.5),
        ("single", "tv", 0.4),
    ):
        forced = None if variant == "single" else 1.01
        each = {str(k): {"mtp_eagle": k * factor, "trained": 1.0, "forced": forced} for k in range(1, 6)}
        row = {"settings": shared, "step_seconds": 1.0, "steps": 3, "greedy": each, "sampled": each}
        (kept / f"steps-{variant}-{loss}-1.json").write_text(json.dumps(row))
    flags = ["--losses", "kd,tv", "--variants", "plain,both,single", "--seeds", "1"]
    summary = summary_of("objectives.py", "--checkpoint", str(tmp_path), "--out", str(tmp_path), *flags)
    found = {goal["what"]: (round(goal["value"], 6), goal["goal"], goal["met"]) for goal in summary["goals"]}
    command = [sys.executable, str(REPOSITORY / "benchmarks/objectives.py"), "--quick", "--checkpoint", str(tmp_path)]
    other = fork_server.run([*command, "--out", str(tmp_path), *flags, "--lr", "1e-4"])
    assert other.returncode == 1
    assert "steps-plain-kd-1.json was made with other settings" in other.stderr.splitlines()[-1]
    assert found == {
        **{
            f"K=5, {kind}, equal {equal}: both tv / {variant} kd": (ratio, goal, True)
            for equal in ("steps", "seconds")
            for kind, goal in (("greedy", 1.05), ("sampled", 1.10))
            for variant, ratio in (("plain", 1.2), ("single", 2.4))
        },
        "greedy: engine and teacher-forced apart, %": (1.0, 1.0, False),
        "sampled: engine and teacher-forced apart, %": (1.0, 1.0, False),
    }


@pytest.mark.usefixtures("megatron")
def test_the_only_depth_of_a_checkpoint_goes_on_as_it_is(tmp_path: Path) -> None:
    """There is nothing that `drop-mtp` could take out."""
    folder, name = tmp_path / "iter_0000001", "mtp.layers.0.eh_proj.weight"
    folder.mkdir()
    state = {name: ShardedTensor.from_rank_offsets(name, torch.zeros(4)), "args": Namespace()}
    dist_checkpointing.save(state, str(folder))
    (tmp_path / TRACKER).write_text("1")
    assert objectives.first_depth(Namespace(checkpoint=tmp_path, out=tmp_path / "out")) == tmp_path


@pytest.mark.parametrize(("seconds", "steps"), [(0.5, 200), (0.9, 111), (0.92, 100), (1.08, 100), (1.12, 89)])
def test_equal_time_is_other_steps_where_timings_tell_them_apart(seconds: float, steps: int) -> None:
    """The median of the seeds counts, so that one slow run changes nothing."""
    of_kinds = {"kd": (1.0, 1.0, 9.0), "lk": (seconds, seconds, 9.0)}
    results = {
        objectives.Run("steps", "plain", loss, seed): {"step_seconds": each}
        for loss, times in of_kinds.items()
        for seed, each in enumerate(times, 1)
    }
    run = objectives.Run("seconds", "plain", "lk", 1)
    assert objectives.steps_of(run, results, Namespace(steps=100)) == steps


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--losses kd,l2", "argument --losses: kd,l2 was given; give names out of ce,kd,tv,nla,lk,e2e_tv."),
        ("--passes 3 --counts 1 4", "--counts has 4, and --passes is 3; give at most that."),
        ("--losses tv", "--equal seconds compares with kd, plain; add them to --losses and --variants."),
        ("--checkpoint nowhere", "there is no nowhere; make it with scripts/quickstart.sh, or give --checkpoint."),
    ],
)
def test_objectives_refuses_what_it_cannot_compare(flags: str, says: str, tmp_path: Path) -> None:
    checkpoint = [] if "--checkpoint" in flags else ["--checkpoint", str(tmp_path)]
    run = fork_server.run([sys.executable, str(REPOSITORY / "benchmarks/objectives.py"), *checkpoint, *flags.split()])
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].endswith(says)


def test_trunk_compares_trunks_with_and_without_depths(tmp_path: Path) -> None:
    """Each factor less none, means over seeds; and what cannot be compared is refused."""
    kept, data = tmp_path / "quick", tmp_path / "corpus"
    kept.mkdir()
    data.with_suffix(".idx").touch()
    shared = {"data": str(data), "steps": 3, "windows": 2}
    for factor, losses in {"0": (2.0, 2.2), "0.3": (1.9, 2.1)}.items():
        for seed, loss in enumerate(losses, 1):
            row = {"settings": shared, "steps": 3, "step_seconds": 1.0, "loss": loss, "accuracy": 0.5, "completed": 0.1}
            (kept / f"steps-{factor}-{seed}.json").write_text(json.dumps(row))
    flags = ["--data", str(data), "--out", str(tmp_path), "--seeds", "2", "--equal", "steps", "--factors"]
    found = {
        goal["what"]: (round(goal["value"], 6), goal["met"])
        for goal in summary_of("trunk.py", *flags, "0,0.3")["goals"]
    }
    assert found == {
        "loss of the trunk, factor 0.3 less none, equal steps": (-0.1, True),
        "accuracy of the trunk, factor 0.3 less none, equal steps": (0.0, True),
        "completed of the trunk, factor 0.3 less none, equal steps": (0.0, True),
    }
    other = fork_server.run([sys.executable, str(REPOSITORY / "benchmarks/trunk.py"), *flags, "0.3"])
    assert other.returncode == 2
    assert other.stderr.splitlines()[-1].endswith("is what the others are compared with; add it to --factors.")


def test_shift_runs_and_ends_with_its_report() -> None:
    summary = summary_of("shift.py")
    assert summary["benchmark"] == "shift"
    (goal,) = summary["goals"]
    assert (goal["value"], goal["goal"], goal["op"]) == (summary["results"]["times_faster"], 20.0, ">=")


def test_startup_runs_and_ends_with_its_report() -> None:
    summary = summary_of("startup.py")
    assert summary["benchmark"] == "startup"
    assert [(goal["what"], goal["goal"], goal["op"]) for goal in summary["goals"]] == [
        ("report --help: seconds", 2.0, "<=")
    ]


def test_first_batch_compares_automatic_k_with_plain_decoding() -> None:
    summary = summary_of("first_batch.py")
    assert all(summary["results"][f"tiny, depths that {kind}"]["drafts"] >= 0 for kind in ("err", "agree"))
    (goal,) = summary["goals"]
    assert (goal["goal"], goal["op"]) == (0.98, ">=")


def test_decoding_runs_and_ends_with_its_report() -> None:
    summary = summary_of("decoding.py", "--dtype", "float32")
    large, small = (summary["results"][f"{model} float32"] for model in ("large", "small"))
    assert small["tokens_per_second"].keys() == {"plain", "draft", "transformers", "transformers mtp"}
    layer, head = 2 * 4 * 128**2 + 2 * 3 * 128 * 352, 512 * 128
    weights = 4 * (layer + head + 5 * 128)  # two layers with two norms each, and the last norm
    assert small["bound"] == pytest.approx(small["read_gb_per_second"] * 1e9 / weights, rel=0.01)
    assert [(goal["goal"], goal["op"]) for goal in summary["goals"]] == [
        (bound, ">=") for bound in (0.85, 1.0, 1400, 1.3, 2.0)
    ]
    share = large["tokens_per_second"]["plain"] / large["bound"]
    assert summary["goals"][0]["value"] == pytest.approx(share / (50.4 / 89))
    assert summary["goals"][2]["value"] == small["tokens_per_second"]["plain"]


def test_decoding_takes_llama_cpps_rate_from_its_own_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small-float32.gguf").touch()
    program = tmp_path / "llama-bench"
    program.write_text("""#!/bin/sh\necho "$@" > "$(dirname "$0")/given"\necho '[{"n_gen": 12, "avg_ts": 84.5}]'\n""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert decoding.llama_bench(tmp_path, "small-float32", 12) == 84.5
    given = (tmp_path / "given").read_text()
    assert given == f"-m {tmp_path}/small-float32.gguf -p 0 -n 12 -t {torch.get_num_threads()} -o json\n"
    with pytest.raises(SystemExit, match=r"--gguf needs llama-bench on the PATH and .*large-float32.gguf"):
        decoding.llama_bench(tmp_path, "large-float32", 12)
    assert decoding.llama_bench(None, "large-float32", 12) is None


@pytest.mark.parametrize("flags", tiered(["", "--large"], ("",)))
def test_serving_compares_the_engine_with_batches_and_transformers(flags: str) -> None:
    summary = summary_of("serving.py", *flags.split())
    rates = summary["results"]["tokens_per_second"]
    assert list(rates) == ["engine", "batch", "engine plain", "batch plain", "transformers"]
    assert [goal["goal"] for goal in summary["goals"]] == [1.5, 1.5, 3.0, 1.0, 1.0, 2.0, 2.0]
    assert min(one[way] for one in summary["results"]["gap_milliseconds"].values() for way in ("overlap", "none")) > 0
    assert all(len(one["first"]) == 3 for one in summary["results"]["first_token"].values())


def test_http_cost_counts_the_rounds_after_the_first() -> None:
    results = summary_of("http_cost.py")["results"]
    assert (results["requests"], results["tokens"]) == (4, 8)
    (micros,) = results["microseconds_per_token"]
    assert micros > 0


def test_late_first_tokens_are_counted_in_decode_steps() -> None:
    """95 of 100 prompts wait 3 s in all, of which 1 s is their own; a decode step takes half a second."""
    assert Waits([1.0], 0.5, [3.0] * 95 + [3.5] * 5).p95_steps == 5.0
    assert Waits([1.0], 0.5, [3.0] * 96 + [3.5] * 4).p95_steps == 4.0
    varied = Waits([1.0] * 95 + [2.0] * 5, 0.5, [3.0])
    assert (varied.p95_steps, varied.own_p95_steps) == (4.0, 2.0)
