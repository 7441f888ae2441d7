"""What the layers of a drafter attend to, and the settings of its kind, by the keys of its config."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_mtp.checkpoint.hf.config import CONFIG
from megatron_mtp.spec.attention import CAUSAL, CAUSAL_IN_WINDOWS
from megatron_mtp.spec.head import HeadSpec
from megatron_mtp.spec.kinds import DRAFTERS, DrafterKind, settings_of_kinds

FULL, SLIDING = "full_attention", "sliding_attention"
"""Types of layers."""
CAUSAL_KEYS, NON_CAUSAL = ("is_causal", "causal"), "sliding_window_non_causal"
"""Config keys for causality, of all layers and, in speculators, of windowed ones."""


@dataclass(frozen=True)
class LayerView:
    """What the rows of a layer attend to.

    Attributes:
        window: a row at position p attends to positions above p minus this number; None for all positions.
        causal: whether rows of a block attend only to earlier rows.
    """

    window: int | None
    causal: bool


def layer_views(keys: Mapping[str, Any], sees_ahead: bool) -> list[LayerView]:
    """Return what each layer of a drafter attends to, as engines read the keys of its config (`with_inner`).

    A layer that does not see ahead in its blocks is causal. For others, `is_causal` and `causal` apply to all layers;
    `sliding_window_non_causal`, which speculators writes, applies to windowed layers, and its full layers are never
    causal. Without a key, layers that are windowed in `layer_types` are causal.

    Raises:
        ValueError: the keys contradict each other, or do not determine what layers attend to.
    """
    types = _layer_types(keys)
    listed = keys.get("layer_types") or [FULL] * len(types)
    widths = {name: keys[name] for name in ("swa_window_size", "sliding_window") if keys.get(name) is not None}
    width = next(iter(widths.values()), None)
    if SLIDING in types:
        if len({*widths.values()}) > 1:
            raise ValueError(f"has {_both(widths)}, two widths of one window; remove the one that was not trained.")
        if type(width) is not int or width < 1:
            raise ValueError(f"has sliding_window {width!r:.40}, which is a number from 1 on.")
    if not sees_ahead:
        return [LayerView(width if one == SLIDING else None, causal=True) for one in types]
    said = {name: [bool(keys[name])] * len(types) for name in CAUSAL_KEYS if keys.get(name) is not None}
    if SLIDING in types and keys.get(NON_CAUSAL) is not None:
        said[NON_CAUSAL] = [one == SLIDING and not keys[NON_CAUSAL] for one in types]
    if len({*map(tuple, said.values())}) > 1:
        raise ValueError(
            f"has {_both({name: keys[name] for name in said})}, which differ on which layers are causal "
            f"({NON_CAUSAL} leaves full layers non-causal); keep the key by which the drafter was trained."
        )
    if not said and len({*types}) > 1:
        raise ValueError(
            "lacks is_causal, and engines take windowed layers as causal and others not; add the key as the drafter "
            f"was trained: is_causal for all layers, {NON_CAUSAL} for windowed ones alone."
        )
    causal = next(iter(said.values()), [one == SLIDING for one in listed])
    return [LayerView(width if one == SLIDING else None, own) for one, own in zip(types, causal, strict=True)]


def _layer_types(keys: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer, `FULL` or `SLIDING`; `use_swa` gives every layer a window."""
    count, types = keys.get("num_hidden_layers", 1), keys.get("layer_types")
    if types is None:
        if keys.get("use_sliding_window") and not keys.get("use_swa"):
            raise ValueError("has use_sliding_window without layer_types; give the type of each layer.")
        return [SLIDING if keys.get("use_swa") else FULL] * count
    if len(types) != count or {*types} - {FULL, SLIDING}:
        raise ValueError(f"has layer_types {types!r:.80}, which has to be {FULL} or {SLIDING} for each layer.")
    if keys.get("use_swa") and {*types} == {FULL, SLIDING}:
        raise ValueError(
            "has use_swa and layer_types with both kinds of layers, and engines differ on which of the two they take; "
            "remove use_swa, or give every layer a window."
        )
    return [SLIDING] * count if keys.get("use_swa") else [*types]


def _both(said: Mapping[str, Any]) -> str:
    return " and ".join(f"{name} {value}" for name, value in said.items())


def layers_in(path: Path, row: DrafterKind, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of what the layers attend to, by flag name, as engines read them.

    Raises:
        ValueError: they are missing or contradict each other, or the kind has no such layers.
    """
    try:
        views = layer_views(keys, row.sees_ahead)
    except ValueError as error:
        raise ValueError(f"{path / CONFIG} {error}") from None
    has_sinks = bool(keys.get("attention_sink_bias") or keys.get("add_swa_attention_sink_bias"))
    if has_sinks and "drafter_softmax_type" not in row.settings:
        raise ValueError(f"{path / CONFIG} has attention_sink_bias, which {row.called} does not have; give another.")
    found: dict[str, Any] = {"drafter_softmax_type": "learnable" if has_sinks else None}
    if (window := next((one.window for one in views if one.window is not None), None)) is not None:
        full = tuple(number for number, one in enumerate(views, start=1) if one.window is None)
        found |= {"drafter_window_size": window, "drafter_full_layers": full}
    if row.sees_ahead and any(one.causal for one in views):
        found["drafter_causal"] = CAUSAL if all(one.causal for one in views) else CAUSAL_IN_WINDOWS
    return found


# --- settings with their own key --------------------------------------------------------------------------------------


def keys_of_settings(kind: HeadSpec) -> dict[str, Any]:
    """Return the keys (`Setting.key`) of a drafter's settings that are not the default."""
    made: dict[str, Any] = {}
    for name, setting in DRAFTERS[kind.kind].settings.items():
        if setting.key is not None and kind.own[name] != setting.default:
            made[setting.key] = bool(kind.own[name]) if setting.is_switch else kind.own[name]
    return made


def settings_in(path: Path, row: DrafterKind, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that have a key of their own (`Setting.key`), by flag name.

    Raises:
        ValueError: a value is not allowed, or the kind does not have this setting.
    """
    found: dict[str, Any] = {}
    for name, setting in settings_of_kinds().items():
        if setting.key is None or keys.get(setting.key) is None:
            continue
        value = keys[setting.key]
        if name not in row.settings:
            if value and value != setting.default:
                raise ValueError(f"{path / CONFIG} has {setting.key}, which {row.called} does not have; give another.")
            continue
        wrong = setting.refusal(value)
        if setting.is_switch:
            wrong = "" if value in (False, True) else "give true or false."
        if wrong:
            raise ValueError(f"{path / CONFIG} has {setting.key} {value!r:.40}; {wrong}")
        found[name] = setting.value_type(value) if setting.is_switch else value
    return found
