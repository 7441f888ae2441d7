"""Depths that `attach-mtp` made, in the folder of a family that has no names for depths: layers like the trunk's last.

    mtp.layers.{k}.enorm, hnorm, eh_proj, final_layernorm     the parts around the layer; the embedding half first
    mtp.layers.{k}.*                                          the layer, by the names of the trunk's last one

transformers ignores these tensors, and the depths convert back.
"""

from dataclasses import replace

from megatron_mtp.checkpoint.families.blocks import Frame, depth_frame, depth_layer
from megatron_mtp.checkpoint.families.family import Depths, Layout
from megatron_mtp.checkpoint.families.rules import Piece, Rule
from megatron_mtp.checkpoint.families.trunk import layers
from megatron_mtp.checkpoint.hf.config import HFConfig

ATTACHED = Depths(r"^mtp\.layers\.(\d+)\.eh_proj\.weight$")


def attached_rules(trunk: list[Rule], config: HFConfig, layout: Layout) -> list[Rule]:
    """Rules of the depths, from those of the trunk.

    Args:
        trunk: rules of the text model, by its own names.
        config: its config.
        layout: counts the depths.
    """
    last = layers(config) - 1
    hf, mcore = f"model.layers.{last}.", f"decoder.layers.{last}."
    layer = [rule for rule in trunk if rule.hf[0].name.startswith(hf)]
    rules: list[Rule] = []
    for depth in range(layout.depths):
        own = f"mtp.layers.{depth}."
        names = Frame.under(own, "enorm", "hnorm", "eh_proj", "final_layernorm")
        rules += depth_frame(depth, config.integer("hidden_size"), names)
        rules += [_moved(rule, (hf, own), (mcore, depth_layer(depth))) for rule in layer]
    return rules


def _moved(rule: Rule, hf: tuple[str, str], mcore: tuple[str, str]) -> Rule:
    """The rule for another layer; each pair is the prefix of the one and of the other."""
    tensors = tuple(replace(tensor, name=tensor.name.replace(*hf, 1)) for tensor in rule.hf)
    return replace(rule, hf=tensors, mcore=tuple(_piece(piece, mcore) for piece in rule.mcore))


def _piece(piece: Piece, mcore: tuple[str, str]) -> Piece:
    key, *aliases = (key.replace(*mcore, 1) for key in (piece.key, *piece.aliases))
    return replace(piece, key=key, aliases=tuple(aliases))
