"""--mtp-repeated-layer-first-pass-kv: later passes attend only to pass 1's keys, against a reference of plain matrices.

test_drafting.py tests that drafts match the training forward pass, test_packed.py packed rows, and
tests/functional/test_layouts.py layouts. Letters in names: S positions, B batch, H hidden, N heads, G key heads, C
channels.
"""

from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron_single import LATENT, VOCABULARY, our_model, relative_difference
from torch import Tensor
from torch.nn.functional import silu

from megatron_mtp.model.attachment import attached_of
from megatron_mtp.model.chain import DepthInputs
from megatron_mtp.model.trunk_output import AttentionInputs

pytestmark = pytest.mark.usefixtures("megatron")

PASSES, LENGTH, ROWS, HEADS, GROUPS, CHANNELS = 7, 6, 2, 4, 2, 8
FIRST_PASS = {"mtp_use_repeated_layer": True, "first_pass_kv": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}


def normed(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden * (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def turned(heads_SBNC: Tensor, first: int) -> Tensor:
    """Rotate halves of channels by position; row 0 is at position `first`."""
    half = heads_SBNC.size(-1) // 2
    rates = 10000.0 ** (-torch.arange(half) / half)
    angles_S11C = ((first + torch.arange(len(heads_SBNC))).unsqueeze(1) * rates)[:, None, None]
    one, other = heads_SBNC.split(half, dim=-1)
    cosine, sine = angles_S11C.cos(), angles_S11C.sin()
    return torch.cat((one * cosine - other * sine, other * cosine + one * sine), dim=-1)


def neighbors_apart(heads: Tensor) -> Tensor:
    """Reorder channels to 0 2 4 .. 1 3 5 ..: latent attention rotates neighbors."""
    return torch.cat((heads[..., ::2], heads[..., 1::2]), dim=-1)


def attended(query_SBNC: Tensor, key_SBNC: Tensor, value_SBNC: Tensor) -> Tensor:
    """Let position i attend to keys 0 .. i."""
    scores_BNST = torch.einsum("sbnc,tbnc->bnst", query_SBNC, key_SBNC) / query_SBNC.size(-1) ** 0.5
    later_ST = torch.ones(LENGTH, LENGTH).triu(1).bool()
    weights_BNST = scores_BNST.masked_fill(later_ST, -torch.inf).softmax(-1)
    return torch.einsum("bnst,tbnc->sbnc", weights_BNST, value_SBNC).flatten(2)


def of_groups(weights: dict[str, Tensor], hidden: Tensor, number: int, kept: list[Tensor]) -> Tensor:
    """Return grouped-query attention of a pass; `kept` are keys and values of pass 1."""
    mixed = (hidden @ weights["linear_qkv.weight"].t()).view(LENGTH, ROWS, GROUPS, -1, CHANNELS)
    if not kept:
        kept += [turned(mixed[..., -2, :], 0), mixed[..., -1, :]]
    query = turned(mixed[..., :-2, :].flatten(2, 3), number)
    return attended(query, *(one.repeat_interleave(HEADS // GROUPS, dim=2) for one in kept))


def of_latents(weights: dict[str, Tensor], hidden: Tensor, number: int, kept: list[Tensor]) -> Tensor:
    """Return latent attention of a pass; `kept` are pass 1's normed latents and the rotary part of its keys."""
    plain, place, latents = LATENT["qk_head_dim"], LATENT["qk_pos_emb_head_dim"], LATENT["kv_lora_rank"]
    compressed = normed(hidden @ weights["linear_q_down_proj.weight"].t(), weights["q_layernorm.weight"])
    query = (compressed @ weights["linear_q_up_proj.weight"].t()).unflatten(-1, (HEADS, plain + place))
    if not kept:
        both = hidden @ weights["linear_kv_down_proj.weight"].t()
        kept += [normed(both[..., :latents], weights["kv_layernorm.weight"])]
        kept += [turned(neighbors_apart(both[..., None, latents:]), 0)]
    key, value = (
        (kept[0] @ weights["linear_kv_up_proj.weight"].t())
        .unflatten(-1, (HEADS, -1))
        .split([plain, LATENT["v_head_dim"]], dim=-1)
    )
    query = torch.cat((query[..., :plain], turned(neighbors_apart(query[..., plain:]), number)), dim=-1)
    return attended(query, torch.cat((key, kept[1].expand(-1, -1, HEADS, -1)), dim=-1), value)


def reference(model: GPTModel, hidden_SBH: Tensor, tokens_DBS: Tensor) -> list[Tensor]:
    """Return the states of all passes."""
    weights = dict(model.mtp.layers[0].named_parameters())
    mark = "tf_layer.self_attention."
    of_attention = {name.removeprefix(mark): one for name, one in weights.items() if name.startswith(mark)}
    attention = of_latents if model.config.multi_latent_attention else of_groups
    kept, states = list[Tensor](), list[Tensor]()
    for number, tokens_BS in enumerate(tokens_DBS):
        embedded = model.embedding.word_embeddings.weight[tokens_BS.t()]
        halves = normed(embedded, weights["enorm.weight"]), normed(hidden_SBH, weights["hnorm.weight"])
        mixed = torch.cat(halves, dim=-1) @ weights["eh_proj.weight"].t()
        seen = attention(of_attention, normed(mixed, weights["tf_layer.input_layernorm.weight"]), number, kept)
        mixed = mixed + seen @ of_attention["linear_proj.weight"].t()
        wide = (
            normed(mixed, weights["tf_layer.pre_mlp_layernorm.weight"]) @ weights["tf_layer.mlp.linear_fc1.weight"].t()
        )
        gate, up = wide.chunk(2, dim=-1)
        mixed = mixed + (silu(gate) * up) @ weights["tf_layer.mlp.linear_fc2.weight"].t()
        hidden_SBH = normed(mixed, weights["final_layernorm.weight"])
        states.append(hidden_SBH)
    return states


def inputs() -> tuple[Tensor, Tensor]:
    """Return trunk states, and tokens of every pass."""
    generator = torch.Generator().manual_seed(4)
    hidden_SBH = torch.randn(LENGTH, ROWS, 32, generator=generator).requires_grad_()
    stream = torch.randint(1, VOCABULARY, (ROWS, LENGTH + PASSES), generator=generator)
    return hidden_SBH, torch.stack([stream[:, number : number + LENGTH] for number in range(1, PASSES + 1)])


def block_states(model: GPTModel, hidden_SBH: Tensor, tokens_DBS: Tensor) -> list[Tensor]:
    attached = attached_of(model)
    positions_BS = torch.arange(LENGTH).expand(ROWS, LENGTH)
    angles = attached.rotary_angles(LENGTH)[0] if attached.turns_heads else None
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    attention = AttentionInputs(attention_mask=mask, rotary_pos_emb=angles)
    trunk = attached.trunk_output(hidden_SBH, positions_BS, attention)
    positions, angles = [positions_BS] * len(tokens_DBS), model.mtp.later_angles(trunk)
    inputs = DepthInputs(tokens_DBS, positions, model.embedding, attention, angles=angles)
    states: list[Tensor] = model.mtp(hidden_SBH, inputs)
    return states


def gradients(model: GPTModel, states: list[Tensor], hidden_SBH: Tensor) -> dict[str, Tensor]:
    """Return gradients of a weighted sum of the states: for the trunk's states, and every weight of the layer."""
    model.zero_grad()
    hidden_SBH.grad = None
    upstream = torch.randn(torch.stack(states).shape, generator=torch.Generator().manual_seed(5))
    (torch.stack(states) * upstream).sum().backward()
    assert hidden_SBH.grad is not None
    found = {name: one.grad.clone() for name, one in model.mtp.named_parameters() if one.grad is not None}
    return found | {"trunk": hidden_SBH.grad.clone()}


@pytest.mark.parametrize(
    ("kind", "recomputes"),
    [
        ({}, {}),
        ({}, FULL),
        ({}, {**SELECTIVE, "recompute_modules": ["core_attn"]}),
        (LATENT, {}),
        (LATENT, FULL),
        (LATENT, {**SELECTIVE, "recompute_modules": ["core_attn", "mla_up_proj"]}),
    ],
    ids=["gqa", "gqa-full", "gqa-core", "latent", "latent-full", "latent-selective"],
)
def test_seven_passes_match_the_reference(kind: dict[str, Any], recomputes: dict[str, Any]) -> None:
    """Pass d at i: a query at position i + d - 1, over the keys of pass 1 at 0 .. i."""
    model = our_model(PASSES, **FIRST_PASS, **kind, **recomputes).train()
    hidden_SBH, tokens_DBS = inputs()
    found = block_states(model, hidden_SBH, tokens_DBS)
    grads = gradients(model, found, hidden_SBH)
    expected = reference(model, hidden_SBH, tokens_DBS)
    wanted = gradients(model, expected, hidden_SBH)
    for one, other in zip(found, expected, strict=True):
        assert relative_difference(one, other) < 1e-5
    assert grads.keys() == wanted.keys()
    assert {name: far for name in wanted if (far := relative_difference(grads[name], wanted[name])) > 1e-5} == {}


def bytes_held(passes: int, **changes: Any) -> int:
    """Return the bytes that the block's forward pass stores for its backward pass, without the weights."""
    model = our_model(passes, **FIRST_PASS, **changes).train()
    hidden_SBH, tokens_DBS = inputs()
    held = dict[int, Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor  # kept alive, so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states = block_states(model, hidden_SBH, tokens_DBS[:passes])
    assert len(states) == passes
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    return sum(one.untyped_storage().nbytes() for place, one in held.items() if place not in weights)


@pytest.mark.parametrize("kind", [{}, LATENT], ids=["gqa", "latent"])
def test_seven_recomputed_passes_take_at_most_twice_the_memory_of_one(kind: dict[str, Any]) -> None:
    """While the backward pass recomputes one of them, the inputs of all are stored."""
    one = bytes_held(1, **kind)
    assert bytes_held(PASSES, **kind, **FULL) + one <= 2 * one
    assert bytes_held(PASSES, **kind) > 4 * one


def test_no_keys_are_kept_after_a_forward_pass() -> None:
    model = our_model(2, **FIRST_PASS)
    hidden_SBH, tokens_DBS = inputs()
    first, second = (block_states(model, hidden_SBH, tokens_DBS[:2]) for _ in range(2))
    assert model.mtp.layers[0].tf_layer.self_attention.passes is None
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_weights_are_those_of_any_repeated_layer() -> None:
    kinds = ({}, LATENT)
    for kind in kinds:
        repeated, first = (
            our_model(3, mtp_use_repeated_layer=True, first_pass_kv=is_first, **kind).state_dict()
            for is_first in (False, True)
        )
        assert repeated.keys() == first.keys()
