"""Training continues from a published drafter's folder, and initializes other kinds of drafters from it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_folders import DRAFTED, KINDS, Change, change, make_drafter, make_trunk, nothing, spoiled
from hf_models import VOCABULARY
from judged_models import QUIET
from megatron.core import parallel_state
from megatron_single import one_head
from safetensors.torch import load_file
from tiers import tiered
from torch import Tensor

from megatron_mtp.checkpoint.convert.drafters import plan_attaching_drafter, plan_drafter
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.checkpoint.verify.drafters import REFERENCES, drafts_of_both, verify_drafter
from megatron_mtp.checkpoint.verify.forms import prompt_of
from megatron_mtp.data.batch import depth_batch
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.losses.table import depth_loss
from megatron_mtp.megatron.checkpoint import DRAFTER
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.spec.config import MTPConfig

pytestmark = pytest.mark.usefixtures("megatron")
LENGTH = 20
CASES = {
    "its own layers": "dflash",
    "windows": "dflash-windows",
    "sinks": "dspark-sinks",
    "layers that are read": "peagle-windows",
    "draft vocabulary": "eagle3",
}
"""Properties that a continued drafter must keep, and a drafter of `KINDS` that has it, unlike a new drafter."""


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trunk(tmp_path_factory.mktemp("trunk"))[1]


def losses_of_checkpoint(saved: Path, tokens_S: Tensor) -> tuple[list[float], dict[int, Tensor], Any]:
    """Return the losses (tv) of the first training step, draft by draft, the trunk's states by layer, and the model."""
    model, states = load_model(saved), dict[int, Tensor]()
    for number, layer in enumerate(model.decoder.layers, start=1):
        layer.register_forward_hook(lambda _, __, made, number=number: states.update({number: made[0][:, 0]}))
    model.decoder.register_forward_hook(lambda _, __, made: states.update({0: made[:, 0]}))
    drafts = model.config.mtp_num_layers
    labels_S = torch.cat([tokens_S[1:], tokens_S[:1]])
    batch: dict[str, Any] = {"tokens": tokens_S[None], "labels": labels_S[None], "loss_mask": torch.ones(1, LENGTH)}
    batch["loss_mask"][:, -1] = 0
    loss = depth_loss(MTPConfig(mtp_loss="tv"))
    group = parallel_state.get_context_parallel_group()
    made = model.train()(
        batch["tokens"],
        torch.arange(LENGTH)[None],
        None,
        labels=batch["labels"],
        output_processor=one_head([1.0] * drafts, group, loss, linear_main=True, trains_trunk=False),
        output_processor_context=[depth_batch(batch, drafts)],
    )
    return [(each.total / each.tokens).item() for each in made.heads[0].depths], states, model


def losses_of_folder(folder: Path, kind: str, tokens_S: Tensor, states: dict[int, Tensor], model: Any) -> list[float]:
    """Return the same from plain torch with the folder's names and keys; only the first draft for a single layer."""
    reference = REFERENCES[kind](folder)
    head_VH, words_VH = attached_of(model).head().weight[:VOCABULARY], model.embedding.word_embeddings.weight
    drafts, layers = model.config.mtp_num_layers, attached_of(model).drafter.layers
    taught_SV = (states[0] @ head_VH.t()).softmax(-1)
    states_SX = torch.cat([states[number] for number in layers], dim=-1)
    padded_S = torch.cat([tokens_S, torch.zeros(drafts).to(tokens_S)])
    distances: list[list[Tensor]] = [[] for _ in range(drafts if reference.at_once else 1)]
    alone_SV = None
    if not reference.at_once:
        alone_SV = reference.steps(states_SX[:-1], words_VH[tokens_S[1:]], head_VH)["logits of drafts"]
    drafted = DRAFTED if "d2t" in reference.weights else [*range(VOCABULARY)]
    for place in range(LENGTH - 2):
        if alone_SV is None:
            given = states_SX[: place + 1], padded_S[: place + 1 + drafts], words_VH, head_VH
            logits_KV = reference.drafts(*given)["logits of drafts"]
        else:
            logits_KV = alone_SV[place : place + 1]
        for draft, logits_V in enumerate(logits_KV, start=1):
            if place + draft + 1 < LENGTH:
                q_N = logits_V[drafted].softmax(-1)
                distances[draft - 1].append(1 - torch.minimum(q_N, taught_SV[place + draft][drafted]).sum())
    return [torch.stack(each).mean().item() for each in distances]


@pytest.mark.parametrize("what", CASES)
@torch.no_grad()
def test_a_continued_drafter_matches_its_folder(what: str, trunk: Path, tmp_path: Path) -> None:
    """Its first step has the loss that plain torch computes from the folder; its export has equal keys and tensors."""
    name = CASES[what]
    folder, _ = make_drafter(tmp_path, name, trunk)
    plan_attaching_drafter(trunk, folder).write(tmp_path / "attached", QUIET)
    tokens_S = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(4))
    ours, states, model = losses_of_checkpoint(tmp_path / "attached", tokens_S)
    theirs = losses_of_folder(folder, KINDS[name][0], tokens_S, states, model)
    assert ours[: len(theirs)] == pytest.approx(theirs, rel=1e-4)
    plan_drafter(tmp_path / "attached", QUIET).write(tmp_path / "exported", QUIET)
    one, other = (json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "exported"))
    assert one == other
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "exported"))
    assert before.keys() == after.keys()
    assert [key for key, tensor in before.items() if not torch.equal(after[key], tensor)] == []


def of_window(width: int) -> dict[str, object]:
    inner = {"target_layer_ids": [0, 2], "mask_token_id": 7, "causal": False, "swa_window_size": width}
    return {"sliding_window": width, "dflash_config": inner}


LOST: dict[str, tuple[Change, dict[str, object]]] = {
    "its own layers": (change("layers.1.self_attn.o_proj.weight", torch.zeros_like), {}),
    "windows": (nothing, of_window(2)),
    "sinks": (change("layers.0.self_attn.attention_sink_bias", torch.zeros_like), {}),
    "layers that are read": (change("fc.weight", lambda one: one.roll(one.shape[1] // 3, 1)), {}),
    "draft vocabulary": (change("lm_head.weight", lambda one: one.flip(0)), {}),
}


@pytest.mark.parametrize("what", LOST)
@torch.no_grad()
def test_a_modified_drafter_folder_is_detected(what: str, trunk: Path, tmp_path: Path) -> None:
    """Planted: the loss of a modified folder differs from that of the checkpoint."""
    name = CASES[what]
    folder, saved = make_drafter(tmp_path, name, trunk)
    tokens_S = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(4))
    ours, states, model = losses_of_checkpoint(saved, tokens_S)
    by, keys = LOST[what]
    other = spoiled(folder, tmp_path / "other", by, **keys)
    theirs = losses_of_folder(other, KINDS[name][0], tokens_S, states, model)
    assert ours[: len(theirs)] != pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("kind", tiered(["dspark", "dflash2", "domino"], ["dflash2"]))
def test_a_block_drafter_can_start_from_a_dflash_backbone(kind: str, trunk: Path, tmp_path: Path) -> None:
    """Its weights equal the folder's bit by bit. What DSpark and DFlash2 add is initially 0, so they draft the same."""
    folder, saved = make_drafter(tmp_path, "dflash-windows", trunk)
    plan_attaching_drafter(trunk, folder, as_kind=kind).write(tmp_path / "begun", QUIET)
    old, new = DistReader(saved), DistReader(tmp_path / "begun")
    kept = {key for key in old.keys if key.startswith(DRAFTER)}
    assert [key for key in kept if not torch.equal(old.read(key), new.read(key))] == []
    assert any(new.read(key).any() for key in new.keys if key.startswith(DRAFTER) and key not in kept)
    assert new.common()["args"].drafter == kind
    plan_drafter(tmp_path / "begun", QUIET).write(tmp_path / "exported", QUIET)
    prompt = prompt_of(old, 0, LENGTH)
    made = [
        drafts_of_both(*each, attached_of(load_model(saved)).drafter.layers, prompt)[0]["logits of drafts"]
        for each in ((folder, saved), (tmp_path / "exported", tmp_path / "begun"))
    ]
    assert torch.equal(*made) == (kind != "domino")
    assert [check.name for check in verify_drafter(tmp_path / "exported", tmp_path / "begun") if not check.ok] == []
    runner = Runner(load_model(tmp_path / "begun"), VOCABULARY)
    prompts = [[5, 6, 7], [1, 2, 3, 4]]
    drafted = generate(runner, prompts, 20, speculative={"method": kind})
    assert drafted.token_ids == generate(runner, prompts, 20).token_ids
    assert drafted.stats.drafted > 0


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("dflash", "eagle3", "is a DFlash drafter, and an EAGLE-3 drafter has not all of its weights; give a kind"),
        ("dspark", "dflash", "is a DSpark drafter, and a DFlash drafter has not all of its weights"),
        ("dspark-idle", "dflash2", "drafts 33 of 96 tokens, and a DFlash2 drafter drafts from all"),
    ],
)
def test_kinds_that_cannot_start_from_a_folder_are_rejected(
    name: str, kind: str, says: str, trunk: Path, tmp_path: Path
) -> None:
    folder, _ = make_drafter(tmp_path, name, trunk)
    with pytest.raises(ValueError, match=says):
        plan_attaching_drafter(trunk, folder, as_kind=kind)
