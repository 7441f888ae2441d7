"""Our MTP layers against Megatron's own and against plain torch: same weights and batch, losses and every gradient.

Router losses: Megatron routes shifted-in slots, ours masks them. The two are compared without our mask; the mask is
tested separately.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron_single import (
    LAMBDA,
    LENGTH,
    MOE,
    ROWS,
    backward_megatron,
    backward_ours,
    copy_weights,
    forward_ours,
    gradients,
    loss_of,
    make_batch,
    mean_losses,
    megatron_model,
    megatron_name,
    our_model,
    relative_difference,
)
from torch import Tensor
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu

from megatron_mtp.data.batch import DepthBatch

TOLERANCE = 1e-5
"""For float32: the largest difference in a tensor relative to its largest value."""

HIDDEN, HEADS, GROUPS = 32, 4, 2

pytestmark = pytest.mark.usefixtures("megatron")


# --- against Megatron ------------------------------------------------------------------------------------------------


def pair(depths: int, tied: bool = False, **changes: Any) -> tuple[GPTModel, GPTModel]:
    """Return our model and Megatron's, with the same weights."""
    ours, theirs = our_model(depths, tied, **changes), megatron_model(depths, tied, **changes)
    copy_weights(ours, theirs)
    return ours, theirs


def worst_gradient(ours: GPTModel, theirs: GPTModel) -> float:
    expected = gradients(theirs)
    return max(relative_difference(grad, expected[megatron_name(name)]) for name, grad in gradients(ours).items())


def assert_parity(
    ours: GPTModel, theirs: GPTModel, whole: dict[str, Any], note: Callable[..., None], **changes: Any
) -> None:
    losses = backward_ours(ours, whole, replace(whole["depths"], **changes))
    expected = backward_megatron(theirs, whole)
    differences = [*map(relative_difference, losses, expected)]
    worst = worst_gradient(ours, theirs)
    note("loss", max(differences))
    note("gradient", worst)
    assert max(differences) <= TOLERANCE
    assert worst <= TOLERANCE
    for name, grad in gradients(ours).items():
        assert ".experts." in name or grad.any(), f"the gradient of {name} is zero: the comparison says nothing"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("repeated", [False, True], ids=["own-layers", "repeated-layer"])
@pytest.mark.parametrize("depths", [1, 2, 3])
@pytest.mark.parametrize("kind", [{}, MOE], ids=["dense", "moe"])
def test_same_losses_and_gradients_as_megatron(
    kind: dict[str, Any], depths: int, repeated: bool, tied: bool, record_property: Callable[..., None]
) -> None:
    ours, theirs = pair(depths, tied, mtp_use_repeated_layer=repeated, **kind)
    assert_parity(ours, theirs, make_batch(depths), record_property)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_same_as_megatron_with_detached_heads(tied: bool, record_property: Callable[..., None]) -> None:
    ours, theirs = pair(2, tied, mtp_detach_heads=True)
    assert_parity(ours, theirs, make_batch(2), record_property)


def test_same_as_megatron_without_an_attention_mask(record_property: Callable[..., None]) -> None:
    batch = make_batch(2) | {"attention_mask": None}
    assert_parity(*pair(2), batch, record_property)


AUX_LOSSES = {
    "aux": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "seq-aux": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
    "z": {"moe_z_loss_coeff": 0.1},
}


@pytest.mark.parametrize("aux", AUX_LOSSES.values(), ids=AUX_LOSSES.keys())
@pytest.mark.parametrize("repeated", [False, True], ids=["own-layers", "repeated-layer"])
def test_same_as_megatron_with_router_losses(
    repeated: bool, aux: dict[str, Any], record_property: Callable[..., None]
) -> None:
    batch = make_batch(2)
    inside_DBS = torch.ones_like(batch["depths"].inside_DBS)  # Megatron's MTP layers have no notion of shifted-in slots
    ours, theirs = pair(2, mtp_use_repeated_layer=repeated, **{**MOE, **aux})
    assert_parity(ours, theirs, batch, record_property, inside_DBS=inside_DBS)


def test_same_as_megatron_per_token_where_no_depth_loses_a_token() -> None:
    """Megatron divides a depth's sum by the depth's own count, the paper by T: equal if the counts are."""
    depths = 2
    mask_BS = torch.ones(ROWS, LENGTH)
    mask_BS[:, :depths] = 0  # what the shifts drop
    batch = make_batch(depths, mask_BS)
    ours, theirs = pair(depths, calculate_per_token_loss=True)
    output = forward_ours(ours, batch, per_token=True)
    assert [sums.tokens for sums in output.heads[0].depths] == [output.main.tokens] * depths
    output.loss.backward()
    backward_megatron(theirs, batch, per_token=True)
    assert worst_gradient(ours, theirs) <= TOLERANCE


def test_an_empty_mask_gives_gradients_of_zero() -> None:
    """All slots masked; then all but the first: the trunk has a label there, no depth has."""
    only_first_BS = torch.zeros(ROWS, LENGTH)
    only_first_BS[0, 0] = 1
    for mask_BS, trunk_learns in ((torch.zeros(ROWS, LENGTH), False), (only_first_BS, True)):
        model = our_model(2)
        whole = make_batch(2, mask_BS)
        losses = backward_ours(model, whole)
        assert losses[1:].tolist() == [0, 0]
        for name, grad in gradients(model).items():
            learns = trunk_learns and not name.startswith("mtp.")
            assert grad.isfinite().all(), name
            assert grad.any() == learns, name


# --- the comparison can fail -----------------------------------------------------------------------------------------


def swap_halves_of_eh_proj(model: GPTModel, batch: DepthBatch) -> DepthBatch:
    with torch.no_grad():
        for layer in model.mtp.layers:
            layer.eh_proj.weight.copy_(layer.eh_proj.weight.roll(HIDDEN, dims=1))
    return batch


def chain_before_the_final_norm(model: GPTModel, batch: DepthBatch) -> DepthBatch:
    first, second = model.mtp.layers
    unnormed: list[Tensor] = []
    first.final_layernorm.register_forward_hook(lambda _, inputs, __: unnormed.append(inputs[0]))
    second.hnorm.register_forward_pre_hook(lambda _, __: (unnormed[0],))
    return batch


def later_tokens(_: GPTModel, batch: DepthBatch) -> DepthBatch:
    return replace(batch, tokens_DBS=batch.tokens_DBS.roll(-1, dims=2))


def later_labels(_: GPTModel, batch: DepthBatch) -> DepthBatch:
    return replace(batch, labels_DBS=batch.labels_DBS.roll(-1, dims=2))


def unshifted_mask(_: GPTModel, batch: DepthBatch) -> DepthBatch:
    return replace(batch, loss_mask_DBS=batch.loss_mask_BS.expand_as(batch.loss_mask_DBS))


@pytest.mark.parametrize(
    "fault", [swap_halves_of_eh_proj, chain_before_the_final_norm, later_tokens, later_labels, unshifted_mask]
)
def test_a_planted_fault_is_seen(fault: Callable[[GPTModel, DepthBatch], DepthBatch]) -> None:
    ours, theirs = pair(2)
    whole = make_batch(2)
    losses = backward_ours(ours, whole, fault(ours, whole["depths"]))
    expected = backward_megatron(theirs, whole)
    assert relative_difference(losses[0], expected[0]) <= TOLERANCE, "the trunk is not touched"
    assert relative_difference(losses[2], expected[2]) > 100 * TOLERANCE
    assert worst_gradient(ours, theirs) > 100 * TOLERANCE


def test_a_loss_weight_that_is_not_divided_by_depths_is_seen() -> None:
    ours, theirs = pair(2)
    whole = make_batch(2)
    backward_ours(ours, whole, factor=2 * LAMBDA)
    backward_megatron(theirs, whole)
    assert worst_gradient(ours, theirs) > 100 * TOLERANCE


# --- against plain torch ---------------------------------------------------------------------------------------------


def plain_norm(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return rms_norm(x, (HIDDEN,), p[f"{name}.weight"], eps=1e-5)


def plain_layer(p: dict[str, Tensor], name: str, x_BSH: Tensor) -> Tensor:
    """Compute a pre-norm transformer layer: causal grouped-query attention without positions, then SwiGLU."""
    rows, slots, _ = x_BSH.shape
    normed = plain_norm(p, f"{name}.input_layernorm", x_BSH)
    # Megatron stores the projections by group: the group's queries, its key, its value.
    qkv = (normed @ p[f"{name}.self_attention.linear_qkv.weight"].T).view(rows, slots, GROUPS, HEADS // GROUPS + 2, -1)
    query = qkv[:, :, :, :-2].flatten(2, 3).transpose(1, 2)
    key, value = (qkv[:, :, :, part].repeat_interleave(HEADS // GROUPS, dim=2).transpose(1, 2) for part in (-2, -1))
    attended = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
    x_BSH = x_BSH + attended @ p[f"{name}.self_attention.linear_proj.weight"].T
    gate, up = (plain_norm(p, f"{name}.pre_mlp_layernorm", x_BSH) @ p[f"{name}.mlp.linear_fc1.weight"].T).chunk(2, -1)
    return x_BSH + (silu(gate) * up) @ p[f"{name}.mlp.linear_fc2.weight"].T


def plain_losses(
    p: dict[str, Tensor], batch: dict[str, Any], depths: int, sequential: bool, vocabulary: int | None = None
) -> Tensor:
    """Return mean losses of the trunk and of every depth, [1 + D], from their definition, without padding rows of the
    head.
    """
    tokens, labels, mask = batch["tokens"], batch["labels"], batch["loss_mask"]
    embed = p["embedding.word_embeddings.weight"]
    hidden = embed[tokens]
    for layer in range(2):
        hidden = plain_layer(p, f"decoder.layers.{layer}", hidden)
    trunk = plain_norm(p, "decoder.final_layernorm", hidden)
    states = [trunk]
    for depth in range(1, depths + 1):
        name = f"mtp.layers.{depth - 1}"
        state = trunk
        if sequential:
            embedded = embed[plain_shift(tokens, depth)]
            both = (plain_norm(p, f"{name}.enorm", embedded), plain_norm(p, f"{name}.hnorm", states[-1]))
            state = torch.cat(both, dim=-1) @ p[f"{name}.eh_proj.weight"].T
        states.append(plain_norm(p, f"{name}.final_layernorm", plain_layer(p, f"{name}.tf_layer", state)))
    means = []
    for depth, state in enumerate(states):
        logits = state @ p["output_layer.weight"][:vocabulary].T
        losses = cross_entropy(logits.flatten(0, 1), plain_shift(labels, depth).flatten(), reduction="none")
        kept = plain_shift(mask, depth).flatten()
        means.append((losses * kept).sum() / kept.sum())
    return torch.stack(means)


def plain_shift(values_BS: Tensor, depth: int) -> Tensor:
    return torch.cat([values_BS[:, depth:], torch.zeros_like(values_BS[:, :depth])], dim=1)


@pytest.mark.parametrize("depths", [1, 3])
@pytest.mark.parametrize("architecture", ["sequential", "parallel"])
def test_same_as_plain_torch(architecture: str, depths: int, record_property: Callable[..., None]) -> None:
    model = our_model(depths, architecture=architecture, position="none")
    whole = make_batch(depths)
    losses = backward_ours(model, whole)

    parameters = dict(model.named_parameters())
    expected = plain_losses(parameters, whole, depths, architecture == "sequential")
    total = expected[0] + LAMBDA / depths * expected[1:].sum()
    grads = dict(zip(parameters, torch.autograd.grad(total, list(parameters.values())), strict=True))

    worst = max(relative_difference(grad, grads[name]) for name, grad in gradients(model).items())
    record_property("gradient", worst)
    assert max(map(relative_difference, losses, expected.detach())) <= TOLERANCE
    assert worst <= TOLERANCE
    assert all(grad.any() for grad in grads.values())


TOKENS = 83
"""Tokens in a vocabulary of 96 rows."""
PATHS: dict[str, dict[str, Any]] = {
    "usual": {},
    "chunked trunk": {"linear_main": True},
    "fused": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"},
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_vocabulary_padding_does_not_affect_any_loss(path: dict[str, Any]) -> None:
    """Regression: padding rows took part in the softmax of trunk and MTP layers, so losses depended on their number and
    on TP.
    """
    objective = {name: value for name, value in path.items() if name == "linear_main"}
    model = our_model(2, position="none", tokens=TOKENS, **{name: path[name] for name in path if name not in objective})
    whole = make_batch(2, tokens=TOKENS)
    output = forward_ours(model, whole, **objective)
    loss_of(output).backward()

    parameters = dict(model.named_parameters())
    expected = plain_losses(parameters, whole, 2, sequential=True, vocabulary=TOKENS)
    total = expected[0] + LAMBDA / 2 * expected[1:].sum()
    grads = dict(zip(parameters, torch.autograd.grad(total, list(parameters.values())), strict=True))
    assert max(map(relative_difference, mean_losses(output), expected.detach())) <= TOLERANCE
    worst = max(relative_difference(grad, grads[name]) for name, grad in gradients(model).items())
    assert worst <= (2e-2 if "cross_entropy_loss_fusion" in path else TOLERANCE), "Megatron's fused loss rounds to bf16"
    for name in ("output_layer.weight", "embedding.word_embeddings.weight"):
        assert not gradients(model)[name][TOKENS:].any()


def test_vocabulary_padding_does_not_affect_a_plain_gpt_loss() -> None:
    whole = make_batch(0, tokens=TOKENS)
    arguments = whole["tokens"], whole["position_ids"], whole["attention_mask"]
    model = our_model(None, tokens=TOKENS)
    expected = cross_entropy(model(*arguments)[..., :TOKENS].flatten(0, 1), whole["labels"].flatten(), reduction="none")
    assert relative_difference(model(*arguments, labels=whole["labels"]).flatten(), expected) <= TOLERANCE


# --- routers skip slots that were shifted in --------------------------------------------------------------------------


def test_the_routers_of_an_mtp_layer_get_a_mask_of_shifted_positions() -> None:
    model = our_model(2, **MOE)
    masks_BS: list[Tensor] = []
    for layer in model.mtp.layers:
        layer.tf_layer.mlp.router.register_forward_pre_hook(lambda _, args: masks_BS.append(args[1].T))
    forward_ours(model, make_batch(2))
    for depth, mask_BS in enumerate(masks_BS, start=1):
        assert mask_BS.tolist() == [[False] * (LENGTH - depth) + [True] * depth] * ROWS


def test_a_router_loss_ignores_shifted_in_positions() -> None:
    """Depth 1 ends one slot early: the router's gradient of only its balancing loss is zero at the last slot."""
    model = our_model(1, **{**MOE, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0})
    router = model.mtp.layers[0].tf_layer.mlp.router
    inputs_SBH: list[Tensor] = []

    def keep(_: Any, args: tuple[Tensor, ...]) -> None:
        args[0].retain_grad()
        inputs_SBH.append(args[0])

    router.register_forward_pre_hook(keep)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0).cuda())
    output = forward_ours(model, make_batch(1), factor=0.0)
    (output.loss - output.main.total).backward()  # 0; only the balancing loss remains
    seen_S = inputs_SBH[0].grad.abs().sum(dim=(1, 2)) > 0
    assert seen_S.tolist() == [True] * (LENGTH - 1) + [False]


def test_expert_bias_ignores_shifted_in_positions() -> None:
    model = our_model(2, **{**MOE, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"})
    forward_ours(model, make_batch(2))
    counts = [layer.tf_layer.mlp.router.local_tokens_per_expert.sum() for layer in model.mtp.layers]
    assert counts == [ROWS * (LENGTH - 1) * 2, ROWS * (LENGTH - 2) * 2]
