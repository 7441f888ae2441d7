"""Step-3.5: windows and gates by head; three depths, fed from before the final norm, each with a head of its own."""

from megatron_mtp.checkpoint.families.blocks import Frame, Place, depth_frame, depth_layer, mlp_norm, mlp_rules
from megatron_mtp.checkpoint.families.depth_flags import framed_depths
from megatron_mtp.checkpoint.families.family import Depths, Family, Layout
from megatron_mtp.checkpoint.families.flags import CENTRED
from megatron_mtp.checkpoint.families.numbered import depth_after
from megatron_mtp.checkpoint.families.rules import Rule, rename
from megatron_mtp.checkpoint.families.trunk import STORED_HEAD, frame, layers
from megatron_mtp.checkpoint.hf.config import HFConfig


def _rules(config: HFConfig, layout: Layout) -> list[Rule]:
    hidden, vocabulary = config.integer("hidden_size"), config.integer("vocab_size")
    width = config.integer("intermediate_size")
    rules = frame(config, layout)
    for depth in range(layout.depths):
        place = Place(f"model.layers.{layers(config) + depth}.", depth_layer(depth))
        head = f"{place.hf}transformer.shared_head."
        frame_names = Frame.under(place.hf, "enorm", "hnorm", "eh_proj", "transformer.shared_head.norm")
        rules += depth_frame(depth, hidden, frame_names)
        rules.append(mlp_norm(place, hidden))
        rules += mlp_rules(f"{place.hf}mlp.", f"{place.mcore}mlp.", hidden, width)
        rules.append(rename(f"{head}output.weight", f"mtp.layers.{depth}.output_layer.weight", (vocabulary, hidden)))
    return rules


STEP = Family(
    "Step-3.5",
    "Step-3.5, Step-3.7",
    ("step3p5", "step3p7"),
    _rules,
    depths=Depths(
        r"^model\.layers\.(\d+)\.eh_proj\.weight$",
        depth_of=depth_after(r"model\.layers\.(\d+)\."),
        before_norm=True,
        flags=lambda config, layout: [*framed_depths(config, layout), *CENTRED],
    ),
    features=STORED_HEAD,
    carried=(r"model\.layers\.", r"(vision_model|vit_large_projector|model\.vision)"),
    untrainable="sliding windows with gates by head, and depths fed from before the final norm",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-5,
    },
)
