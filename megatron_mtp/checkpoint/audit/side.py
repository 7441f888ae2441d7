"""One side of an audit: a Hugging Face folder or a Megatron checkpoint, as far as it can be read.

Nothing here refuses: what is damaged or missing becomes a finding, and the rest is listed. A folder's plan is that of
its conversion: the rules of its family, for the depths that its config counts or its files hold.

    model.layers.61.eh_proj.weight of a model of 61 layers      depth 0
    mtp.layers.0.mlp.up_proj.weight, mtp.fc.weight              depth 0
    decoder.layers.3.mlp.linear_fc1.weight                      trunk, layer 3
"""

import math
import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.checkpoint.audit.finding import Finding
from megatron_mtp.checkpoint.families import CARRIED, Family, Layout
from megatron_mtp.checkpoint.families.rules import Rule, Shape
from megatron_mtp.checkpoint.families.trunk import MOST_LAYERS, ORIGINAL
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.checkpoint.hf.quantized import Quantized
from megatron_mtp.checkpoint.mcore.reader import DistReader

DEPTH_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers", "num_mtp_layers")
"""Config keys that count depths, of families known here and of others."""
NESTED = "language_model."
"""What keys of the text model begin with in checkpoints of multimodal models; it is left out of `tensors`."""
UNFIT = (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, OverflowError)
"""What the rules of a family raise for a config that they do not fit."""
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types whose numbers are looked at."""
PIECE = 2**20
"""Numbers that are looked at at a time."""
TRUNK, DEPTH, EMBEDDING, HEAD, BESIDE = "trunk", "depth", "embedding", "head", "beside"
_BESIDE = re.compile(r"(^|\.|_)(vision|visual|audio|vit|mm_projector|multi_modal_projector|image_newline)")
_MTP = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.(?:layers\.)?(\d+\.)?")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|word_embeddings|embeddings|wte|tok_embeddings)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|output_layer|output|embed_out)\.weight$")
BLOCKS = "mtp_layers_block_type"
"""Nemotron-H's other key of a depth's layers, which are attention and experts without one."""


@dataclass(frozen=True)
class Entry:
    """A tensor.

    Attributes:
        shape: its shape; None if the form of a quantized weight does not tell it.
        dtype: name of its type, as stored: "bfloat16"; of a quantized weight, the name of the form.
        bytes: its size in the file.
        read: reads it whole; None for a quantized weight whose form is not read.
    """

    shape: Shape | None
    dtype: str
    bytes: int
    read: Callable[[], Tensor] | None

    @property
    def kind(self) -> torch.dtype | None:
        """The type, if torch has it."""
        found = getattr(torch, self.dtype, None)
        return found if isinstance(found, torch.dtype) else None

    def tensor(self) -> Tensor:
        """The numbers.

        Raises:
            ValueError: the form is not read here, or a file is damaged.
        """
        if self.read is None:
            raise ValueError(f"weights in the form '{self.dtype}' are not read")
        return self.read()


def largest(tensor: Tensor) -> float | None:
    """The largest absolute number of a tensor: NaN if there is one; None for types that are not looked at."""
    if tensor.dtype not in FLOATS or not tensor.numel():
        return None
    found = [piece.abs().max().item() for piece in tensor.flatten().split(PIECE)]
    return math.nan if any(map(math.isnan, found)) else max(found)


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, type and bits: a NaN is equal to itself, -0 is not 0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    left, right = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(left, right)


@dataclass(frozen=True)
class Part:
    """A part of a model: a layer of the trunk, a depth, embedding, head, or what is beside them.

    Attributes:
        kind: one of the five above.
        index: the layer, or the depth from 0; None without one.
    """

    kind: str
    index: int | None = None


@dataclass(frozen=True)
class Parts:
    """How the names of a side are read.

    Attributes:
        layers: number of the trunk's layers, behind which depths follow; None if it is not known.
        flat: numbered layers of one depth.
    """

    layers: int | None
    flat: int = 1

    def of(self, name: str) -> Part:
        """The part of a tensor, by its name alone."""
        name = name.removeprefix(CARRIED)
        if name.startswith(ORIGINAL) or _BESIDE.search(name):
            return Part(BESIDE)
        if match := _MTP.search(name):
            return Part(DEPTH, int((match.group(1) or "0.")[:-1]) // self.flat)
        if match := _LAYER.search(name):
            index = int(match.group(1))
            in_trunk = self.layers is None or index < self.layers
            return Part(TRUNK, index) if in_trunk else Part(DEPTH, index - (self.layers or 0))
        return Part(EMBEDDING if _EMBEDDING.search(name) else HEAD if _HEAD.search(name) else TRUNK)

    def depths(self, names: Iterable[str]) -> dict[int, list[str]]:
        """The tensors of every depth, by its index from 0."""
        return self._by_index(names, DEPTH)

    def trunk(self, names: Iterable[str]) -> dict[int, list[str]]:
        """The tensors of every layer of the trunk, by its index."""
        return self._by_index(names, TRUNK)

    def _by_index(self, names: Iterable[str], kind: str) -> dict[int, list[str]]:
        found: dict[int, list[str]] = defaultdict(list)
        for name in names:
            part = self.of(name)
            if part.kind == kind and part.index is not None:
                found[part.index].append(name)
        return dict(sorted(found.items()))


@dataclass
class HFSide:
    """A Hugging Face folder.

    Attributes:
        path: the folder.
        keys: the keys of its `config.json`; empty if it cannot be read.
        config: the config, with the defaults of its family; None if it has no `model_type`.
        family: the family of its `model_type`; None if there is none.
        tensors: what loaders see, by name; the tensors of a quantized weight are one.
        hidden: what the files hold beside that, by name: the file.
        files: names of the files with tensors.
        unread: names of tensors that another finding accounts for: their file is missing or damaged.
        partial: whether a damaged file may hold any tensor, since no index lists them.
        quantized: the quantized weights, by name.
        scales: of weights that were read, what is wrong with their scales.
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
    quantized: dict[str, Quantized] = field(default_factory=dict)
    scales: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    form = "Hugging Face"

    def counts(self, *names: str) -> int | None:
        """The first of these config keys that holds a number of layers; None without one."""
        keys = {} if self.config is None else self.config.keys
        return next((value for value in map(keys.get, names) if is_count(value)), None)

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

    @property
    def parts(self) -> Parts:
        """How its names are read."""
        key = None if self.family is None or self.family.depths is None else self.family.depths.layers_key
        if key is None or self.config is None:
            return Parts(self.layers)
        pattern = next((self.config.keys[name] for name in (key, BLOCKS) if self.config.has(name)), "*E")
        return Parts(self.layers, len(pattern) if isinstance(pattern, str | list) and pattern else 1)

    @cached_property
    def held_depths(self) -> int:
        """The number of depths up to the last one of which there is a tensor."""
        return max(self.parts.depths(self.tensors), default=-1) + 1

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
        stored = 0 if self.family.depths is None else self.family.depths.stored(self.tensors)
        keys = {**self.config.keys, **dict.fromkeys(self.family.depths.keys if self.family.depths else (), stored)}
        try:
            found = self.family.layout(replace(self.config, keys=keys), self.tensors)
        except UNFIT:
            return None
        return replace(found, depths=depths)

    @cached_property
    def plan(self) -> list[Rule] | None:
        """The rules of all tensors that the config calls for; None as for `rules`."""
        layout = self.layout(max(self.said_depths or 0, self.held_depths))
        return None if layout is None else self.rules(layout)


@dataclass
class MegatronSide:
    """A distributed checkpoint of Megatron.

    Attributes:
        path: the folder.
        reader: reads it; None if not even the list of its tensors can be read.
        args: the arguments of its model; None if it stores none.
        args_from: what the arguments were read from.
        kept: the `config.json` that a conversion kept beside it; empty without one.
        iteration: the number of its iteration.
        tensors: the model's tensors by key, without the optimizer's.
        findings: what was found when it was opened.
        optimizer: the optimizer's tensors: how many, their bytes, and their numbers by kind and type; empty if none.
    """

    path: Path
    reader: DistReader | None = None
    args: Namespace | None = None
    args_from: str = ""
    kept: Mapping[str, Any] = field(default_factory=dict)
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
        """The number of the trunk's layers in the arguments, or in the config of a model that Megatron cannot run."""
        runs = self.runs or self.args is None
        found = self.argument("num_layers") if runs else self.kept.get("num_hidden_layers")
        return found if is_count(found) else None

    @property
    def said_depths(self) -> int | None:
        """The number of depths in the arguments; a repeated layer serves them all."""
        found = 0 if self.argument("drafter") else self.argument("mtp_num_layers")
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

    @property
    def parts(self) -> Parts:
        """How its keys are read: Megatron's depths are `mtp.layers`, carried ones have the folder's names."""
        return Parts(None if self.runs else self.layers)


Side = HFSide | MegatronSide


def is_count(value: Any) -> bool:
    """Whether a setting is a number of layers or depths that a model can have."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_LAYERS
