"""Logits of Megatron's depths behind a trunk that Megatron cannot run, from a checkpoint and given hidden states.

The depths are the block that is trained, with Megatron's layers inside, loaded from the checkpoint by Megatron's keys
without the rules of the conversion. The input of the first depth comes from transformers' trunk. If the checkpoint has
no attention under Megatron's keys, what transformers computed replaces it; if it has no MLP either, the whole layer.
Letters: S positions, B batch (1), H hidden, V vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_mtp.checkpoint.convert.plan import HFModel
from megatron_mtp.checkpoint.mcore import EMBEDDING, OUTPUT
from megatron_mtp.checkpoint.mcore.model import fill, model_of
from megatron_mtp.checkpoint.mcore.reader import DistReader
from megatron_mtp.checkpoint.verify.prompt import Prompt
from megatron_mtp.model.arguments import parsed
from megatron_mtp.model.mtp import AttentionInputs, MultiTokenPredictionLayer
from megatron_mtp.model.rope import place
from megatron_mtp.model.trunk import MTPTrunk


class Constant(torch.nn.Module):
    """A substitute for an attention, with a fixed output."""

    def __init__(self, added_SBH: Tensor) -> None:
        super().__init__()
        self.added_SBH = added_SBH

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """The output and no bias, as Megatron's modules return them."""
        return self.added_SBH.clone(), None  # Megatron adds in place


def depth_logits(
    folder: Path, source: HFModel, flags: list[str], prompt: Prompt, given: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Logits [S, V] of every depth by name, teacher-forced, in float32.

    Args:
        folder: the checkpoint.
        source: family and config of the model.
        flags: Megatron's flags for such depths, from `depth_flags_of`.
        prompt: the tokens.
        given: `given state` [S, H], and `given 1` .. for what Megatron cannot compute, from reference.py.

    Raises:
        ValueError: the checkpoint is damaged.
    """
    reader = DistReader(folder)
    model = model_of(parsed(flags, source.config.integer("vocab_size")))
    place(model, prompt.positions_S.tolist())
    tokens_BS, given = prompt.tokens_BS.cuda(), {name: value.cuda() for name, value in given.items()}
    for number, layer in enumerate(model.mtp.layers, start=1):
        _replace_absent(layer, f"mtp.layers.{number - 1}.", reader, given.get(f"given {number}"))
    fill(model, reader, ("mtp.", "embedding.", "output_layer."))
    stored = source.family.depths
    assert stored is not None  # `flags` are theirs
    _scale(model, stored.scales(source.config))
    with torch.no_grad():
        out = _run(model, reader, tokens_BS, given["given state"].unsqueeze(1), stored.before_norm)
    return {name: logits_SV.cpu() for name, logits_SV in out.items()}


def _replace_absent(layer: Any, prefix: str, reader: DistReader, added_SH: Tensor | None) -> None:
    """Replace the modules of a depth for which the checkpoint has no tensors."""
    if not reader.holds(f"{prefix}final_layernorm.weight"):
        layer.final_layernorm = torch.nn.Identity()
    if added_SH is None:
        return
    if not _holds_any(reader, f"{prefix}transformer_layer.self_attention."):
        layer.tf_layer.input_layernorm = torch.nn.Identity()
        layer.tf_layer.self_attention = Constant(added_SH.unsqueeze(1))
    if not _holds_any(reader, f"{prefix}transformer_layer.mlp."):
        layer.tf_layer.pre_mlp_layernorm = torch.nn.Identity()
        layer.tf_layer.mlp = Constant(torch.zeros_like(added_SH).unsqueeze(1))


def _holds_any(reader: DistReader, prefix: str) -> bool:
    return any(key.startswith(prefix) for key in reader.keys)


def _scale(model: MTPTrunk, scales: dict[str, float]) -> None:
    for layer in model.mtp.layers:
        for name, factor in scales.items():
            layer.get_parameter(f"tf_layer.{name}").data *= factor


def _run(
    model: MTPTrunk, reader: DistReader, tokens_BS: Tensor, state_SBH: Tensor, before_norm: bool
) -> dict[str, Tensor]:
    words_VH = model.embedding.word_embeddings.weight
    tied = model.share_embeddings_and_output_weights
    head_VH = words_VH if tied else model.output_layer.weight
    length, attention = state_SBH.size(0), _attention_inputs(model, state_SBH.size(0))
    out = {}
    for number, layer in enumerate(model.mtp.layers, start=1):
        assert isinstance(layer, MultiTokenPredictionLayer)
        own_words_VH = _own(reader, number, EMBEDDING, words_VH)
        norm, layer.final_layernorm = layer.final_layernorm, torch.nn.Identity()
        state_SBH = layer(state_SBH, own_words_VH[tokens_BS[:, number : number + length]].transpose(0, 1), attention)
        normed_SBH = norm(state_SBH)
        out[f"depth {number}"] = linear(normed_SBH, _own(reader, number, OUTPUT, head_VH))[:, 0]
        state_SBH = state_SBH if before_norm else normed_SBH
    return out


def _own(reader: DistReader, number: int, key: str, shared: Tensor) -> Tensor:
    """A depth's own tensor, or the trunk's if it has none."""
    own = f"mtp.layers.{number - 1}.{key}"
    return reader.read(own).float().cuda() if reader.holds(own) else shared


def _attention_inputs(model: MTPTrunk, length: int) -> AttentionInputs:
    """Rotary angles, which latent attention computes itself."""
    return AttentionInputs(rotary_pos_emb=model.rotary_angles(length)[0] if model.turns_heads else None)
