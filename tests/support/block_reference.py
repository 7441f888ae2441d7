"""Block drafters in plain torch, and the models that are compared with them."""

from collections.abc import Callable
from typing import Any

import torch
from eagle_reference import compared, rms, states_after, turned
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron_single import LENGTH, VOCABULARY, make_batch, one_head, our_model
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, embedding, silu

from megatron_mtp.data.batch import with_blocks
from megatron_mtp.losses.acceptance import measured
from megatron_mtp.losses.head_objective import depth_weights
from megatron_mtp.losses.table import depth_loss
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.spec.config import MTPConfig

DRAFTS, LAYERS, READ, HEADS, GROUPS, CHANNELS, MASK, RANK, STATE = 3, 5, (1, 4), 4, 2, 8, 7, 6, 10


KINDS = {
    "dflash": {"drafter": "dflash", "drafter_num_layers": 2, "drafter_mask_token": MASK},
    "dspark": {
        "drafter": "dspark",
        "drafter_num_layers": 2,
        "drafter_mask_token": MASK,
        "drafter_markov_rank": RANK,
    },
    "dflash2": {
        "drafter": "dflash2",
        "drafter_num_layers": 2,
        "drafter_mask_token": MASK,
        "drafter_markov_rank": RANK,
    },
    "domino": {
        "drafter": "domino",
        "drafter_num_layers": 2,
        "drafter_mask_token": MASK,
        "drafter_markov_rank": RANK,
        "drafter_gru_size": STATE,
    },
}


LOSSES = {
    "dflash": {"mtp_loss": "ce"},
    "dspark": {"mtp_loss": "mix", "mtp_loss_mix": "ce=0.1,tv=0.9"},
    "dflash2": {"mtp_loss": "kd"},
    "domino": {"mtp_loss": "ce"},
}


BASE_SHARE = 0.3
"""Share of a Domino drafter's loss that comes from its logits without the bias."""


def drafter_model(kind: str, drafted: list[int] | None = None) -> GPTModel:
    """Return a model with the drafter in training mode and a frozen trunk."""
    given: dict[str, Any] = {"num_layers": LAYERS, "drafter_layers": READ, "drafter": KINDS[kind]}
    return our_model(DRAFTS, drafted=drafted, **given).double()


class Reference:
    """Compute one block of one sequence at a time, row by row, from the weights."""

    def __init__(self, model: GPTModel, kind: str) -> None:
        self.layer, self.table, self.kind = model.mtp.layer, model.embedding.word_embeddings.weight, kind
        self.head = model.mtp.layer.head if model.mtp.layer.head is not None else attached_of(model).head().weight

    def heads(self, layer: Any, row_H: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a row's queries [N, C], keys and values [G, C]."""
        own = layer.self_attention
        mixed = (own.linear_qkv.weight @ row_H).view(GROUPS, HEADS // GROUPS + 2, CHANNELS)
        query = rms(mixed[:, :-2].flatten(0, 1), own.q_layernorm.weight)
        return turned(query, position), turned(rms(mixed[:, -2], own.k_layernorm.weight), position), mixed[:, -1]

    def convolved(self, part: Any, normed: list[Tensor], values: list[Tensor], side: int) -> list[Tensor]:
        """Convolve a block's rows before a part (side 0) or after it. Each row adds to its kernel, which 16 channels
        share.
        """
        if self.kind != "dflash2":
            return values
        conv, made = part.conv, []
        for number, row_H in enumerate(normed):
            added = (conv.kernel_projection @ row_H).view(2, 2, -1)[side].repeat_interleave(16, -1)
            own, earlier = conv.base_kernel[side] + added
            before_H = values[number - 1] if number else torch.zeros_like(row_H)
            made.append(own * values[number] + earlier * before_H)
        return made

    def rows(self, features_SH: Tensor, newest: Tensor, position: int) -> Tensor:
        """Return states [rows, H] after the norm of the block whose newest token is at `position`."""
        count = DRAFTS + (self.kind not in ("dspark", "domino"))
        tokens = [newest, *[torch.tensor(MASK)] * (count - 1)]
        states = [embedding(token, self.table) for token in tokens]
        for layer in self.layer.layers:
            normed = [rms(state_H, layer.input_layernorm.weight) for state_H in states]
            known = [self.heads(layer, feature_H, number)[1:] for number, feature_H in enumerate(features_SH)]
            given = self.convolved(layer.self_attention, normed, normed, 0)
            own = [self.heads(layer, state_H, position + number) for number, state_H in enumerate(given)]
            keys, values = (
                torch.stack([each[part] for each in (*known, *(one[1:] for one in own))]).repeat_interleave(
                    HEADS // GROUPS, 1
                )
                for part in (0, 1)
            )
            attended = []
            for query, _, _ in own:
                weights = (torch.einsum("nc,tnc->nt", query, keys) / CHANNELS**0.5).softmax(-1)
                heads = torch.einsum("nt,tnc->nc", weights, values).flatten()
                attended.append(layer.self_attention.linear_proj.weight @ heads)
            attended = self.convolved(layer.self_attention, normed, attended, 1)
            states = [state_H + made_H for state_H, made_H in zip(states, attended, strict=True)]
            normed, made = [rms(state_H, layer.pre_mlp_layernorm.weight) for state_H in states], []
            for given_H in self.convolved(layer.mlp, normed, normed, 0):
                gate, up = (layer.mlp.linear_fc1.weight @ given_H).chunk(2)
                made.append(layer.mlp.linear_fc2.weight @ (silu(gate) * up))
            made = self.convolved(layer.mlp, normed, made, 1)
            states = [state_H + made_H for state_H, made_H in zip(states, made, strict=True)]
        return torch.stack([rms(state_H, self.layer.norm.weight) for state_H in states])

    def drafts(self, features_SH: Tensor, tokens_S: Tensor, position: int) -> tuple[Tensor, Tensor | None]:
        """Return logits [K, N] of the block's drafts, and confidence logits [K], or logits with the bias [K, N]."""
        states_KH = self.rows(features_SH[:position], tokens_S[position], position)[-DRAFTS:]
        logits_KN = states_KH @ self.head.t()
        if self.kind == "dflash":
            return logits_KN, None
        if self.kind == "domino":
            return logits_KN, logits_KN + self.bias(states_KH, tokens_S[position : position + DRAFTS])
        before_KR = self.layer.markov_w1[tokens_S[position : position + DRAFTS]]
        if self.kind == "dflash2":
            context_KR = before_KR * (states_KH @ self.layer.markov_projection.t())
            return logits_KN, logits_KN + context_KR @ self.layer.markov_w2.t()
        both = torch.cat([states_KH, before_KR], dim=-1)
        confidence_K = both @ self.layer.confidence_weight[0] + self.layer.confidence_bias
        return logits_KN + before_KR @ self.layer.markov_w2.t(), confidence_K

    def bias(self, states_KH: Tensor, tokens_K: Tensor) -> Tensor:
        """Return Domino's bias, from torch's GRU over the tokens before each draft. The first draft has none."""
        gru = torch.nn.GRU(self.table.size(1), STATE, bias=False, dtype=torch.double)
        named = {"weight_ih_l0": self.layer.gru_input, "weight_hh_l0": self.layer.gru_state}
        memory_KG, _ = torch.func.functional_call(gru, named, (embedding(tokens_K, self.table),))
        made = silu(torch.cat([states_KH, memory_KG], dim=-1) @ self.layer.bias_input.t()) @ self.layer.bias_output.t()
        return torch.cat([torch.zeros_like(made[:1]), made[1:]])


def reference_loss(
    model: GPTModel, kind: str, batch: dict[str, Any], read: Callable[[list[Tensor]], Tensor], is_paced: bool = False
) -> Tensor:
    """Return sum_k exp(-2 (k - 1) / (K + 1)), for Domino exp(-16 (k - 1) / 7 K), times the mean loss of draft k over
    blocks.

    If `is_paced`, draft k of a block has the weight sum_(j >= k) r_1 .. r_j with r = (1 + exp(-loss)) / 2, or 0 if the
    draft does not count.
    """
    with torch.no_grad():
        after, last_SBH = states_after(model, batch)
        trunk_SBV = last_SBH @ attached_of(model).head().weight.t()
    drafted = torch.arange(VOCABULARY) if model.mtp.draft_vocabulary is None else model.mtp.draft_vocabulary
    index = {token: number for number, token in enumerate(drafted.tolist())}
    reference, layer, depths = Reference(model, kind), model.mtp.layer, batch["depths"]
    features_SBH = rms(read(after) @ layer.fc.weight.t(), layer.hidden_norm.weight)
    total_K, count_K = torch.zeros(DRAFTS, dtype=torch.double), torch.zeros(DRAFTS)
    blocks = range(LENGTH) if depths.blocks_A is None else depths.blocks_A.tolist()
    for row in range(len(batch["tokens"])):
        tokens_S = torch.cat([batch["tokens"][row], batch["labels"][row, -1:], torch.zeros(DRAFTS, dtype=torch.long)])
        for place in blocks:
            if place + 2 > LENGTH:
                continue
            losses, paces_K = dict[int, Tensor](), torch.zeros(DRAFTS, dtype=torch.double)
            reached = 1.0
            logits_KN, further = reference.drafts(features_SBH[:, row], tokens_S, place + 1)
            for number in range(DRAFTS):
                label = int(depths.labels_DBS[number, row, place])
                counts = depths.loss_mask_DBS[number, row, place] > 0 and (kind != "dflash" or label in index)
                if not counts:
                    reached = 0.0
                    continue
                log_q_N, p_V = logits_KN[number].log_softmax(-1), trunk_SBV[place + number + 1, row].softmax(-1)
                cross_entropy = -log_q_N[index[label]] if label in index else torch.zeros(())
                loss = cross_entropy
                if kind == "dspark":
                    overlap = torch.minimum(log_q_N.exp(), p_V[drafted]).sum()
                    assert further is not None
                    sure = binary_cross_entropy_with_logits(further[number], overlap.detach())
                    loss = 0.1 * cross_entropy + 0.9 * (1 - overlap) + sure
                elif kind == "domino":
                    assert further is not None
                    with_bias = -further[number].log_softmax(-1)[label]
                    loss = (1 - BASE_SHARE) * with_bias + BASE_SHARE * cross_entropy
                elif kind == "dflash2":
                    assert further is not None
                    candidates = logits_KN[number].topk(16).indices.tolist()
                    if label not in candidates:
                        candidates[15] = label
                    choice = further[number][candidates].log_softmax(-1)[candidates.index(label)]
                    loss = (p_V * (p_V.log() - log_q_N)).sum() - choice
                losses[number] = loss
                reached *= (1 + loss.neg().exp().item()) / 2
                paces_K[: number + 1] += reached
                count_K[number] += 1
            for number, loss in losses.items():
                total_K[number] += loss * (paces_K[number] if is_paced else 1)
    halving = [-2 * number / (DRAFTS + 1) for number in range(DRAFTS)]
    if kind == "domino":
        halving = [-16 * number / (7 * DRAFTS) for number in range(DRAFTS)]
    weights_K = torch.ones(DRAFTS) if is_paced else torch.tensor(halving, dtype=torch.double).exp()
    counts_of_blocks = depths.blocks_A is None or (kind == "dflash" and len(drafted) < VOCABULARY)
    counts_K = count_K.double() if counts_of_blocks else depths.whole_tokens[1:] / depths.block_weight
    return (weights_K * total_K / counts_K).sum()


def side_by_side(after: list[Tensor]) -> Tensor:
    return torch.cat([after[number] for number in READ], dim=-1)


def losses(
    model: GPTModel,
    kind: str,
    read: Callable[[list[Tensor]], Tensor] = side_by_side,
    blocks: int | None = None,
    has_mask: bool = True,
    is_paced: bool = False,
) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return our loss and the reference's, and both gradients by name."""
    batch = make_batch(DRAFTS)
    if blocks is not None:
        batch["depths"] = with_blocks(batch["depths"], blocks, (1, 2), LENGTH)
    settings = MTPConfig(**KINDS[kind], **({"mtp_loss": "dpace"} if is_paced else LOSSES[kind]))
    loss, group = depth_loss(settings), parallel_state.get_context_parallel_group()
    weights = depth_weights(settings, DRAFTS, 1.0, loss)
    objective = one_head(
        weights,
        group,
        loss,
        linear_main=True,
        trains_trunk=False,
        measure=measured,
        base_share=BASE_SHARE if kind == "domino" else 0,
    )
    return compared(model, batch, objective, lambda: reference_loss(model, kind, batch, read, is_paced), has_mask)


def earlier(states: list[Tensor]) -> Tensor:
    return torch.cat([side_by_side(states)[:1], side_by_side(states)[:-1]])
