"""Whole commands: train --chat, stopped and resumed, on several ranks, and on the output of preprocess --chat."""

import json
import re
from pathlib import Path
from typing import Any

import launch
import pytest
from chat_cases import SHAPES, said, user

from megatron_mtp.cli.main import main

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 96 --max-position-embeddings 96 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --micro-batch-size 1 "
    "--global-batch-size 2 --lr 1e-3 --mtp-num-layers 2 --train-iters 4 --log-interval 1 --eval-interval 4 "
    "--eval-iters 1 --split 80,20,0 --attention-dropout 0 --hidden-dropout 0 --calculate-per-token-loss "
    "--num-workers 0 "
    "--save-interval 2 --tokenizer-type HuggingFaceTokenizer"
)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a tokenizer and chats of lengths divisible by four, so that context-parallel ranks pack them alike."""
    folder = tmp_path_factory.mktemp("chats")
    SHAPES["Qwen3"].tokenizer(folder / "tokenizer", tagged=False)
    rows = [
        {"messages": [user("q" * (1 + number % 7)), said("a" * (4 * (number % 5 + 2) - number % 7))]}
        for number in range(40)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(scene: Path, folder: Path, *flags: str, processes: int = 1) -> tuple[str, list[dict[str, Any]]]:
    """Return the output of a training run, and its metrics without machine-dependent ones."""
    words = [*MODEL.split(), "--tokenizer-model", str(scene / "tokenizer"), "--mtp-metrics-dir", str(folder), *flags]
    log = launch.run(launch.Command("pretrain_gpt.py", tuple(words), processes), folder.with_suffix(".log"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return log, [{name: value for name, value in row.items() if name not in launch.MEASURED} for row in rows]


@pytest.fixture(scope="module")
def whole(scene: Path) -> tuple[str, list[dict[str, Any]]]:
    """Train four steps in one process."""
    where = ("--save", str(scene / "start"))
    return run(scene, scene / "whole", "--chat", str(scene / "chats.jsonl"), "--show-example", *where)


def test_training_on_chats_first_prints_which_tokens_count(whole: tuple[str, list[dict[str, Any]]]) -> None:
    log, rows = whole
    counted, of_all = (
        int(found.replace(",", "")) for found in re.findall(r"([\d,]+) of ([\d,]+) tokens count", log)[0]
    )
    assert 0 < counted < of_all
    assert "<|im_start|>assistant\n<think>\n\n</think>\n\n⟦a" in log
    assert log.index("tokens count") < log.index("⟦") < log.index("step 1/4")
    losses = [row["lm loss"] for row in rows if row["split"] == "training"]
    assert losses[-1] < losses[0]


def test_a_stopped_run_resumes_with_the_same_chats(scene: Path, whole: tuple[str, list[dict[str, Any]]]) -> None:
    folder, chats = scene / "stopped", ("--chat", str(scene / "chats.jsonl"))
    save = ("--save", str(folder / "checkpoint"), "--load", str(folder / "checkpoint"))
    run(scene, folder, *chats, *save, "--exit-interval", "2")
    _, rows = run(scene, folder, *chats, *save)
    assert rows == whole[1]


def test_preprocessed_chats_train_with_the_same_losses(scene: Path, whole: tuple[str, list[dict[str, Any]]]) -> None:
    paths = ["--chat", str(scene / "chats.jsonl"), "--tokenizer", str(scene / "tokenizer")]
    assert main(["preprocess", *paths, "--output-prefix", str(scene / "made"), "--workers", "1"]) == 0
    _, rows = run(scene, scene / "again", "--data-path", str(scene / "made"))
    assert rows == whole[1]


LAYOUTS = {"dp2": "", "cp2": "--context-parallel-size 2", "pp2": "--pipeline-model-parallel-size 2"}


@pytest.mark.matrix
@pytest.mark.parametrize("flags", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_two_ranks_train_as_one(
    flags: str, scene: Path, whole: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Start from the same checkpoint, because a new model's weights depend on the layout."""
    start = ("--chat", str(scene / "chats.jsonl"), "--load", str(scene / "start"), "--finetune")
    _, one = run(scene, tmp_path / "one", *start)
    _, two = run(scene, tmp_path / "two", *start, *flags.split(), processes=2)
    for ours, theirs in zip(one, two, strict=True):
        for name in ("lm loss", "mtp_1 loss", "mtp_2 loss"):
            assert theirs[name] == pytest.approx(ours[name], rel=2e-5)
