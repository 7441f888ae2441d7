"""model/drafter.py: on one trunk, a drafter next to MTP layers learns what it learns alone, and so do they."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron_single import LAMBDA, VOCABULARY, make_batch, one_head, our_model
from torch import Tensor

from megatron_mtp.data.batch import with_blocks
from megatron_mtp.losses.acceptance import measured
from megatron_mtp.losses.head_objective import depth_weights
from megatron_mtp.losses.objective import NextTokensObjective, ObjectiveOutput
from megatron_mtp.losses.table import depth_loss
from megatron_mtp.model.arguments import as_mtp_layers
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.model.stored_arguments import alone
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.spec.head import HEADS, drafted_steps, has_both
from megatron_mtp.spec.kinds import DRAFTERS

_, DRAFTER_BLOCK = HEADS
DEPTHS, STEPS, LAYERS, BLOCKS = 2, 4, 5, 6
DRAFTED = sorted({*range(0, VOCABULARY, 3), 1})
OF_MTP = MTPConfig(mtp_loss="tv")
OF_DRAFTER: dict[str, dict[str, Any]] = {
    "eagle3": {"drafter_layers": (1, 2, 4), "mtp_loss": "kd"},
    "eagle": {"drafter_layers": None, "mtp_loss": "kd"},
    "dflash": {"drafter_layers": (1, 3), "drafter_num_layers": 2, "drafter_blocks": BLOCKS},
    "dspark": {
        "drafter_layers": (1, 3),
        "drafter_num_layers": 2,
        "drafter_markov_rank": 4,
        "drafter_blocks": BLOCKS,
        "mtp_loss": "mix",
        "mtp_loss_mix": "ce=0.1,tv=0.9",
    },
    "dflash2": {
        "drafter_layers": (1, 3),
        "drafter_num_layers": 2,
        "drafter_markov_rank": 4,
        "drafter_blocks": BLOCKS,
        "mtp_loss": "kd",
    },
    "domino": {
        "drafter_layers": (1, 3),
        "drafter_num_layers": 2,
        "drafter_markov_rank": 4,
        "drafter_gru_size": 5,
        "drafter_blocks": BLOCKS,
        "mtp_loss": "ce",
    },
    "peagle": {"drafter_layers": (1, 2, 4), "drafter_num_layers": 2, "drafter_blocks": BLOCKS, "mtp_loss": "kd"},
}

pytestmark = pytest.mark.usefixtures("megatron")


def settings_beside(kind: str) -> dict[str, Any]:
    """Return the settings of a drafter next to MTP layers, without those of its loss."""
    own = {name: value for name, value in OF_DRAFTER[kind].items() if name.startswith("drafter")}
    return {"drafter": kind, "drafter_steps": STEPS, **own}


def settings_of(kind: str) -> MTPConfig:
    return MTPConfig(drafter=kind, **OF_DRAFTER[kind])


def models(kind: str, drafted: list[int] | None, freezes: bool) -> tuple[GPTModel, GPTModel, GPTModel]:
    """Return MTP layers with the drafter, and each alone, all with the same weights in float64."""
    drafter = settings_beside(kind)
    both = our_model(DEPTHS, drafted=drafted, num_layers=LAYERS, freezes=freezes, beside=drafter).double()
    mtp = our_model(DEPTHS, drafted=drafted, num_layers=LAYERS, freezes=freezes).double()
    in_place = {"drafter": kind, **OF_DRAFTER[kind]}
    layers = in_place["drafter_layers"] or ()
    single = our_model(STEPS, drafted=drafted, num_layers=LAYERS, drafter_layers=layers, drafter=in_place).double()
    state = both.state_dict()
    mtp.load_state_dict({name: value for name, value in state.items() if not name.startswith(DRAFTER_BLOCK)})
    own = {name: value for name, value in state.items() if not name.startswith("mtp.")}
    single.load_state_dict({name.replace(DRAFTER_BLOCK, "mtp"): value for name, value in own.items()})
    return both, mtp, single


def objective(settings: MTPConfig, depths: int, factor: float, trains_trunk: bool) -> NextTokensObjective:
    loss, group = depth_loss(settings), parallel_state.get_context_parallel_group()
    weights = depth_weights(settings, depths, factor)
    return one_head(weights, group, loss, linear_main=True, trains_trunk=trains_trunk, measure=measured)


def both_heads(mtp: NextTokensObjective, drafter: NextTokensObjective) -> NextTokensObjective:
    return replace(mtp, heads=[*mtp.heads, *drafter.heads])


def run(
    model: GPTModel, made: NextTokensObjective, depths: int, kind: str | None = None
) -> tuple[ObjectiveOutput, dict[str, Tensor]]:
    """Run a step and return its gradients by name; with `kind`, that drafter has the depths, or those next to them."""
    has_both = len(made.heads) == 2
    batch = make_batch(max(depths, STEPS) if has_both else depths)
    whole = batch["depths"]
    fills_blocks = kind is not None and DRAFTERS[kind].fills_blocks
    blocks = with_blocks(whole, BLOCKS, (1, 2), whole.positions_S.numel()) if fills_blocks else whole
    batches = [whole.first(depths), blocks.first(STEPS)] if has_both else [blocks]
    output = model(
        *(batch[name] for name in ("tokens", "position_ids", "attention_mask")),
        labels=batch["labels"],
        output_processor=made,
        output_processor_context=batches,
    )
    output.loss.backward()
    return output, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("freezes", [True, False], ids=["frozen trunk", "trained trunk"])
@pytest.mark.parametrize(
    ("kind", "drafted"),
    [
        *(("eagle3", DRAFTED), ("eagle3", None), ("eagle", None)),
        *(("dflash", None), ("dspark", DRAFTED), ("dflash2", None)),
        *(("domino", None), ("peagle", DRAFTED)),
    ],
)
def test_mtp_layers_and_a_drafter_train_as_each_does_alone(kind: str, drafted: list[int] | None, freezes: bool) -> None:
    both, mtp, single = models(kind, drafted, freezes)
    of_mtp = objective(OF_MTP, DEPTHS, LAMBDA, not freezes)
    of_drafter = objective(settings_of(kind), STEPS, 1.0, False)
    together, found = run(both, both_heads(of_mtp, of_drafter), DEPTHS, kind)
    first, wanted = run(mtp, of_mtp, DEPTHS)
    second, drafter = run(single, of_drafter, STEPS, kind)
    assert {name.split(".")[0] for name in drafter} == {"mtp"}
    wanted |= {name.replace("mtp.", f"{DRAFTER_BLOCK}.", 1): gradient for name, gradient in drafter.items()}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9 * gradient.abs().max().item())
    for ours, theirs in zip(together.heads, (*first.heads, *second.heads), strict=True):
        assert ours.acceptance is not None
        assert theirs.acceptance is not None
        assert torch.equal(ours.acceptance, theirs.acceptance)
        for one, other in zip(ours.depths, theirs.depths, strict=True):
            torch.testing.assert_close(one.report(), other.report())


@pytest.mark.parametrize("method", ["uniform", "block"])
@pytest.mark.parametrize("kind", OF_DRAFTER)
def test_recomputed_layers_of_a_trained_trunk_change_no_gradient_and_leave_no_states(kind: str, method: str) -> None:
    drafter = settings_beside(kind)
    made = both_heads(objective(OF_MTP, DEPTHS, LAMBDA, True), objective(settings_of(kind), STEPS, 1.0, False))
    kept, recomputed = (
        our_model(DEPTHS, num_layers=LAYERS, beside=drafter, **changes).double()
        for changes in ({}, {"recompute_granularity": "full", "recompute_num_layers": 1, "recompute_method": method})
    )
    for _ in range(2):  # microbatches
        wanted, found = (run(model, made, DEPTHS, kind)[1] for model in (kept, recomputed))
        assert attached_of(recomputed)._read.after == {}
    assert any(name.startswith("decoder.") for name in wanted)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9 * gradient.abs().max().item())


def test_a_checkpoint_of_both_is_read_as_one_of_them() -> None:
    of_mtp = {"mtp_num_layers": 2, "mtp_use_repeated_layer": False, "mtp_unroll": None, "mtp_train_only": False}
    both = Namespace(**of_mtp, drafter="eagle3", drafter_steps=5, drafter_beside_mtp=True)
    assert has_both(both)
    assert drafted_steps(both) == 5
    mtp, single = alone(both, is_drafter=False), alone(both, is_drafter=True)
    assert mtp.drafter is None
    assert {name: getattr(mtp, name) for name in of_mtp} == of_mtp
    assert {name: getattr(single, name) for name in as_mtp_layers(5, both)} == as_mtp_layers(5, both)
    assert single.drafter == "eagle3"
    for one in (mtp, single):
        assert not has_both(one)
        assert drafted_steps(one) == 0
        assert alone(one, is_drafter=True) is one


def test_a_drafter_beside_mtp_layers_keeps_its_default_loss() -> None:
    given = MTPConfig(drafter="dspark", drafter_steps=3, drafter_blocks=2, mtp_loss="ce", mtp_z_loss=0.1)
    mtp, drafter = given.apart()
    assert mtp == MTPConfig(mtp_loss="ce", mtp_z_loss=0.1)
    own = {"drafter_steps": 3, "drafter_blocks": 2, "mtp_loss": "mix", "mtp_loss_mix": "ce=0.1,tv=0.9"}
    assert drafter == MTPConfig(drafter="dspark", **own)
