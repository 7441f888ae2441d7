"""Flags of a small run, and the error for invalid ones."""

import sys

import pytest

from megatron_mtp.training.run import main

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --train-iters 1 --eval-interval 1 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 99"
)


ROPE, MOCK, DEPTHS = "--position-embedding-type rope", "--mock-data", "--mtp-num-layers 2"


@pytest.fixture(autouse=True)
def _in_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def refusal(flags: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error message that the program ends with."""
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *MODEL.split(), *flags.split()])
    with pytest.raises(SystemExit) as exit_info:
        main(sys.argv, on_cpu=True)
    assert exit_info.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]
