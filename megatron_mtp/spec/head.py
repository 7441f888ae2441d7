"""The description of a drafter: the only place that gives a setting which nobody gave its value, and checks the rest.

    HeadSpec.resolve("dflash", {"drafter_steps": 4}, trunk)

Flags, a checkpoint's arguments and a model's settings give what they have, by the names of the flags. What is built,
written to a folder, trained or served reads the description.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_mtp.spec.attention import AttentionSizes, own_sizes, size_settings, windows_of
from megatron_mtp.spec.kinds import DRAFTERS, STEPS, DrafterKind, kind_of


@dataclass(frozen=True)
class TrunkSpec:
    """What a drafter depends on in its trunk.

    Attributes:
        layers: as drafters count them.
        vocabulary: tokens.
        hidden: hidden size.
        ffn: hidden size of its MLPs.
        attention: sizes of its attention.
    """

    layers: int
    vocabulary: int
    hidden: int
    ffn: int
    attention: AttentionSizes


@dataclass(frozen=True)
class HeadSpec:
    """A drafter, with a value for every setting.

    Attributes:
        kind: a name of `kinds.DRAFTERS`.
        drafts: tokens that it drafts, or was trained to draft.
        layers: numbers of the trunk's layers that it reads, from 1; none where it reads the last state.
        depth: its own layers.
        ffn: hidden size of its MLPs.
        attention: sizes and positions of its attention.
        vocabulary: tokens of its trunk.
        mask_token: whose embedding stands at the places of a block that are to be drafted; None without blocks.
        markov_rank: of the bias by the token before, or by all before in the block; None without one.
        gru_size: numbers of the state of a bias by all tokens before; None without one.
        idle_rows: the first rows of a block, which draft nothing.
        window: positions that its layers attend to; None for all.
        full_layers: numbers of the layers, from 1, that attend to all positions although there is a window.
        causal: of --drafter-causal: 1 if the rows of a block see only those before them, 2 in windowed layers alone.
        has_sinks: whether every head has a sink with a trained score.
        norm_before_residual: whether an EAGLE-3 layer adds to the normalized feature.
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
        """The drafter of some settings on a trunk.

        Args:
            kind: a name of `kinds.DRAFTERS`.
            given: settings by the names of their flags, in which None or no entry is "not given".
            trunk: what it stands on.

        Raises:
            ValueError: the trunk has no such drafter, or settings do not go together.
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
        """What each layer attends to, as of `windows_of`."""
        sees_ahead = DRAFTERS[self.kind].sees_ahead
        return windows_of(self.window, self.full_layers, self.causal, self.depth, sees_ahead)

    def arguments(self, trunk: TrunkSpec) -> dict[str, Any]:
        """The settings that a checkpoint keeps, by the names of their flags; None for those that are usual."""
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
    """Tokens that a drafter learns to draft."""
    return int(given.get("drafter_steps") or STEPS)


def own_numbers(row: DrafterKind, given: Mapping[str, Any]) -> dict[str, int | None]:
    """A drafter's layers and the sizes of its bias, by the names of the flags; None where its kind has none."""
    names = "drafter_num_layers", "drafter_markov_rank", "drafter_gru_size"
    return {name: given.get(name) or row.settings.get(name) for name in names}


def layers_of(row: DrafterKind, given: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Numbers of the layers that a drafter reads of a trunk that has so many. Raises ValueError if it cannot."""
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
