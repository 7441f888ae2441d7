"""Whole commands: a run counts a draft vocabulary, others resume it in other layouts, and it drafts."""

from pathlib import Path

import launch
import pytest
from frequent_corpus import DRAFTED, HALF, STEPS, corpus

from megatron_mtp.checkpoint.inspecting import inspect
from megatron_mtp.cli.convert import main as convert
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.load import load_runner
from megatron_mtp.megatron.runtime import prepare

prepare()

CONTEXT, TENSOR = "--context-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"


def command(folder: Path, data: Path, *flags: str) -> launch.Command:
    arguments = [
        *(flag for flag in launch.TINY_RUN if flag != "--mock-data"),
        # a blend, which evaluations would read, but none runs
        *f"--data-path 1 {data} --split 90,5,5 --train-iters {STEPS} --eval-interval 100 --eval-iters 0".split(),
        *f"--log-interval 1 --mtp-acceptance-interval 1 --mtp-metrics-dir {folder}".split(),
        *"--attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 64".split(),
        *flags,
    ]
    return launch.torchrun(2, "pretrain_gpt.py", *arguments)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train four steps on two context-parallel ranks, saving after two."""
    folder = tmp_path_factory.mktemp("trained")
    flags = f"--mtp-draft-vocab-size {DRAFTED} --save {folder}/checkpoint --save-interval {HALF} {CONTEXT}".split()
    log = launch.run(command(folder, corpus(folder / "corpus"), *flags), folder / "log")
    assert f"> the MTP layers draft {DRAFTED} of 128 tokens, the most frequent, 9" in log
    return folder


@pytest.mark.matrix
def test_a_draft_vocabulary_is_resumed_in_another_layout(trained: Path, tmp_path: Path) -> None:
    flags = f"--load {trained}/checkpoint --ckpt-step {HALF} {TENSOR}".split()
    log = launch.run(command(tmp_path, trained / "corpus", *flags), tmp_path / "log")
    assert f"> the MTP layers draft {DRAFTED} of 128 tokens, as --load {trained}" in log
    ours, theirs = launch.learned(tmp_path), launch.learned(trained)
    assert list(ours) == [3, 4]
    for step, row in ours.items():
        assert row == pytest.approx(theirs[step], rel=2e-4), step


def test_a_draft_vocabulary_model_drafts_and_exports_its_full_head(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner, prompts = load_runner(trained / "checkpoint"), [[1, 2, 3], [101, 7]]
    assert runner.drafted == DRAFTED
    drafted = generate(runner, prompts, 30, speculative={"method": "mtp"})
    assert drafted.token_ids == generate(runner, prompts, 30).token_ids
    assert drafted.stats.drafted > 0
    assert inspect(trained / "checkpoint")["draft vocabulary"] == DRAFTED
    assert convert(["drop-mtp", str(trained / "checkpoint"), str(tmp_path / "one"), "--keep", "1"]) == 0
    assert inspect(tmp_path / "one")["draft vocabulary"] == DRAFTED
    assert convert(["mcore-to-hf", str(trained / "checkpoint"), str(tmp_path / "exported")]) == 0
    said = f"draft vocabulary: {DRAFTED} tokens, in draft_vocabulary.pt, which hf-to-mcore and SGLang"
    assert said in capsys.readouterr().out
