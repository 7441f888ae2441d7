"""Trained checkpoints as Hugging Face folders: other layouts give the same bytes, other programs the same numbers."""

import json
from pathlib import Path

import launch
import pytest
import torch
from torch import Tensor

from megatron_mtp.platform import prepare

prepare()

from megatron_mtp.checkpoint.verify import megatron_logits  # noqa: E402

TOOL, WORKER = "tools/checkpoint/convert.py", Path(__file__).parent / "layout_worker.py"
CLIENT = Path(__file__).parent / "mtp_client.py"
RESAVED = {"untied-d3": ("tp2", "pp2", "pp2-vpp2"), "tied-d3": ("tp2", "pp2"), "moe-d2": ("ep2",)}
"""Models of layouts.py, and the layouts that save them."""


@pytest.fixture(scope="module")
def resaved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, saved by one process and in every layout."""
    folder = tmp_path_factory.mktemp("resaved")
    one = [job for model in RESAVED for job in (f"init/{model}/ours", f"resave/{model}/single/sigmoid")]
    two = [f"resave/{model}/{layout}/sigmoid" for model, layouts in RESAVED.items() for layout in layouts]
    launch.run(launch.python(WORKER, str(folder), *one), folder / "one.log")
    launch.run(launch.torchrun(2, WORKER, str(folder), *two), folder / "two.log")
    return folder


def export(source: Path, target: Path) -> Path:
    launch.run(launch.python(TOOL, "mcore-to-hf", str(source), str(target)), target.with_suffix(".log"))
    return target


@pytest.mark.parametrize("model", RESAVED)
def test_every_layout_is_exported_to_the_same_bytes(resaved: Path, model: str, tmp_path: Path) -> None:
    single = export(resaved / "resaved" / f"{model}-single", tmp_path / "single")
    for layout in RESAVED[model]:
        other = export(resaved / "resaved" / f"{model}-{layout}", tmp_path / layout)
        assert (other / "model.safetensors").read_bytes() == (single / "model.safetensors").read_bytes(), layout
        assert (other / "config.json").read_bytes() == (single / "config.json").read_bytes(), layout


TRAINED = {
    "dense": "--ffn-hidden-size 128 --qk-layernorm",
    "experts": "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 32 --moe-layer-freq [0,1] "
    "--moe-router-load-balancing-type none --moe-token-dispatcher-type allgather --add-qkv-bias",
}
STEPS = "--train-iters 120 --lr 5e-3 --eval-interval 1000 --eval-iters 1 --save-interval 120 --init-method-std 0.1"
NEW = 200


@pytest.mark.parametrize("kind", TRAINED)
def test_a_trained_model_drafts_in_transformers_as_it_was_trained(kind: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    flags = [*STEPS.split(), *TRAINED[kind].split(), "--save", str(checkpoint)]
    launch.run(launch.pretrain(*flags, "--untie-embeddings-and-output-weights"), tmp_path / "train.log")
    exported = export(checkpoint, tmp_path / "exported")
    proof = launch.run(launch.python(TOOL, "verify", str(exported), str(checkpoint), "--json"), tmp_path / "verify.log")
    assert json.loads(proof.strip().splitlines()[-1])["ok"]

    command = launch.python(CLIENT, str(exported), json.dumps([3, 4, 5, 6]), str(NEW))
    done = json.loads(launch.run(command, tmp_path / "client.log").strip().splitlines()[-1])
    assert done["with"] == done["without"]
    teacher_forced = rounds(megatron_logits(checkpoint, torch.tensor([done["with"]])), done["with"], 4, 2)
    assert done["accepted"] / done["drafted"] == pytest.approx(teacher_forced, abs=0.01)
    assert done["accepted"] > 0.2 * done["drafted"]


def rounds(logits: dict[str, Tensor], tokens: list[int], prompt: int, depths: int) -> float:
    """Accepted part of all drafts, if the depths' teacher-forced drafts had been verified round after round."""
    drafts = [logits[f"depth {depth}"].argmax(-1).tolist() for depth in range(1, depths + 1)]
    known, drafted, accepted = prompt + 1, 0, 0  # the trunk's first token comes without a draft
    while known + depths < len(tokens):
        matches = [draft[known - 2] == tokens[known + offset] for offset, draft in enumerate(drafts)]
        run = matches.index(False) if False in matches else depths
        drafted, accepted, known = drafted + depths, accepted + run, known + run + 1
    return accepted / drafted
