"""MTP layers that a checkpoint lacks: a copy of the last layer starts as one more layer of the trunk."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hf_models
import hybrid_single
import megatron_single
import pytest
import torch
from hybrid_single import our_hybrid
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron_single import LATENT, MOE, VOCABULARY, our_model
from torch import Tensor

from megatron_mtp.checkpoint.convert.edit import Init, plan_attaching
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.model.initialize import RandomWeights, _pass_hidden_state, fill_absent_layers

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


def drafter(kind: str, layers: tuple[int, ...] | None, drafted: list[int] | None = None, **own: Any) -> GPTModel:
    settings = {"drafter": kind, **({} if layers else {"drafter_layers": None}), **own}
    return our_model(3, num_layers=4, drafter_layers=layers or (), drafter=settings, drafted=drafted)


def test_every_tensor_parallel_rank_passes_its_own_part_of_the_hidden_state() -> None:
    ranks = [SimpleNamespace(tp_group=SimpleNamespace(rank=lambda rank=rank: rank)) for rank in range(2)]
    parts = [_pass_hidden_state(torch.ones(2, 8), rank) for rank in ranks]  # type: ignore[arg-type]
    assert torch.equal(torch.cat(parts), torch.cat([torch.zeros(4, 4), torch.eye(4)], dim=1))


KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": {**MOE, "moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
    "biased experts": {**MOE, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    "latent": LATENT,
    "layer norm": {"normalization": "LayerNorm", "add_bias_linear": True, "qk_layernorm": True},
    "zero-centered": {"layernorm_zero_centered_gamma": True},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_random_initialization_matches_megatrons_distribution(kind: dict[str, Any]) -> None:
    """Norms and biases are equal; matrices have the same mean and standard deviation."""
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
def test_a_run_and_a_conversion_draw_the_same_depths(family: str, tmp_path: Path) -> None:
    """Regression: attach-mtp used neither the smaller deviation of residual projections nor norms of 1."""
    hf_to_mcore(hf_models.make(tmp_path / "hf", family, 0), tmp_path / "trunk", QUIET)
    plan_attaching(tmp_path / "trunk", 2, Init("random", 7)).write(tmp_path / "attached", QUIET)
    attached = load_model(tmp_path / "attached")
    loaded = {name: value for name, value in attached.state_dict().items() if not name.startswith("mtp.")}
    drawn = fill_absent_layers(loaded, attached.state_dict(), attached.mtp, (0, 1), "random", 7)
    for name, value in attached.mtp.state_dict().items():
        if value is not None:
            torch.testing.assert_close(drawn[f"mtp.{name}"], value, rtol=0, atol=0)


def built(depths: int, **kind: Any) -> GPTModel:
    """Return a model that Megatron initializes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_single, "randomize", lambda _: None)
        return our_model(depths, **kind)


def test_random_weights_depend_on_seed_and_layer() -> None:
    weights, key = RandomWeights(7, 0.02, 4), "mtp.layers.0.eh_proj.weight"
    drawn = weights.draw(key, (6, 12))
    assert drawn is not None
    for other in (replace(weights, seed=8).draw(key, (6, 12)), weights.draw(key.replace("0", "1"), (6, 12))):
        assert other is not None
        assert not (drawn == other).any()


@pytest.mark.parametrize(
    ("key", "shape"),
    [("linear_qkv.weight", (8, 6)), ("experts.linear_fc2.weight", (4, 6, 8)), ("mixer.conv1d.weight.x", (8, 6))],
)
def test_random_does_not_depend_on_how_a_tensor_is_cut(key: str, shape: tuple[int, ...]) -> None:
    weights = RandomWeights(7, 0.02, 4)
    whole = weights.draw(key, shape)
    assert whole is not None
    last: tuple[int | slice, ...] = (2,) * (len(shape) - 2)
    for part in ((*last, slice(3, 5), slice(None)), (*last, slice(None), slice(4, 6))):
        assert torch.equal(weights.draw(key, shape, part), whole[part])  # type: ignore[arg-type]


def test_random_initialization_rejects_unknown_parameters(model: GPTModel) -> None:
    """A run reports it before it starts, as attach-mtp does."""
    assert RandomWeights(7, 0.02, 4).draw("mtp.layers.0.transformer_layer.self_attention.decay", (4,)) is None
    model.mtp.layers[0].decay = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match=r"random cannot draw 'mtp.layers.0.decay'; give --mtp-init"):
        fill_absent_layers(without_layer(model, 0), model.state_dict(), model.mtp, (0,), "random", 7)


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


MANY = {
    "mamba_num_heads": 512,
    "mamba_head_dim": 1,
    "linear_num_key_heads": 512,
    "linear_num_value_heads": 512,
    "linear_key_head_dim": 1,
    "linear_value_head_dim": 1,
}
"""Enough heads to compare distributions."""


@pytest.mark.parametrize("pattern", ["M-/M-", "G-/G-"])
def test_random_draws_recurrent_layers_as_megatron_does(pattern: str, megatron: None) -> None:
    """Each tensor has Megatron's distribution: its CDF differs by at most 0.12 from ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid_single, "randomize", lambda _: None)
        made = our_hybrid(pattern, layernorm_zero_centered_gamma=True, **MANY)
    filled = fill_absent_layers(without_layer(made, 0), made.state_dict(), made.mtp, (0,), "random", 7)
    start, seen = "mtp.layers.0.tf_layer.layers.0.", set[str]()
    for name, expected in made.named_parameters():
        if name.startswith(start):
            seen.add(name.rpartition(".")[2])
            own, drawn = (each.detach().double().flatten().sort()[0] for each in (expected, filled[name]))
            distance = torch.searchsorted(drawn, own, right=True) / len(own) - torch.arange(1, 1 + len(own)) / len(own)
            assert distance.abs().max() < (1 if own[0] == own[-1] else 0.12), name
            assert own[0] != own[-1] or torch.equal(own, drawn), name
    assert {"A_log", "dt_bias", "weight"} <= seen


DRAFTED = [*range(0, VOCABULARY, 2)]
LATENTS = {"drafter_multi_latent_attention": [10, 12, 6, 4, 6]}
BLOCK = {"drafter_num_layers": 2, "drafter_mask_token": 7}
SINKS = {"drafter_softmax_type": "learnable", "drafter_window_size": 4}
BEGUN: dict[str, Callable[[], Any]] = {
    **{kind: partial(our_model, 1, **changes) for kind, changes in KINDS.items()},
    **{pattern: partial(our_hybrid, pattern) for pattern in ("M-/M-", "G-/G-")},
    "experts in a hybrid": partial(our_hybrid, "M*E/*E", **MOE),
    "sinks": partial(our_model, 1, softmax_type="learnable"),
    "parallel": partial(our_model, 1, architecture="parallel"),
    "repeated": partial(our_model, 3, mtp_use_repeated_layer=True, shares_kv=True),
    "draft vocabulary": partial(our_model, 1, drafted=DRAFTED),
    "eagle": partial(drafter, "eagle", None),
    "eagle, vocabulary": partial(drafter, "eagle", None, DRAFTED),
    "eagle3": partial(drafter, "eagle3", (1, 2, 3), drafter_norm_before_residual=1),
    "eagle3, latent, vocabulary": partial(drafter, "eagle3", (1, 2, 3), DRAFTED, **LATENTS),
    "dflash": partial(drafter, "dflash", (1, 3), **BLOCK, drafter_causal=1),
    "dflash, sinks, vocabulary": partial(drafter, "dflash", (1, 3), DRAFTED, **BLOCK, **SINKS),
    "dspark, sinks": partial(drafter, "dspark", (1, 3), **BLOCK, **SINKS, drafter_idle_rows=1),
    "dspark, vocabulary": partial(drafter, "dspark", (1, 3), DRAFTED, **BLOCK),
    "dflash2, sinks": partial(drafter, "dflash2", (1, 3), **BLOCK, **SINKS),
    "domino": partial(drafter, "domino", (1, 3), **BLOCK, drafter_gru_size=10),
    "peagle, vocabulary": partial(drafter, "peagle", (1, 2, 3), DRAFTED, drafter_num_layers=2, drafter_mask_token=7),
}
"""Every kind of drafter and MTP layer, and each of its optional parts in one of them."""


@pytest.mark.parametrize("kind", BEGUN)
def test_every_kind_of_head_can_start_from_a_trunk_checkpoint(kind: str, megatron: None) -> None:
    """Loading fills each weight by name, whatever a rank initialized; otherwise it would depend on the layout."""
    made, found = BEGUN[kind](), []
    trunk = {name: value for name, value in made.state_dict().items() if not name.startswith("mtp.")}
    made.mtp_attached._heads.plans = (replace(made.mtp_attached._heads.plans[0], absent=(0,)),)
    for _ in range(2):
        with torch.no_grad():
            for parameter in made.mtp.parameters():
                parameter.add_(1)
        made.mtp.absent = ("layers.0.",)
        made.load_state_dict(trunk, strict=False)
        found.append({name: value.clone() for name, value in made.mtp.named_parameters()})
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
