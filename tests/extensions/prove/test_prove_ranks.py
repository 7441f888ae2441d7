"""`prove` with ranks: Megatron's own block, as it is and with planted faults."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from mutants import CURES, MUTANTS, Mutant, planted, proof_of

from megatron_mtp.extensions.prove.cases import ONE, Case
from megatron_mtp.extensions.prove.command import main
from megatron_mtp.extensions.prove.proving import RIGHT, WRONG, prove
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


@pytest.mark.matrix
def test_a_rank_that_hangs_is_ended() -> None:
    roll = "    if tensor is None:\n        return None, None\n"
    hanging = Mutant("hang", roll, f"{roll}    while True:\n        pass\n", "")
    tiny = shrink(FLAGS.split())
    with planted(hanging) as folder:
        verdicts = prove(tiny, [Case(ONE, "rows", False)], {}, folder, seconds=5).verdicts
    assert [verdict.status for verdict in verdicts] == [WRONG]
    assert "rank 0 hangs in roll_tensor (multi_token_prediction.py:" in verdicts[0].words
