"""Kinds of drafters, a row of plain facts each.

A drafter reads the trunk's states after some of its layers, or its last state. It stands in the place of MTP layers or
with them, and to a model, a loss and a folder it is what they are: a head that drafts.

A kind is a folder of `heads/`, or of another package, whose row names its parts; an entry point registers the row:

    [project.entry-points."megatron_mtp.heads"]
    echo = "my_package.echo.row:ROW"

Letters in names: K drafts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_mtp.spec.registry import Registry

STEPS = 7
"""Tokens that a drafter learns to draft, unless --drafter-steps says otherwise."""

BLOCK_LAYERS, MARKOV_RANK, BLOCKS, GRU_SIZE = 5, 256, 512, 1024
"""Defaults of block drafters: layers, rank of the bias by the tokens before, blocks of a sequence, numbers of the state
that a bias by all tokens before keeps."""


FIRST_TAP = "first tap"
"""How a convolution [sides, taps, hidden] begins that changes nothing: with 1 at its first tap, and 0 at the others."""


def spread_layers(layers: int, depth: int | None = None) -> tuple[int, ...]:
    """As many layers as the drafter has, from the second to the last but two at equal distances."""
    count, last = min(depth or BLOCK_LAYERS, layers - 1), max(layers - 2, 2)
    if count == 1:
        return (min(layers // 2 + 1, layers - 1),)
    return tuple(sorted({2 + round(number * (last - 2) / (count - 1)) for number in range(count)}))


@dataclass(frozen=True)
class DrafterKind:
    """Facts of a kind of drafters.

    Attributes:
        name: of --drafter, and of the method that drafts with it.
        called: what a sentence calls it, with its article.
        architecture, model_type: of its folder's config.
        also_called: other architectures of folders with the same computation.
        published_as: the architecture in other published folders, which is that of whole models too: there `fc.weight`
            and a layer without a model around it tell the drafter.
        block: its module in a model, a `DrafterBlock`, written as an entry point is, "module:class".
        folder: the form of its folder, a `DrafterCodec`, written likewise.
        reference: its computation from a folder alone, a subclass of `verify.drafters.Reference`, written likewise.
        methods: its drafting methods by name, `Proposer`s written likewise; the first one has the kind's name.
        default_layers: from the trunk's layers and its own to the numbers of the layers that it reads, from 1; none
            for a drafter that reads the trunk's last state, after its norm.
        weights: from K to the weights of the losses of draft 1 .. K.
        loss: what it learns unless --mtp-loss says otherwise, as settings.
        settings: arguments that drafters of its kind read and others do not, with their defaults.
        reads: the number of layers that it reads; None where it may be any but 0.
        idle_rows: rows of a block that draft nothing, unless `drafter_idle_rows` says otherwise.
        has_confidence: whether it learns how many of its drafts are accepted, from a loss that knows that.
        can_be_fitted: whether `fit-drafter` makes one.
        latent_architectures: architectures of folders of drafters with latent attention, the one that is written first.
        latent_model_type: `model_type` there.
        drafts_all: whether it drafts from all tokens, and has no draft vocabulary.
        projector_type: in `dflash_config`, which tells its folders from others of the same architecture.
        base_share: what the logits without the bias have of the loss, from the share of the run that is over; None for
            nothing.
        begins: how parameters of its own begin in a new drafter, by name: their standard deviation, 0 for zeros, None
            for that of matrices (--init-method-std), or `FIRST_TAP`.
    """

    name: str
    called: str
    architecture: str
    model_type: str
    block: str
    folder: str
    methods: Mapping[str, str]
    default_layers: Callable[[int, int | None], tuple[int, ...]]
    weights: Callable[[int], list[float]]
    loss: dict[str, str]
    settings: dict[str, int | None] = field(default_factory=dict)
    also_called: tuple[str, ...] = ()
    reads: int | None = None
    idle_rows: int = 0
    has_confidence: bool = False
    can_be_fitted: bool = False
    published_as: str | None = None
    latent_architectures: tuple[str, ...] = ()
    latent_model_type: str = "deepseek_v3"
    begins: Mapping[str, float | str | None] = field(default_factory=dict)
    drafts_all: bool = False
    projector_type: str | None = None
    base_share: Callable[[float], float] | None = None
    reference: str = "megatron_mtp.checkpoint.verify.drafters:Reference"

    @property
    def fills_blocks(self) -> bool:
        """Whether it drafts a block of tokens in one pass, and is trained on blocks in the place of positions."""
        return "drafter_blocks" in self.settings

    @property
    def sees_ahead(self) -> bool:
        """Whether the rows of its blocks may see one another in both directions."""
        return "drafter_causal" in self.settings

    def blocks(self, given: Mapping[str, Any]) -> int | None:
        """Blocks of a sequence that it is trained on, by settings by the names of their flags; None without."""
        return given.get("drafter_blocks") or self.settings.get("drafter_blocks")

    def can_read(self, chosen: Sequence[int], layers: int) -> bool:
        """Return whether it can read these layers of a trunk that has so many.

        A number counts the layers before the state, as the config key `eagle_aux_hidden_state_layer_ids` does.
        """
        count = max(len(chosen), 1) if self.reads is None else self.reads
        exist = all(1 <= number < layers for number in chosen)
        return len(chosen) == count and [*chosen] == sorted(set(chosen)) and exist

    def check_layers(self, chosen: tuple[int, ...], layers: int) -> None:
        """Raises ValueError where `can_read` does not hold."""
        least = (1 if self.reads is None else self.reads) + 1
        if layers < least:
            raise ValueError(
                f"--drafter {self.name} reads {self.reads or 'one or more'} layers before the trunk's last, and the "
                f"trunk has {layers}; give a trunk of at least {least} layers."
            )
        if self.reads == 0 and chosen:
            raise ValueError(
                f"--drafter-layers is {' '.join(map(str, chosen))}, and {self.called} reads the trunk's last state "
                "alone; drop the flag."
            )
        if not self.can_read(chosen, layers):
            count = f"{self.reads} " if self.reads else ""
            raise ValueError(
                f"--drafter-layers is {' '.join(map(str, chosen))}, and the trunk has {layers} layers; give {count}"
                f"rising numbers from 1 to {layers - 1}, each the number of layers before the state that is read."
            )


def weights_of_passes(drafts: int) -> list[float]:
    """Weights of passes of one layer: each is 0.8 of the one before, as EAGLE-3 is trained."""
    return [0.8**draft for draft in range(drafts)]


def weights_of_blocks(drafts: int) -> list[float]:
    """Weights that fall by the factor e in half of a block, as published for blocks of 8 and 10."""
    return [math.exp(-2 * draft / (drafts + 1)) for draft in range(drafts)]


SETTINGS_OF_BLOCKS: dict[str, int | None] = {
    "drafter_layers": None,
    "drafter_num_layers": BLOCK_LAYERS,
    "drafter_mask_token": None,
    "drafter_blocks": BLOCKS,
    "drafter_causal": 0,
    "drafter_full_layers": None,
    "drafter_softmax_type": None,
}
"""Settings of kinds that fill blocks, with their defaults."""

MARKOV: dict[str, float | str | None] = {"markov_w1": None, "markov_w2": 0}
"""How the matrices of a bias by the token before begin: it is 0."""

DRAFTERS: Registry[DrafterKind] = Registry("megatron_mtp.heads", {})
"""Kinds by name. All of them, ours too, are registered by entry points."""


CALLED_ELSEWHERE = {
    "eagle2": "EAGLE-2 is --drafter eagle, drafted with the method eagle_tree",
    "medusa": "such heads are MTP layers: --mtp-num-layers N --mtp-architecture parallel --mtp-train-only",
    "mtp": "MTP layers are --mtp-num-layers",
}
"""Names of drafters that are not kinds here, in small letters and digits, and what they are."""


def fitted_kind() -> DrafterKind:
    """The kind that `fit-drafter` makes."""
    return next(row for row in DRAFTERS.values() if row.can_be_fitted)


def kind_of(name: str) -> DrafterKind:
    """The kind of a name. Raises ValueError where there is none."""
    if name not in DRAFTERS:
        plain = "".join(filter(str.isalnum, name.lower()))
        meant = f"did you mean {plain}?" if plain in DRAFTERS else CALLED_ELSEWHERE.get(plain)
        raise ValueError(f"--drafter is '{name}'; choose one of {', '.join(DRAFTERS)}{f'; {meant}' if meant else '.'}")
    return DRAFTERS[name]


def readers_of(setting: str) -> list[str]:
    """Names of the kinds that read a setting: those whose row has it, or all."""
    return [row.name for row in DRAFTERS.values() if setting in row.settings] or [*DRAFTERS]
