"""Draft heads: the complete description of a drafter, and which heads a run has.

HeadSpec describes a drafter. All defaults are filled in and all settings checked here:

    HeadSpec.resolve("dflash", {"drafter_steps": 4}, trunk)

Flags, checkpoint arguments and model settings pass what they have, by flag name. Model building, export, training and
serving read the resolved description.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_mtp.spec.attention import SIZE_SETTINGS, AttentionSizes, own_sizes, size_settings, windows_of
from megatron_mtp.spec.config import OF_KINDS, MTPConfig
from megatron_mtp.spec.kinds import DRAFTERS, DrafterKind, drafts_of, kind_of, settings_of_kinds

DRAFTER_SETTINGS = (
    *("drafter", "drafter_layers", "drafter_ffn_hidden_size", "drafter_window_size", *SIZE_SETTINGS),
    *(name for name, setting in OF_KINDS.items() if setting.is_kept),
)
"""Settings that determine the architecture of a drafter."""


@dataclass(frozen=True)
class TrunkSpec:
    """Facts of the trunk that a drafter depends on.

    Attributes:
        layers: number of layers, as drafters count them.
        vocabulary: number of tokens.
        hidden: hidden size.
        ffn: hidden size of the MLPs.
        attention: sizes of the attention.
    """

    layers: int
    vocabulary: int
    hidden: int
    ffn: int
    attention: AttentionSizes


@dataclass(frozen=True)
class HeadSpec:
    """A drafter with a value for every setting.

    Properties such as `idle_rows` have values of `own` that code for many kinds reads.

    Attributes:
        kind: a name of `kinds.DRAFTERS`.
        drafts: number of tokens that it drafts, or was trained to draft.
        layers: numbers of the trunk layers that it reads, from 1; empty if it reads the last hidden state.
        ffn: hidden size of its MLPs.
        attention: sizes and positions of its attention.
        vocabulary: number of tokens of the trunk.
        window: number of positions that its layers attend to; None for all.
        own: values of the settings that the row of its kind declares, by name.
    """

    kind: str
    drafts: int
    layers: tuple[int, ...]
    ffn: int
    attention: AttentionSizes
    vocabulary: int
    window: int | None
    own: Mapping[str, Any] = field(hash=False)

    @classmethod
    def resolve(cls, kind: str, given: Mapping[str, Any], trunk: TrunkSpec) -> "HeadSpec":
        """Resolve settings to a drafter for a trunk.

        Args:
            kind: a name of `kinds.DRAFTERS`.
            given: settings by flag name; None or a missing entry means not set.
            trunk: facts of the trunk.

        Raises:
            ValueError: the trunk does not support such a drafter, or settings contradict each other.
        """
        row = kind_of(kind)
        own = row.own(given)
        if "drafter_mask_token" in own:
            own["drafter_mask_token"] = _mask_token(own["drafter_mask_token"], trunk.vocabulary)
        made = cls(
            kind=kind,
            drafts=drafts_of(given),
            layers=layers_of(row, given, trunk.layers),
            ffn=given.get("drafter_ffn_hidden_size") or trunk.ffn,
            attention=own_sizes(trunk.hidden, trunk.attention, given),
            vocabulary=trunk.vocabulary,
            window=given.get("drafter_window_size"),
            own=own,
        )
        _ = made.windows  # raises if its layers cannot have them
        return made

    @property
    def depth(self) -> int:
        """Number of its own layers."""
        return int(self.own.get("drafter_num_layers", 1))

    @property
    def mask_token(self) -> int | None:
        """Token whose embedding fills the block positions to draft; None for drafters without blocks."""
        return self.own.get("drafter_mask_token")

    @property
    def idle_rows(self) -> int:
        """Number of rows at the start of a block that draft nothing."""
        return int(self.own.get("drafter_idle_rows", DRAFTERS[self.kind].idle_rows))

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Numbers of the layers, from 1, that attend to all positions even if there is a window."""
        return tuple(self.own.get("drafter_full_layers", ()))

    @property
    def causal(self) -> int:
        """1 if rows of a block attend only to earlier rows, 2 if only those of windowed layers do so, 0 otherwise."""
        return int(self.own.get("drafter_causal", 0))

    @property
    def has_sinks(self) -> bool:
        """Whether every attention head has a sink with a trained score."""
        return self.own.get("drafter_softmax_type") == "learnable"

    @property
    def windows(self) -> tuple[tuple[int, int] | None, ...]:
        """Attention window of each layer, as returned by `windows_of`."""
        sees_ahead = DRAFTERS[self.kind].sees_ahead
        return windows_of(self.window, self.full_layers, self.causal, self.depth, sees_ahead)

    def arguments(self, trunk: TrunkSpec) -> dict[str, Any]:
        """Settings to store in a checkpoint, by flag name; None where the default applies, or the kind has none."""
        declared = DRAFTERS[self.kind].settings
        return {
            "drafter": self.kind,
            "drafter_layers": [*self.layers] or None,
            "drafter_steps": self.drafts,
            "drafter_window_size": self.window,
            "drafter_ffn_hidden_size": None if self.ffn == trunk.ffn else self.ffn,
            **{name: None for name, setting in settings_of_kinds().items() if setting.is_kept},
            **{name: declared[name].stored(value) for name, value in self.own.items()},
            **size_settings(self.attention, trunk.hidden, trunk.attention),
        }


def layers_of(row: DrafterKind, given: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the numbers of the trunk layers that a drafter reads.

    Raises:
        ValueError: the drafter cannot read these layers of a trunk of this depth.
    """
    chosen = given.get("drafter_layers") or row.default_layers(layers, row.own(given).get("drafter_num_layers"))
    row.check_layers(tuple(chosen), layers)
    return tuple(chosen)


def _mask_token(given: int | None, vocabulary: int) -> int:
    mask = vocabulary - 1 if given is None else given
    if mask >= vocabulary:
        raise ValueError(
            f"--drafter-mask-token is {mask}, and the vocabulary has {vocabulary} tokens; give one of those."
        )
    return mask


# --- heads of a run ---------------------------------------------------------------------------------------------------

WITH_MTP = "drafter_beside_mtp"
"""Argument that is true if a drafter is trained together with MTP layers rather than instead of them."""

NO_DRAFTER = {"drafter": None, WITH_MTP: False}
"""Arguments of a model without a drafter."""

HEADS = {"mtp": "mtp", "drafter_block": "drafter"}
"""Module names of draft heads, with their prefix in metrics; a drafter without MTP layers is `mtp` too."""


def is_head(module: str) -> bool:
    """Return whether a module with this name is a draft head, including drafters named by `attach`."""
    return module in HEADS or module.startswith("drafter_")


def module_of(head: str) -> str:
    """Return the module name of an attached head."""
    return head if head in HEADS else f"drafter_{head}"


@dataclass(frozen=True)
class HeadSettings:
    """A draft head of a run or a model.

    Attributes:
        name: name of its module, a key of `HEADS`.
        settings: architecture and training settings.
        depths: number of tokens that it drafts.
        has_lambda: whether its loss is weighted with lambda and trains the output layer like the trunk's loss. False
            for a drafter trained with MTP layers.
    """

    name: str
    settings: MTPConfig
    depths: int
    has_lambda: bool = True


def heads_of(settings: MTPConfig, depths: int, steps: int) -> list[HeadSettings]:
    """Return the draft heads of a run or a model.

    Args:
        settings: settings of all heads.
        depths: number of depths of the first head (`trained_depths`); 0 if there are no heads.
        steps: number of tokens that a drafter trained with MTP layers drafts (`drafted_steps`); 0 without one.
    """
    first, *others = HEADS
    if not depths:
        return []
    if not steps:
        return [HeadSettings(first, settings, depths)]
    own, drafter = settings.apart()
    return [HeadSettings(first, own, depths), HeadSettings(others[0], drafter, steps, has_lambda=False)]


def trained_depths(args: Namespace) -> int:
    """Return the number of depths: the passes of a repeated layer, otherwise --mtp-num-layers."""
    if not args.mtp_num_layers:
        return 0
    passes: int | None = getattr(args, "mtp_unroll", None)
    return passes or int(args.mtp_num_layers)


def drafted_steps(args: Namespace) -> int:
    """Return the number of tokens that a drafter trained with MTP layers learns to draft; 0 without one."""
    return drafts_of(vars(args)) if has_both(args) else 0


def has_both(args: Namespace) -> bool:
    """Return whether a model has MTP layers and a drafter."""
    return getattr(args, "drafter", None) is not None and getattr(args, WITH_MTP, False)


def only_drafter(args: Namespace) -> str | None:
    """Return the kind of a drafter that a model has instead of MTP layers; None if it has none, or both."""
    return None if has_both(args) else getattr(args, "drafter", None)
