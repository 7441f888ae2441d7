"""Sizes and rotary positions of a drafter's layers: those of the settings, else the trunk's.

They are attention with grouped queries, whatever the trunk has: latent attention, recurrent layers, windows, positions
in a part of each head. So a drafter has its own heads and its own angles.
"""

import json
from dataclasses import dataclass
from typing import Any

from megatron_mtp.rope_scaling import scaling_of

OF_LATENT_TRUNKS = (128, 64, 32, 16, 8)
"""Channels of a head behind latent attention: the first of which a multiple of 8 heads fills the hidden size."""


def parsed_scaling(text: str) -> dict[str, Any] | None:
    """The scaling that --drafter-rope-scaling spells out in JSON.

    Raises:
        ValueError: it is no JSON object, or as of `scaling_of`.
    """
    example = """'{"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 4096}'"""
    try:
        keys = json.loads(text)
    except ValueError:
        keys = None
    if not isinstance(keys, dict):
        raise ValueError(f"--drafter-rope-scaling is {text:.60}, which is no JSON object; give for example {example}.")
    try:
        return scaling_of(keys)
    except ValueError as error:
        raise ValueError(f"--drafter-rope-scaling has {error}; give for example {example}.") from None


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes and positions of attention with grouped queries.

    Attributes:
        heads, groups, channels: query heads, key heads, channels of a head.
        epsilon: of the norms.
        theta: base of the rotary angles.
        scaling: of these, from `scaling_of`; None without one.
    """

    heads: int
    groups: int
    channels: int
    epsilon: float
    theta: float
    scaling: dict[str, Any] | None = None


OWN_SIZES = {
    "drafter_num_attention_heads": "heads",
    "drafter_num_query_groups": "groups",
    "drafter_kv_channels": "channels",
    "drafter_norm_epsilon": "epsilon",
    "drafter_rotary_base": "theta",
}
"""Settings of a drafter's sizes; `drafter_rope_scaling` is that of the scaling."""


def own_sizes(hidden: int, trunk: AttentionSizes, is_latent: bool, settings: Any) -> AttentionSizes:
    """Sizes of a drafter's layers: those of the settings, else the trunk's.

    Behind latent attention, which has other heads, a drafter has as many as fill the hidden size, and a key head for
    four of them; where no usual width does that, as many as the trunk.

    Args:
        hidden: hidden size of both.
        trunk: the sizes of its attention.
        is_latent: whether that is latent attention.
        settings: has `OWN_SIZES` and `drafter_rope_scaling` as attributes, None or absent where not given.

    Raises:
        ValueError: heads cannot be shared out to groups, or turned.
    """
    given = {name: getattr(settings, flag, None) for flag, name in OWN_SIZES.items()}
    made = {name: getattr(trunk, name) if value is None else value for name, value in given.items()}
    if is_latent:
        fitting = next((one for one in OF_LATENT_TRUNKS if hidden % (8 * one) == 0), hidden // trunk.heads)
        channels = given["channels"] or fitting
        heads = given["heads"] or max(hidden // channels, 1)
        made |= {"channels": channels, "heads": heads, "groups": given["groups"] or max(heads // 4, 1)}
    if made["heads"] % made["groups"] or made["channels"] % 2:
        raise ValueError(
            f"the drafter would have {made['heads']} heads of {made['channels']} channels in {made['groups']} groups; "
            "give an even --drafter-kv-channels, and --drafter-num-query-groups that divide "
            "--drafter-num-attention-heads."
        )
    text = getattr(settings, "drafter_rope_scaling", None)
    return AttentionSizes(**made, scaling=trunk.scaling if text is None else parsed_scaling(text))


def size_settings(sizes: AttentionSizes, usual: AttentionSizes) -> dict[str, Any]:
    """The settings of such sizes, by flag; None where they are the usual ones, of `own_sizes` without settings."""
    pairs = {flag: (getattr(sizes, name), getattr(usual, name)) for flag, name in OWN_SIZES.items()}
    text = json.dumps(sizes.scaling or {"rope_type": "default"})
    return {
        **{flag: None if own == default else own for flag, (own, default) in pairs.items()},
        "drafter_rope_scaling": None if sizes.scaling == usual.scaling else text,
    }


# --- windows ----------------------------------------------------------------------------------------------------------


def drafter_windows(settings: Any, layers: int, fills_blocks: bool) -> tuple[tuple[int, int] | None, ...]:
    """The positions before and after its own that a row of each layer attends to; None for all that there are.

    A row at position p of a window of W attends to positions above p - W, as engines serve it. -1 is without limit:
    the rows of a block see one another in both directions, unless they are causal.

    Raises:
        ValueError: a layer that is to attend to all positions is none of the drafter's, or has no window beside it.
    """
    names = "drafter_window_size", "drafter_full_layers", "drafter_causal"
    width, full, causal = (getattr(settings, name, None) for name in names)
    numbers, after = range(1, layers + 1), 0 if causal or not fills_blocks else -1
    if full and (width is None or not {*full} < {*numbers}):
        raise ValueError(
            f"--drafter-full-layers is {' '.join(map(str, full))}, of {layers} layers with --drafter-window-size "
            f"{width}; give a window, and some of the layers, counted from 1."
        )
    wide = (-1, 0) if causal else None
    return tuple(wide if width is None or number in (full or ()) else (width - 1, after) for number in numbers)
