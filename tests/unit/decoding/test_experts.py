"""Expert layers for few rows against Megatron's own, and which layers do not synchronize with the host."""

from typing import Any

import pytest
import torch
from drafting_single import KINDS, launches_of_a_layer, model_of, place_static_experts_everywhere, prompts_of, two_steps
from tiers import tiered
from torch._subclasses.fake_tensor import DataDependentOutputException

from megatron_mtp.decoding import experts
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.experts import StaticExperts, place_static_experts
from megatron_mtp.decoding.runner import Runner

pytestmark = pytest.mark.usefixtures("megatron")

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid with a bias": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "groups": {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_topk_scaling_factor": 2.5},
    "shared": {"moe_shared_expert_intermediate_size": 48},
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "ungated": {"gated_linear_unit": False},
}


@pytest.mark.parametrize("copies", [0, 100])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@torch.inference_mode()
def test_few_rows_match_megatrons_expert_layer(
    router: str, dtype: torch.dtype, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By gathering the experts' weights, and by running all experts; also in parts of the weights."""
    monkeypatch.setattr(experts, "COPIES", copies)
    layer = model_of("moe", depths=1, dtype=dtype, **ROUTERS[router]).decoder.layers[1]
    hidden_SBH = torch.randn(5, 3, layer.config.hidden_size, generator=torch.Generator().manual_seed(3)).to(dtype)
    wanted, _ = layer.mlp(hidden_SBH)
    place_static_experts(layer)
    assert isinstance(layer.mlp, StaticExperts)
    made, bias = layer.mlp(hidden_SBH)
    assert bias is None
    allowed = {torch.float64: 1e-12, torch.bfloat16: 0.02}[dtype] * wanted.abs().max().item()
    torch.testing.assert_close(made, wanted, rtol=0, atol=allowed)
    torch.testing.assert_close(layer.mlp.own(hidden_SBH)[0], wanted, rtol=0, atol=allowed)
    monkeypatch.setattr(experts, "MOST_ROWS", 14)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert torch.equal(layer.mlp(hidden_SBH)[0], layer.mlp.own(hidden_SBH)[0])


@torch.inference_mode()
def test_an_expert_that_overflows_for_others_rows_changes_nothing() -> None:
    layer = model_of("moe", depths=1).decoder.layers[1]
    hidden_SBH = torch.randn(1, 1, layer.config.hidden_size, dtype=torch.float64)
    _, chosen_TE = layer.mlp.router(hidden_SBH)
    wanted, _ = layer.mlp(hidden_SBH)
    unchosen = int((~chosen_TE[0]).nonzero()[0])
    layer.mlp.experts.local_experts[unchosen].linear_fc1.weight.fill_(torch.inf)
    place_static_experts(layer)
    torch.testing.assert_close(layer.mlp(hidden_SBH)[0], wanted)


@pytest.mark.parametrize(
    "changes",
    [{"moe_input_jitter_eps": 0.1}, {"moe_router_load_balancing_type": "sinkhorn"}, {"add_bias_linear": True}],
)
def test_other_experts_are_left_to_megatron(changes: dict[str, Any]) -> None:
    layer = model_of("moe", depths=1, **changes).decoder.layers[0]
    own = layer.mlp
    place_static_experts(layer)
    assert layer.mlp is own


@pytest.fixture
def static_experts_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    place_static_experts_everywhere(monkeypatch)


@pytest.mark.usefixtures("static_experts_everywhere")
@pytest.mark.parametrize("kind", tiered([*KINDS, "mla", "mla-moe"], ("gqa", "mla-moe")))
@torch.inference_mode()
def test_a_step_never_synchronizes_with_the_host(kind: str) -> None:
    assert Runner(model_of(kind)).recordable
    two_steps(kind)


ROUTED_AS_DEEPSEEK: dict[str, Any] = {
    **ROUTERS["sigmoid with a bias"],
    **ROUTERS["shared"],
    "moe_router_dtype": "fp32",
}


@pytest.mark.parametrize(("copies", "of_all"), tiered([(0, 0), (100, 2)], [(100, 2)]))
@pytest.mark.parametrize(
    ("kind", "changes", "launches"),
    [
        ("moe", {}, 26),
        ("moe", ROUTED_AS_DEEPSEEK, 37),
        ("moe", {**ROUTED_AS_DEEPSEEK, "qk_layernorm": True}, 40),
        ("mla-moe", {}, 64),
    ],
)
def test_launches_of_a_layer(
    kind: str, changes: dict[str, Any], launches: int, copies: int, of_all: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a few experts and for all; paged blocks add copies of keys and values, or only of latents."""
    monkeypatch.setattr(experts, "COPIES", copies)
    assert launches_of_a_layer(monkeypatch, kind, paged=False, **changes) == launches + of_all
    pages = 1 if kind == "mla-moe" else 2
    assert launches_of_a_layer(monkeypatch, kind, paged=True, **changes) == launches + of_all + pages


@pytest.mark.parametrize("kind", ["moe", "mla-moe"])
@torch.inference_mode()
def test_megatrons_experts_synchronize_with_the_host(kind: str) -> None:
    assert not Runner(model_of(kind)).recordable
    with pytest.raises(DataDependentOutputException):
        two_steps(kind)


@pytest.mark.parametrize("copies", [0, 100])
@pytest.mark.parametrize("kind", tiered(["moe", "mla-moe"], ("moe",)))
def test_texts_are_the_same_with_few_rows(
    kind: str, copies: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(experts, "COPIES", copies)
    prompts, settings = prompts_of(3), {"method": "mtp", "num_speculative_tokens": 3}
    answers = generate(Runner(model_of(kind)), prompts, 40).token_ids
    request.getfixturevalue("static_experts_everywhere")
    assert generate(Runner(model_of(kind)), prompts, 40, speculative=settings).token_ids == answers
