"""Trained checkpoints exported as Hugging Face folders: all layouts give the same bytes, and other programs the same
numbers.
"""

import json
from pathlib import Path
from statistics import mean

import launch
import pytest
import torch
from layouts import SINGLE
from records import Records
from torch import Tensor

from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.verify.prompt import Prompt
from megatron_mtp.checkpoint.verify.verify import megatron_logits, verify
from megatron_mtp.megatron.runtime import prepare

prepare()

pytestmark = pytest.mark.usefixtures("forked_python")


CLIENT = Path(__file__).parents[1] / "support" / "mtp_client.py"
RESAVED = {"untied-d3": ("tp2", "pp2", "pp2-vpp2"), "tied-d3": ("tp2", "pp2"), "moe-d2": ("ep2",)}
"""Models of layouts.py, and the layouts that save them."""


def export(source: Path, target: Path) -> Path:
    mcore_to_hf(source, target, Options(quiet=True), form_of(source))
    return target


@pytest.mark.parametrize(
    "model", [model if model == "tied-d3" else pytest.param(model, marks=pytest.mark.matrix) for model in RESAVED]
)
def test_every_layout_is_exported_to_the_same_bytes(records: Records, model: str, tmp_path: Path) -> None:
    for layout in (SINGLE, *RESAVED[model]):
        records.of(f"resave/{model}/{layout}/sigmoid")
    single = export(records.folder / "resaved" / f"{model}-{SINGLE}", tmp_path / "single")
    for layout in RESAVED[model]:
        other = export(records.folder / "resaved" / f"{model}-{layout}", tmp_path / layout)
        assert (other / "model.safetensors").read_bytes() == (single / "model.safetensors").read_bytes(), layout
        assert (other / "config.json").read_bytes() == (single / "config.json").read_bytes(), layout


TRAINED = {
    "dense": "--ffn-hidden-size 128 --qk-layernorm",
    "experts": "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 32 --moe-layer-freq [0,1] "
    "--moe-router-load-balancing-type none --moe-token-dispatcher-type allgather --add-qkv-bias",
}
STEPS = "--train-iters 30 --lr 3e-3 --eval-interval 1000 --eval-iters 1 --save-interval 30 --init-method-std 0.1"
NEW = 200


@pytest.mark.matrix
@pytest.mark.parametrize("kind", TRAINED)
def test_a_trained_model_drafts_in_transformers_as_it_was_trained(kind: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    flags = [*STEPS.split(), *TRAINED[kind].split(), "--save", str(checkpoint)]
    launch.run(launch.pretrain(*flags, "--untie-embeddings-and-output-weights"), tmp_path / "train.log")
    exported = export(checkpoint, tmp_path / "exported")
    assert [check for check in verify(exported, checkpoint) if not check.ok] == []

    command = launch.python(CLIENT, str(exported), json.dumps([3, 4, 5, 6]), str(NEW))
    done = json.loads(launch.run(command, tmp_path / "client.log").strip().splitlines()[-1])
    assert done["with"] == done["without"]
    teacher_forced = rounds(megatron_logits(checkpoint, Prompt.of(torch.tensor([done["with"]]))), done["with"], 4, 2)
    theirs = done["accepted"][1 : 1 + len(teacher_forced)]  # the trunk's first token has no draft
    assert mean(theirs) / 2 == pytest.approx(mean(teacher_forced) / 2, abs=0.01)
    assert 0.05 < mean(theirs) / 2 < 0.95  # all or no drafts accepted would show nothing


def rounds(logits: dict[str, Tensor], tokens: list[int], prompt: int, depths: int) -> list[int]:
    """Return the drafts accepted in each round, if teacher-forced drafts were verified round by round."""
    drafts = [logits[f"depth {depth}"].argmax(-1).tolist() for depth in range(1, depths + 1)]
    known, accepted = prompt + 1, []
    while known + depths < len(tokens):
        matches = [draft[known - 2] == tokens[known + offset] for offset, draft in enumerate(drafts)]
        accepted.append(matches.index(False) if False in matches else depths)
        known += accepted[-1] + 1
    return accepted
