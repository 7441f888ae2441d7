"""EAGLE-3 in plain torch, and its losses."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron_single import VOCABULARY, make_batch, one_head
from torch import Tensor
from torch.nn.functional import embedding, kl_div, silu

from megatron_mtp.losses.head_objective import depth_weights
from megatron_mtp.losses.table import depth_loss
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.spec.config import MTPConfig

STEPS, LAYERS, READ, HEADS, GROUPS, CHANNELS = 3, 5, (1, 2, 4), 4, 2, 8


DRAFTED = sorted({*range(0, VOCABULARY, 3), 1})


KD = depth_loss(MTPConfig(mtp_loss="kd"))


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def states_after(model: GPTModel, batch: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
    """Return the trunk's states after 0, 1, ... layers and after its final norm, each [S, B, H]."""
    hidden = [model.embedding(batch["tokens"], batch["position_ids"])]
    angles = attached_of(model).rotary_angles(hidden[0].size(0))[0]
    for layer in model.decoder.layers:
        hidden.append(layer(hidden[-1], attention_mask=batch["attention_mask"], rotary_pos_emb=angles)[0])
    return hidden, model.decoder.final_layernorm(hidden[-1])


def rms(value: Tensor, weight: Tensor) -> Tensor:
    return value / (value.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(heads_GC: Tensor, position: int) -> Tensor:
    """Rotate one position's heads (float32, as in Megatron): each channel of the first half pairs with one of the
    second.
    """
    channels = heads_GC.size(-1)
    angles = position * (1 / 10000.0 ** (torch.arange(0, channels, 2) / channels))
    front, back = heads_GC.chunk(2, dim=-1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat((front * cosine - back * sine, back * cosine + front * sine), dim=-1)


class Reference:
    """Compute one sequence, position and step at a time, from the weights."""

    def __init__(self, model: GPTModel) -> None:
        layer, self.table = model.mtp.layer, model.embedding.word_embeddings.weight
        self.weights = dict(layer.named_parameters())
        self.norms = layer.tf_layer.input_layernorm
        self.layer, self.own = layer.tf_layer, layer

    def features(self, states: Tensor) -> Tensor:
        """Return the input of step 1: the trunk's states, concatenated."""
        return states @ self.own.fc.weight.t()

    def inputs(self, feature_H: Tensor, embedded_H: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's residual and the input of its attention."""
        both = rms(embedded_H, self.norms.enorm.weight), rms(feature_H, self.norms.hnorm.weight)
        return feature_H, torch.cat(both)

    def normed(self, states_SH: Tensor) -> Tensor:
        """Return the input of the head."""
        return rms(states_SH, self.own.norm.weight)

    def heads(self, given: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of a position, all with the same number of heads."""
        mixed = (self.layer.self_attention.linear_qkv.weight @ given).view(GROUPS, HEADS // GROUPS + 2, CHANNELS)
        key_NC, value_NC = (part.repeat_interleave(HEADS // GROUPS, 0) for part in (mixed[:, -2], mixed[:, -1]))
        return turned(mixed[:, :-2].flatten(0, 1), position), turned(key_NC, position), value_NC

    def step(self, feature_H: Tensor, token: Tensor, position: int, seen: list[tuple[Tensor, Tensor]]) -> Any:
        """Return the state [H], and the step's keys and values; `seen` has those of earlier steps."""
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
        """Return states of steps 1 .. K at every position, [K, S, H]. Step k of position i is at position i + k - 1."""
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


def reference_loss(
    model: GPTModel, batch: dict[str, Any], read: Callable[[list[Tensor]], Tensor], kind: type[Reference] = Reference
) -> Tensor:
    """Return sum_k 0.8^(k - 1) times the mean KL divergence of step k from the trunk's distribution for its token."""
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
    """Return our loss and the reference's, and both gradients by name."""
    batch = make_batch(STEPS)
    settings = MTPConfig(drafter=name, mtp_loss="kd")
    weights, group = depth_weights(settings, STEPS, 1.0), parallel_state.get_context_parallel_group()
    objective = one_head(weights, group, KD, linear_main=True, trains_trunk=False)
    return compared(model, batch, objective, lambda: reference_loss(model, batch, read, kind))


def compared(
    model: GPTModel, batch: dict[str, Any], objective: Any, reference: Callable[[], Tensor], has_mask: bool = True
) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return the drafter's part of the objective's loss, the reference's loss, and both gradients by name."""
    output = model(
        *(batch[name] for name in ("tokens", "position_ids")),
        batch["attention_mask"] if has_mask else None,
        labels=batch["labels"],
        output_processor=objective,
        output_processor_context=[batch["depths"]],
    )
    ours = (output.loss - output.main.total) / output.main.tokens
    expected = reference()
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    trained = [model.get_parameter(name) for name in names]
    found, wanted = (dict(zip(names, torch.autograd.grad(loss, trained), strict=True)) for loss in (ours, expected))
    return ours, expected, found, wanted
