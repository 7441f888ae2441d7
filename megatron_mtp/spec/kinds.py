"""Kinds of drafters, as a table with one row of plain facts each.

A drafter reads hidden states of some trunk layers, or the trunk's last hidden state. A model has it instead of MTP
layers or in addition to them; models, losses and exports treat both alike.

A kind is a folder of `heads/` or of another package. Its row names its parts, and an entry point registers the row:

    [project.entry-points."megatron_mtp.heads"]
    echo = "my_package.echo.row:ROW"

Letters in names: K draft tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_mtp.spec.registry import Registry

STEPS = 7
"""Default of --drafter-steps: tokens that a drafter learns to draft."""

BLOCK_LAYERS, MARKOV_RANK, BLOCKS, GRU_SIZE = 5, 256, 512, 1024
"""Defaults of block drafters: layers, rank of the bias by the previous token, blocks of a sequence, and state size of a
bias by all previous tokens.
"""


FIRST_TAP = "first tap"
"""How a convolution [sides, taps, hidden] begins that changes nothing: with 1 at its first tap, and 0 at the others."""


def spread_layers(layers: int, depth: int | None = None) -> tuple[int, ...]:
    """Choose trunk layers to read: one for each drafter layer, evenly spaced from the second to the third-last."""
    count, last = min(depth or BLOCK_LAYERS, layers - 1), max(layers - 2, 2)
    if count == 1:
        return (min(layers // 2 + 1, layers - 1),)
    return tuple(sorted({2 + round(number * (last - 2) / (count - 1)) for number in range(count)}))


@dataclass(frozen=True)
class DrafterKind:
    """Facts of one kind of drafter.

    Attributes:
        name: value of --drafter, and name of its drafting method.
        called: its name in messages, with an article.
        architecture, model_type: values in the config of its Hugging Face folder.
        also_called: other architecture names with the same computation.
        published_as: architecture name in other published folders that whole models use too. There, `fc.weight` and a
            layer without a model prefix identify a drafter.
        block: its module, a `DrafterBlock`, as an entry point "module:class".
        folder: its Hugging Face format, a `DrafterCodec`, as an entry point.
        reference: reference implementation that runs from a folder alone, a subclass of `verify.drafters.Reference`, as
            an entry point.
        methods: its drafting methods by name, `Proposer`s as entry points. The first one has the name of the kind.
        default_layers: function from the number of trunk layers and of drafter layers to the numbers of the layers that
            it reads, from 1; empty for a drafter that reads the trunk's last hidden state after the final norm.
        weights: function from K to the loss weights of draft tokens 1 .. K.
        loss: settings of its default loss, if --mtp-loss is not set.
        settings: arguments that only this kind reads, with their defaults.
        reads: number of trunk layers that it reads; None for any number above 0.
        idle_rows: rows of a block that draft nothing, unless `drafter_idle_rows` is set.
        has_confidence: whether it learns to predict how many of its draft tokens are accepted. Needs a loss that
            computes the acceptance rate.
        can_be_fitted: whether `fit-drafter` can initialize it.
        latent_architectures: architecture names of its folders with latent attention; the first one is written.
        latent_model_type: `model_type` of these folders.
        drafts_all: whether it drafts from the whole vocabulary and supports no draft vocabulary.
        projector_type: value in `dflash_config` that identifies its folders among others of the same architecture.
        base_share: function from the fraction of the run that is completed to the loss weight of the logits without the
            bias; None for 0.
        begins: initial standard deviation of its own parameters by name; 0 for zeros, None for the standard deviation
            of matrices (--init-method-std), or `FIRST_TAP`.
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
        """Whether it drafts a block of tokens in one forward pass and is trained on blocks instead of positions."""
        return "drafter_blocks" in self.settings

    @property
    def sees_ahead(self) -> bool:
        """Whether rows of a block may attend to later rows of it."""
        return "drafter_causal" in self.settings

    def blocks(self, given: Mapping[str, Any]) -> int | None:
        """Blocks of a sequence that it is trained on, by settings by the names of their flags; None without."""
        return given.get("drafter_blocks") or self.settings.get("drafter_blocks")

    def can_read(self, chosen: Sequence[int], layers: int) -> bool:
        """Return whether it can read these layers of a trunk with this many layers.

        A layer number counts the layers before the hidden state, as the config key `eagle_aux_hidden_state_layer_ids`
        does.
        """
        count = max(len(chosen), 1) if self.reads is None else self.reads
        exist = all(1 <= number < layers for number in chosen)
        return len(chosen) == count and [*chosen] == sorted(set(chosen)) and exist

    def check_layers(self, chosen: tuple[int, ...], layers: int) -> None:
        """Raise ValueError if `can_read` is false."""
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
    """Return loss weights of the passes of one layer: each is 0.8 times the previous one, as in EAGLE-3 training."""
    return [0.8**draft for draft in range(drafts)]


def weights_of_blocks(drafts: int) -> list[float]:
    """Return loss weights that fall by a factor of e per half block, as published for blocks of 8 and 10."""
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
"""Initial values of the matrices of a bias by the previous token, None for random: the bias starts at 0."""

DRAFTERS: Registry[DrafterKind] = Registry("megatron_mtp.heads", {})
"""Drafter kinds by name. All of them, including those of this package, are registered by entry points."""


CALLED_ELSEWHERE = {
    "eagle2": "EAGLE-2 is --drafter eagle, drafted with the method eagle_tree",
    "medusa": "such heads are MTP layers: --mtp-num-layers N --mtp-architecture parallel --mtp-train-only",
    "mtp": "MTP layers are --mtp-num-layers",
}
"""Names of drafters that are not kinds here, in lower-case letters and digits, with a description."""


def fitted_kind() -> DrafterKind:
    """Return the kind that `fit-drafter` initializes."""
    return next(row for row in DRAFTERS.values() if row.can_be_fitted)


def kind_of(name: str) -> DrafterKind:
    """Look up a kind by name. Raise ValueError if there is none."""
    if name not in DRAFTERS:
        plain = "".join(filter(str.isalnum, name.lower()))
        meant = f"did you mean {plain}?" if plain in DRAFTERS else CALLED_ELSEWHERE.get(plain)
        raise ValueError(f"--drafter is '{name}'; choose one of {', '.join(DRAFTERS)}{f'; {meant}' if meant else '.'}")
    return DRAFTERS[name]


def readers_of(setting: str) -> list[str]:
    """Return the names of the kinds that read a setting: those whose row lists it, or all kinds."""
    return [row.name for row in DRAFTERS.values() if setting in row.settings] or [*DRAFTERS]
