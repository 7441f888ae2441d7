"""HeadSpec: the complete description of a drafter. All defaults are filled in and all settings checked here.

    HeadSpec.resolve("dflash", {"drafter_steps": 4}, trunk)

Flags, checkpoint arguments and model settings pass what they have, by flag name. Model building, export, training and
serving read the resolved description.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_mtp.spec.attention import AttentionSizes, own_sizes, size_settings, windows_of
from megatron_mtp.spec.kinds import DRAFTERS, STEPS, DrafterKind, kind_of


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

    Attributes:
        kind: a name of `kinds.DRAFTERS`.
        drafts: number of tokens that it drafts, or was trained to draft.
        layers: numbers of the trunk layers that it reads, from 1; empty if it reads the last hidden state.
        depth: number of its own layers.
        ffn: hidden size of its MLPs.
        attention: sizes and positions of its attention.
        vocabulary: number of tokens of the trunk.
        mask_token: token whose embedding fills the block positions to draft; None for drafters without blocks.
        markov_rank: rank of the bias that depends on the previous token, or on all previous tokens of the block; None
            if there is no bias.
        gru_size: state size of a bias that depends on all previous tokens; None if there is none.
        idle_rows: number of rows at the start of a block that draft nothing.
        window: number of positions that its layers attend to; None for all.
        full_layers: numbers of the layers, from 1, that attend to all positions even if there is a window.
        causal: value of --drafter-causal: 1 if rows of a block attend only to earlier rows, 2 if only windowed layers
            do so.
        has_sinks: whether every attention head has a sink with a trained score.
        norm_before_residual: whether an EAGLE-3 layer adds its residual to the normalized feature.
    """

    kind: str
    drafts: int
    layers: tuple[int, ...]
    depth: int
    ffn: int
    attention: AttentionSizes
    vocabulary: int
    mask_token: int | None
    markov_rank: int | None
    gru_size: int | None
    idle_rows: int
    window: int | None
    full_layers: tuple[int, ...]
    causal: int
    has_sinks: bool
    norm_before_residual: bool

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
        numbers = own_numbers(row, given)
        made = cls(
            kind=kind,
            drafts=drafts_of(given),
            layers=layers_of(row, given, trunk.layers),
            depth=numbers["drafter_num_layers"] or 1,
            ffn=given.get("drafter_ffn_hidden_size") or trunk.ffn,
            attention=own_sizes(trunk.hidden, trunk.attention, given),
            vocabulary=trunk.vocabulary,
            mask_token=_mask_token(given, trunk.vocabulary) if row.fills_blocks else None,
            markov_rank=numbers["drafter_markov_rank"],
            gru_size=numbers["drafter_gru_size"],
            idle_rows=_or(given.get("drafter_idle_rows"), row.idle_rows),
            window=given.get("drafter_window_size"),
            full_layers=tuple(given.get("drafter_full_layers") or ()),
            causal=given.get("drafter_causal") or 0,
            has_sinks=given.get("drafter_softmax_type") == "learnable",
            norm_before_residual=bool(given.get("drafter_norm_before_residual")),
        )
        _ = made.windows  # refused where its layers cannot have them
        return made

    @property
    def windows(self) -> tuple[tuple[int, int] | None, ...]:
        """Attention window of each layer, as returned by `windows_of`."""
        sees_ahead = DRAFTERS[self.kind].sees_ahead
        return windows_of(self.window, self.full_layers, self.causal, self.depth, sees_ahead)

    def arguments(self, trunk: TrunkSpec) -> dict[str, Any]:
        """Settings to store in a checkpoint, by flag name; None where the default applies."""
        row = DRAFTERS[self.kind]
        own = {
            "drafter_num_layers": self.depth,
            "drafter_mask_token": self.mask_token,
            "drafter_markov_rank": self.markov_rank,
            "drafter_gru_size": self.gru_size,
            "drafter_idle_rows": None if self.idle_rows == row.idle_rows else self.idle_rows,
            "drafter_full_layers": [*self.full_layers] or None,
            "drafter_causal": self.causal or None,
            "drafter_softmax_type": "learnable" if self.has_sinks else None,
            "drafter_norm_before_residual": int(self.norm_before_residual) or None,
        }
        return {
            "drafter": self.kind,
            "drafter_layers": [*self.layers] or None,
            "drafter_steps": self.drafts,
            "drafter_window_size": self.window,
            "drafter_ffn_hidden_size": None if self.ffn == trunk.ffn else self.ffn,
            **{name: value if name in row.settings else None for name, value in own.items()},
            **size_settings(self.attention, trunk.hidden, trunk.attention),
        }


def drafts_of(given: Mapping[str, Any]) -> int:
    """Return the number of tokens that a drafter learns to draft."""
    return int(given.get("drafter_steps") or STEPS)


def own_numbers(row: DrafterKind, given: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the number of drafter layers and the sizes of its bias, by flag name; None where the kind has none."""
    names = "drafter_num_layers", "drafter_markov_rank", "drafter_gru_size"
    return {name: given.get(name) or row.settings.get(name) for name in names}


def layers_of(row: DrafterKind, given: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the numbers of the trunk layers that a drafter reads.

    Raises:
        ValueError: the drafter cannot read these layers of a trunk of this depth.
    """
    chosen = given.get("drafter_layers") or row.default_layers(layers, own_numbers(row, given)["drafter_num_layers"])
    row.check_layers(tuple(chosen), layers)
    return tuple(chosen)


def _mask_token(given: Mapping[str, Any], vocabulary: int) -> int:
    mask: int = _or(given.get("drafter_mask_token"), vocabulary - 1)
    if mask >= vocabulary:
        raise ValueError(
            f"--drafter-mask-token is {mask}, and the vocabulary has {vocabulary} tokens; give one of those."
        )
    return mask


def _or[T](value: T | None, usual: T) -> T:
    return usual if value is None else value
