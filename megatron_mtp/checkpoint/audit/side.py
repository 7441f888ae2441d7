"""One side of an audit: a Hugging Face folder or a Megatron checkpoint, as far as it can be read.

Nothing here refuses: what is damaged or missing becomes a finding, and the rest is listed.
"""

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_mtp.checkpoint.audit.entry import Entry
from megatron_mtp.checkpoint.audit.finding import Finding
from megatron_mtp.checkpoint.families import Family, Layout
from megatron_mtp.checkpoint.families.rules import Rule, Shape
from megatron_mtp.checkpoint.families.trunk import MOST_LAYERS
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.checkpoint.hf.quantized import ACTIVATION, BLOCK_SCALE, FP8, SCALE
from megatron_mtp.checkpoint.mcore.reader import DistReader

DEPTH_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers", "num_mtp_layers")
"""Config keys that count depths, of families known here and of others."""


MXFP4 = "mxfp4"
"""The type of a weight of two tensors: numbers of 4 bits and their exponents."""
NESTED = "language_model."
"""What keys of the text model begin with in checkpoints of multimodal models; it is left out of `tensors`."""


def is_count(value: Any) -> bool:
    """Whether a setting is a number of layers or depths that a model can have."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_LAYERS


UNFIT = (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, OverflowError)
"""What the rules of a family raise for a config that they do not fit."""


@dataclass
class HFSide:
    """A Hugging Face folder.

    Attributes:
        path: the folder.
        keys: the keys of its `config.json`; empty if it cannot be read.
        config: the config, with the defaults of its family; None if it has no `model_type`.
        family: the family of its `model_type`; None if there is none.
        tensors: what loaders see, by name.
        hidden: what the files hold beside that, by name: the file.
        files: names of the files with tensors.
        unread: names of tensors that another finding accounts for: their file is missing or damaged.
        partial: whether a damaged file may hold any tensor, since no index lists them.
        findings: what was found when it was opened.
    """

    path: Path
    keys: dict[str, Any] = field(default_factory=dict)
    config: HFConfig | None = None
    family: Family | None = None
    tensors: dict[str, Entry] = field(default_factory=dict)
    hidden: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    partial: bool = False
    findings: list[Finding] = field(default_factory=list)
    form = "Hugging Face"

    def counts(self, *names: str) -> int | None:
        """The first of these config keys that holds a number; None without one."""
        keys = {} if self.config is None else self.config.keys
        found = (keys.get(name) for name in names)
        return next((value for value in found if is_count(value)), None)

    @property
    def layers(self) -> int | None:
        """The number of the trunk's layers in the config."""
        return self.counts("num_hidden_layers", "num_layers", "n_layer")

    @property
    def said_depths(self) -> int | None:
        """The number of depths in the config; None if no key holds one."""
        own = self.family.depths.keys if self.family is not None and self.family.depths is not None else DEPTH_KEYS
        return self.counts(*own)

    @property
    def tied(self) -> bool:
        """Whether the config says that embedding and head are one."""
        return self.config is not None and self.config.keys.get("tie_word_embeddings") is True

    def scaled(self, name: str) -> str | None:
        """The quantised weight whose scale this tensor is; None for other tensors."""
        if name.endswith(BLOCK_SCALE):
            weight = name.removesuffix(BLOCK_SCALE)
            return weight if weight in self.tensors else None
        weight = name.removesuffix(ACTIVATION) + "weight" if name.endswith(ACTIVATION) else name.removesuffix(SCALE)
        quantised = weight != name and weight in self.tensors and self.tensors[weight].kind in FP8
        return weight if quantised else None

    def rules(self, layout: Layout) -> list[Rule] | None:
        """The family's rules for a layout; None if there is no family, or the config does not fit it."""
        if self.family is None or self.config is None:
            return None
        try:
            return self.family.all_rules(self.config, layout)
        except UNFIT:
            return None

    def layout(self, depths: int) -> Layout | None:
        """What the names of the tensors decide, with so many depths; None as for `rules`."""
        if self.family is None or self.config is None:
            return None
        keys = dict(self.config.keys)
        if self.family.depths is not None:
            for key in self.family.depths.keys:
                keys[key] = self.family.depths.stored(self.tensors)
        names = [name for name in self.tensors if self.scaled(name) is None]
        try:
            found = self.family.layout(HFConfig(keys, self.config.model_type, self.config.source), names)
        except UNFIT:
            return None
        return Layout(depths, found.features, found.carried)


@dataclass
class MegatronSide:
    """A distributed checkpoint of Megatron.

    Attributes:
        path: the folder.
        reader: reads it; None if not even the list of its tensors can be read.
        args: the arguments of its model; None if it stores none.
        args_from: what the arguments were read from.
        iteration: the number of its iteration.
        tensors: the model's tensors by key, without the optimizer's.
        findings: what was found when it was opened.
        optimizer: the optimizer's tensors: how many, their bytes, and their numbers by kind and type; empty if none.
    """

    path: Path
    reader: DistReader | None = None
    args: Namespace | None = None
    args_from: str = ""
    iteration: int | None = None
    tensors: dict[str, Entry] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    optimizer: dict[str, Any] = field(default_factory=dict)
    form = "Megatron distributed checkpoint"

    def read(self, key: str, offset: Shape | None = None, shape: Shape | None = None) -> Tensor:
        """Read a tensor, or the slab of `shape` at `offset`, by its key in `tensors`.

        Raises:
            ValueError: a file is missing or damaged.
        """
        assert self.reader is not None
        nested = f"{NESTED}{key}"
        return self.reader.read(nested if self.reader.holds(nested) else key, offset, shape)

    def argument(self, *names: str) -> Any:
        """The first of these arguments that is there and not None."""
        return next((value for name in names if (value := getattr(self.args, name, None)) is not None), None)

    @property
    def pattern(self) -> str | None:
        """The layers of a hybrid (`--hybrid-layer-pattern`); None of a GPT."""
        found = self.argument("hybrid_layer_pattern", "hybrid_override_pattern")
        return found if isinstance(found, str) else None

    @property
    def layers(self) -> int | None:
        """The number of the trunk's layers in the arguments."""
        found = self.argument("num_layers")
        return found if is_count(found) else None

    @property
    def said_depths(self) -> int | None:
        """The number of depths in the arguments; a repeated layer serves them all."""
        found = self.argument("mtp_num_layers")
        if not is_count(found):
            return None if self.args is None else 0
        return min(found, 1) if self.argument("mtp_use_repeated_layer") else found

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one."""
        shares = self.argument("share_embeddings_and_output_weights")  # as Megatron-Bridge calls it
        return bool(shares) if shares is not None else self.argument("untie_embeddings_and_output_weights") is False

    @property
    def untied(self) -> bool:
        """Whether the head is a tensor of its own."""
        shares = self.argument("share_embeddings_and_output_weights")
        return shares is False or self.argument("untie_embeddings_and_output_weights") is True

    @property
    def runs(self) -> bool:
        """Whether Megatron can run the model, so that its modules say which tensors there must be."""
        return self.args is not None and not getattr(self.args, "megatron_mtp_untrainable", None)


Side = HFSide | MegatronSide
