"""A converted model continues training with its checkpoint's arguments, in any layout, from the same loss.

A hybrid is then converted back to its family, with norms that training changed.

The first tier compares logits of converted models: tests/unit/checkpoint/verify/test_verify.py.
"""

import re
from dataclasses import replace
from pathlib import Path

import launch
import pytest
import torch
from hf_models import make, read

from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.verify.verify import verify
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.megatron.runtime import prepare

prepare()

pytestmark = pytest.mark.matrix

RUN = (
    "--use-checkpoint-args --micro-batch-size 2 --global-batch-size 4 --seq-length 32 --train-iters 1 --lr 1e-4 "
    "--log-interval 1 --eval-interval 100 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer "
    "--moe-token-dispatcher-type allgather --verbose"
)
LAYOUTS = {
    "single": (1, ""),
    "pp2": (2, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|tmmmL"),
    "ep2": (2, "--expert-model-parallel-size 2 --use-distributed-optimizer"),
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2-even": (2, "--pipeline-model-parallel-size 2"),
}


CASES = {
    "deepseek_v3": (3, ("single", "pp2")),
    "glm4_moe": (3, ("single", "tp2", "ep2")),
    "qwen3_next": (1, ("single", "tp2", "pp2-even")),
    "qwen3_5_text": (1, ("single", "tp2")),
    "qwen3_5_moe_text": (1, ("single", "ep2")),
    "nemotron_h": (3, ("single", "tp2")),
    "nemotron_h-latent": (1, ("single", "ep2")),
}
"""Families, their numbers of MTP layers, and layouts."""


@pytest.mark.parametrize("family", CASES)
def test_training_starts_from_the_same_losses_in_every_layout(family: str, tmp_path: Path) -> None:
    depths, layouts = CASES[family]
    source = make(tmp_path / "source", family, depths)
    hf_to_mcore(source, tmp_path / "mcore", Options(quiet=True))
    losses = {}
    for name in layouts:
        processes, flags = LAYOUTS[name]
        arguments = f"{RUN} --load {tmp_path / 'mcore'} {flags}".split()
        command = (
            launch.python("pretrain_gpt.py", *arguments)
            if processes == 1
            else launch.torchrun(processes, "pretrain_gpt.py", *arguments)
        )
        printed = launch.run(command, tmp_path / f"{name}.log")
        assert "loaded checkpoint" in printed
        losses[name] = [float(loss) for loss in re.findall(r"(?:lm|mtp_\d) loss: (\S+) \|", printed)][: 1 + depths]
    assert len(losses["single"]) == 1 + depths
    for name, found in losses.items():
        assert found == pytest.approx(losses["single"], rel=1e-5), name


def test_tensor_and_expert_parallelism_give_the_same_weights(tmp_path: Path) -> None:
    """Every rank holds whole latent projections; Transformer Engine or this package sums their gradients."""
    source = make(tmp_path / "source", "nemotron_h-latent", 1)
    hf_to_mcore(source, tmp_path / "mcore", Options(quiet=True))
    step = f"{RUN} --load {tmp_path / 'mcore'} --optimizer sgd --save-interval 1 --sequence-parallel".split()
    single = [*step, "--lr", "1", "--clip-grad", "0", "--save", str(tmp_path / "single")]
    both = [*step, "--lr", "1", "--clip-grad", "0", "--save", str(tmp_path / "both")]
    layout = "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1".split()
    launch.run(launch.python("pretrain_gpt.py", *single), tmp_path / "single.log")
    launch.run(launch.torchrun(2, "pretrain_gpt.py", *both, *layout), tmp_path / "both.log")
    readers = [DistReader(tmp_path / name) for name in ("mcore", "single", "both")]
    for key in readers[0].keys:
        before, one, two = (reader.read(key)[: readers[0].shape(key)[0]] for reader in readers)  # without padding
        moved = (one - before).abs().max()
        assert moved > 0 or key.endswith("expert_bias"), key
        assert (two - one).abs().max() <= 1e-4 * moved, key


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_a_trained_hybrid_is_exported_to_its_family(family: str, tmp_path: Path) -> None:
    """In bfloat16 too: a norm that Megatron stores as w - 1 then has more digits than w."""
    source = make(tmp_path / "source", family, 1, torch.bfloat16)
    hf_to_mcore(source, tmp_path / "mcore", Options(quiet=True))
    saved = tmp_path / "saved"
    arguments = f"{RUN} --bf16 --load {tmp_path / 'mcore'} --finetune --save {saved} --save-interval 1".split()
    launch.run(launch.python("pretrain_gpt.py", *arguments, "--lr", "1e-2"), tmp_path / "train.log")
    mcore_to_hf(saved, tmp_path / "back", Options(quiet=True), form_of(saved, like=tmp_path / "mcore"))
    there, back = read(source), read(tmp_path / "back")
    assert there.keys() == back.keys()
    assert [key for key in there if torch.equal(there[key], back[key])] == []
    checks = verify(tmp_path / "back", saved)
    assert [check for check in checks if not check.ok] == []


SEEN = r"model\.(visual|vision|time_series)|vision_model|perception"
"""Name prefixes of the towers' tensors, which are passed through."""


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize(
    "family", ["sarvam_moe", "sarvam_mla", "glm4v_moe", "intern_s2_preview", "nemotron_h_omni", "nemo_speechlm"]
)
def test_a_family_is_exported_after_twenty_steps(family: str, tmp_path: Path) -> None:
    """Bit-identical before training; then every weight of the text model has changed, and both compute the same."""
    source = make(tmp_path / "source", family, 1)
    hf_to_mcore(source, tmp_path / "mcore", Options(quiet=True))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "same", Options(quiet=True), form_of(tmp_path / "mcore"))
    there, same = read(source), read(tmp_path / "same")
    assert there.keys() == same.keys()
    assert [key for key in there if not torch.equal(there[key], same[key])] == []
    saved = tmp_path / "saved"
    arguments = f"{RUN} --load {tmp_path / 'mcore'} --finetune --save {saved} --save-interval 20".split()
    launch.run(launch.python("pretrain_gpt.py", *arguments, "--train-iters", "20"), tmp_path / "train.log")
    text = replace(form_of(saved, like=tmp_path / "mcore"), carried=())  # Megatron does not save the towers
    mcore_to_hf(saved, tmp_path / "back", Options(quiet=True), text)
    back = read(tmp_path / "back")
    assert {key for key in there if not re.match(SEEN, key)} == back.keys()
    assert [key for key in back if torch.equal(there[key], back[key]) and not key.endswith("bias")] == []
    assert [check for check in verify(tmp_path / "back", saved) if not check.ok] == []
