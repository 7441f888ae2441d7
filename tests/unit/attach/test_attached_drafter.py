"""attach.py with a drafter on stock models: the policy is bit-identical, and the drafter learns as in `train`.

tests/functional/test_attached_layouts.py has other layouts.
"""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafter_settings import (
    LAYERS,
    SETTINGS,
    STEPS,
    batch_of,
    beside_policy,
    given,
    gradients_of_stage,
    settings_of,
    trained,
)
from megatron_single import VOCABULARY, make_batch, our_model, relative_difference
from stock_models import draw, stock
from tiers import tiered
from torch import Tensor

from megatron_mtp.attach import attach
from megatron_mtp.checkpoint.convert.drafter_form import read_drafter, trunk_of
from megatron_mtp.checkpoint.convert.live_drafter import export_drafter
from megatron_mtp.checkpoint.verify.drafters import REFERENCES
from megatron_mtp.model.initialize import RandomWeights
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.spec.kinds import DRAFTERS

pytestmark = pytest.mark.usefixtures("megatron")

FORMS = ["rows", "packed"]


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_new_drafter_starts_as_in_train_and_every_weight_trains(kind: str) -> None:
    """Its weights equal --mtp-init random with torch's seed; every weight gets a gradient."""
    torch.manual_seed(11)
    batch, model = make_batch(STEPS), stock("dense", **LAYERS)
    attached = attach(model, settings=settings_of(kind))
    own = {name: each for name, each in model.named_parameters() if name.startswith("drafter_")}
    weights = RandomWeights.of(model.config, model.config.num_layers, 11)
    for name, each in own.items():
        key = name.split(".layers.0.", 1)[1]
        if key in ("fc.weight", "markov_w1", "mask_hidden", "gru_input"):
            expected = weights.draw(f"drafter.{key}", each.shape)
            assert expected is not None
            torch.testing.assert_close(each.detach(), expected)
    optimizer = torch.optim.SGD(own.values(), lr=0.1)
    for _ in range(2):  # in the first step, a zero-initialized factor blocks the other's gradient
        optimizer.zero_grad()
        model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
        attached.loss(*given(batch)).loss.backward()
        optimizer.step()
    assert [name for name, each in own.items() if each.grad is None or not each.grad.any()] == []


def test_every_drafter_kind_is_tested_here() -> None:
    assert SETTINGS.keys() == DRAFTERS.keys()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("depths", [None, 2], ids=["alone", "with MTP layers"])
@pytest.mark.parametrize(
    ("trunk", "kind"),
    tiered(
        [(trunk, kind) for trunk in ("dense", "moe", "latent", "hybrid") for kind in SETTINGS],
        [("dense", "eagle3"), ("moe", "dspark"), ("hybrid", "dflash"), ("dense", "eagle")],
    ),
)
def test_the_policy_does_not_change_by_a_bit(trunk: str, kind: str, depths: int | None, form: str) -> None:
    settings = settings_of(kind, mtp_train_only=depths is not None)
    model, found, differ = beside_policy(trunk, form, lambda model: attach(model, depths, settings))
    assert differ == []
    own = {name for name in found if name.startswith(f"gradient of drafter_{kind}.")}
    assert own == {f"gradient of {name}" for name, _ in model.named_parameters() if name.startswith(f"drafter_{kind}.")}
    assert all(found[name].any() for name in own)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SETTINGS)
def test_loss_and_gradients_are_those_of_a_trained_stage(kind: str, form: str) -> None:
    """Compared with `train --drafter` on a frozen trunk."""
    batch, packed = batch_of(form)
    ours, model = our_model(STEPS, drafter_layers=(), drafter=trained(kind), **LAYERS), stock("dense", **LAYERS)
    attached = attach(model, settings=settings_of(kind))
    draw(model)
    wanted = gradients_of_stage(ours, model, attached.given[0], batch, packed)
    model(batch["tokens"], batch["position_ids"], batch["attention_mask"], packed_seq_params=packed)
    attached.loss(*given(batch)).loss.backward()
    weights = dict(model.named_parameters())
    assert wanted
    assert [name for name, grad in wanted.items() if not torch.equal(weights[name].grad, grad)] == []


@pytest.mark.parametrize("progress", [0.0, 0.25, 1.0])
def test_domino_uses_the_base_share_of_its_progress(progress: float) -> None:
    """The loop passes the fraction of its run that is over; the gradients match `train` at that point."""
    batch, model = make_batch(STEPS), stock("dense", **LAYERS)
    ours = our_model(STEPS, drafter_layers=(), drafter=trained("domino"), **LAYERS)
    attached = attach(model, settings=settings_of("domino"))
    draw(model)
    attached.progress = progress
    wanted = gradients_of_stage(ours, model, attached.given[0], batch, None, progress=progress)
    model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
    attached.loss(*given(batch)).loss.backward()
    weights = dict(model.named_parameters())
    assert [name for name, grad in wanted.items() if not torch.equal(weights[name].grad, grad)] == []


def test_a_weight_adds_the_loss_in_the_forward() -> None:
    """With weight=, for frameworks that own the loop: the same gradients as `Attached.loss`."""
    batch, gradients = make_batch(STEPS), []
    for weight in (None, 0.3):
        model = stock("dense", **LAYERS)
        attached = attach(model, 2, settings_of("eagle3"), weight)
        draw(model)
        arguments = batch["tokens"], batch["position_ids"], batch["attention_mask"]
        named = {} if weight is None else {"loss_mask": batch["loss_mask"], "labels": batch["labels"]}
        trunk = model(*arguments, **named).sum()
        (trunk if weight else 0.3 * attached.loss(*given(batch)).loss).backward()
        gradients.append({name: each.grad for name, each in model.named_parameters() if name.startswith("drafter")})
    assert all(relative_difference(gradients[1][name], each) < 1e-5 for name, each in gradients[0].items())


def test_a_reference_policys_forward_in_between_changes_nothing() -> None:
    """The drafter reads the states of the forward pass whose loss is requested."""
    losses = []
    for runs_in_between in (False, True):
        batch, model = make_batch(STEPS), stock("dense", **LAYERS)
        attached = attach(model, settings=settings_of("eagle3"))
        draw(model)
        arguments = batch["tokens"], batch["position_ids"], batch["attention_mask"]
        model(*arguments)
        if runs_in_between:
            with torch.no_grad():
                model(arguments[0].flip(1), *arguments[1:])
        losses.append(attached.loss(*given(batch)).loss.item())
    assert losses[0] == losses[1]


def test_losses_of_both_heads_add_up_and_are_reported_separately() -> None:
    batch, model = make_batch(STEPS), stock("dense", **LAYERS)
    attached = attach(model, 2, settings_of("dspark"))
    draw(model)
    model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
    made = attached.loss(*given(batch))
    assert {name: len(each.depth_means) for name, each in made.heads.items()} == {"mtp": 2, "dspark": STEPS}
    alone = stock("dense", **LAYERS)
    of_mtp = attach(alone, 2)
    draw(alone)
    alone(batch["tokens"], batch["position_ids"], batch["attention_mask"])
    assert made.loss.item() == pytest.approx(of_mtp.loss(*given(batch)).loss.item() + made.heads["dspark"].loss.item())


@pytest.mark.parametrize(
    ("settings", "changes", "said"),
    [
        (
            {"drafter": "eagle3", "mtp_draft_vocab_size": 8},
            {},
            "mtp_draft_vocab_size in the settings is not supported for these",
        ),
        ({"drafter": "eagle3", "drafter_layers": (1, 2, 9)}, {}, "--drafter-layers is 1 2 9, and the trunk has 4"),
        ({"drafter": "dspark", "mtp_loss": "no"}, {}, "--mtp-loss is 'no'"),
        ({"drafter": "eagle3"}, {"num_layers": 2}, "give a trunk of at least 4 layers"),
    ],
)
def test_unsupported_drafter_settings_are_rejected(
    settings: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    model = stock("dense", **{**LAYERS, **changes})
    names = {name for name, _ in model.named_parameters()}
    with pytest.raises(ValueError, match=said):
        attach(model, settings=MTPConfig(**settings))
    assert {name for name, _ in model.named_parameters()} == names


def test_a_block_that_cannot_be_made_leaves_the_model_as_it_was() -> None:
    model = stock("hybrid")
    with pytest.raises(ValueError, match="Q"):
        attach(model, 2, settings_of("dflash"), block="Q")
    assert not hasattr(model, "drafter_dflash")


@torch.no_grad()
@pytest.mark.parametrize("kind", SETTINGS)
def test_the_exported_folder_drafts_as_the_attached_drafter(kind: str, tmp_path: Path) -> None:
    """Plain torch with only the folder gives the attached drafter's distance from the trunk, draft by draft."""
    model, batch = stock("dense", **LAYERS), make_batch(STEPS)
    attached = attach(model, settings=settings_of(kind, mtp_loss="tv"))
    draw(model)
    tokens_BS, states = batch["tokens"], dict[int, Tensor]()
    for number, layer in enumerate(model.decoder.layers, start=1):
        layer.register_forward_hook(lambda _, __, made, number=number: states.update({number: made[0]}))
    model.decoder.register_forward_hook(lambda _, __, made: states.update({0: made}))
    logits_BSV = model(tokens_BS, batch["position_ids"], batch["attention_mask"])
    found = attached.loss(tokens_BS, None, torch.ones_like(tokens_BS)).depth_means
    export_drafter(model, tmp_path / "drafter")
    form = read_drafter(tmp_path / "drafter", trunk_of(tmp_path / "drafter"))
    assert form.settings["drafts"] in (STEPS, None)
    reference, words_VH = REFERENCES[kind](tmp_path / "drafter"), model.embedding.word_embeddings.weight
    reference.weights.pop("candidate_selector.predecessor_codebook", None)  # rows learn before the selection
    head_VH, drafts = model.output_layer.weight, STEPS if reference.at_once else 1
    distances = [list[Tensor]() for _ in range(drafts)]
    for row, tokens_S in enumerate(tokens_BS):
        states_SX = torch.cat([states[number][:, row] for number in form.kind.layers or [0]], dim=-1)
        length = len(tokens_S)
        if not reference.at_once:
            made = reference.steps(states_SX[:-1], words_VH[tokens_S[1:]], head_VH)["logits of drafts"]
            by_draft = [(place, 1, made[place]) for place in range(length - 2)]
        else:
            padded_S, by_draft = torch.cat([tokens_S, torch.zeros(STEPS).to(tokens_S)]), []
            for place in range(length - 2):
                known_S = padded_S[: place + 1 + STEPS]
                drafted = reference.drafts(states_SX[: place + 1], known_S, words_VH, head_VH)["logits of drafts"]
                by_draft += [(place, draft, drafted_V) for draft, drafted_V in enumerate(drafted, start=1)]
        for place, draft, drafted_V in by_draft:
            if place + draft + 1 < length:
                taught_V = logits_BSV[row, place + draft].softmax(-1)
                distances[draft - 1].append((taught_V - drafted_V.softmax(-1)).abs().sum() / 2)
    expected = torch.stack([torch.stack(each).mean() for each in distances])
    torch.testing.assert_close(found[:drafts], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [None, "eagle3", "dspark"])
def test_rows_that_only_pad_the_vocabulary_have_no_probability(kind: str | None, tmp_path: Path) -> None:
    """They do not change the loss, and the drafter's folder has no rows for them."""
    losses, tokens = [], VOCABULARY - 5
    batch = make_batch(STEPS)
    text = batch["tokens"].clamp(max=tokens - 1)
    for shift in (0.0, 3.0):
        model = stock("dense", **LAYERS)
        attached = attach(model, None if kind else 2, settings_of(kind) if kind else None, true_vocab_size=tokens)
        draw(model)
        with torch.no_grad():
            model.output_layer.weight[tokens:] += shift
        model(text, batch["position_ids"], batch["attention_mask"])
        losses.append(attached.loss(text, None, torch.ones_like(text)).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    if kind:
        export_drafter(model, tmp_path / "drafter")
        assert read_drafter(tmp_path / "drafter", trunk_of(tmp_path / "drafter")).kind.vocabulary == tokens
    with pytest.raises(ValueError, match=f"true_vocab_size is {VOCABULARY + 1}, and the output layer has {VOCABULARY}"):
        attach(stock("dense"), 1, true_vocab_size=VOCABULARY + 1)


def test_virtual_stages_on_two_ranks_require_overlap_p2p_comm() -> None:
    """On two ranks, Megatron batches forward and backward messages, and ranks would mistake each other's."""
    model = stock("dense", **LAYERS)
    model.vp_stage, model.pg_collection = 0, copy.copy(model.pg_collection)
    model.pg_collection.pp = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    with pytest.raises(ValueError, match="overlap_p2p_comm to True and batch_p2p_comm to False"):
        attach(model, settings=settings_of("eagle3"))


def test_a_model_without_a_drafter_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model has no drafter; give attach settings with one"):
        export_drafter(stock("dense"), tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_a_trunk_with_scaled_rope_requires_drafter_rope_scaling() -> None:
    model = stock("dense", **LAYERS)
    model.rotary_pos_emb.inv_freq = model.rotary_pos_emb.inv_freq / 2
    with pytest.raises(ValueError, match=r"scales its rotary positions.*give drafter_rope_scaling"):
        attach(model, settings=settings_of("eagle3"))
    attach(model, settings=settings_of("eagle3", drafter_rope_scaling='{"rope_type": "default"}'))


def test_the_comparison_sees_other_layers_that_are_read() -> None:
    batch, losses = make_batch(STEPS), []
    for layers in ((1, 2, 3), (1, 2, 4)):
        model = stock("dense", num_layers=5)
        attached = attach(model, settings=MTPConfig(drafter="eagle3", drafter_steps=STEPS, drafter_layers=layers))
        draw(model)
        model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
        losses.append(attached.loss(*given(batch)).loss.item())
    assert losses[0] != losses[1]
