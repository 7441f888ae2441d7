"""heads/eagle3/: steps, losses and gradients against the paper's definition in plain float64; error messages."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import megatron_single
import pytest
import torch
from eagle_reference import (
    DRAFTED,
    HEADS,
    KD,
    LAYERS,
    READ,
    RECOMPUTE,
    STEPS,
    Reference,
    losses,
    rms,
    side_by_side,
    turned,
)
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron_single import VOCABULARY, make_batch, one_head, our_model
from tiers import tiered
from torch import Tensor

from benchmarks.harness import MIB, allocated_peak
from megatron_mtp.heads.eagle3.row import engine_layers
from megatron_mtp.losses.head_objective import depth_weights
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.model.draft_vocabulary import DraftVocabulary
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.spec.kinds import DRAFTERS

EAGLE3 = DRAFTERS["eagle3"]

pytestmark = pytest.mark.usefixtures("megatron")


def drafter_model(drafted: list[int] | None = None, **changes: Any) -> GPTModel:
    """Return a model with the drafter in training mode and a frozen trunk."""
    layers = {"num_layers": LAYERS, "drafter_layers": READ}
    return our_model(STEPS, drafted=drafted, **{**layers, **changes}).double()


LATENTS = RANK, KEY_RANK, CONTENT, TURNED, VALUE = 10, 12, 6, 4, 5


class LatentReference(Reference):
    """Latent attention whose latents depend on both halves of the input."""

    def heads(self, given: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        own = self.layer.self_attention
        latent = rms(own.linear_q_down_proj.weight @ given, own.q_layernorm.weight)
        query_NC = (own.linear_q_up_proj.weight @ latent).view(HEADS, CONTENT + TURNED)
        narrow, shared = (own.linear_kv_down_proj.weight @ given).split([KEY_RANK, TURNED])
        wide_NC = (own.linear_kv_up_proj.weight @ rms(narrow, own.kv_layernorm.weight)).view(HEADS, CONTENT + VALUE)
        shared_NC = turned_in_pairs(shared.expand(HEADS, TURNED), position)
        query_NC = torch.cat([query_NC[:, :CONTENT], turned_in_pairs(query_NC[:, CONTENT:], position)], dim=1)
        return query_NC, torch.cat([wide_NC[:, :CONTENT], shared_NC], dim=1), wide_NC[:, CONTENT:]


def turned_in_pairs(heads_NC: Tensor, position: int) -> Tensor:
    """Rotate channels paired with their neighbors, in the order of halves."""
    return turned(torch.cat((heads_NC[:, ::2], heads_NC[:, 1::2]), dim=-1), position)


@pytest.mark.parametrize("drafted", [None, DRAFTED], ids=["trunk's head", "own head"])
@pytest.mark.parametrize("recompute", [{}, RECOMPUTE], ids=["kept", "recomputed"])
def test_loss_and_gradients_are_those_of_the_definition(recompute: dict[str, Any], drafted: list[int] | None) -> None:
    ours, expected, found, wanted = losses(drafter_model(drafted, **recompute))
    assert ("mtp.layers.0.head" in found) == (drafted is not None)
    check_gradients(ours, expected, found, wanted)


def check_gradients(ours: Tensor, expected: Tensor, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    torch.testing.assert_close(ours, expected, rtol=5e-8, atol=0)  # the steps' weights are float32
    assert all(name.startswith("mtp.") for name in found)
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-7 * gradient.abs().max().item())


@pytest.mark.parametrize("recompute", tiered([{}, RECOMPUTE], (RECOMPUTE,)), ids=["kept", "recomputed"])
def test_loss_and_gradients_of_latent_attention_are_those_of_the_definition(recompute: dict[str, Any]) -> None:
    model = drafter_model(DRAFTED, drafter={"drafter_multi_latent_attention": LATENTS}, **recompute)
    check_gradients(*losses(model, kind=LatentReference))


@pytest.mark.parametrize(
    ("recompute", "most"), [({}, 26), pytest.param(RECOMPUTE, 10, marks=pytest.mark.matrix)], ids=["kept", "recomputed"]
)
def test_memory_of_each_further_step_is_bounded(
    recompute: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In units of a state of all positions: recomputed, a step stores its input, embedding, keys, values and state."""
    monkeypatch.setattr(megatron_single, "LENGTH", 256)
    peaks = []
    for steps in (3, 7):
        model, batch = (
            our_model(steps, num_layers=LAYERS, drafter_layers=READ, hidden_size=128, **recompute),
            make_batch(steps),
        )
        weights = depth_weights(MTPConfig(drafter="eagle3"), steps, 1.0)
        objective = one_head(weights, parallel_state.get_context_parallel_group(), KD, trains_trunk=False)
        named = [batch[name] for name in ("tokens", "position_ids", "attention_mask")]
        given = {
            "labels": batch["labels"],
            "output_processor": objective,
            "output_processor_context": [batch["depths"]],
        }
        peaks.append(allocated_peak(lambda: model(*named, **given).loss.backward(), on_cpu=True))  # noqa: B023
    unit = batch["tokens"].numel() * model.config.hidden_size * 4 / MIB
    assert (peaks[1] - peaks[0]) / 4 / unit < most


def earlier(states: list[Tensor]) -> Tensor:
    return torch.cat([side_by_side(states)[:1], side_by_side(states)[:-1]])


def other_layer(states: list[Tensor]) -> Tensor:
    return torch.cat([states[number] for number in (1, 2, 5)], dim=-1)


@pytest.mark.parametrize("wrong", [earlier, other_layer])
def test_features_of_other_positions_or_layers_are_seen(wrong: Callable[[list[Tensor]], Tensor]) -> None:
    ours, expected, _, _ = losses(drafter_model(DRAFTED), wrong)
    assert abs(ours - expected) / expected > 1e-3


def test_attention_to_the_future_of_a_step_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = drafter_model(DRAFTED)
    attention = model.mtp.layer.tf_layer.self_attention.core_attention
    masked = attention.forward

    def unmasked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **others: Any) -> Tensor:
        return masked(query, key, value, torch.zeros_like(mask), **others)

    monkeypatch.setattr(attention, "forward", unmasked)
    ours, expected, _, _ = losses(model)
    assert abs(ours - expected) / expected > 1e-3


def test_a_new_drafter_copies_trunk_rows_and_freezes_the_trunk() -> None:
    model = drafter_model(DRAFTED)
    model.mtp.begin_head(attached_of(model).head())
    assert torch.equal(model.mtp.layer.head, attached_of(model).head().weight[DRAFTED])
    assert {name.split(".")[0] for name, weight in model.named_parameters() if weight.requires_grad} == {"mtp"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_new_drafter_copies_rows_of_all_tensor_parallel_ranks(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, half = drafter_model(DRAFTED), VOCABULARY // 2
    drafted, whole_VH = torch.tensor(DRAFTED, device="cuda"), attached_of(model).head().weight
    slices = [DraftVocabulary(drafted, half, 2, each) for each in (0, 1)]

    def add_those_of_the_other(rows_NH: Tensor, group: object) -> None:
        others = slices[1 - rank]
        rows_NH[others.first : others.first + len(others.rows_K)] += whole_VH[(1 - rank) * half :][others.rows_K]

    monkeypatch.setattr(torch.distributed, "all_reduce", add_those_of_the_other)
    own_VH = whole_VH[rank * half : (rank + 1) * half]
    model.mtp.begin_head(replace(attached_of(model).head(), weight=own_VH, draft_vocabulary=slices[rank]))
    assert torch.equal(model.mtp.layer.head, whole_VH[drafted])


@pytest.mark.parametrize(
    ("chosen", "layers"), [((1, 2), 8), ((1, 2, 8), 8), ((0, 2, 4), 8), ((2, 2, 4), 8), ((4, 2, 6), 8), ((2, 2, 1), 4)]
)
def test_layers_that_do_not_exist_are_refused(chosen: tuple[int, ...], layers: int) -> None:
    given = " ".join(map(str, chosen))
    with pytest.raises(ValueError, match=rf"--drafter-layers is {given}, .* {layers} layers; give 3 rising"):
        EAGLE3.check_layers(chosen, layers)


def test_a_pipeline_stage_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="gives --drafter eagle3 a stage of its own"):
        drafter_model(mtp_standalone=True)


def test_the_default_layers_are_those_of_engines() -> None:
    assert EAGLE3.default_layers(32, None) == engine_layers(32) == (2, 16, 29)


def test_a_short_trunk_has_default_layers_or_is_refused() -> None:
    """Regression: (2, 2, 1) of four layers was rejected as if the user had given it."""
    assert [EAGLE3.default_layers(layers, None) for layers in (4, 5, 6, 7)] == [
        (1, 2, 3),
        (1, 2, 4),
        (1, 3, 5),
        (2, 3, 4),
    ]
    for layers in (4, 5, 6, 7):
        EAGLE3.check_layers(EAGLE3.default_layers(layers, None), layers)
    for layers in (1, 2, 3):
        with pytest.raises(ValueError, match=rf"eagle3 reads 3 layers .*, and the trunk has {layers};"):
            EAGLE3.check_layers(EAGLE3.default_layers(layers, None), layers)
    with pytest.raises(ValueError, match=r"one or more layers .* the trunk has 1; give a"):
        DRAFTERS["dflash"].check_layers(DRAFTERS["dflash"].default_layers(1, 5), 1)


def test_step_weights_decay_by_a_fifth_and_stray_flags_are_rejected() -> None:
    assert depth_weights(MTPConfig(drafter="eagle3"), 3, 1.0) == pytest.approx([1, 0.8, 0.64])
    with pytest.raises(ValueError, match=r"given without --drafter; give --drafter .* or drop it"):
        MTPConfig(drafter_steps=3)
    with pytest.raises(ValueError, match="--drafter is 'eagle2'; choose one of dflash, dflash2"):
        MTPConfig(drafter="eagle2")
