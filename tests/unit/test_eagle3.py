"""heads/eagle3/: steps, losses and gradients against the paper's definition in plain float64; what is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import megatron_single
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron_single import VOCABULARY, make_batch, one_head, our_model
from tiers import tiered
from torch import Tensor
from torch.nn.functional import embedding, kl_div, silu

from benchmarks.harness import MIB, allocated_peak
from megatron_mtp.heads.eagle3.row import engine_layers
from megatron_mtp.losses import depth_loss
from megatron_mtp.losses.objective import depth_weights
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.model.draft_vocabulary import DraftVocabulary
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.spec.kinds import DRAFTERS

STEPS, LAYERS, READ, HEADS, GROUPS, CHANNELS = 3, 5, (1, 2, 4), 4, 2, 8
DRAFTED = sorted({*range(0, VOCABULARY, 3), 1})
EAGLE3 = DRAFTERS["eagle3"]
KD = depth_loss(MTPConfig(mtp_loss="kd"))
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

pytestmark = pytest.mark.usefixtures("megatron")


def drafter_model(drafted: list[int] | None = None, **changes: Any) -> GPTModel:
    """With the drafter in training; the trunk is frozen."""
    layers = {"num_layers": LAYERS, "drafter_layers": READ}
    return our_model(STEPS, drafted=drafted, **{**layers, **changes}).double()


def states_after(model: GPTModel, batch: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
    """The trunk's states after 0, 1, .. layers, and after its final norm, each [S, B, H]."""
    hidden = [model.embedding(batch["tokens"], batch["position_ids"])]
    angles = attached_of(model).rotary_angles(hidden[0].size(0))[0]
    for layer in model.decoder.layers:
        hidden.append(layer(hidden[-1], attention_mask=batch["attention_mask"], rotary_pos_emb=angles)[0])
    return hidden, model.decoder.final_layernorm(hidden[-1])


def rms(value: Tensor, weight: Tensor) -> Tensor:
    return value / (value.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(heads_GC: Tensor, position: int) -> Tensor:
    """One position's heads with rotary angles (float32, as Megatron's): each channel of the front half is turned with
    one of the back half."""
    channels = heads_GC.size(-1)
    angles = position * (1 / 10000.0 ** (torch.arange(0, channels, 2) / channels))
    front, back = heads_GC.chunk(2, dim=-1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat((front * cosine - back * sine, back * cosine + front * sine), dim=-1)


class Reference:
    """One text at a time, one position and step at a time, from the weights alone."""

    def __init__(self, model: GPTModel) -> None:
        layer, self.table = model.mtp.layer, model.embedding.word_embeddings.weight
        self.weights = dict(layer.named_parameters())
        self.norms = layer.tf_layer.input_layernorm
        self.layer, self.own = layer.tf_layer, layer

    def features(self, states: Tensor) -> Tensor:
        """What step 1 reads, of the trunk's states that are read side by side."""
        return states @ self.own.fc.weight.t()

    def inputs(self, feature_H: Tensor, embedded_H: Tensor) -> tuple[Tensor, Tensor]:
        """The residual of the layer, and the input of its attention."""
        both = rms(embedded_H, self.norms.enorm.weight), rms(feature_H, self.norms.hnorm.weight)
        return feature_H, torch.cat(both)

    def normed(self, states_SH: Tensor) -> Tensor:
        """What the head reads."""
        return rms(states_SH, self.own.norm.weight)

    def heads(self, given: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a position, all with as many heads."""
        mixed = (self.layer.self_attention.linear_qkv.weight @ given).view(GROUPS, HEADS // GROUPS + 2, CHANNELS)
        key_NC, value_NC = (part.repeat_interleave(HEADS // GROUPS, 0) for part in (mixed[:, -2], mixed[:, -1]))
        return turned(mixed[:, :-2].flatten(0, 1), position), turned(key_NC, position), value_NC

    def step(self, feature_H: Tensor, token: Tensor, position: int, seen: list[tuple[Tensor, Tensor]]) -> Any:
        """The state [H], and the step's keys and values; `seen` are those before it."""
        attention, mlp = self.layer.self_attention, self.layer.mlp
        residual_H, given = self.inputs(feature_H, embedding(token, self.table))
        query_NC, *own = self.heads(given, position)
        keys, values = (torch.stack([each[part] for each in (*seen, own)]) for part in (0, 1))
        weights = (torch.einsum("nc,tnc->nt", query_NC, keys) / query_NC.size(-1) ** 0.5).softmax(-1)
        attended = torch.einsum("nt,tnc->nc", weights, values).flatten()
        state_H = residual_H + attention.linear_proj.weight @ attended
        gate, up = (mlp.linear_fc1.weight @ rms(state_H, self.layer.pre_mlp_layernorm.weight)).chunk(2)
        return state_H + mlp.linear_fc2.weight @ (silu(gate) * up), own

    def steps(self, features_SH: Tensor, tokens_KS: Tensor) -> Tensor:
        """States of step 1 .. K at every position, [K, S, H]: step k of position i stands at i + k - 1."""
        first, states = [], []
        for position, feature_H in enumerate(features_SH):
            state_H, own = self.step(feature_H, tokens_KS[0, position], position, first)
            first.append(own)
            chain, of_position = list(first), [state_H]
            for number in range(1, len(tokens_KS)):
                state_H, own = self.step(state_H, tokens_KS[number, position], position + number, chain)
                chain.append(own)
                of_position.append(state_H)
            states.append(torch.stack(of_position))
        return torch.stack(states, dim=1)


LATENTS = RANK, KEY_RANK, CONTENT, TURNED, VALUE = 10, 12, 6, 4, 5


class LatentReference(Reference):
    """Latent attention, whose latents are made of both halves of the input."""

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
    """The same of channels that are turned with their neighbors, in the order of halves."""
    return turned(torch.cat((heads_NC[:, ::2], heads_NC[:, 1::2]), dim=-1), position)


def reference_loss(
    model: GPTModel, batch: dict[str, Any], read: Callable[[list[Tensor]], Tensor], kind: type[Reference] = Reference
) -> Tensor:
    """sum_k 0.8^(k - 1) times the mean KL divergence of step k from the trunk's distribution of the same token."""
    with torch.no_grad():
        after, last_SBH = states_after(model, batch)
        trunk_SBV = last_SBH @ attached_of(model).head().weight.t()
    drafted = torch.arange(VOCABULARY) if model.mtp.draft_vocabulary is None else model.mtp.draft_vocabulary
    head = model.mtp.layer.head if model.mtp.layer.head is not None else attached_of(model).head().weight
    reference, depths = kind(model), batch["depths"]
    features_SBH = reference.features(read([*after, last_SBH]))
    total = torch.zeros((), dtype=torch.double)
    for row in range(len(batch["tokens"])):
        states_KSH = reference.steps(features_SBH[:, row], depths.tokens_DBS[:, row])
        for number, states_SH in enumerate(states_KSH):
            inside = len(states_SH) - number - 1
            log_q = (reference.normed(states_SH) @ head.t()).log_softmax(-1)[:inside]
            log_p = trunk_SBV[number + 1 :, row, drafted].log_softmax(-1)
            mask_S = depths.loss_mask_DBS[number, row, :inside].double()
            divergence_S = kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
            mean = (divergence_S * mask_S).sum() / depths.whole_tokens[1 + number]
            total = total + 0.8**number * mean
    return total


def side_by_side(after: list[Tensor]) -> Tensor:
    return torch.cat([after[number] for number in READ], dim=-1)


def losses(
    model: GPTModel,
    read: Callable[[list[Tensor]], Tensor] = side_by_side,
    name: str = "eagle3",
    kind: type[Reference] = Reference,
) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Ours and the reference's loss, and the gradients of both by name."""
    batch = make_batch(STEPS)
    settings = MTPConfig(drafter=name, mtp_loss="kd")
    weights, group = depth_weights(settings, STEPS, 1.0), parallel_state.get_context_parallel_group()
    output = model(
        *(batch[name] for name in ("tokens", "position_ids", "attention_mask")),
        labels=batch["labels"],
        output_processor=one_head(weights, group, KD, linear_main=True, trains_trunk=False),
        output_processor_context=[batch["depths"]],
    )
    ours = (output.loss - output.main.total) / output.main.tokens
    expected = reference_loss(model, batch, read, kind)
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    trained = [model.get_parameter(name) for name in names]
    found, wanted = (dict(zip(names, torch.autograd.grad(loss, trained), strict=True)) for loss in (ours, expected))
    return ours, expected, found, wanted


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
def test_what_a_further_step_holds(recompute: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In units of a state of all positions: recomputed, a step keeps its input, embedding, keys, values and state."""
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


def test_a_step_that_sees_its_own_future_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = drafter_model(DRAFTED)
    attention = model.mtp.layer.tf_layer.self_attention.core_attention
    masked = attention.forward

    def unmasked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **others: Any) -> Tensor:
        return masked(query, key, value, torch.zeros_like(mask), **others)

    monkeypatch.setattr(attention, "forward", unmasked)
    ours, expected, _, _ = losses(model)
    assert abs(ours - expected) / expected > 1e-3


def test_a_new_drafter_begins_with_the_trunks_rows_and_the_trunk_stays_frozen() -> None:
    model = drafter_model(DRAFTED)
    model.mtp.begin_head(attached_of(model).head())
    assert torch.equal(model.mtp.layer.head, attached_of(model).head().weight[DRAFTED])
    assert {name.split(".")[0] for name, weight in model.named_parameters() if weight.requires_grad} == {"mtp"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_new_drafter_begins_with_the_rows_of_all_tensor_parallel_ranks(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.raises(
        ValueError, match=f"--drafter-layers is {given}, and the trunk has {layers} layers; give 3 rising"
    ):
        EAGLE3.check_layers(chosen, layers)


def test_a_pipeline_stage_of_its_own_is_refused() -> None:
    with pytest.raises(
        ValueError, match="gives --drafter eagle3 a stage of its own, but it belongs to the stage of the output layer"
    ):
        drafter_model(mtp_standalone=True)


def test_the_default_layers_are_those_of_engines() -> None:
    assert EAGLE3.default_layers(32, None) == engine_layers(32) == (2, 16, 29)


def test_a_short_trunk_has_default_layers_or_is_refused() -> None:
    """(2, 2, 1) of four layers was refused as if it had been typed."""
    assert [EAGLE3.default_layers(layers, None) for layers in (4, 5, 6, 7)] == [
        (1, 2, 3),
        (1, 2, 4),
        (1, 3, 5),
        (2, 3, 4),
    ]
    for layers in (4, 5, 6, 7):
        EAGLE3.check_layers(EAGLE3.default_layers(layers, None), layers)
    for layers in (1, 2, 3):
        with pytest.raises(
            ValueError, match=f"eagle3 reads 3 layers before the trunk's last, and the trunk has {layers};"
        ):
            EAGLE3.check_layers(EAGLE3.default_layers(layers, None), layers)
    with pytest.raises(
        ValueError, match="reads one or more layers before the trunk's last, and the trunk has 1; give a"
    ):
        DRAFTERS["dflash"].check_layers(DRAFTERS["dflash"].default_layers(1, 5), 1)


def test_weights_fall_by_a_fifth_a_step_and_flags_without_a_drafter_are_refused() -> None:
    assert depth_weights(MTPConfig(drafter="eagle3"), 3, 1.0) == pytest.approx([1, 0.8, 0.64])
    with pytest.raises(ValueError, match=r"was given without --drafter; give --drafter .* or peagle, or drop it"):
        MTPConfig(drafter_steps=3)
    with pytest.raises(ValueError, match="--drafter is 'eagle2'; choose one of dflash, dflash2"):
        MTPConfig(drafter="eagle2")
