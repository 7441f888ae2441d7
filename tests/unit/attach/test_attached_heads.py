"""attach.py with several heads at once: each learns as it does alone, and the policy is bit-identical.

tests/functional/test_attached_layouts.py has other layouts.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_settings import (
    DRAFTED,
    LAYERS,
    SETTINGS,
    STEPS,
    batch_of,
    beside_policy,
    given,
    gradients_of_stage,
    settings_of,
    several_heads,
    trained,
    vocabulary_in,
)
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron_single import VOCABULARY, make_batch, megatron_name, our_model, relative_difference
from safetensors.torch import load_file
from stock_models import draw, learned, stock
from tiers import tiered
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megatron_mtp.attach import Head, attach
from megatron_mtp.checkpoint.convert.drafter_form import read_drafter, trunk_of
from megatron_mtp.checkpoint.convert.live_drafter import export_drafter, export_drafter_weights
from megatron_mtp.losses.mtp_loss import mtp_loss, trunk_states
from megatron_mtp.losses.stage_loss import Batch, loss_of_stage
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.spec.head import is_head
from megatron_mtp.training.parameter_group import get_mtp_optimizer

pytestmark = pytest.mark.usefixtures("megatron")

NAMES, DRAFTERS = ["dspark", "mtp", "eagle3"], ["dspark", "eagle3"]
WITH_VOCABULARY = [kind for kind in SETTINGS if kind not in ("dflash2", "domino")]
"""Kinds that support a draft vocabulary."""


def forward(model: Any, batch: dict[str, Any], packed: Any = None) -> Tensor:
    made: Tensor = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], packed_seq_params=packed)
    return made


def with_several() -> tuple[Any, Any]:
    model = stock("dense", **LAYERS)
    return model, attach(model, heads=several_heads())


@pytest.mark.parametrize("form", ["rows", "packed"])
@pytest.mark.parametrize("trunk", tiered(["dense", "moe", "latent", "hybrid"], ["dense", "hybrid"]))
def test_several_heads_do_not_change_the_policy_by_a_bit(trunk: str, form: str) -> None:
    _, found, differ = beside_policy(trunk, form, lambda model: attach(model, heads=several_heads()))
    assert differ == []
    own = {name for name in found if name.startswith(("gradient of drafter_", "gradient of mtp."))}
    assert {name.split()[-1].partition(".")[0] for name in own} == {"drafter_dspark", "mtp", "drafter_eagle3"}
    assert all(found[name].any() for name in own)


@pytest.mark.parametrize("form", ["rows", "packed"])
def test_each_head_learns_as_it_does_alone(form: str) -> None:
    """Its loss and gradients, scaled by its weight, bit by bit; the sum includes every weight."""
    (batch, packed), (model, attached) = batch_of(form), with_several()
    draw(model)
    forward(model, batch, packed)
    made = attached.loss(*given(batch))
    made.loss.backward()
    assert [*made.heads] == NAMES
    assert made.loss.item() == pytest.approx(
        sum(one.weight * made.heads[one.called].loss.item() for one in attached.given)
    )
    assert torch.equal(made.depth_means, made.heads["dspark"].depth_means)
    together = {name: each.grad for name, each in model.named_parameters()}
    for head in several_heads():
        alone = stock("dense", **LAYERS)
        of_one = attach(alone, heads=[head])
        draw(alone)
        forward(alone, batch, packed)
        loss = of_one.loss(*given(batch))
        loss.loss.backward()
        assert torch.equal(loss.heads[head.called].loss, made.heads[head.called].loss)
        own = {name: each.grad for name, each in alone.named_parameters() if name.startswith(f"{head.module}.")}
        assert own
        assert [name for name, grad in own.items() if not torch.equal(grad, together[name])] == []


def test_losses_added_in_the_forward_are_logged_without_a_graph() -> None:
    model, batch = stock("dense", **LAYERS), make_batch(STEPS)
    attached = attach(model, heads=several_heads(), weight=0.3)
    draw(model)
    model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]).mean().backward()
    assert [*attached.last.heads] == NAMES
    assert not any(made.loss.requires_grad for made in (attached.last, *attached.last.heads.values()))
    assert all(each.grad is not None for name, each in model.named_parameters() if name.startswith("drafter_"))


def test_gradient_clipping_of_the_policy_ignores_the_heads() -> None:
    """With groups for a torch optimizer, the policy's weights after clipped steps match a loop without heads."""
    batch, weights, norms = make_batch(STEPS), [], []
    for has_heads in (False, True):
        model = stock("dense", **LAYERS)
        attached = attach(model, heads=several_heads()) if has_heads else None
        draw(model)
        clips = {"policy": 0.01, "eagle3": 0.25}
        groups: list[dict[str, Any]] = [{"name": "policy", "params": [*model.parameters()], "clip_grad": 0.01}]
        if attached is not None:
            groups = attached.parameter_groups(lr={"eagle3": 1e-1, "mtp": 1e-3}, clip_grad=clips)
        optimizer = torch.optim.SGD(groups, lr=1e-2)
        for _ in range(2):
            loss = forward(model, batch).log_softmax(-1)[..., 0].mean()
            (loss if attached is None else loss + attached.loss(*given(batch)).loss).backward()
            for group in optimizer.param_groups:
                norm = torch.nn.utils.clip_grad_norm_(group["params"], group.get("clip_grad", torch.inf))
                norms.append((group["name"], norm.item()))
            optimizer.step()
            optimizer.zero_grad()
        weights.append({name: each.detach().clone() for name, each in model.named_parameters()})
    assert [name for name, value in weights[0].items() if not torch.equal(weights[1][name], value)] == []
    assert [norm for name, norm in norms[2:] if name == "policy"] == [norm for _, norm in norms[:2]]
    assert all(norm > 0.01 for _, norm in norms)
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {"policy": 1e-2, "dspark": 1e-2, "mtp": 1e-3, "eagle3": 1e-1}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(weights[1])
    assert attached is not None
    with pytest.raises(ValueError, match="lr is given for eagle; give it for policy, dspark, mtp"):
        attached.parameter_groups(lr={"eagle": 1.0})


def test_every_head_has_a_rate_of_its_own_in_megatrons_optimizer() -> None:
    model, _ = with_several()
    config = OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=1e-3)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    optimizer = get_mtp_optimizer(config, [wrapped], lr={"eagle3": 4e-2, "mtp": 2e-2}, clip_grad=1.0)
    rates = {id(one): group["max_lr"] for group in optimizer.param_groups for one in group["params"]}
    found = {name.partition(".")[0]: rates[id(each)] for name, each in model.named_parameters()}
    own = {"mtp": 2e-2, "drafter_eagle3": 4e-2}
    assert found == {name: own.get(name, 1e-2) for name in found}
    assert own.keys() < found.keys()


# --- settings of MTP layers and windows of drafters ------------------------------------------------------------------


def gradients_of_ours(ours: Any, batch: dict[str, Any], packed: Any, settings: MTPConfig, step: int) -> dict[str, Any]:
    """Return gradients of a model that `train` builds, by Megatron's names."""
    head = attached_of(ours).heads[0]
    states_SBH = ours(
        *(batch[name] for name in ("tokens", "position_ids", "attention_mask")),
        packed_seq_params=packed,
        output_processor=lambda stage: stage.hidden_SBH,
    )
    whole = Batch(*given(batch), None, packed)
    loss_of_stage(attached_of(ours), head, states_SBH, whole, settings, step).loss.backward()
    return {megatron_name(name): each.grad for name, each in ours.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("form", ["rows", "packed"])
def test_an_attached_layer_is_unrolled_as_in_train(form: str) -> None:
    """One layer in three passes: all gradients match a repeated layer."""
    (batch, packed), settings = batch_of(form), MTPConfig(mtp_unroll=STEPS, mtp_loss_weights="1,0.8,0.5")
    model, ours = stock("dense"), our_model(STEPS, mtp_use_repeated_layer=True)
    attached = attach(model, 1, settings)
    for each in (model, ours):
        draw(each)
    wanted = gradients_of_ours(ours, batch, packed, settings, 1)
    forward(model, batch, packed)
    made = attached.loss(*given(batch))
    made.loss.backward()
    assert (len(model.mtp.layers), len(made.depth_means)) == (1, STEPS)
    weights = dict(model.named_parameters())
    assert [name for name, grad in wanted.items() if relative_difference(weights[name].grad, grad) > 1e-5] == []


@pytest.mark.parametrize("form", ["rows", "packed"])
def test_attached_layers_mix_states_as_in_train_with_new_draws_per_step(form: str) -> None:
    (batch, packed), settings = batch_of(form), MTPConfig(mtp_hidden_state_mixing=True)
    model, ours, seen = stock("dense"), our_model(STEPS), []
    attached = attach(model, STEPS, settings)
    for each in (model, ours):
        draw(each)
    for step in (1, 2):
        for each in (model, ours):
            each.zero_grad()
        wanted = gradients_of_ours(ours, batch, packed, settings, step)
        forward(model, batch, packed)
        made = attached.loss(*given(batch))
        made.loss.backward()
        weights = dict(model.named_parameters())
        assert [name for name, grad in wanted.items() if relative_difference(weights[name].grad, grad) > 1e-5] == []
        seen.append(made.depth_means.tolist())
    assert seen[0][0] == seen[1][0]  # depth 1 only has the trunk's state
    assert seen[0][1:] != seen[1][1:]


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_an_attached_drafter_has_its_window_as_in_train(kind: str) -> None:
    batch, model, window = make_batch(STEPS), stock("dense", **LAYERS), {"drafter_window_size": 3}
    attached = attach(model, heads=[Head(settings_of(kind, **window))])
    draw(model)
    ours = our_model(STEPS, drafter_layers=(), drafter={**trained(kind), **window}, **LAYERS)
    wanted = gradients_of_stage(ours, model, attached.given[0], batch, None)
    plain = our_model(STEPS, drafter_layers=(), drafter=trained(kind), **LAYERS)
    without = gradients_of_stage(plain, model, attached.given[0], batch, None)
    forward(model, batch)
    attached.loss(*given(batch)).loss.backward()
    weights = dict(model.named_parameters())
    assert [name for name, grad in wanted.items() if not torch.equal(weights[name].grad, grad)] == []
    assert [name for name, grad in without.items() if relative_difference(weights[name].grad, grad) > 1e-3]


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        ([Head(MTPConfig(mtp_unroll=3), 2)], "mtp_unroll is set, which repeats one MTP layer, and the model has 2"),
        ([Head(settings_of("eagle3", mtp_unroll=3))], "mtp_unroll in the settings is not supported for these"),
    ],
)
def test_an_unroll_needs_one_layer(heads: list[Head], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        attach(stock("dense", **LAYERS), heads=heads)


# --- loops with several forward passes, or with images ----------------------------------------------------------------


def log_probability(logits_BSV: Tensor, batch: dict[str, Any]) -> Tensor:
    return logits_BSV.log_softmax(-1).gather(-1, batch["labels"][..., None]).sum()


@pytest.mark.parametrize("has_reference", [False, True], ids=["no reference", "reference passes in between"])
def test_the_two_forwards_of_a_preference_loss_train_the_heads_on_both(has_reference: bool) -> None:
    """As in DPO, with one backward pass; the reference is the same model under no_grad, which sees different states."""
    pair, gradients = [make_batch(STEPS, seed=seed) for seed in (2, 3)], list[dict[str, Any]]()
    for has_heads in (False, True):
        model, total = stock("dense", **LAYERS), torch.zeros(())
        attached = attach(model, heads=several_heads()) if has_heads else None
        draw(model)
        scores = []
        for batch in pair:
            score = log_probability(forward(model, batch), batch)
            if has_reference:
                with torch.no_grad():
                    reference = log_probability(forward(model, batch | {"tokens": batch["tokens"].flip(0)}), batch)
                score = score - reference
            scores.append(score)
            if attached is not None:
                total = total + attached.loss(*given(batch)).loss
        (total - torch.nn.functional.logsigmoid(0.01 * (scores[0] - scores[1]))).backward()
        gradients.append({name: each.grad for name, each in model.named_parameters()})
    assert [name for name, grad in gradients[0].items() if not torch.equal(gradients[1][name], grad)] == []
    alone = stock("dense", **LAYERS)
    of_one = attach(alone, heads=several_heads())
    draw(alone)
    for batch in pair:
        forward(alone, batch)
        of_one.loss(*given(batch)).loss.backward()
    heads = {name: each.grad for name, each in alone.named_parameters() if is_head(name.partition(".")[0])}
    assert [name for name, grad in heads.items() if relative_difference(gradients[1][name], grad) > 1e-6] == []


def test_the_loss_of_an_earlier_forward_is_not_available() -> None:
    (model, attached), pair = with_several(), [make_batch(STEPS, seed=seed) for seed in (2, 3)]
    for batch in pair:
        forward(model, batch)
    with pytest.raises(ValueError, match=r"2 forwards .* since the last loss .* these tokens are not"):
        attached.loss(*given(pair[0]))


def test_image_placeholders_do_not_affect_the_losses_of_heads() -> None:
    """Image placeholder ids count like negative ids: their embeddings change neither loss."""
    batch, image, losses = make_batch(STEPS), VOCABULARY - 1, []
    text_BS = batch["tokens"].clamp(max=image - 1)
    images_BS = text_BS.clone()
    images_BS[:, 4:7] = image
    for tokens_BS, ids in ((images_BS, (image,)), (images_BS.masked_fill(images_BS == image, -200), ()), (text_BS, ())):
        model = stock("dense", **LAYERS)
        attached = attach(model, heads=several_heads(), placeholders=ids)
        draw(model)
        embedded_SBH = model.embedding(input_ids=text_BS, position_ids=batch["position_ids"]).detach().clone()
        embedded_SBH[4:7] = 0.3
        with torch.no_grad():
            model.embedding.word_embeddings.weight[image] += 5.0
        model(tokens_BS, batch["position_ids"], batch["attention_mask"], decoder_input=embedded_SBH)
        made = attached.loss(tokens_BS, None, torch.ones_like(tokens_BS))
        losses.append({name: each.depth_means.tolist() for name, each in made.heads.items()})
    assert losses[0] == losses[1]
    assert all(losses[0][name] != losses[2][name] for name in NAMES)


def test_the_fsdp_of_the_whole_model_trains_several_heads() -> None:
    found, batch = list[dict[str, Any]](), make_batch(STEPS)
    for shards in (False, True):
        model, attached = with_several()
        draw(model)
        if shards:
            mesh = DeviceMesh.from_group(torch.distributed.group.WORLD, "cpu")
            for layer in model.decoder.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        loss = forward(model, batch).log_softmax(-1)[..., 0].mean()
        (loss + attached.loss(*given(batch)).loss).backward()
        found.append({name: each.grad for name, each in model.named_parameters()})
    assert [name for name, grad in found[1].items() if not torch.equal(grad.full_tensor(), found[0][name])] == []


def test_a_drafter_that_fsdp_has_sharded_by_itself_is_refused() -> None:
    (model, attached), batch = with_several(), make_batch(STEPS)
    mesh = DeviceMesh.from_group(torch.distributed.group.WORLD, "cpu")
    fully_shard(model.drafter_eagle3, mesh=mesh)
    fully_shard(model, mesh=mesh)
    forward(model, batch)
    with pytest.raises(ValueError, match=r"FSDP has sharded .* or a drafter by itself"):
        attached.loss(*given(batch))


def test_megatron_fsdp_is_refused() -> None:
    """Recognized by its mark on the weights; it only runs on GPUs."""
    (model, attached), batch = with_several(), make_batch(STEPS)
    for weight in model.parameters():
        weight._megatron_fsdp_model = model
    forward(model, batch)
    with pytest.raises(ValueError, match="Megatron-FSDP has wrapped the model"):
        attached.loss(*given(batch))


# --- draft vocabularies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WITH_VOCABULARY)
def test_a_drafter_with_a_draft_vocabulary_learns_as_in_train(kind: str, tmp_path: Path) -> None:
    """Its output rows start as the policy's, and all gradients match a trained stage."""
    batch, model = make_batch(STEPS), stock("dense", **LAYERS)
    draw(model)
    head = Head(settings_of(kind, mtp_draft_vocab_file=str(vocabulary_in(tmp_path))))
    attached = attach(model, heads=[head])
    block = getattr(model, head.module)
    assert block.draft_vocabulary.tolist() == DRAFTED
    assert block.layer.head is None or torch.equal(block.layer.head, model.output_layer.weight[DRAFTED])
    draw(model)
    ours = our_model(STEPS, drafter_layers=(), drafter=trained(kind), drafted=DRAFTED, **LAYERS)
    wanted = gradients_of_stage(ours, model, attached.given[0], batch, None)
    forward(model, batch)
    attached.loss(*given(batch)).loss.backward()
    weights = dict(model.named_parameters())
    assert wanted
    assert [name for name, grad in wanted.items() if not torch.equal(weights[name].grad, grad)] == []
    assert weights["output_layer.weight"].grad is None


def test_mtp_layers_train_only_on_their_draft_vocabulary(tmp_path: Path) -> None:
    """The loss matches a model that `train` builds with the same list."""
    batch, model = make_batch(2), stock("dense")
    settings = MTPConfig(mtp_loss="kd", mtp_draft_vocab_file=str(vocabulary_in(tmp_path)))
    attached, ours = attach(model, 2, settings), our_model(2, drafted=DRAFTED)
    for each in (model, ours):
        draw(each)
    forward(model, batch)
    states = trunk_states(ours, batch["tokens"])
    expected = mtp_loss(states, ours, *given(batch), MTPConfig(mtp_loss="kd"))
    torch.testing.assert_close(attached.loss(*given(batch)).depth_means, expected.depth_means)
    everything = mtp_loss(states, our_model(2), *given(batch), MTPConfig(mtp_loss="kd"))
    assert not torch.allclose(expected.depth_means, everything.depth_means, rtol=1e-2)


@pytest.mark.parametrize("kind", WITH_VOCABULARY)
def test_a_draft_vocabulary_is_exported(kind: str, tmp_path: Path) -> None:
    model = stock("dense", **LAYERS)
    attach(model, heads=[Head(settings_of(kind, mtp_draft_vocab_file=str(vocabulary_in(tmp_path))))])
    draw(model)
    export_drafter(model, tmp_path / "drafter")
    form = read_drafter(tmp_path / "drafter", trunk_of(tmp_path / "drafter"))
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    assert len(form.order_N) == len(DRAFTED)
    assert (tensors["d2t"] + torch.arange(len(DRAFTED))).tolist() == DRAFTED
    assert tensors["t2d"].nonzero()[:, 0].tolist() == DRAFTED
    rows = getattr(model, f"drafter_{kind}").layer.head
    assert torch.equal(tensors["lm_head.weight"], model.output_layer.weight[DRAFTED] if rows is None else rows)


def test_a_checkpoint_of_another_draft_vocabulary_is_refused(tmp_path: Path) -> None:
    model = stock("dense", **LAYERS)
    attach(model, heads=several_heads(vocabulary_in(tmp_path)))
    state = model.state_dict()
    model.load_state_dict(state)
    state["drafter_eagle3.draft_vocabulary"] = state["drafter_eagle3.draft_vocabulary"] + 1
    with pytest.raises(ValueError, match="drafter_eagle3 drafts other tokens than mtp_draft_vocab"):
        model.load_state_dict(state)


def test_a_draft_vocabulary_that_cannot_be_read_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("4\n999\n")
    model = stock("dense", **LAYERS)
    names = {name for name, _ in model.named_parameters()}
    with pytest.raises(ValueError, match=r"mtp_draft_vocab_file is .*has the id 999, and ids are 0 to"):
        attach(model, heads=[Head(settings_of("eagle3", mtp_draft_vocab_file=str(tmp_path / "ids")))])
    assert {name for name, _ in model.named_parameters()} == names


def test_a_drafter_alone_leaves_megatrons_own_block_as_it_is() -> None:
    """A policy whose MTP layers are not among the heads."""
    batch, plain, model = make_batch(STEPS), stock("dense", **LAYERS), stock("dense", depths=2, **LAYERS)
    attached = attach(model, heads=[Head(settings_of("eagle3"))])
    for each in (plain, model):
        draw(each)
    assert model.config.mtp_num_layers == 2
    expected = learned(plain, batch, None, None)
    found = learned(model, batch, None, lambda: attached.loss(*given(batch)).loss)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    assert not [name for name in found if name.startswith("gradient of mtp.")]


def test_depths_and_settings_are_a_shorthand_for_heads() -> None:
    """They give the same modules, settings and losses."""
    batch, losses, made = make_batch(STEPS), [], []
    ways: list[dict[str, Any]] = [
        {"depths": 2, "settings": settings_of("eagle3", mtp_loss="kd")},
        {"heads": [Head(MTPConfig(mtp_loss="kd"), 2), Head(settings_of("eagle3"))]},
    ]
    for way in ways:
        model = stock("dense", **LAYERS)
        attached = attach(model, **way)
        draw(model)
        forward(model, batch)
        losses.append(attached.loss(*given(batch)).loss.item())
        made.append((attached.given, [name for name, _ in model.named_parameters()]))
    assert losses[0] == losses[1]
    assert made[0] == made[1]


def test_a_policys_checkpoint_loads_strictly_with_and_without_the_heads() -> None:
    """New heads keep their values if the checkpoint has none of them; a checkpoint with part of a head is rejected."""
    (model, _), plain = with_several(), stock("dense", **LAYERS)
    draw(plain)
    policy, heads = (
        plain.state_dict(),
        {name for name, _ in model.named_parameters()} - dict(plain.named_parameters()).keys(),
    )
    before = {name: each.clone() for name, each in model.named_parameters()}
    assert {name.partition(".")[0] for name in heads} == {"drafter_dspark", "mtp", "drafter_eagle3"}
    with pytest.warns(UserWarning, match="has no drafter_dspark, drafter_eagle3, mtp, which stay"):
        model.load_state_dict(policy, strict=True)
    for name, each in model.named_parameters():
        assert torch.equal(each, before[name] if name in heads else policy[name]), name
    whole = {name: None if each is None else each + 1 for name, each in model.state_dict().items()}
    model.load_state_dict(whole, strict=True)
    assert all(torch.equal(each, whole[name]) for name, each in model.named_parameters())
    del whole["drafter_eagle3.layers.0.fc.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*drafter_eagle3.layers.0.fc.weight"):
        model.load_state_dict(whole, strict=True)


def test_heads_have_keys_of_their_own_in_checkpoints(tmp_path: Path) -> None:
    """So that a distributed checkpoint restores each of them."""
    (model, _), (other, _) = with_several(), with_several()
    draw(model)
    keys = {name: entry.key for name, entry in model.sharded_state_dict().items()}
    policys = {entry.key for entry in stock("dense", **LAYERS).sharded_state_dict().values()}
    of_drafters = [key for name, key in keys.items() if name.startswith("drafter_")]
    assert len(of_drafters) == len({*of_drafters} - policys)
    assert {"drafter_eagle3.fc.weight", "drafter_dspark.fc.weight"} <= {*of_drafters}
    dist_checkpointing.save(model.sharded_state_dict(), str(tmp_path))
    other.load_state_dict(dist_checkpointing.load(other.sharded_state_dict(), str(tmp_path)), strict=True)
    weights = dict(other.named_parameters())
    assert [name for name, each in model.named_parameters() if not torch.equal(weights[name], each)] == []


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_named_head_is_exported_as_if_it_were_alone(name: str, tmp_path: Path) -> None:
    (model, _), alone = with_several(), stock("dense", **LAYERS)
    attach(alone, heads=[Head(settings_of(name))])
    for each in (model, alone):
        draw(each)
    for each, head, folder in ((model, name, "of several"), (alone, None, "alone")):
        export_drafter(each, tmp_path / folder, head)
    of_several, expected = (load_file(tmp_path / folder / "model.safetensors") for folder in ("of several", "alone"))
    assert of_several.keys() == expected.keys()
    assert all(torch.equal(of_several[key], value) for key, value in expected.items())
    configs = {(tmp_path / folder / "config.json").read_text() for folder in ("of several", "alone")}
    assert len(configs) == 1
    with pytest.raises(ValueError, match=r"head is None, .* drafters dspark, eagle3; give one"):
        next(export_drafter_weights(model))
    with pytest.raises(ValueError, match="head is 'mtp', and the model has the drafters dspark, eagle3"):
        export_drafter(model, tmp_path / "none", "mtp")


def test_the_stream_of_each_drafter_follows_the_steps_of_a_wrapped_model(tmp_path: Path) -> None:
    """A running engine gets after a step what the folder of that step would contain."""
    (model, attached), batch = with_several(), make_batch(STEPS)
    draw(model)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    streams = {name: {key: one.clone() for key, one in export_drafter_weights(wrapped, name)} for name in DRAFTERS}
    assert streams["dspark"].keys() != streams["eagle3"].keys()
    forward(wrapped, batch)
    attached.loss(*given(batch)).loss.backward()
    with torch.no_grad():
        for each in model.parameters():
            each -= 0.1 * each.main_grad
    for name in DRAFTERS:
        export_drafter(wrapped, tmp_path / name, name)
        folder = load_file(tmp_path / name / "model.safetensors")
        after = dict(export_drafter_weights(wrapped, name))
        assert after.keys() == folder.keys()
        assert all(torch.equal(one, folder[key]) for key, one in after.items())
        assert not any(torch.equal(one, streams[name][key]) for key, one in after.items() if key != "lm_head.weight")


def test_two_drafters_of_a_kind_have_names() -> None:
    model, batch = stock("dense", **LAYERS), make_batch(STEPS)
    attached = attach(model, heads=[Head(settings_of("eagle3", mtp_loss=loss), name=loss) for loss in ("kd", "tv")])
    assert (model.drafter_kd.drafter, model.drafter_tv.drafter.kind) == (model.drafter_tv.drafter, "eagle3")
    draw(model)
    forward(model, batch)
    assert [*attached.loss(*given(batch)).heads] == ["kd", "tv"]


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        ([Head(depths=1), Head(depths=2)], "two of the heads are MTP layers"),
        ([Head(settings_of("eagle3")), Head(settings_of("eagle3"))], r"two heads are called 'eagle3'; .*name="),
        ([Head(settings_of("eagle3"), name="policy")], "a drafter cannot be called mtp or drafter_block or policy"),
        ([Head(settings_of("eagle3"), name="a.b")], "a head is called 'a.b', which is not a valid module name"),
        ([Head(settings_of("eagle3"), 2)], "'eagle3' is a drafter, whose number of drafts is drafter_steps"),
        ([Head(depths=1, weight=-1.0)], "the weight of a head is -1.0; give 0 or more"),
        ([Head(depths=1), Head(settings_of("eagle3", mtp_loss="no"))], "--mtp-loss is 'no'"),
        ([Head(), Head(settings_of("eagle3"))], "the model has no MTP layers, and depths is None"),
    ],
)
def test_incompatible_heads_are_rejected(heads: list[Head], said: str) -> None:
    model = stock("dense", **LAYERS)
    names = {name for name, _ in model.named_parameters()}
    with pytest.raises(ValueError, match=said):
        attach(model, heads=heads)
    assert {name for name, _ in model.named_parameters()} == names


def test_heads_together_with_depths_or_settings_are_rejected() -> None:
    with pytest.raises(ValueError, match="heads were given with `depths=` or `settings=`"):
        attach(stock("dense"), 1, heads=[Head(depths=1)])
