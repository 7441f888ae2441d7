"""Nemotron-3: each layer is Mamba, attention or experts; a depth has several such layers."""

from dataclasses import replace

from megatron_mtp.checkpoint.families.blocks import Frame, depth_frame
from megatron_mtp.checkpoint.families.depth_flags import framed_depths
from megatron_mtp.checkpoint.families.family import Depths, Family, Layout, numbered_depth
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.families.trunk import STORED_HEAD, frame
from megatron_mtp.checkpoint.hf.config import HFConfig


def _rules(config: HFConfig, layout: Layout) -> list[Rule]:
    rules = frame(config, layout, "backbone.", embedding="embeddings.weight", norm="norm_f.weight")
    row = _row(config)
    for depth in range(layout.depths):
        first, last = f"mtp.layers.{depth * row}.", f"mtp.layers.{(depth + 1) * row - 1}."
        names = replace(Frame.under(first, "enorm", "hnorm", "eh_proj", None), final=f"{last}final_layernorm.weight")
        rules += depth_frame(depth, config.integer("hidden_size"), names)
    return rules


def _row(config: HFConfig) -> int:
    """Number of layers of a depth; by default attention and experts."""
    pattern = config.keys.get("mtp_hybrid_override_pattern") or config.keys.get("mtp_layers_block_type") or "*E"
    if not isinstance(pattern, (str, list)):
        raise ValueError(
            f"{config.source}: 'mtp_hybrid_override_pattern' is {pattern!r:.40}; it must be a string or a list."
        )
    return len(pattern)


def _depth_of(config: HFConfig, name: str) -> int | None:
    index = numbered_depth(r"mtp\.layers\.(\d+)\.")(config, name)
    return None if index is None else index // _row(config)


NEMOTRON = Family(
    "Nemotron-3",
    "Nemotron-3",
    ("nemotron_h",),
    _rules,
    depths=Depths(r"^mtp\.layers\.(\d+)\.eh_proj\.weight$", depth_of=_depth_of, flags=framed_depths),
    features=STORED_HEAD,
    carried=(r"backbone\.layers\.", r"mtp\.layers\.\d+\.(mixer|norm)\."),
    untrainable="Mamba layers, whose weights are not converted to those of a hybrid trunk",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
    },
)
