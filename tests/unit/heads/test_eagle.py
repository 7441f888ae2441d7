"""heads/eagle/: steps, losses and gradients against the paper's definition in plain float64; error messages."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from eagle_reference import DRAFTED, RECOMPUTE, STEPS, Reference, losses
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron_single import our_model
from torch import Tensor

from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.spec.kinds import DRAFTERS

pytestmark = pytest.mark.usefixtures("megatron")


class EagleReference(Reference):
    """The layer reads fc([embedding; feature]) without a norm, and the head reads its output."""

    def features(self, states: Tensor) -> Tensor:
        return states

    def inputs(self, feature_H: Tensor, embedded_H: Tensor) -> tuple[Tensor, Tensor]:
        merged_H = self.own.fc.weight @ torch.cat((embedded_H, feature_H))
        return merged_H, merged_H

    def normed(self, states_SH: Tensor) -> Tensor:
        return states_SH

    def __init__(self, model: GPTModel) -> None:
        super().__init__(model)
        assert not [*self.norms.parameters()]


def eagle_model(drafted: list[int] | None = None, **changes: Any) -> GPTModel:
    own = {"drafter": "eagle", "drafter_layers": None}
    return our_model(STEPS, drafted=drafted, drafter_layers=(), drafter=own, **changes).double()


def last_state(states: list[Tensor]) -> Tensor:
    """Return the state after the final norm."""
    return states[-1]


@pytest.mark.parametrize("drafted", [None, DRAFTED], ids=["trunk's head", "own head"])
@pytest.mark.parametrize("recompute", [{}, RECOMPUTE], ids=["kept", "recomputed"])
def test_loss_and_gradients_are_those_of_the_definition(recompute: dict[str, Any], drafted: list[int] | None) -> None:
    ours, expected, found, wanted = losses(eagle_model(drafted, **recompute), last_state, "eagle", EagleReference)
    torch.testing.assert_close(ours, expected, rtol=5e-8, atol=0)  # the steps' weights are float32
    own = {name.removeprefix("mtp.layers.0.") for name in found}
    assert own == {
        *(["head"] if drafted else []),
        "fc.weight",
        "tf_layer.self_attention.linear_qkv.weight",
        "tf_layer.self_attention.linear_proj.weight",
        "tf_layer.pre_mlp_layernorm.weight",
        "tf_layer.mlp.linear_fc1.weight",
        "tf_layer.mlp.linear_fc2.weight",
    }
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-7 * gradient.abs().max().item())


def before_the_norm(states: list[Tensor]) -> Tensor:
    return states[-2]


def earlier(states: list[Tensor]) -> Tensor:
    return torch.cat([states[-1][:1], states[-1][:-1]])


@pytest.mark.parametrize("wrong", [before_the_norm, earlier])
def test_a_wrong_state_or_position_is_detected(wrong: Callable[[list[Tensor]], Tensor]) -> None:
    ours, expected, _, _ = losses(eagle_model(), wrong, "eagle", EagleReference)
    assert abs(ours - expected) / expected > 1e-3


def test_eagle_reads_no_inner_layer() -> None:
    kind = DRAFTERS["eagle"]
    assert kind.default_layers(1, None) == ()
    kind.check_layers((), 1)
    with pytest.raises(ValueError, match=r"with --drafter eagle; give --drafter .* or drop it"):
        MTPConfig(drafter="eagle", drafter_layers=(1,))
