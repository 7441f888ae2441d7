"""ERNIE-4.5 MoE: dense depths named piece by piece (`mtp_block.k`), without a norm before the head."""

from megatron_mtp.checkpoint.families.blocks import GQA, Frame, Place, depth_frame, depth_layer
from megatron_mtp.checkpoint.families.depth_flags import gqa_depths, rotary
from megatron_mtp.checkpoint.families.family import Depths, Family, Layout, numbered_depth
from megatron_mtp.checkpoint.families.llama import dense_layer
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.families.trunk import STORED_HEAD, frame, gqa
from megatron_mtp.checkpoint.hf.config import HFConfig


def _attention(config: HFConfig) -> GQA:
    bias = config.flag("use_bias")
    return gqa(config, bias=bias, out_bias=bias)


def _rules(config: HFConfig, layout: Layout) -> list[Rule]:
    bias, width, attention = config.flag("use_bias"), config.integer("intermediate_size"), _attention(config)
    rules = frame(config, layout)
    for depth in range(layout.depths):
        norms, projection = (f"mtp_emb_norm.{depth}", f"mtp_hidden_norm.{depth}"), f"mtp_linear_proj.{depth}"
        names = Frame.under("model.", *norms, projection, None)
        rules += depth_frame(depth, attention.hidden, names)
        rules += dense_layer(Place(f"model.mtp_block.{depth}.", depth_layer(depth)), attention, width, bias)
    return rules


def _depth_flags(config: HFConfig, layout: Layout) -> list[str]:
    return [*gqa_depths(config, layout, _attention(config)), *rotary(config, interleaved=True)]


ERNIE = Family(
    "ERNIE-4.5 MoE",
    "ERNIE-4.5 with experts",
    ("ernie4_5_moe",),
    _rules,
    depths=Depths(
        r"^model\.mtp_linear_proj\.(\d+)\.weight$",
        depth_of=numbered_depth(r"model\.mtp_linear_proj\.(\d+)\."),
        flags=_depth_flags,
    ),
    features=STORED_HEAD,
    carried=(r"model\.layers\.", r"model\.mtp_linear_proj\.\d+\.bias$"),
    untrainable="a router of softmax scores with a correction bias, and depths without a norm before the head",
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
)
