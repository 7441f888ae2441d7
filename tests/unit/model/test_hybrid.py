"""model/hybrid.py: a hybrid with a GPT's weights equals the GPT, and ours equals Megatron's hybrid with its own MTP."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hybrid_single import hybrid_name, megatrons_hybrid, our_hybrid
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.hybrid import hybrid_layer_specs
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron_single import (
    LATENT,
    MOE,
    backward_megatron,
    backward_ours,
    copy_weights,
    gradients,
    make_batch,
    megatron_name,
    our_model,
    relative_difference,
    transformer_config,
)

from megatron_mtp.model.hybrid import stack_spec
from megatron_mtp.training import forward_step

pytestmark = pytest.mark.usefixtures("megatron")


# --- against a GPT ---------------------------------------------------------------------------------------------------

GPT_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dense": ("*", "-", {}),
    "moe": ("*", "E", {**MOE, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}),
    "latent": ("+", "-", LATENT),
    "latent-moe": ("+", "E", {**LATENT, **MOE}),
}


def gpt_and_hybrid(kind: str, depths: int, **changes: Any) -> tuple[LanguageModule, HybridModel]:
    attention, mlp, fields = GPT_KINDS[kind]
    gpt = our_model(depths, **fields, **changes)
    layer = attention + mlp
    hybrid = our_hybrid("/".join([2 * layer, *[layer] * depths]), **fields, **changes)
    weights = {hybrid_name(name): weight for name, weight in gpt.named_parameters()}
    own = dict(hybrid.named_parameters())
    assert weights.keys() == own.keys()
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(weights[name])
    return gpt, hybrid


@pytest.mark.parametrize("kind", GPT_KINDS)
@pytest.mark.parametrize("depths", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [{}, {"tied": True}, {"mtp_use_repeated_layer": True}, {"architecture": "parallel"}],
    ids=["untied", "tied", "repeated", "parallel"],
)
def test_a_hybrid_with_the_weights_of_a_gpt_is_that_gpt(
    kind: str, depths: int, changes: dict[str, Any], record_property: Callable[..., None]
) -> None:
    gpt, hybrid = gpt_and_hybrid(kind, depths, **changes)
    whole = make_batch(depths)
    expected, losses = backward_ours(gpt, whole), backward_ours(hybrid, whole)
    of_gpt, of_hybrid = gradients(gpt), gradients(hybrid)
    worst = max(relative_difference(of_hybrid[hybrid_name(name)], grad) for name, grad in of_gpt.items())
    record_property("gradient", worst)
    assert torch.equal(losses, expected)
    assert worst <= 1e-6
    for name, grad in of_gpt.items():
        assert ".experts." in name or grad.any(), f"the gradient of {name} is zero: the comparison says nothing"


def test_without_an_objective_a_hybrid_has_logits_and_a_loss() -> None:
    gpt, hybrid = gpt_and_hybrid("dense", 1)
    whole = make_batch(0)
    arguments = whole["tokens"], whole["position_ids"], whole["attention_mask"]
    assert torch.equal(hybrid(*arguments), gpt(*arguments))
    assert torch.equal(hybrid(*arguments, labels=whole["labels"]), gpt(*arguments, labels=whole["labels"]))


# --- against Megatron ------------------------------------------------------------------------------------------------

DOUBLE = {"params_dtype": torch.float64}
"""In float32, sums of decays lose up to 1e-5 of a gradient."""

PATTERNS = ("M-*-/*-", "M-M-/M-/M-", "G-*E/GE", "GM*-/*-/*-", "M+-/M+")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_same_losses_and_gradients_as_megatrons_own_hybrid(
    pattern: str, tied: bool, record_property: Callable[..., None]
) -> None:
    changes = DOUBLE | (MOE if "E" in pattern else {}) | (LATENT if "+" in pattern else {})
    ours, theirs = our_hybrid(pattern, tied, **changes).double(), megatrons_hybrid(pattern, tied, **changes).double()
    copy_weights(ours, theirs)
    whole = make_batch(pattern.count("/"))
    losses, expected = backward_ours(ours, whole), backward_megatron(theirs, whole)
    of_theirs = gradients(theirs)
    worst = max(relative_difference(grad, of_theirs[megatron_name(name)]) for name, grad in gradients(ours).items())
    record_property("gradient", worst)
    assert max(map(relative_difference, losses, expected)) <= 1e-6
    assert worst <= 1e-6


@pytest.mark.parametrize("pattern", PATTERNS[:3])
def test_checkpoints_have_the_keys_of_megatrons_own_hybrid(pattern: str) -> None:
    changes = MOE if "E" in pattern else {}
    ours, theirs = our_hybrid(pattern, **changes), megatrons_hybrid(pattern, **changes)
    keys = ({entry.key for entry in model.sharded_state_dict().values()} for model in (ours, theirs))
    assert next(keys) == next(keys)


# --- recomputation and frozen trunks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["*-*-/*-", "M-G-/MG-"])
@pytest.mark.parametrize("method", ["uniform", "block"])
def test_recomputing_activations_changes_no_gradient(pattern: str, method: str) -> None:
    whole = make_batch(1)
    recomputed = DOUBLE | {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": 1}
    plain, saving = our_hybrid(pattern, **DOUBLE).double(), our_hybrid(pattern, **recomputed).double()
    assert torch.equal(backward_ours(plain, whole), backward_ours(saving, whole))
    of_plain = gradients(plain)
    assert max(relative_difference(grad, of_plain[name]) for name, grad in gradients(saving).items()) <= 1e-6


def test_a_depth_recomputes_its_stack_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = our_hybrid("*-/*-", recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    mlp, calls = model.mtp.layers[0].tf_layer.layers[1].mlp, []
    mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    backward_ours(model, make_batch(1))
    assert len(calls) == 2, "once forward, once to recompute"


@pytest.mark.parametrize("pattern", ["*-*-/*-", "M-G-/MG-"])
def test_a_frozen_trunk_gets_no_gradient(pattern: str) -> None:
    model = our_hybrid(pattern, settings={"mtp_train_only": True})
    backward_ours(model, make_batch(1))
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if name.startswith("mtp.")}


def test_a_draft_vocabulary_works_as_on_a_gpt() -> None:
    drafted = [*range(0, 96, 3)]
    gpt, hybrid = gpt_and_hybrid("dense", 2, drafted=drafted)
    whole = make_batch(2)
    assert torch.equal(backward_ours(hybrid, whole), backward_ours(gpt, whole))


@pytest.mark.parametrize("pattern", [None, "M*-"])
def test_megatrons_own_mamba_layers_get_the_document_indices(
    pattern: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_step, "get_args", lambda: Namespace(hybrid_layer_pattern=pattern))
    monkeypatch.setattr(forward_step, "update_seqlen_stats_from_cu_seqlens", lambda _: None)
    offsets = {"cu_seqlens": torch.tensor([0, 2, 5, 5]), "cu_seqlens_padded": torch.tensor([0, 4, 8, 8])}
    packed = forward_step.packed_seq_params(offsets)
    assert packed is not None
    assert (None if packed.seq_idx is None else packed.seq_idx.tolist()) == (pattern and [[0] * 4 + [1] * 4])


# --- Transformer Engine ----------------------------------------------------------------------------------------------


def test_with_te_queries_and_keys_have_the_norms_of_a_gpt() -> None:
    """Regression: Megatron's own spec omits them regardless of --qk-layernorm; TE itself may be missing here."""
    config = transformer_config(None, qk_layernorm=True)
    config.transformer_impl = "transformer_engine"  # cannot be requested without TE
    parts = stack_spec(config).submodules
    attention = parts.attention_layer.submodules.self_attention.submodules
    latent = parts.mla_layer.submodules.self_attention.submodules
    assert attention.q_layernorm is attention.k_layernorm is hybrid_layer_specs.TENorm
    fused = hybrid_layer_specs.TELayerNormColumnParallelLinear
    assert latent.linear_q_up_proj is latent.linear_kv_up_proj is fused
    config.qk_layernorm = False
    assert stack_spec(config).submodules.attention_layer.submodules.self_attention.submodules.q_layernorm is None


def test_sparse_attention_without_transformer_engine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"D \(sparse attention\), .* Transformer Engine's modules"):
        our_hybrid("D-D-", **LATENT, experimental_attention_variant="dsa")
