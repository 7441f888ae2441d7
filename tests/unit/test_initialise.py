"""Depths that a checkpoint lacks: the last layer's copy starts as one more step of the trunk."""

import pytest
import torch
from megatron_single import our_model
from torch import Tensor

from megatron_mtp.model.initialise import fill_absent_layers
from megatron_mtp.model.trunk import MTPGPTModel


@pytest.fixture
def model(megatron: None) -> MTPGPTModel:
    return our_model(depths=2)


def without_layer(model: MTPGPTModel, index: int) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if f"mtp.layers.{index}." not in name}


def test_last_layer_is_copied_and_the_hidden_state_passes(model: MTPGPTModel) -> None:
    filled = fill_absent_layers(without_layer(model, 1), model.state_dict(), model.mtp, (1,), "last-layer")
    assert filled.keys() == model.state_dict().keys()
    made = "mtp.layers.1."
    assert torch.equal(
        filled[made + "tf_layer.mlp.linear_fc1.weight"], filled["decoder.layers.1.mlp.linear_fc1.weight"]
    )
    assert torch.equal(filled[made + "final_layernorm.weight"], filled["decoder.final_layernorm.weight"])
    embedded, hidden = torch.randn(3, 32), torch.randn(3, 32)
    projected = torch.cat([embedded, hidden], dim=-1) @ filled[made + "eh_proj.weight"].cpu().T
    assert torch.equal(projected, hidden)


def test_random_keeps_what_was_initialised(model: MTPGPTModel) -> None:
    filled = fill_absent_layers(without_layer(model, 1), model.state_dict(), model.mtp, (1,), "random")
    for name, value in model.state_dict().items():
        assert filled[name] is value or torch.equal(filled[name], value)


def test_stored_depths_are_left_alone(model: MTPGPTModel) -> None:
    loaded = {name: value + 1 if value is not None else None for name, value in without_layer(model, 1).items()}
    filled = fill_absent_layers(loaded, model.state_dict(), model.mtp, (1,), "last-layer")
    name = "mtp.layers.0.eh_proj.weight"
    assert torch.equal(filled[name], loaded[name])


def test_a_stage_without_trunk_layers_cannot_copy_one(model: MTPGPTModel) -> None:
    loaded = {name: value for name, value in without_layer(model, 1).items() if not name.startswith("decoder.layers.")}
    with pytest.raises(ValueError, match=r"--mtp-init last-layer .* give --mtp-init random"):
        fill_absent_layers(loaded, model.state_dict(), model.mtp, (1,), "last-layer")


@pytest.mark.parametrize("name", ["transformer_layer", "mtp_model_layer"])
def test_plain_state_dicts_of_megatrons_own_mtp_are_read(model: MTPGPTModel, name: str) -> None:
    expected = {key: value.clone() for key, value in model.state_dict().items() if value is not None}
    other = our_model(depths=2)
    other.load_state_dict({key.replace("tf_layer", name): value for key, value in expected.items()}, strict=False)
    for key, value in other.state_dict().items():
        if value is not None:
            assert torch.equal(value, expected[key])
