"""Attention sizes and rotary positions of a drafter's layers: from the settings, or the trunk's by default.

Drafters use grouped-query attention, even if the trunk has latent attention, recurrent layers, windows or partial
rotary embeddings. So a drafter has its own head counts and rotary angles. With --drafter-multi-latent-attention,
drafters use latent attention.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

OF_LATENT_TRUNKS = (128, 64, 32, 16, 8)
"""Channels of a head if the trunk has latent attention: the first value for which a multiple of 8 heads fills the
hidden size.
"""


def parsed_scaling(text: str, is_latent: bool = False) -> dict[str, Any] | None:
    """Parse the JSON of --drafter-rope-scaling, for latent or grouped-query attention.

    Raises:
        ValueError: it is not a JSON object, or as of `scaling_of`.
    """
    from megatron_mtp.spec.rope_scaling import scaling_of

    example = """'{"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 4096}'"""
    try:
        keys = json.loads(text)
    except ValueError:
        keys = None
    if not isinstance(keys, dict):
        raise ValueError(
            f"--drafter-rope-scaling is {text:.60}, which is not a JSON object; give for example {example}."
        )
    try:
        return scaling_of(keys, is_latent)
    except ValueError as error:
        raise ValueError(f"--drafter-rope-scaling has {error}; give for example {example}.") from None


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of latent attention (arXiv:2405.04434), under the names of Megatron's arguments.

    Attributes:
        q_lora_rank: rank of the compressed queries; None if queries are not compressed.
        kv_lora_rank: rank of the compressed keys and values.
        qk_head_dim, qk_pos_emb_head_dim: channels of a query or key without and with rotary positions.
        v_head_dim: channels of a value.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, named: Callable[[str], Any]) -> "LatentSizes":
        """Read the sizes from a function of their names; a query rank of 0 counts as none."""
        query, *others = (named(one.name) for one in fields(cls))
        return cls(query or None, *others)

    @classmethod
    def given(cls, numbers: Sequence[int]) -> "LatentSizes":
        """Of --drafter-multi-latent-attention.

        Raises:
            ValueError: there are not five, or one is not a size.
        """
        names = [one.name for one in fields(cls)]
        if len(numbers) != len(names) or min(numbers[1:]) < 1 or numbers[0] < 0 or numbers[3] % 2:
            raise ValueError(
                f"{LATENT} is {' '.join(map(str, numbers))}; give the five numbers Q KV NOPE ROPE V, of which Q may be "
                "0 and ROPE is even."
            )
        return cls.of(dict(zip(names, numbers, strict=True)).__getitem__)

    @property
    def channels(self) -> int:
        """Number of channels of a query or key."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


LATENT = "--drafter-multi-latent-attention"


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes and positions of grouped-query or latent attention.

    Attributes:
        heads, groups, channels: number of query heads, number of key heads, channels per head.
        epsilon: epsilon of the norms.
        theta: base of the rotary angles.
        scaling: RoPE scaling from `scaling_of`; None if there is none.
        latents: sizes of latent attention; None for grouped-query attention. Latent attention has as many key heads as
            query heads.
    """

    heads: int
    groups: int
    channels: int
    epsilon: float
    theta: float
    scaling: dict[str, Any] | None = None
    latents: LatentSizes | None = None


OWN_SIZES = {
    "drafter_num_attention_heads": "heads",
    "drafter_num_query_groups": "groups",
    "drafter_kv_channels": "channels",
    "drafter_norm_epsilon": "epsilon",
    "drafter_rotary_base": "theta",
}
"""Numbers among the settings of a drafter's sizes."""

GROUPED = ("drafter_num_query_groups", "drafter_kv_channels")
"""Settings that only grouped-query attention has."""

SIZE_SETTINGS = (*OWN_SIZES, "drafter_rope_scaling", "drafter_multi_latent_attention")
"""All settings of a drafter's sizes."""


def own_sizes(hidden: int, trunk: AttentionSizes, flags: Mapping[str, Any]) -> AttentionSizes:
    """Resolve the attention sizes of a drafter: from its settings, or the trunk's by default.

    On a trunk with latent attention, a grouped-query drafter gets as many heads as fill the hidden size, with one key
    head per four query heads. If no common head width fits, it gets as many heads as the trunk.

    Args:
        hidden: hidden size of trunk and drafter.
        trunk: attention sizes of the trunk.
        flags: `SIZE_SETTINGS` by name; None or missing if not set.

    Raises:
        ValueError: heads do not divide into groups, or have an odd width; the trunk has no latent sizes, or its scaling
            cannot be used by the drafter.
    """
    given = {name: flags.get(flag) for flag, name in OWN_SIZES.items()}
    made = {name: getattr(trunk, name) if value is None else value for name, value in given.items()}
    latents = _latents(trunk, flags)
    if latents is not None:
        if wrong := [flag for flag in GROUPED if given[OWN_SIZES[flag]] is not None]:
            raise ValueError(
                f"{LATENT} was given with --{wrong[0].replace('_', '-')}, which is of grouped queries; drop one of "
                "the two."
            )
        made |= {"groups": made["heads"], "channels": latents.channels}
    elif trunk.latents is not None:
        fitting = next((one for one in OF_LATENT_TRUNKS if hidden % (8 * one) == 0), hidden // trunk.heads)
        channels = given["channels"] or fitting
        heads = given["heads"] or max(hidden // channels, 1)
        made |= {"channels": channels, "heads": heads, "groups": given["groups"] or max(heads // 4, 1)}
    if made["heads"] % made["groups"] or (made["channels"] % 2 and latents is None):
        raise ValueError(
            f"the drafter would have {made['heads']} heads of {made['channels']} channels in {made['groups']} groups; "
            "give an even --drafter-kv-channels, and --drafter-num-query-groups that divide "
            "--drafter-num-attention-heads."
        )
    text = flags.get("drafter_rope_scaling")
    is_latent = latents is not None
    scaling = _scaling_behind(trunk, is_latent) if text is None else parsed_scaling(text, is_latent)
    return AttentionSizes(**made, scaling=scaling, latents=latents)


def _latents(trunk: AttentionSizes, flags: Mapping[str, Any]) -> LatentSizes | None:
    numbers = flags.get("drafter_multi_latent_attention")
    if numbers is None:
        return None
    if numbers:
        return LatentSizes.given(numbers)
    if trunk.latents is None:
        raise ValueError(
            f"{LATENT} has no numbers, and the trunk has no latent attention to take them from; give Q KV NOPE ROPE V."
        )
    return trunk.latents


def _scaling_behind(trunk: AttentionSizes, is_latent: bool) -> dict[str, Any] | None:
    """Return the trunk's scaling for a drafter; other attention has its own factors of angles and scores."""
    if trunk.scaling is None or is_latent == (trunk.latents is not None):
        return trunk.scaling

    from megatron_mtp.spec.rope_scaling import MSCALES, scaling_of

    try:
        return scaling_of({name: value for name, value in trunk.scaling.items() if name not in MSCALES}, is_latent)
    except ValueError as error:
        raise ValueError(f"the trunk's rotary positions have {error}; give --drafter-rope-scaling.") from None


def size_settings(sizes: AttentionSizes, hidden: int, trunk: AttentionSizes) -> dict[str, Any]:
    """Settings that reproduce these sizes on a trunk, by flag; None where the default is the same.

    All latent sizes are set, because not every trunk has the usual ones.
    """
    of_latents = latent_settings(sizes)
    usual = own_sizes(hidden, trunk, of_latents)
    pairs = {flag: (getattr(sizes, name), getattr(usual, name)) for flag, name in OWN_SIZES.items()}
    return {
        **{flag: None if own == default else own for flag, (own, default) in pairs.items()},
        "drafter_rope_scaling": None if sizes.scaling == usual.scaling else _text(sizes.scaling),
        "drafter_multi_latent_attention": None,
        **of_latents,
    }


def latent_settings(sizes: AttentionSizes) -> dict[str, Any]:
    """Settings of latent attention, by flag; empty for grouped-query attention."""
    if sizes.latents is None:
        return {}
    numbers = [number or 0 for number in astuple(sizes.latents)]
    return {
        **dict.fromkeys(GROUPED),
        "drafter_multi_latent_attention": numbers,
        "drafter_rope_scaling": _text(sizes.scaling),
    }


def _text(scaling: dict[str, Any] | None) -> str:
    return json.dumps(scaling or {"rope_type": "default"})


# --- windows ----------------------------------------------------------------------------------------------------------


CAUSAL, CAUSAL_IN_WINDOWS = 1, 2
"""Values of --drafter-causal: every layer of a block drafter is causal, or only layers with a window."""


def windows_of(
    width: int | None, full: Sequence[int], causal: int, layers: int, sees_ahead: bool
) -> tuple[tuple[int, int] | None, ...]:
    """Number of positions before and after its own that each layer attends to; None if no layer has a limit.

    With a window of W, the row at position p attends to positions above p - W, as engines implement it. -1 means no
    limit: rows of a block attend to each other in both directions unless the layer is causal.

    Args:
        width: window size; None for full attention.
        full: numbers of the layers, from 1, that attend to all positions even if there is a window.
        causal: value of --drafter-causal.
        layers: number of layers of the drafter.
        sees_ahead: whether rows of a block may attend to later rows of it.

    Raises:
        ValueError: `full` names a layer that does not exist, or there is no window for other layers; or only windowed
            layers are to be causal, and either all layers have windows or none has.
    """
    numbers, after = range(1, layers + 1), 0 if causal or not sees_ahead else -1
    if causal == CAUSAL_IN_WINDOWS and not full:
        raise ValueError(
            f"--drafter-causal {CAUSAL_IN_WINDOWS} needs both windowed and full layers; give --drafter-window-size "
            "and --drafter-full-layers, or --drafter-causal 0 or 1."
        )
    if full and (width is None or not {*full} < {*numbers}):
        raise ValueError(
            f"--drafter-full-layers is {' '.join(map(str, full))}, of {layers} layers with --drafter-window-size "
            f"{width}; give a window, and some of the layers, counted from 1."
        )
    wide = (-1, 0) if causal == CAUSAL else None
    return tuple(wide if width is None or number in full else (width - 1, after) for number in numbers)
