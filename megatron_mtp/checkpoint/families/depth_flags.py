"""Megatron's flags for the depths of families whose trunk it cannot run: a model with one layer and these depths.

`verify` builds it and gives the depths the trunk's hidden states, and the output of modules that Megatron lacks.
"""

from megatron_mtp.checkpoint.families.blocks import GQA, MLA
from megatron_mtp.checkpoint.families.family import Layout
from megatron_mtp.checkpoint.families.flags import (
    UntrainableError,
    common_flags,
    expert_flags,
    gqa_flags,
    latent_flags,
    pairs,
    rope_flags,
)
from megatron_mtp.checkpoint.families.trunk import gqa
from megatron_mtp.checkpoint.hf.config import HFConfig

ALL_LAYERS = pairs({"moe-layer-freq": 1})
NO_POSITIONS = pairs({"position-embedding-type": "none"})


def gqa_depths(config: HFConfig, layout: Layout, attention: GQA) -> list[str]:
    """Flags of dense depths with grouped-query attention, without positions."""
    if attention.out_bias:
        raise UntrainableError("biases of all projections, which Megatron has only together with all others")
    width = config.integer("intermediate_size")
    return [*common_flags(config, layout.depths, 1, width), *gqa_flags(attention), *NO_POSITIONS]


def rotary(config: HFConfig, interleaved: bool = False) -> list[str]:
    """Flags of rotary positions."""
    return rope_flags(config, interleaved)


def framed_depths(config: HFConfig, layout: Layout) -> list[str]:
    """Flags of depths whose attention Megatron lacks: it computes the frame, and the MLP if it is dense."""
    width = config.integer("intermediate_size", "moe_intermediate_size")
    return [*common_flags(config, layout.depths, 1, width), *gqa_flags(gqa(config)), *NO_POSITIONS]


def latent_depths(config: HFConfig, layout: Layout, attention: MLA, width: int) -> list[str]:
    """Flags of dense depths with latent attention."""
    return [*common_flags(config, layout.depths, 1, width), *latent_flags(config, attention)]


def sigmoid_experts(config: HFConfig) -> list[str]:
    """Flags of experts in every depth, with DeepSeek-V3's router."""
    return [*expert_flags(config), *ALL_LAYERS]
