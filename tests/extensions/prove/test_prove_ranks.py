"""`prove` with ranks: Megatron's own block, unmodified and with planted faults."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from documents import ROOT
from mutants import CURES, MUTANTS, Mutant, planted, proof_of

from megatron_mtp.extensions.prove.cases import ONE, Case, cases_of
from megatron_mtp.extensions.prove.command import main
from megatron_mtp.extensions.prove.proving import BASE, NOT_RUN, RIGHT, WRONG, prove
from megatron_mtp.extensions.prove.shrink import shrink
from megatron_mtp.extensions.prove.stand_ins import Mamba

FLAGS = (
    "--num-layers 61 --group-query-attention --num-query-groups 8 --num-attention-heads 128 --normalization RMSNorm "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--mtp-num-layers 2 --context-parallel-size 8 --pipeline-model-parallel-size 16"
)


@pytest.mark.matrix
def test_only_known_megatron_bugs_are_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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
def test_a_corrected_megatron_passes(cure: Mutant, more: str) -> None:
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
def test_attached_layers_pass_every_case(kind: str) -> None:
    words = f"--num-layers 61 --num-attention-heads 128 --mtp-num-layers 2 {ATTACHED[kind]}"
    tiny = replace(shrink(words.split()), attached=True)
    verdicts = prove(tiny, *cases_of(tiny, everything=True), megatron=None, seconds=60).verdicts
    left = {verdict.case.layout.name for verdict in verdicts if verdict.status != RIGHT}
    refused = {"experts": {"TP 2"}, "latent": {"TP 2", "TP 2 with sequence parallelism", "TP 2 with CP 2"}}
    assert left == refused.get(kind, set())  # rejected by Megatron, or wrong in its own attention
    assert {verdict.status for verdict in verdicts} <= {RIGHT, NOT_RUN}


@pytest.mark.matrix
def test_a_hybrid_is_judged_by_comparison_with_one_process() -> None:
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
    """With the installed Megatron, and with one whose mask is never shifted."""
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


MS_SWIFT = ROOT / ".venv-stacks/ms_swift"


@pytest.fixture(scope="module")
def faulty_bridge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a copy of mcore-bridge that does not divide lambda by the number of MTP layers."""
    folder = tmp_path_factory.mktemp("faulty")
    shutil.copytree(MS_SWIFT / "mcore_bridge", folder / "mcore_bridge", ignore=shutil.ignore_patterns("__pycache__"))
    model = folder / "mcore_bridge/model/gpt_model.py"
    divided = "mtp_loss_scaling_factor / self.config.mtp_unroll_steps"
    head, line, tail = model.read_text(encoding="utf-8").partition(divided)
    assert line
    model.write_text(f"{head}mtp_loss_scaling_factor{tail}", encoding="utf-8")
    return folder


@pytest.mark.matrix
@pytest.mark.skipif(
    not (MS_SWIFT / "installed.txt").is_file(), reason="ms_swift is missing; run bash scripts/test_stacks.sh ms_swift"
)
@pytest.mark.parametrize(
    ("kind", "other", "cause"),
    [
        ("rows", "", ""),
        ("holes --per-token", "", ""),
        ("packed", "", ""),
        ("padded", "padded offsets", ""),
        ("padded", "", None),  # Megatron's roll, which mcore-bridge calls, is wrong
        ("holes", "faulty", "as if lambda were not divided by the number of MTP layers"),
    ],
)
def test_a_step_of_mcore_bridge_is_judged(
    kind: str, other: str, cause: str | None, tmp_path: Path, request: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    cure = next((one for one in CURES if one.name == other), None)
    folder, script = tmp_path / "step", Path(__file__).with_name("mcore_bridge_step.py")
    with planted(cure) if cure is not None else nullcontext() as megatron:
        first = request.getfixturevalue("faulty_bridge") if other == "faulty" else megatron
        paths = os.pathsep.join(map(str, filter(None, (first, MS_SWIFT, ROOT, ROOT / "tests/support"))))
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, str(script), str(folder), *kind.split()]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    flags = ended.stdout.splitlines()[-1].split()
    assert main(["--json", "--grads", str(folder), "--", *flags], "megatron-mtp prove") == (cause != "")
    [case] = json.loads(capfd.readouterr().out)["cases"]
    assert (case["status"] == RIGHT) == (cause == "")
    assert (cause or "") in (case["cause"] or "")


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
def test_a_script_that_does_not_train_gives_a_clear_error(
    text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert main(["--script", str(script), "--", *FLAGS.split()], "megatron-mtp prove") == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1


HIDDEN = (
    "transformers tokenizers safetensors yaml psutil tqdm huggingface_hub sentencepiece tensorboard datasets "
    "megatron.training megatron_mtp.model megatron_mtp.megatron"
).split()
"""Modules that this package or Megatron's training script needs, but prove does not."""

ALONE = {
    "gpt": FLAGS.split()[:-4],
    "hybrid": "--hybrid-layer-pattern MEM*EME/*E --num-experts 64 --disable-bias-linear --position-embedding-type none "
    "--normalization RMSNorm".split(),
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ALONE)
def test_prove_needs_only_torch_and_megatron_core(kind: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nfor name in {HIDDEN}:\n    sys.modules[name] = None\n")
    command = [sys.executable, "-m", "megatron_mtp", "prove", "--json", "--", *ALONE[kind]]
    path = os.pathsep.join(map(str, (tmp_path, ROOT)))
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    found = {one["case"]: one["status"] for one in json.loads(ended.stdout)["cases"]}
    if kind == "gpt":
        assert found.pop("1 process, packed and padded documents") == "WRONG"
    assert {*found.values()} == ({"right", "base"} if kind == "hybrid" else {"right"})


@pytest.mark.matrix
def test_the_hybrid_mixer_matches_the_mixer_of_this_package() -> None:
    from megatron_mtp.model import recurrent

    sizes = SimpleNamespace(
        mamba_head_dim=3, mamba_state_dim=5, mamba_num_heads=4, mamba_num_groups=2, init_method=None
    )
    linear = Mock(return_value=torch.nn.Identity())
    mixer = Mamba(sizes, (linear, linear), 8, SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)))
    generator, document = torch.Generator().manual_seed(0), torch.tensor([0] * 5 + [1] * 2 + [2] * 6)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    mixed_BLC, dt_BLH = (torch.randn(2, 13, channels, generator=generator) for channels in (32, 4))
    found = mixer._scan(mixer._convolution(mixed_BLC.transpose(0, 1), document), dt_BLH.transpose(0, 1), document)
    convolved_BLC = recurrent.causal_convolution(mixed_BLC, mixer.conv1d_weight, mixer.conv1d_bias, document[None])
    x_BLC, *shared = torch.nn.functional.silu(convolved_BLC).split([12, 10, 10], dim=-1)
    x_BLHP, B_BLGN, C_BLGN = x_BLC.unflatten(-1, (4, 3)), *(one.unflatten(-1, (2, 5)) for one in shared)
    dt_BLH = torch.nn.functional.softplus(dt_BLH + mixer.dt_bias)
    y_BLHP = recurrent.scan(x_BLHP, dt_BLH, -mixer.A_log.exp(), B_BLGN, C_BLGN, document[None], chunk=4)
    expected_BLC = (y_BLHP + mixer.D[:, None] * x_BLHP).flatten(2)
    torch.testing.assert_close(found.transpose(0, 1), expected_BLC)


@pytest.mark.matrix
def test_a_rank_that_hangs_is_ended() -> None:
    roll = "    if tensor is None:\n        return None, None\n"
    hanging = Mutant("hang", roll, f"{roll}    while True:\n        pass\n", "")
    tiny = shrink(FLAGS.split())
    with planted(hanging) as folder:
        verdicts = prove(tiny, [Case(ONE, "rows", False)], {}, folder, seconds=15).verdicts
    assert [verdict.status for verdict in verdicts] == [WRONG]
    assert "rank 0 hangs in roll_tensor (multi_token_prediction.py:" in verdicts[0].words
