"""Whole commands over several processes: they train, evaluate and succeed."""

import json
import re
import shutil
import sys
from pathlib import Path

import launch
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

RUNS = {
    "pp2-vpp2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"),
    "pp3-mtp-stage": (
        3,
        "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Ett|mm|L --eod-mask-loss",
    ),
    "dp2": (2, "--use-distributed-optimizer"),
    "cp2": (2, "--context-parallel-size 2"),
    "tp2-packed": (2, "--tensor-model-parallel-size 2 --dataloader-inter-document-masking"),
    "pp3-packed": (
        3,
        "--pipeline-model-parallel-size 3 --num-layers 3 --dataloader-inter-document-masking --micro-batch-size 1",
    ),
    "pp3-documents": (3, "--pipeline-model-parallel-size 3 --num-layers 3 --reset-attention-mask --eod-mask-loss"),
}


FIRST = ("pp3-mtp-stage",)
"""Cases of the first tier: what test_layouts.py does not catch, since it creates its batches itself."""


@pytest.mark.parametrize(
    ("processes", "flags"),
    [pytest.param(*RUNS[name], id=name, marks=() if name in FIRST else pytest.mark.matrix) for name in RUNS],
)
def test_a_run_over_several_processes_trains_and_evaluates(processes: int, flags: str, tmp_path: Path) -> None:
    run_of_four_steps = "--train-iters 4 --log-interval 1 --eval-interval 2 --eval-iters 1".split()
    log = launch.run(launch.pretrain(*run_of_four_steps, *flags.split(), processes=processes), tmp_path / "log")
    losses = [float(loss) for loss in re.findall(r"lm loss (\S+) \|", log)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert log.count("expected accepted length") == 3  # at steps 2 and 4, and at the end on test data


def test_metric_rows_name_the_evaluated_split(tmp_path: Path) -> None:
    """Step 2 is evaluated once in the loop, and once after it on test data."""
    flags = "--train-iters 2 --log-interval 1 --eval-interval 2 --eval-iters 1 --split 80,10,10".split()
    launch.run(launch.pretrain(*flags, "--mtp-metrics-dir", str(tmp_path)), tmp_path / "log")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    expected = [(1, "training"), (2, "training"), (2, "validation"), (2, "test")]
    assert [(row["iteration"], row["split"]) for row in rows] == expected


def test_a_run_stops_without_improvement_and_keeps_the_best_state(tmp_path: Path) -> None:
    """With learning rate 0, every evaluation repeats the first, on the same samples."""
    checkpoint = tmp_path / "checkpoint"
    flags = "--lr 0 --lr-decay-style constant --train-iters 20 --save-interval 8 --eval-interval 2 --eval-iters 2 "
    flags += f"--mtp-patience 3 --log-interval 2 --save {checkpoint} --load {checkpoint} --mtp-metrics-dir {tmp_path}"
    log = launch.run(launch.pretrain(*flags.split()), tmp_path / "log")
    assert "> no improvement in 3 evaluations: training stops at step 8\n" in log
    assert "> the checkpoint is from step 2, the best one: expected accepted length " in log
    assert sorted(path.name for path in checkpoint.glob("iter_*")) == ["iter_0000002", "iter_0000008"]
    assert (checkpoint / "latest_checkpointed_iteration.txt").read_text() == "2"
    record = json.loads((checkpoint / "mtp_acceptance.json").read_text())
    assert record["iteration"] == 2
    assert (
        record["expected accepted length"]
        == json.loads((checkpoint / "best.json").read_text())["expected accepted length"]
    )
    again = launch.run(launch.pretrain(*flags.split()), tmp_path / "log")
    assert "> the run has already finished; its best checkpoint is from step 2\n" in again


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a checkpoint to train MTP layers on."""
    folder = tmp_path_factory.mktemp("start")
    flags = "--train-iters 1 --eval-interval 9 --eval-iters 0 --save-interval 1".split()
    launch.run(launch.pretrain(*flags, "--save", str(folder / "checkpoint")), folder / "log")
    return folder / "checkpoint"


@pytest.mark.parametrize(
    "flags", [pytest.param("--bf16", marks=pytest.mark.matrix), "--bf16 --use-distributed-optimizer"]
)
def test_mtp_only_runs_resume_where_a_stage_trains_nothing(flags: str, start: Path, tmp_path: Path) -> None:
    """Megatron fails in the save, or when other stages load what the first stage wrote of its empty optimizer."""

    def run(*loaded: str, to: Path) -> dict[str, torch.Tensor]:
        fixed = "--pipeline-model-parallel-size 2 --mtp-train-only --train-iters 2 --save-interval 1 --eval-interval 9"
        command = (*fixed.split(), "--eval-iters", "0", *flags.split(), *loaded, "--save", str(to))
        launch.run(launch.pretrain(*command, processes=2), tmp_path / "log")
        dcp_to_torch_save(to / "iter_0000002", tmp_path / "whole.pt")
        stored = torch.load(tmp_path / "whole.pt", weights_only=False)
        return {name: value for name, value in stored.items() if isinstance(value, torch.Tensor)}

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    expected = run("--load", str(start), "--finetune", to=whole)
    shutil.copytree(whole / "iter_0000001", resumed / "iter_0000001")
    (resumed / "latest_checkpointed_iteration.txt").write_text("1")
    tensors = run("--load", str(resumed), to=resumed)
    assert sum(name.startswith("optimizer") for name in tensors) > 2
    assert tensors.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(tensors[name], value)] == []


def test_bad_input_over_two_processes_is_reported_once(tmp_path: Path) -> None:
    flags = ["--mtp-architecture", "diagonal", "--train-iters", "2", "--eval-interval", "2"]
    command = launch.pretrain(*flags, processes=2)
    process = launch.start(command, tmp_path / "log")
    assert process.wait(launch.TIMEOUT) != 0
    assert (tmp_path / "log").read_text().count("error: --mtp-architecture is 'diagonal'") == 1


def test_a_run_without_a_length_is_refused(tmp_path: Path) -> None:
    assert launch.start(launch.pretrain(), tmp_path / "log").wait(launch.TIMEOUT) == 2
    assert "error: --train-iters, --eval-interval are missing" in (tmp_path / "log").read_text()


def test_the_examples_run_on_a_checkpoint(start: Path, tmp_path: Path) -> None:
    """A custom loop lowers the loss, drafting reports its gain, and the profile contains a layer's products."""

    def run(name: str, *arguments: str) -> str:
        return launch.run(launch.python(f"examples/{name}.py", str(start), *arguments), tmp_path / name)

    losses = [float(line.split()[4].rstrip(",")) for line in run("own_loop", "3").splitlines() if line[:5] == "step "]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert "tokens per forward" in run("draft")
    profile = run("profile_layer")
    assert "aten::mm" in profile
    assert "Self CPU time total" in profile


@pytest.mark.matrix
def test_the_reinforcement_learning_example_runs_all_variants(forked_python: Path, tmp_path: Path) -> None:
    """Two steps: the engine's token probabilities match the trainer's, and all variants draft."""
    script = str(launch.ROOT / "examples" / "rl.py")
    code = (
        f"import runpy, sys; sys.executable = {str(forked_python)!r}; runpy.run_path({script!r}, run_name='__main__')"
    )
    launch.run([sys.executable, "-c", code, "--quick", "--out", str(tmp_path)], tmp_path / "log")
    out = tmp_path / "quick"
    steps = [step for seeds in json.loads((out / "results.json").read_text()).values() for step in seeds["0"]]
    assert len(steps) == 12
    assert all(step["log-probabilities apart"] < 3e-5 for step in steps)
    assert all(0.02 < step["reward"] < 0.9 for step in steps)
    assert all(step["accepted length"] > 1 for step in steps)
    assert (out / "rl.png").stat().st_size > 10_000
