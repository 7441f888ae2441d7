"""Layer patterns of hybrid models: one symbol per layer, `|` at the end of a pipeline stage, `/` before every depth."""

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

RECURRENT = (Symbols.MAMBA, Symbols.GDN)
"""Symbols of layers with recurrent states."""
KINDS = {
    Symbols.ATTENTION: "attention",
    Symbols.MLA: "latent attention",
    Symbols.DS_ATTENTION: "sparse attention",
    Symbols.MLP: "MLP",
    Symbols.MOE: "MoE",
    Symbols.MAMBA: "Mamba-2",
    Symbols.GDN: "Gated DeltaNet",
}
"""Layer symbols of a pattern, with their descriptions."""
SHARDED_STACK = "mtp_model_layer"
"""Name of a depth's stack in checkpoints; Megatron's own MTP uses it too."""


def without_stages(pattern: str) -> str:
    """Return the pattern without pipeline stages; Megatron then splits the trunk evenly."""
    return pattern.replace(Symbols.PIPE, "")


def trunk_and_depths(pattern: str) -> tuple[str, list[str]]:
    """Return the layers of the trunk, without stages, and those of every depth."""
    trunk, *depths = without_stages(pattern).split(Symbols.MTP_SEPARATOR)
    return trunk, depths


CHANNEL_MIXERS = Symbols.MLP + Symbols.MOE
"""Symbols of layers that do not mix positions."""


def symbols_of_a_layer(pattern: str | None) -> int:
    """Return how many symbols form one layer of a model's folder.

    2 if each layer is a mixer other than Mamba with its MLP or MoE, otherwise 1.

    G-G-*-      three layers, as in Qwen3.5          M-M-*-      six, as in Nemotron-H
    """
    kinds = "" if pattern is None else trunk_and_depths(pattern)[0]
    mixers, channels = set(kinds[::2]), set(kinds[1::2])
    is_paired = kinds and not len(kinds) % 2 and channels <= set(CHANNEL_MIXERS)
    return 2 if is_paired and mixers.isdisjoint({*CHANNEL_MIXERS, Symbols.MAMBA}) else 1
