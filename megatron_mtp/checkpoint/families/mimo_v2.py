"""MiMo-V2: sliding windows with sinks, keys and values of unequal width; several dense depths under `model.mtp`."""

from megatron_mtp.checkpoint.families.blocks import Frame, Place, depth_frame, depth_layer, mlp_norm, mlp_rules
from megatron_mtp.checkpoint.families.depth_flags import framed_depths
from megatron_mtp.checkpoint.families.family import Depths, Family, Layout, numbered_depth
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.families.trunk import STORED_HEAD, frame
from megatron_mtp.checkpoint.hf.config import HFConfig


def _rules(config: HFConfig, layout: Layout) -> list[Rule]:
    hidden, width = config.integer("hidden_size"), config.integer("intermediate_size")
    rules = frame(config, layout)
    for depth in range(layout.depths):
        place = Place(f"model.mtp.layers.{depth}.", depth_layer(depth))
        rules += depth_frame(depth, hidden, Frame.under(place.hf, "enorm", "hnorm", "eh_proj", "final_layernorm"))
        rules.append(mlp_norm(place, hidden, name="pre_mlp_layernorm"))
        rules += mlp_rules(f"{place.hf}mlp.", f"{place.mcore}mlp.", hidden, width)
    return rules


MIMO_V2 = Family(
    "MiMo-V2",
    "MiMo-V2",
    ("mimo_v2_flash",),
    _rules,
    depths=Depths(
        r"^model\.mtp\.layers\.(\d+)\.eh_proj\.weight$",
        default=None,
        depth_of=numbered_depth(r"model\.mtp\.layers\.(\d+)\."),
        flags=framed_depths,
    ),
    features=STORED_HEAD,
    carried=(r"model\.layers\.", r"model\.mtp\.layers\.\d+\.(input_layernorm|self_attn)\."),
    untrainable="sliding windows with sinks, and values of another width than keys",
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 192,
        "max_position_embeddings": 131072,
        "layernorm_epsilon": 1e-5,
    },
)
