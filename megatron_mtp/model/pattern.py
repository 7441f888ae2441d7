"""Patterns of hybrid models (`--hybrid-layer-pattern`): a symbol a layer, the trunk's, and after each `/` a depth's.

    M*-|M*-/*-    a trunk of six layers on two pipeline stages, and one depth

Read without building a model.
"""

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

RECURRENT = (Symbols.MAMBA, Symbols.GDN)
"""Layers with states."""
KINDS = {
    Symbols.ATTENTION: "attention",
    Symbols.MLA: "latent attention",
    Symbols.DS_ATTENTION: "sparse attention",
    Symbols.MLP: "MLP",
    Symbols.MOE: "MoE",
    Symbols.MAMBA: "Mamba-2",
    Symbols.GDN: "Gated DeltaNet",
}
"""The symbols of a pattern, in words."""
SHARDED_STACK = "mtp_model_layer"
"""The name of a depth's stack in checkpoints, which Megatron's own MTP uses too."""


def without_stages(pattern: str) -> str:
    """The pattern without the ends of its pipeline stages: Megatron cuts such a trunk evenly."""
    return pattern.replace(Symbols.PIPE, "")


def trunk_and_depths(pattern: str) -> tuple[str, list[str]]:
    """The layers of the trunk, without stages, and those of every depth."""
    trunk, *depths = without_stages(pattern).split(Symbols.MTP_SEPARATOR)
    return trunk, depths
