"""Depths that a checkpoint lacks: the last layer's copy starts as one more step of the trunk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_models
import megatron_single
import pytest
import torch
from hybrid_single import our_hybrid
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron_single import LATENT, MOE, our_model
from torch import Tensor

from megatron_mtp.checkpoint.convert.edit import Init, plan_attaching
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.mcore.model import load_model
from megatron_mtp.model.initialize import RandomWeights, fill_absent_layers

QUIET = Options(quiet=True, workers=1)

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def model(megatron: None) -> GPTModel:
    return our_model(depths=2)


def without_layer(model: GPTModel, index: int) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if f"mtp.layers.{index}." not in name}


def test_last_layer_is_copied_and_the_hidden_state_passes(model: GPTModel) -> None:
    filled = fill_absent_layers(without_layer(model, 1), model.state_dict(), model.mtp, (1,), "last-layer", 0)
    assert filled.keys() == model.state_dict().keys()
    made = "mtp.layers.1."
    assert torch.equal(
        filled[made + "tf_layer.mlp.linear_fc1.weight"], filled["decoder.layers.1.mlp.linear_fc1.weight"]
    )
    assert torch.equal(filled[made + "final_layernorm.weight"], filled["decoder.final_layernorm.weight"])
    embedded, hidden = torch.randn(3, 32), torch.randn(3, 32)
    projected = torch.cat([embedded, hidden], dim=-1) @ filled[made + "eh_proj.weight"].cpu().T
    assert torch.equal(projected, hidden)


KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": {**MOE, "moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
    "biased experts": {**MOE, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    "latent": LATENT,
    "layer norm": {"normalization": "LayerNorm", "add_bias_linear": True, "qk_layernorm": True},
    "zero-centered": {"layernorm_zero_centered_gamma": True},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_random_is_what_megatron_gives_a_new_model(kind: dict[str, Any]) -> None:
    """Norms and biases are the same; matrices have the same mean and deviation."""
    model, new = our_model(2, **kind), built(2, **kind)
    filled = fill_absent_layers(without_layer(model, 1), model.state_dict(), model.mtp, (1,), "random", 7)
    for name, parameter in new.named_parameters():
        if not name.startswith("mtp.layers.1."):
            assert torch.equal(filled[name], model.state_dict()[name])
        elif parameter.dim() == 1:
            assert torch.equal(filled[name], parameter), name
        else:
            five_sigma = 5 / parameter.numel() ** 0.5
            assert filled[name].std().item() == pytest.approx(parameter.std().item(), rel=five_sigma), name
            assert abs(filled[name].mean()) <= five_sigma * parameter.std(), name


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "glm4_moe"])
def test_a_run_and_attach_mtp_draw_the_same_depths(family: str, tmp_path: Path) -> None:
    """attach-mtp knew neither the smaller deviation of what writes to the residual stream nor norms of 1."""
    hf_to_mcore(hf_models.make(tmp_path / "hf", family, 0), tmp_path / "trunk", QUIET)
    plan_attaching(tmp_path / "trunk", 2, Init("random", 7)).write(tmp_path / "attached", QUIET)
    attached = load_model(tmp_path / "attached")
    loaded = {name: value for name, value in attached.state_dict().items() if not name.startswith("mtp.")}
    drawn = fill_absent_layers(loaded, attached.state_dict(), attached.mtp, (0, 1), "random", 7)
    for name, value in attached.mtp.state_dict().items():
        if value is not None:
            torch.testing.assert_close(drawn[f"mtp.{name}"], value, rtol=0, atol=0)


def built(depths: int, **kind: Any) -> GPTModel:
    """As Megatron initializes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_single, "randomize", lambda _: None)
        return our_model(depths, **kind)


def test_random_goes_by_seed_and_layer() -> None:
    weights, key = RandomWeights(7, 0.02, 4), "mtp.layers.0.eh_proj.weight"
    drawn = weights.draw(key, (6, 12))
    assert drawn is not None
    for other in (replace(weights, seed=8).draw(key, (6, 12)), weights.draw(key.replace("0", "1"), (6, 12))):
        assert other is not None
        assert not (drawn == other).any()


@pytest.mark.parametrize(("key", "shape"), [("linear_qkv.weight", (8, 6)), ("experts.linear_fc2.weight", (4, 6, 8))])
def test_random_does_not_depend_on_how_a_tensor_is_cut(key: str, shape: tuple[int, ...]) -> None:
    weights = RandomWeights(7, 0.02, 4)
    whole = weights.draw(key, shape)
    assert whole is not None
    last: tuple[int | slice, ...] = (2,) * (len(shape) - 2)
    for part in ((*last, slice(3, 5), slice(None)), (*last, slice(None), slice(4, 6))):
        assert torch.equal(weights.draw(key, shape, part), whole[part])  # type: ignore[arg-type]


def test_random_has_no_rule_for_what_it_does_not_know() -> None:
    assert RandomWeights(7, 0.02, 4).draw("mtp.layers.0.transformer_layer.self_attention.A_log", (4,)) is None


def test_stored_depths_are_left_alone(model: GPTModel) -> None:
    loaded = {name: value + 1 if value is not None else None for name, value in without_layer(model, 1).items()}
    filled = fill_absent_layers(loaded, model.state_dict(), model.mtp, (1,), "last-layer", 0)
    name = "mtp.layers.0.eh_proj.weight"
    assert torch.equal(filled[name], loaded[name])


def test_a_stage_without_trunk_layers_cannot_copy_one(model: GPTModel) -> None:
    loaded = {name: value for name, value in without_layer(model, 1).items() if not name.startswith("decoder.layers.")}
    with pytest.raises(ValueError, match=r"--mtp-init last-layer .* give --mtp-init random"):
        fill_absent_layers(loaded, model.state_dict(), model.mtp, (1,), "last-layer", 0)


@pytest.mark.parametrize("name", ["transformer_layer", "mtp_model_layer"])
def test_plain_state_dicts_of_megatrons_own_mtp_are_read(model: GPTModel, name: str) -> None:
    expected = {key: value.clone() for key, value in model.state_dict().items() if value is not None}
    other = our_model(depths=2)
    other.load_state_dict({key.replace("tf_layer", name): value for key, value in expected.items()}, strict=False)
    for key, value in other.state_dict().items():
        if value is not None:
            assert torch.equal(value, expected[key])


@pytest.mark.parametrize("pattern", ["M-G-/G-", "M-*G*-/*G*-", "MGE*E/E*E"])
def test_the_last_layers_of_a_hybrid_are_copied(pattern: str, megatron: None) -> None:
    made = our_hybrid(pattern, **(MOE if "E" in pattern else {}))
    trunk, stack = pattern.split("/")
    filled = fill_absent_layers(without_layer(made, 0), made.state_dict(), made.mtp, (0,), "last-layer", 1)
    inner = {name: value for name, value in filled.items() if name.startswith("mtp.layers.0.tf_layer.layers.")}
    assert {int(name.split(".")[5]) for name in inner} == set(range(len(stack)))
    for name, value in inner.items():
        *_, index, rest = name.split(".", 6)
        source = f"decoder.layers.{len(trunk) - len(stack) + int(index)}.{rest}"
        assert value is None or torch.equal(value, filled[source]), name
    assert torch.equal(filled["mtp.layers.0.final_layernorm.weight"], filled["decoder.final_norm.weight"])


@pytest.mark.parametrize("pattern", ["M-/M-", "G-/G-"])
def test_random_draws_the_projections_of_recurrent_layers(pattern: str, megatron: None) -> None:
    """What has no rule, such as A and the convolution, stays as Megatron has initialized it."""
    made = our_hybrid(pattern)
    own = made.state_dict()
    filled = fill_absent_layers(without_layer(made, 0), own, made.mtp, (0,), "random", 7)
    start = "mtp.layers.0.tf_layer.layers.0."
    drawn = {name for name, value in filled.items() if name.startswith(start) and value is not None}
    changed = {name.removeprefix(start) for name in drawn if not torch.equal(filled[name], own[name])}
    module = "mixer" if pattern.startswith("M") else "self_attention"
    norm = "norm" if pattern.startswith("M") else "input_layernorm"
    assert {f"{module}.in_proj.weight", f"{module}.out_proj.weight", f"{norm}.weight"} <= changed
    assert not {name for name in changed if name.endswith(("A_log", "dt_bias", ".D", "conv1d.weight", "conv1d_weight"))}
    written, read = (filled[f"{start}{module}.{name}.weight"].std().item() for name in ("out_proj", "in_proj"))
    assert read == pytest.approx(0.02, rel=0.1)
    assert written == pytest.approx(0.02 / 2, rel=0.1), "divided by sqrt(2 layers), of which the trunk has two"
