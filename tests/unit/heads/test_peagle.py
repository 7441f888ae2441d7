"""heads/peagle: losses and gradients against the definition in plain float64, and what a mask may attend to."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from eagle_reference import compared, rms, side_by_side, states_after, turned
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron_single import LENGTH, VOCABULARY, make_batch, one_head, our_model
from tiers import tiered
from torch import Tensor
from torch.nn.functional import embedding, kl_div, silu

from megatron_mtp.data.batch import with_blocks
from megatron_mtp.heads.peagle.block import TextAndMasks
from megatron_mtp.losses.head_objective import depth_weights
from megatron_mtp.losses.table import depth_loss
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.spec.kinds import DRAFTERS

DRAFTS, LAYERS, READ, HEADS, GROUPS, MASK = 3, 5, (1, 2, 4), 4, 2, 7
DRAFTED = sorted({*range(0, VOCABULARY, 3), 1})
SETTINGS: dict[str, Any] = {"drafter": "peagle", "drafter_num_layers": 2, "drafter_mask_token": MASK}

pytestmark = pytest.mark.usefixtures("megatron")


def drafter_model(drafted: list[int] | None = None, **others: Any) -> GPTModel:
    """Return a model with the drafter in training mode and a frozen trunk."""
    given: dict[str, Any] = {"num_layers": LAYERS, "drafter_layers": READ, "drafter": {**SETTINGS, **others}}
    return our_model(DRAFTS, drafted=drafted, **given).double()


class Reference:
    """Compute one sequence at a time, row by row, from the weights."""

    def __init__(self, model: GPTModel, window: int | None, before_residual: bool) -> None:
        self.layer, self.table = model.mtp.layer, model.embedding.word_embeddings.weight
        self.head = self.layer.head if self.layer.head is not None else attached_of(model).head().weight
        self.window, self.before_residual = window or LENGTH + DRAFTS, before_residual

    def drafts(self, states_SX: Tensor, next_S: Tensor, place: int) -> Tensor:
        """Return logits [K, N] of the drafts after a position; later rows are left out."""
        masks = DRAFTS - 1
        read = torch.cat([states_SX[: place + 1], self.layer.mask_hidden[0].expand(masks, -1)])
        tokens = torch.cat([next_S[: place + 1], torch.tensor([MASK] * masks)])
        features_RH = read @ self.layer.fc.weight.t()
        norms = self.layer.layers[0].input_layernorm
        normed = rms(features_RH, norms.hnorm.weight)
        given = torch.cat([rms(embedding(tokens, self.table), norms.enorm.weight), normed], dim=-1)
        state_RH = normed if self.before_residual else features_RH
        for number, layer in enumerate(self.layer.layers):
            if number:
                given = rms(state_RH, layer.input_layernorm.weight)
            state_RH = state_RH + self.attended(layer.self_attention, given)
            gate, up = (rms(state_RH, layer.pre_mlp_layernorm.weight) @ layer.mlp.linear_fc1.weight.t()).chunk(2, -1)
            state_RH = state_RH + (silu(gate) * up) @ layer.mlp.linear_fc2.weight.t()
        return rms(state_RH[-DRAFTS:], self.layer.norm.weight) @ self.head.t()

    def attended(self, own: Any, given_RX: Tensor) -> Tensor:
        """Let each row attend to those before it, in its window."""
        rows = []
        mixed = (given_RX @ own.linear_qkv.weight.t()).unflatten(-1, (GROUPS, HEADS // GROUPS + 2, -1))
        query, key, value = mixed[:, :, :-2].flatten(1, 2), mixed[:, :, -2], mixed[:, :, -1]
        query, key = (torch.stack([turned(one, n) for n, one in enumerate(each)]) for each in (query, key))
        key, value = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (key, value))
        for number, query_NC in enumerate(query):
            seen = slice(max(number + 1 - self.window, 0), number + 1)
            scores = torch.einsum("nc,tnc->nt", query_NC, key[seen]) / query_NC.size(-1) ** 0.5
            rows.append(torch.einsum("nt,tnc->nc", scores.softmax(-1), value[seen]).flatten())
        return torch.stack(rows) @ own.linear_proj.weight.t()


def reference_loss(
    model: GPTModel, batch: dict[str, Any], read: Callable[[list[Tensor]], Tensor], window: int | None, before: bool
) -> Tensor:
    """Return sum_k w_k times the mean KL divergence of draft k from the trunk's distribution, over all blocks."""
    with torch.no_grad():
        after, last_SBH = states_after(model, batch)
        trunk_SBV = last_SBH @ attached_of(model).head().weight.t()
    drafted = torch.arange(VOCABULARY) if model.mtp.draft_vocabulary is None else model.mtp.draft_vocabulary
    reference, depths, states_SBX = Reference(model, window, before), batch["depths"], read(after)
    blocks = range(LENGTH) if depths.blocks_A is None else depths.blocks_A.tolist()
    total_K = torch.zeros(DRAFTS, dtype=torch.double)
    for row in range(len(batch["tokens"])):
        for place in blocks:
            log_q_KN = reference.drafts(states_SBX[:, row], depths.tokens_DBS[0, row], place).log_softmax(-1)
            for number in range(min(DRAFTS, LENGTH - place - 1)):
                log_p_N = trunk_SBV[place + number + 1, row, drafted].log_softmax(-1)
                divergence = kl_div(log_q_KN[number], log_p_N, log_target=True, reduction="sum")
                total_K[number] += divergence * (depths.loss_mask_DBS[number, row, place] > 0)
    weights_K = torch.tensor([1, 0.7, 0.49], dtype=torch.double)
    return (weights_K * total_K / (depths.whole_tokens[1:] / depths.block_weight)).sum()


def losses(
    model: GPTModel,
    read: Callable[[list[Tensor]], Tensor] = side_by_side,
    blocks: int | None = None,
    has_mask: bool = True,
    window: int | None = None,
    before: bool = False,
) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return our loss and the reference's, and both gradients by name."""
    batch = make_batch(DRAFTS)
    if blocks is not None:
        batch["depths"] = with_blocks(batch["depths"], blocks, (1, 2), LENGTH)
    settings = MTPConfig(**SETTINGS, **DRAFTERS["peagle"].loss)
    loss, group = depth_loss(settings), parallel_state.get_context_parallel_group()
    weights = depth_weights(settings, DRAFTS, 1.0, loss)
    objective = one_head(weights, group, loss, linear_main=True, trains_trunk=False)
    return compared(model, batch, objective, lambda: reference_loss(model, batch, read, window, before), has_mask)


@pytest.mark.parametrize("drafted", [None, DRAFTED], ids=["trunk's head", "own head"])
@pytest.mark.parametrize("blocks", tiered([None, 5], (5,)), ids=["everywhere", "five"])
def test_loss_and_gradients_are_those_of_the_definition(blocks: int | None, drafted: list[int] | None) -> None:
    ours, expected, found, wanted = losses(drafter_model(drafted), blocks=blocks)
    torch.testing.assert_close(ours, expected, rtol=5e-7, atol=0)  # weights and masks are float32
    assert ("mtp.layers.0.head" in found) == (drafted is not None)
    assert "mtp.layers.0.mask_hidden" in found
    assert all(name.startswith("mtp.") for name in found)
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=3e-7 * gradient.abs().max().item())


def test_a_window_and_a_normed_residual_match_the_definition() -> None:
    """The window is counted from a mask's own position; without a given mask, attention is causal."""
    model = drafter_model(drafter_window_size=4, drafter_norm_before_residual=1)
    ours, expected, _, _ = losses(model, has_mask=False, window=4, before=True)
    torch.testing.assert_close(ours, expected, rtol=5e-7, atol=0)


def earlier(states: list[Tensor]) -> Tensor:
    return torch.cat([side_by_side(states)[:1], side_by_side(states)[:-1]])


def test_features_of_other_positions_are_seen() -> None:
    ours, expected, _, _ = losses(drafter_model(), earlier, blocks=5)
    assert abs(ours - expected) / expected > 1e-3


def test_non_causal_mask_attention_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: masks of a block attend to each other in both directions."""
    made = TextAndMasks.__init__

    def unaware(self: TextAndMasks, *args: Any, **others: Any) -> None:
        made(self, *args, **others)
        self.window = None

    monkeypatch.setattr(TextAndMasks, "__init__", unaware)
    ours, expected, _, _ = losses(drafter_model(), blocks=5)
    assert abs(ours - expected) / expected > 1e-4
