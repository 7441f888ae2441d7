"""Drafts made by the rules of an engine (`Feeding`), at all positions of a document at once, with Megatron's modules.

The chain that starts at row i makes draft 1 from the trunk's state i and token i + 1, and draft d predicts token
i + d + 1. Its earlier drafts are taken to be right, since a wrong one ends the round. So one forward of the depth per
draft suffices: what a draft attends to is written as blocks of rows, one behind the other, and a mask.

    keys "chain", draft 3       block 0: rows 0 .. R-1 of the known tokens, trunk states
                                block 1: of every start i, the row of draft 1's state, one position later
                                block 2: of every start i, the row of draft 2's state, two positions later
    the start i sees            of block 0 the rows 0 .. i, of the others its own

A row of a depth depends on the rows that its mask shows it, so rows need not be run in order. Recurrent layers read
them in order, so a depth may have none; the trunk, which is run over the text itself, may.
Letters in names: S positions of the text, R starts, B batch (1), H hidden, V vocabulary, N rows of all blocks.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from torch import Tensor

from megatron_mtp.extensions.predict.engines import FIRST_PASS_KEYS, SHARED_KEYS, TRAINED, Feeding
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.model.mtp import MultiTokenPredictionLayer
from megatron_mtp.model.rope import placed
from megatron_mtp.model.trunk_output import AttentionInputs

ROWS_OF_LOGITS = 256
"""Rows whose logits are computed together."""


@dataclass(frozen=True)
class Text:
    """A document and the trunk's states of it, [S, 1, H], after and before the final norm."""

    tokens: list[int]
    after_SBH: Tensor
    before_SBH: Tensor

    def states(self, side: str) -> Tensor:
        """Return the states before or after the norm, [S, 1, H]."""
        return self.after_SBH if side == "after" else self.before_SBH


@dataclass(frozen=True)
class Block:
    """Rows of an MTP layer, one per start: states [R, 1, H], and how far tokens and positions are ahead of it."""

    states_RBH: Tensor
    token: int
    position: int


def check_model(model: LanguageModule) -> None:
    """Raise ValueError for a model that is not supported here."""
    if not model.mtp_process:
        raise ValueError("the checkpoint has no MTP layers to draft with; give one that was trained with some.")
    if not model.mtp.sequential:
        raise ValueError("the MTP layers are parallel heads, which no engine of the table runs; give sequential ones.")
    layers = depth_layers(model)
    if {Symbols.MAMBA, Symbols.GDN} & set(layers):
        raise ValueError(
            f"the MTP layers are stacks {layers} (--hybrid-layer-pattern), and no engine of the table has recurrent "
            "layers in them; measure them as trained with megatron-mtp generate --compare."
        )


def depth_layers(model: LanguageModule) -> str:
    """Return the symbols of an MTP layer's layers (--hybrid-layer-pattern); empty if it is one transformer layer."""
    return "".join(getattr(model.mtp.layers[0].tf_layer, "layer_type_list", ()))


def trained_feeding(model: LanguageModule) -> Feeding:
    """Return how MTP layers are fed in training; a single layer makes every draft, whatever it is called."""
    shared = SHARED_KEYS if model.mtp.has_chain else FIRST_PASS_KEYS
    feeding = shared if model.mtp.shares_kv else TRAINED
    return replace(feeding, module="first") if len(model.mtp.layers) == 1 else feeding


@torch.no_grad()
def read_text(model: LanguageModule, tokens: list[int]) -> Text:
    """Run the trunk over a document."""
    attention, decoder = _attention(model, None, list(range(len(tokens)))), model.decoder
    with _input_of(decoder.final_norm if hasattr(decoder, "final_norm") else decoder.final_layernorm) as before:
        after_SBH = decoder(
            hidden_states=_embed(model, tokens),
            attention_mask=attention.attention_mask,
            rotary_pos_emb=attention.rotary_pos_emb,
        )
    return Text(tokens, after_SBH, before[0])


@torch.no_grad()
def greedy(model: LanguageModule, prompt: list[int], new: int) -> list[int]:
    """Return prompt and continuation, by whole forward passes of the trunk: slow, but without a cache."""
    tokens = list(prompt)
    for _ in range(new):
        tokens += likeliest(model, read_text(model, tokens).after_SBH[-1:])
    return tokens


@torch.no_grad()
def drafts(model: LanguageModule, text: Text, count: int, feeding: Feeding) -> list[list[int]]:
    """Return drafts 1 .. `count` of every start i, as lists of R tokens; draft d is for token i + d + 1.

    Args:
        model: the whole model, in evaluation mode.
        text: document of at least `count` + 2 tokens.
        count: drafts per round.
        feeding: the engine's rules.
    """
    starts = len(text.tokens) - count - 1
    states_RBH = text.states(feeding.trunk)[:starts]
    chain: list[Tensor] = []
    made: list[list[int]] = []
    with _swapped(model, feeding.swapped):
        for number in range(1, count + 1):
            layer = _layer(model, number, feeding)
            blocks = _blocks(text, states_RBH, chain, number, feeding)
            before_RBH, after_RBH = _run(model, layer, text.tokens, blocks, number, feeding)
            states_RBH = after_RBH if feeding.chained == "after" else before_RBH
            chain.append(states_RBH)
            made.append(likeliest(model, after_RBH))
    return made


def likeliest(model: LanguageModule, states_RBH: Tensor) -> list[int]:
    """Return the most likely token of every state [R, 1, H]."""
    attached = attached_of(model)
    project, tokens = attached.head().project, attached.true_vocab_size
    parts = [project(part_RBH)[:, 0, :tokens].argmax(-1) for part_RBH in states_RBH.split(ROWS_OF_LOGITS)]
    return [int(token) for token in torch.cat(parts)]


def _layer(model: LanguageModule, number: int, feeding: Feeding) -> MultiTokenPredictionLayer:
    layers = model.mtp.layers
    layer = layers[0] if feeding.module == "first" else layers[(number - 1) % len(layers)]
    assert isinstance(layer, MultiTokenPredictionLayer)
    return layer


def _blocks(text: Text, states_RBH: Tensor, chain: list[Tensor], number: int, feeding: Feeding) -> list[Block]:
    """Return the rows that exist when draft `number` is made; the last block has the rows that make it."""
    if feeding.keys in ("own", "none"):
        return [Block(states_RBH, number, 0)]
    ahead = number - 1 if feeding.keys == "window" else 0
    starts = states_RBH.size(0)
    trunk_RBH = text.states(feeding.trunk)[ahead : ahead + starts]
    later = [Block(state_RBH, 1 + place, place - ahead) for place, state_RBH in enumerate(chain, start=1)]
    return [Block(trunk_RBH, 1 + ahead, 0), *later]


def _run(
    model: LanguageModule,
    layer: MultiTokenPredictionLayer,
    tokens: list[int],
    blocks: list[Block],
    number: int,
    feeding: Feeding,
) -> tuple[Tensor, Tensor]:
    """Return states of the last block, [R, 1, H], before and after the depth's final norm."""
    starts, first = blocks[-1].states_RBH.size(0), int(feeding.first_row)
    ahead = number - 1 if feeding.keys == "window" else 0
    states_NBH = torch.cat([block.states_RBH for block in blocks])
    ids = [tokens[start + block.token] for block in blocks for start in range(starts)]
    positions = [max(0, start + block.position) for block in blocks for start in range(starts)]
    embedded_NBH = _embed(model, ids)
    if feeding.zeroed:
        embedded_NBH[[place for place, position in enumerate(positions) if not position]] = 0
    visible_NN = _visible(starts, len(blocks), ahead, feeding.keys)
    if first:
        states_NBH = torch.cat([torch.zeros_like(states_NBH[:1]), states_NBH])
        embedded_NBH = torch.cat([_embed(model, tokens[:1]), embedded_NBH])
        positions = [0, *(position + 1 for position in positions)]
        visible_NN = _with_first(visible_NN)
    mask = ~visible_NN[None, None].to(states_NBH.device)
    with _input_of(layer.final_layernorm) as before, placed(layer, positions):
        after_NBH = layer(states_NBH, embedded_NBH, _attention(model, mask, positions))
    return before[0][-starts:], after_NBH[-starts:]


def _visible(starts: int, blocks: int, ahead: int, keys: str) -> Tensor:
    """Return bool [N, N], True if a row attends to another: in block 0 to known tokens, in others to its own chain."""
    own = torch.eye(starts, dtype=torch.bool)
    if keys == "none":
        return own
    known = torch.ones(starts, starts, dtype=torch.bool).tril()
    nothing = torch.zeros_like(own)
    if keys == "first":
        own = nothing
    rows = [torch.cat([known, *[nothing] * (blocks - 1)], dim=1)]
    for place in range(1, blocks):
        seen = [known.tril(-ahead), *[own] * place, *[nothing] * (blocks - 1 - place)]
        rows.append(torch.cat(seen, dim=1))
    return torch.cat(rows)


def _with_first(visible_NN: Tensor) -> Tensor:
    """Return which rows attend to which, with a row in front that all others attend to."""
    wider = torch.cat([torch.ones_like(visible_NN[:, :1]), visible_NN], dim=1)
    first = torch.zeros_like(wider[:1])
    first[0, 0] = True
    return torch.cat([first, wider])


def _attention(model: LanguageModule, mask: Tensor | None, positions: list[int]) -> AttentionInputs:
    """Return mask and rotary angles; latent attention computes its own (`placed`)."""
    attached = attached_of(model)
    angles = attached.rotary_angles(max(positions) + 1)[0][positions] if attached.turns_heads else None
    return AttentionInputs(attention_mask=mask, rotary_pos_emb=angles)


@contextmanager
def _swapped(model: LanguageModule, swapped: bool) -> Iterator[None]:
    """Within the context, exchange the halves of every eh_proj."""
    layers: Iterable[torch.nn.Module] = model.mtp.layers if swapped else ()
    _exchange_halves(layers)
    try:
        yield
    finally:
        _exchange_halves(layers)


def _exchange_halves(layers: Iterable[torch.nn.Module]) -> None:
    for layer in layers:
        weight = layer.get_parameter("eh_proj.weight")
        weight.data = weight.data.roll(weight.size(1) // 2, dims=1)


def _embed(model: LanguageModule, tokens: list[int]) -> Tensor:
    """Return a copy of embeddings, [N, 1, H]."""
    device = _device(model)
    positions_BN = torch.arange(len(tokens), device=device).unsqueeze(0)
    ids_BN = torch.tensor([tokens], device=device)
    embedded_NBH: Tensor = model.embedding(input_ids=ids_BN, position_ids=positions_BN)
    return embedded_NBH.clone()


def _device(model: LanguageModule) -> torch.device:
    return model.embedding.word_embeddings.weight.device


@contextmanager
def _input_of(module: torch.nn.Module) -> Iterator[list[Tensor]]:
    """Within the context, record the inputs of a module's calls."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        handle.remove()
