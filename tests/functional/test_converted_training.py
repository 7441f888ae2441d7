"""A converted model goes on training by its checkpoint's own arguments, in any layout, from the same loss."""

import re
import sys
from pathlib import Path

import launch
import pytest

from megatron_mtp.platform import prepare

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from hf_models import make

from megatron_mtp.checkpoint.convert.importing import Options, hf_to_mcore
from megatron_mtp.checkpoint.convert.megatron_flags import megatron_arguments

prepare()

RUN = (
    "--use-checkpoint-args --micro-batch-size 2 --global-batch-size 4 --seq-length 32 --train-iters 1 --lr 1e-4 "
    "--log-interval 1 --eval-interval 10 --eval-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 95 "
    "--moe-token-dispatcher-type allgather --verbose"
)
LAYOUTS = {
    "single": (1, ""),
    "pp2": (2, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|tmmmL"),
    "ep2": (2, "--expert-model-parallel-size 2 --use-distributed-optimizer"),
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
}


CASES = {"deepseek_v3": ("single", "pp2"), "glm4_moe": ("single", "tp2", "ep2")}


@pytest.mark.parametrize("family", CASES)
def test_training_starts_from_the_same_losses_in_every_layout(family: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", family, 3)
    hf_to_mcore(source, tmp_path / "mcore", Options(quiet=True), megatron_arguments)
    losses = {}
    for name in CASES[family]:
        processes, flags = LAYOUTS[name]
        arguments = f"{RUN} --load {tmp_path / 'mcore'} {flags}".split()
        command = (
            launch.python("pretrain_gpt.py", *arguments)
            if processes == 1
            else launch.torchrun(processes, "pretrain_gpt.py", *arguments)
        )
        printed = launch.run(command, tmp_path / f"{name}.log")
        assert "loaded checkpoint" in printed
        losses[name] = [float(loss) for loss in re.findall(r"(?:lm|mtp_\d) loss: (\S+) \|", printed)][:4]
    assert len(losses["single"]) == 4
    for name, found in losses.items():
        assert found == pytest.approx(losses["single"], rel=1e-5), name
