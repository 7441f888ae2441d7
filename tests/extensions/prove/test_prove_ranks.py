"""`prove` with ranks: Megatron's own block, as it is and with planted faults."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from documents import ROOT
from mutants import CURES, MUTANTS, Mutant, planted, proof_of

from megatron_mtp.extensions.prove.cases import ONE, Case, cases_of
from megatron_mtp.extensions.prove.command import main
from megatron_mtp.extensions.prove.proving import BASE, NOT_RUN, RIGHT, WRONG, prove
from megatron_mtp.extensions.prove.shrink import shrink

FLAGS = (
    "--num-layers 61 --group-query-attention --num-query-groups 8 --num-attention-heads 128 --normalization RMSNorm "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--mtp-num-layers 2 --context-parallel-size 8 --pipeline-model-parallel-size 16"
)


@pytest.mark.matrix
def test_what_is_wrong_in_megatron_is_found_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "prove.html"
    assert main(["--json", "--report", str(page), "--", *FLAGS.split()], "megatron-mtp prove") == 1
    cases = json.loads(capfd.readouterr().out)["cases"]
    known = {one["case"]: one["known"] for one in cases if one["status"] != "right"}
    padded = ["NVIDIA/Megatron-LM#4495", "NVIDIA/Megatron-LM#6205"]
    means = [f"NVIDIA/Megatron-LM#{number}" for number in (7498, 7452, 7513)]
    assert known == {
        "1 process, packed and padded documents": padded,
        "CP 2, packed and padded documents": padded,
        "CP 2, rows": means,
        "CP 2, masked rows": means,
        "CP 2, packed documents": means,
    }
    assert "multi_token_prediction.py:" in page.read_text()


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_found_and_named(mutant: Mutant) -> None:
    wrong = [verdict for verdict in proof_of(mutant).verdicts if verdict.status == WRONG]
    assert wrong
    assert mutant.cause in " ".join(verdict.cause.words for verdict in wrong if verdict.cause is not None)


@pytest.mark.matrix
@pytest.mark.parametrize("more", ["", "--calculate-per-token-loss"])
@pytest.mark.parametrize("cure", CURES, ids=lambda cure: cure.name)
def test_a_corrected_megatron_is_right(cure: Mutant, more: str) -> None:
    assert {verdict.status for verdict in proof_of(replace(cure, more=more)).verdicts} == {RIGHT}


ATTACHED = {
    "dense": "--position-embedding-type rope --normalization RMSNorm --swiglu --untie-embeddings-and-output-weights",
    "tied": "--position-embedding-type rope",
    "experts": "--position-embedding-type rope --untie-embeddings-and-output-weights --num-experts 64 "
    "--moe-router-score-function sigmoid --moe-layer-freq ([0]*3+[1]*58) --disable-bias-linear",
    "latent": "--position-embedding-type rope --multi-latent-attention --q-lora-rank 1536 --disable-bias-linear",
}
"""Models that MTP layers are attached to."""


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ATTACHED)
def test_attached_layers_are_right_in_every_case(kind: str) -> None:
    words = f"--num-layers 61 --num-attention-heads 128 --mtp-num-layers 2 {ATTACHED[kind]}"
    tiny = replace(shrink(words.split()), attached=True)
    verdicts = prove(tiny, *cases_of(tiny, everything=True), megatron=None, seconds=60).verdicts
    left = {verdict.case.layout.name for verdict in verdicts if verdict.status != RIGHT}
    refused = {"experts": {"TP 2"}, "latent": {"TP 2", "TP 2 with sequence parallelism", "TP 2 with CP 2"}}
    assert left == refused.get(kind, set())  # by Megatron, or wrong in its own attention
    assert {verdict.status for verdict in verdicts} <= {RIGHT, NOT_RUN}


@pytest.mark.matrix
def test_a_hybrid_is_right_by_one_process_where_a_gpt_is() -> None:
    words = "--hybrid-layer-pattern MEM*EME/*E --num-experts 64 --position-embedding-type none --normalization RMSNorm"
    sizes = " ".join(
        f"--{name}-parallel-size 2" for name in ("tensor-model", "pipeline-model", "expert-model", "context")
    )
    tiny = shrink(f"{words} --disable-bias-linear --sequence-parallel {sizes}".split())
    verdicts = prove(tiny, *cases_of(tiny, everything=False), megatron=None, seconds=60).verdicts
    by_layout = {verdict.case.layout.name: set[str]() for verdict in verdicts}
    for verdict in verdicts:
        by_layout[verdict.case.layout.name].add(verdict.status)
    wrong = {"CP 2", "TP 2 with CP 2"}
    assert by_layout.pop("1 process") == {BASE}
    assert by_layout == {name: {WRONG if name in wrong else RIGHT} for name in by_layout}
    assert len(by_layout) == 6


@pytest.mark.matrix
@pytest.mark.parametrize("status", [0, 1])
def test_a_step_of_a_plain_loop_is_judged(status: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of the installed Megatron, and of one whose mask is never shifted."""
    flags = (
        "--num-layers 2 --hidden-size 48 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
        "--ffn-hidden-size 64 --vocab-size 96 --mtp-num-layers 1 --position-embedding-type rope --qk-layernorm "
        "--swiglu --hidden-dropout 0 --attention-dropout 0"
    ).split()
    folder, own_step = tmp_path / "step", Path(__file__).with_name("own_step.py")
    with planted(MUTANTS[0]) if status else nullcontext() as megatron:
        paths = os.pathsep.join(map(str, filter(None, (megatron, ROOT))))
        environment = {**os.environ, "PYTHONPATH": paths, "TORCH_COMPILE_DISABLE": "1"}
        command = [sys.executable, str(own_step), str(folder), *flags]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert main(["--json", "--grads", str(folder), "--", *flags], "megatron-mtp prove") == status
    case = json.loads(capfd.readouterr().out)["cases"][0]
    assert case["cause"] == ("masks that are never shifted" if status else None)


@pytest.mark.matrix
@pytest.mark.parametrize("status", [0, 1])
def test_two_steps_of_a_training_script_are_judged(status: int, capfd: pytest.CaptureFixture[str]) -> None:
    """With the installed Megatron, and with one whose mask is never shifted."""
    script = ROOT / "tests/support/users_pretrain_gpt.py"
    with planted(MUTANTS[0]) if status else nullcontext() as megatron:
        own = [] if megatron is None else ["--megatron", str(megatron)]
        arguments = ["--json", *own, "--script", str(script), "--", *FLAGS.split(), "--bf16"]
        assert main(arguments, "megatron-mtp prove") == status
    cases = json.loads(capfd.readouterr().out)["cases"]
    assert [case["case"] for case in cases] == [f"{script.name}, step {number}, rows" for number in (1, 2)]
    assert {case["cause"] for case in cases} == {"masks that are never shifted" if status else None}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "raise RuntimeError('no such flag of ours')",
            "fails on the CPU with tiny sizes (RuntimeError: no such flag of ours)",
        ),
        ("print('no training')", "has taken no step of a GPTModel with MTP layers"),
    ],
)
def test_a_script_that_does_not_train_is_a_sentence(
    text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert main(["--script", str(script), "--", *FLAGS.split()], "megatron-mtp prove") == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1


HIDDEN = "transformers tokenizers safetensors yaml psutil tqdm huggingface_hub sentencepiece tensorboard datasets"
"""What this package or Megatron's training script needs, and prove does not."""


@pytest.mark.matrix
def test_torch_and_megatron_core_are_all_that_it_needs(tmp_path: Path) -> None:
    hook = f"import sys\nfor name in {HIDDEN.split()}:\n    sys.modules[name] = None\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    command = [sys.executable, "-m", "megatron_mtp", "prove", "--json", "--", *FLAGS.split()[:-4]]
    path = os.pathsep.join(map(str, (tmp_path, ROOT)))
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    found = {one["case"]: one["status"] for one in json.loads(ended.stdout)["cases"]}
    assert found.pop("1 process, packed and padded documents") == "WRONG"
    assert {*found.values()} == {"right"}


@pytest.mark.matrix
def test_a_rank_that_hangs_is_ended() -> None:
    roll = "    if tensor is None:\n        return None, None\n"
    hanging = Mutant("hang", roll, f"{roll}    while True:\n        pass\n", "")
    tiny = shrink(FLAGS.split())
    with planted(hanging) as folder:
        verdicts = prove(tiny, [Case(ONE, "rows", False)], {}, folder, seconds=5).verdicts
    assert [verdict.status for verdict in verdicts] == [WRONG]
    assert "rank 0 hangs in roll_tensor (multi_token_prediction.py:" in verdicts[0].words
