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
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_mtp.spec.registry import Registry

STEPS, BLOCK_LAYERS, BLOCKS = 7, 5, 512
"""Defaults of --drafter-steps, and of --drafter-num-layers and --drafter-blocks of block drafters."""

Range = tuple[str, Callable[[float], bool]]
"""Description of the allowed numbers, and a function that checks a number."""

FROM_0: Range = "0 or more", lambda number: 0 <= number < math.inf
FROM_1: Range = "1 or more", lambda number: number >= 1
SWITCH: Range = "0 or 1", lambda number: number in (0, 1)


@dataclass(frozen=True)
class Setting:
    """A setting of one or several kinds of drafters. Its flag, argument and field of `MTPConfig` have its name.

    Attributes:
        default: value if the flag is not given.
        help: help text of the flag, with the default; {kinds} is replaced by the names of the kinds that read it.
        value_type: type of the value, or of each of several. `bool` makes a switch, which is off by default.
        allowed, choices: allowed values; None and () for all.
        is_list: whether there may be several values.
        metavar: placeholder for the value in the help text.
        is_kept: whether it is part of the architecture: checkpoints keep it, and `HeadSpec.own` has its value.
        key: its key in config.json of a drafter's folder; None if the `DrafterCodec` of the kind writes and reads it.
    """

    default: Any
    help: str
    value_type: type = int
    allowed: Range | None = None
    choices: Sequence[str] = ()
    is_list: bool = False
    metavar: str | None = None
    is_kept: bool = True
    key: str | None = None

    @property
    def is_size(self) -> bool:
        """Whether the default is a number above 0, which checkpoints keep in case that another version has another."""
        return isinstance(self.default, int) and self.default > 0

    @property
    def is_switch(self) -> bool:
        """Whether it is true or false in config.json."""
        return self.value_type is bool or self.allowed is SWITCH

    def value(self, given: Any) -> Any:
        """Return the value, of which None is given for the default."""
        if given is None:
            return self.default
        return tuple(given) if self.is_list else given

    def refusal(self, value: Any) -> str:
        """Return what to give instead of a value that is not allowed, as the end of a sentence; '' if it is allowed."""
        types = (int, float) if self.value_type is float else (self.value_type,)
        if self.choices and value not in self.choices:
            return f"choose one of {', '.join(self.choices)}."
        if self.is_list and not (isinstance(value, list) and all(type(one) in types for one in value)):
            return f"give a list with values of type {self.value_type.__name__}."
        if not self.is_list and type(value) not in types:
            return f"give a value of type {self.value_type.__name__}."
        if self.allowed and not self.allowed[1](value):
            return f"give {self.allowed[0]}."
        return ""

    def stored(self, value: Any) -> Any:
        """Return what a checkpoint keeps of a value; None for the default, unless it is a size."""
        if value == self.default and not self.is_size:
            return None
        return [*value] if self.is_list else value


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
        settings: settings that not every kind has, by name; all names begin with "drafter_".
        reads: number of trunk layers that it reads; None for any number above 0.
        idle_rows: rows of a block that draft nothing, unless its settings have `drafter_idle_rows`.
        has_confidence: whether it learns to predict how many of its draft tokens are accepted. Needs a loss that
            computes the acceptance rate.
        can_be_fitted: whether `fit-drafter` can initialize it.
        latent_architectures: architecture names of its folders with latent attention; the first one is written. Only
            kinds with such a name can have it.
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
    settings: Mapping[str, Setting] = field(default_factory=dict)
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

    def own(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of its settings that checkpoints keep, by name; None in `given` means the default."""
        return {name: one.value(given.get(name)) for name, one in self.settings.items() if one.is_kept}

    def blocks(self, given: Mapping[str, Any]) -> int | None:
        """Blocks of a sequence that it is trained on, by settings by the names of their flags; None without."""
        return self.settings["drafter_blocks"].value(given.get("drafter_blocks")) if self.fills_blocks else None

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


SETTINGS_OF_BLOCKS = {
    "drafter_num_layers": Setting(
        BLOCK_LAYERS, f"Layers of a block drafter. Default: {BLOCK_LAYERS}.", allowed=FROM_1, metavar="N"
    ),
    "drafter_mask_token": Setting(
        None,
        "Token id whose embedding stands at the positions of a block that are to be drafted. Default: the last id of "
        "the vocabulary.",
        allowed=FROM_0,
        metavar="ID",
    ),
    "drafter_blocks": Setting(
        BLOCKS,
        "Blocks (anchors) per sequence on which a block drafter is trained, redrawn every step. "
        f"Default: {BLOCKS}, at most one per position.",
        allowed=FROM_1,
        metavar="A",
        is_kept=False,
    ),
    "drafter_causal": Setting(
        0,
        "Attention within a block: 0 is bidirectional, 1 is causal, 2 is causal in windowed layers only, as in "
        "speculators. Default: 0.",
        allowed=("0, 1 or 2", lambda number: number in (0, 1, 2)),
        metavar="N",
    ),
    "drafter_full_layers": Setting(
        (),
        "Layers of a block drafter, counted from 1, that attend to all positions in spite of --drafter-window-size. "
        "Default: none.",
        is_list=True,
        metavar="N",
    ),
    "drafter_softmax_type": Setting(
        "vanilla",
        "'learnable' adds a trained attention sink to each head of a block drafter. Default: vanilla.",
        value_type=str,
        choices=("vanilla", "learnable"),
    ),
}
"""Settings of kinds that fill blocks."""

IDLE_ROWS = {
    "drafter_idle_rows": Setting(
        0,
        "1: the newest token's row drafts nothing, and masks draft their own positions (sample_from_anchor false). "
        "Default: 0, every row drafts the next token.",
        allowed=SWITCH,
        metavar="N",
    )
}
"""Setting of kinds whose blocks can have an idle row or none."""

MARKOV_RANK = {
    "drafter_markov_rank": Setting(
        256,
        "Rank of the bias from the previous token in {kinds}; in domino, from all tokens before in the block. Default: "
        "256.",
        allowed=FROM_1,
        metavar="R",
    )
}
"""Setting of kinds with a bias of low rank."""

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


def drafts_of(given: Mapping[str, Any]) -> int:
    """Return the number of tokens that a drafter learns to draft."""
    return int(given.get("drafter_steps") or STEPS)


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


def settings_of_kinds() -> dict[str, Setting]:
    """Return the settings that the rows of all kinds declare, by name.

    Raises:
        ValueError: a name does not begin with "drafter_", or two kinds declare it with more than another default.
    """
    found: dict[str, tuple[str, Setting]] = {}
    for row in DRAFTERS.values():
        for name, setting in row.settings.items():
            first, declared = found.setdefault(name, (row.name, setting))
            if not name.startswith("drafter_"):
                raise ValueError(f"the drafter '{row.name}' declares the setting '{name}'; begin it with drafter_.")
            if setting is not declared and replace(setting, default=None) != replace(declared, default=None):
                raise ValueError(
                    f"the drafters '{first}' and '{row.name}' declare '{name}' differently; rename one, or let both "
                    "have one `Setting`, of which only the default may differ."
                )
    return {name: setting for name, (_, setting) in found.items()}


def readers_of(setting: str) -> list[str]:
    """Return the names of the kinds that read a setting."""
    rows = DRAFTERS.values()
    if setting == "drafter_layers":
        return [row.name for row in rows if row.reads != 0]
    if setting == "drafter_multi_latent_attention":
        return [row.name for row in rows if row.latent_architectures]
    return [row.name for row in rows if setting in row.settings] or [row.name for row in rows]
