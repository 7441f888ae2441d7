"""attach.py with several heads at once: each learns as it does alone, and the policy does not change by a bit.

tests/functional/test_attached_layouts.py has other layouts.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_settings import LAYERS, STEPS, settings_of, several_heads
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron_single import make_batch
from safetensors.torch import load_file
from stock_models import draw, learned, packed_batch, stock
from tiers import tiered
from torch import Tensor

from megatron_mtp.attach import Head, attach
from megatron_mtp.checkpoint.convert.live_drafter import export_drafter, export_drafter_weights
from megatron_mtp.spec.config import MTPConfig

pytestmark = pytest.mark.usefixtures("megatron")

NAMES = ["dspark", "mtp", "eagle3"]


def batch_of(form: str) -> tuple[dict[str, Any], Any]:
    batch = make_batch(STEPS)
    return (batch, None) if form == "rows" else packed_batch(batch)


def given(batch: dict[str, Any]) -> tuple[Any, ...]:
    return batch["tokens"], batch["labels"], batch["loss_mask"]


def forward(model: Any, batch: dict[str, Any], packed: Any = None) -> Tensor:
    made: Tensor = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], packed_seq_params=packed)
    return made


def with_several() -> tuple[Any, Any]:
    model = stock("dense", **LAYERS)
    return model, attach(model, heads=several_heads())


@pytest.mark.parametrize("form", ["rows", "packed"])
@pytest.mark.parametrize("trunk", tiered(["dense", "moe", "latent", "hybrid"], ["dense", "hybrid"]))
def test_several_heads_do_not_change_the_policy_by_a_bit(trunk: str, form: str) -> None:
    (batch, packed), layers = batch_of(form), {} if trunk == "hybrid" else LAYERS
    plain, model = stock(trunk, **layers), stock(trunk, **layers)
    attached = attach(model, heads=several_heads())
    for each in (plain, model):
        draw(each)
    destroy_moe_metrics_tracker()
    expected = learned(plain, batch, packed, None)
    destroy_moe_metrics_tracker()
    found = learned(model, batch, packed, lambda: attached.loss(*given(batch)).loss)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    own = {name for name in found if name.startswith(("gradient of drafter_", "gradient of mtp."))}
    assert {name.split()[-1].partition(".")[0] for name in own} == {"drafter_dspark", "mtp", "drafter_eagle3"}
    assert all(found[name].any() for name in own)


@pytest.mark.parametrize("form", ["rows", "packed"])
def test_each_head_learns_as_it_does_alone(form: str) -> None:
    """Its loss and gradients, times its weight, bit by bit; the sum has every weight."""
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


def test_the_losses_that_ride_along_are_logged_without_a_graph() -> None:
    model, batch = stock("dense", **LAYERS), make_batch(STEPS)
    attached = attach(model, heads=several_heads(), weight=0.3)
    draw(model)
    model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]).mean().backward()
    assert [*attached.last.heads] == NAMES
    assert not any(made.loss.requires_grad for made in (attached.last, *attached.last.heads.values()))
    assert all(each.grad is not None for name, each in model.named_parameters() if name.startswith("drafter_"))


def test_depths_and_settings_are_short_for_heads() -> None:
    """The same modules, settings and losses."""
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
    """New heads stay as they are where it has none of them; one that has a part of a head is refused."""
    (model, _), plain = with_several(), stock("dense", **LAYERS)
    draw(plain)
    policy, heads = (
        plain.state_dict(),
        {name for name, _ in model.named_parameters()} - dict(plain.named_parameters()).keys(),
    )
    before = {name: each.clone() for name, each in model.named_parameters()}
    assert {name.partition(".")[0] for name in heads} == {"drafter_dspark", "mtp", "drafter_eagle3"}
    with pytest.warns(UserWarning, match="the checkpoint has no drafter_dspark, drafter_eagle3, mtp, which stay"):
        model.load_state_dict(policy, strict=True)
    for name, each in model.named_parameters():
        assert torch.equal(each, before[name] if name in heads else policy[name]), name
    whole = {name: None if each is None else each + 1 for name, each in model.state_dict().items()}
    model.load_state_dict(whole, strict=True)
    assert all(torch.equal(each, whole[name]) for name, each in model.named_parameters())
    del whole["drafter_eagle3.layers.0.fc.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*drafter_eagle3.layers.0.fc.weight"):
        model.load_state_dict(whole, strict=True)


def test_heads_have_keys_of_their_own_in_checkpoints() -> None:
    model, _ = with_several()
    keys = {name: entry.key for name, entry in model.sharded_state_dict().items()}
    policys = {entry.key for entry in stock("dense", **LAYERS).sharded_state_dict().values()}
    of_drafters = [key for name, key in keys.items() if name.startswith("drafter_")]
    assert len(of_drafters) == len({*of_drafters} - policys)
    assert {"drafter_eagle3.fc.weight", "drafter_dspark.fc.weight"} <= {*of_drafters}


@pytest.mark.parametrize("name", ["dspark", "eagle3"])
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
    with pytest.raises(ValueError, match="head is None, and the model has the drafters dspark, eagle3; give one of"):
        next(export_drafter_weights(model))
    with pytest.raises(ValueError, match="head is 'mtp', and the model has the drafters dspark, eagle3"):
        export_drafter(model, tmp_path / "none", "mtp")


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
        ([Head(settings_of("eagle3"), name="a.b")], "a head is called 'a.b', which names a module too"),
        ([Head(settings_of("eagle3"), 2)], "'eagle3' is a drafter, whose number of drafts is drafter_steps"),
        ([Head(depths=1, weight=-1.0)], "the weight of a head is -1.0; give 0 or more"),
        ([Head(depths=1), Head(settings_of("eagle3", mtp_loss="no"))], "--mtp-loss is 'no'"),
        ([Head(), Head(settings_of("eagle3"))], "the model has no MTP layers, and depths is None"),
    ],
)
def test_heads_that_do_not_go_together_are_one_sentence(heads: list[Head], said: str) -> None:
    model = stock("dense", **LAYERS)
    names = {name for name, _ in model.named_parameters()}
    with pytest.raises(ValueError, match=said):
        attach(model, heads=heads)
    assert {name for name, _ in model.named_parameters()} == names


def test_heads_beside_what_is_short_for_them_are_refused() -> None:
    with pytest.raises(ValueError, match="heads were given with what is short for them"):
        attach(stock("dense"), 1, heads=[Head(depths=1)])
