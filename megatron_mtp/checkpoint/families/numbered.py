"""Layers numbered as in DeepSeek-V3: the first k are dense, the others have experts, depths follow as N, N+1, ..."""

from collections.abc import Callable

from megatron_mtp.checkpoint.families.blocks import (
    Frame,
    MoE,
    Place,
    depth_frame,
    depth_layer,
    mlp_rules,
    moe_rules,
    norm_rules,
    split_mlp_rules,
)
from megatron_mtp.checkpoint.families.family import Layout, numbered_depth
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.families.trunk import frame, is_dense, layers, moe, sparse_layers, trunk_places
from megatron_mtp.checkpoint.hf.config import HFConfig

Layer = Callable[[HFConfig, Layout, Place, bool], list[Rule]]
"""Rules of the layer at a place; the last argument is whether it has experts."""


def frame_with_copies(
    config: HFConfig, layout: Layout, prefix: str = "model.", head: str = "lm_head.weight"
) -> list[Rule]:
    """The rules of `frame`, with the copies of embedding and head that every depth may have."""
    count = layers(config)
    return frame(
        config,
        layout,
        prefix,
        head=head,
        embedding_copies=lambda k: f"{prefix}layers.{count + k}.embed_tokens.weight",
        head_copies=lambda k: f"{prefix}layers.{count + k}.shared_head.head.weight",
    )


def depth_after(pattern: str) -> Callable[[HFConfig, str], int | None]:
    """`Depths.depth_of` for names whose match has the number of a layer as the group, counted on from the trunk's."""
    number_of = numbered_depth(pattern)

    def depth_of(config: HFConfig, name: str) -> int | None:
        number, count = number_of(config, name), layers(config)
        return None if number is None or number < count else number - count

    return depth_of


def numbered_layers(
    config: HFConfig, layout: Layout, layer: Layer, prefix: str = "model.", final: str = "shared_head.norm"
) -> list[Rule]:
    """Rules of the layers of trunk and depths.

    Args:
        config: the model's config.
        layout: depths and forms of the folder.
        layer: makes the rules of one layer.
        prefix: HF's prefix.
        final: HF's name of a depth's final norm.
    """
    count = layers(config)
    rules: list[Rule] = []
    for place, sparse in zip(trunk_places(count, prefix), sparse_layers(config), strict=True):
        rules += layer(config, layout, place, sparse)
    for depth in range(layout.depths):
        hf = f"{prefix}layers.{count + depth}."
        rules += depth_frame(depth, config.integer("hidden_size"), Frame.under(hf, "enorm", "hnorm", "eh_proj", final))
        rules += layer(config, layout, Place(hf, depth_layer(depth)), True)
    return rules


def layer_around(
    attention: list[Rule],
    config: HFConfig,
    layout: Layout,
    place: Place,
    has_experts: bool,
    mla: bool,
    experts: Callable[[HFConfig, Layout], MoE] = moe,
) -> list[Rule]:
    """Rules of a layer: its attention, norms, and MLP or experts.

    Args:
        attention: rules of the attention.
        config: the model's config.
        layout: forms of the folder.
        place: prefixes of the layer.
        has_experts: whether the layer has experts, which may be the parts of a dense MLP.
        mla: whether the attention is latent attention.
        experts: names and sizes of the experts.
    """
    hidden = config.integer("hidden_size")
    one = has_experts and is_dense(config)
    rules = norm_rules(place, hidden, mla=mla, moe=has_experts and not one) + attention
    if one:
        return rules + split_mlp_rules(place, hidden, config.integer("intermediate_size"))
    if has_experts:
        return rules + moe_rules(place, experts(config, layout))
    width = config.integer("intermediate_size")
    return rules + mlp_rules(f"{place.hf}mlp.", f"{place.mcore}mlp.", hidden, width)
