"""One side of an audit, as far as it can be read: damaged or missing parts become findings, and the rest is listed.

model.layers.61.eh_proj.weight of a model of 61 layers      depth 0
mtp.layers.0.mlp.up_proj.weight, mtp.fc.weight              depth 0
decoder.layers.3.mlp.linear_fc1.weight                      trunk, layer 3
drafter.layers.0.mlp.linear_fc1.weight                      not in the trunk
"""

import re
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, override

from torch import Tensor

from megatron_mtp.checkpoint.audit import ERROR, Finding
from megatron_mtp.checkpoint.audit.looks import Look
from megatron_mtp.checkpoint.convert.stored import lost_features, zero_features
from megatron_mtp.checkpoint.families import CARRIED, Family, Layout
from megatron_mtp.checkpoint.families.described import Described
from megatron_mtp.checkpoint.families.family import Depths, class_tensors
from megatron_mtp.checkpoint.families.inside import TITLE, InnerDrafter, stage_of
from megatron_mtp.checkpoint.families.rules import Copies, Rule
from megatron_mtp.checkpoint.families.trunk import MOST_LAYERS, ORIGINAL
from megatron_mtp.checkpoint.hf import Shape
from megatron_mtp.checkpoint.hf.config import HFConfig, counted_elsewhere
from megatron_mtp.checkpoint.hf.folder import HFFolder
from megatron_mtp.checkpoint.hf.quantized import QuantizationSettings, Quantized
from megatron_mtp.megatron.checkpoint import DRAFT_VOCABULARY, DRAFTER
from megatron_mtp.megatron.checkpoint.reader import DistReader

if TYPE_CHECKING:
    from megatron_mtp.checkpoint.convert.drafter_form import DrafterForm

DEPTH_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers", "num_mtp_layers")
"""Config keys that count MTP layers, of known and other families."""
BLOCKS = "mtp_layers_block_type"
"""Nemotron-H's other key for the layers inside an MTP layer; without it they are attention and experts."""
UNFIT = (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, OverflowError)
"""Exceptions of a family's rules for a config that they do not fit."""
UNREADABLE = (ValueError, OSError, RuntimeError)
"""Exceptions when reading a damaged file or converting its contents."""
TRUNK, DEPTH, EMBEDDING, HEAD, BESIDE, STAGE = KINDS = ("trunk", "depth", "embedding", "head", "beside", "drafter")
OF_EMBEDDING, OF_HEAD = ("embed_tokens.weight",), ("shared_head.head.weight", "shared_head.output.weight")
ONE_LAYER = re.compile(r"mtp_(unroll$|\w*(repeat|share|tie))")
"""Config keys that make all MTP layers one layer."""
OWN = ("dots3_note", "longcat", "step3")
"""Prefixes of the `model_type`s, or of classes without one, whose MTP layers have their own embedding or output layer.
"""
_BESIDE = re.compile(r"(^|\.|_)(vision|visual|audio|perception|vit|mm_projector|multi_modal_projector|image_newline)")
_MTP = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.(?:layers\.)?(\d+\.)?")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|word_embeddings|embeddings|wte|tok_embeddings)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|output_layer|output|embed_out)\.weight$")


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor.

    Attributes:
        shape: its shape; None if the form of a quantized weight does not determine it.
        dtype: name of its dtype as stored: "bfloat16"; for a quantized weight, the name of the form.
        bytes: size in the file.
        read: function that reads it whole, or the slab of a checkpoint's tensor at an offset; raises ValueError for a
            damaged file. None for a quantized weight whose form cannot be read.
        pieces: function that reads some rows at a time; None for a tensor that can only be read whole.
    """

    shape: Shape | None
    dtype: str
    bytes: int
    read: Callable[..., Tensor] | None
    pieces: Callable[[], Iterable[Tensor]] | None = None


@dataclass(frozen=True)
class ModelPart:
    """A part of a model: one of `KINDS`, with the index of its layer or depth, from 0, if it has one."""

    kind: str
    index: int | None = None


@dataclass(frozen=True)
class Parts:
    """Patterns for reading the names of a side.

    Attributes:
        layers: number of trunk layers, after which MTP layers follow; None if unknown.
        flat: numbered layers of one MTP layer.
        drafter: whether all tensors belong to a drafter.
        stages: tensors of a drafter inside the model.
    """

    layers: int | None
    flat: int = 1
    drafter: bool = False
    stages: frozenset[str] = frozenset()
    _known: dict[str, ModelPart] = field(default_factory=dict, repr=False, compare=False)

    def of(self, name: str) -> ModelPart:
        """Return the part that a tensor belongs to, by its name alone."""
        if (known := self._known.get(name)) is None:
            known = self._known[name] = self._named(name.removeprefix(CARRIED))
        return known

    def _named(self, name: str) -> ModelPart:
        if self.drafter or name.startswith((ORIGINAL, DRAFTER)) or _BESIDE.search(name):
            return ModelPart(BESIDE)
        if name in self.stages:
            return ModelPart(STAGE, stage_of(name))
        if match := _MTP.search(name):
            return ModelPart(DEPTH, int((match.group(1) or "0.")[:-1]) // self.flat)
        if match := _LAYER.search(name):
            index = int(match.group(1))
            return (
                ModelPart(TRUNK, index)
                if self.layers is None or index < self.layers
                else ModelPart(DEPTH, index - self.layers)
            )
        return ModelPart(EMBEDDING if _EMBEDDING.search(name) else HEAD if _HEAD.search(name) else TRUNK)

    def numbered(self, kind: str, names: Iterable[str]) -> dict[int, list[str]]:
        """Return the names in every MTP layer, or in every trunk layer, by index."""
        found: dict[int, list[str]] = defaultdict(list)
        for name in names:
            part = self.of(name)
            if part.kind == kind and part.index is not None:
                found[part.index].append(name)
        return dict(sorted(found.items()))


@dataclass
class Opened(ABC):
    """Interface of both kinds of sides. Reading a tensor records what an audit has to know about its values.

    Attributes:
        path: the folder.
        tensors: what loaders see, by name. The tensors of a quantized weight count as one; the optimizer's are left
            out.
        findings: findings from opening it.
        seen: names of the tensors that were read.
        looks: records of those that were read to the end.
        errors: why a tensor cannot be read, by name.
        scales: what is wrong with the scales of quantized weights that were read.
        unread: names of weights of which only the scales exist, as a finding reports.
    """

    path: Path
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    looks: dict[str, Look] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    scales: dict[str, str] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)
    _noting: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def pieces(self, name: str, looks: bool = True) -> Iterator[Tensor]:
        """Read a tensor, some rows at a time if it is large; without `looks`, nothing is recorded.

        Raises:
            ValueError, OSError, RuntimeError: the form cannot be read, or a file is damaged.
        """
        in_rows = self.tensors[name].pieces
        if in_rows is None:
            yield self.read(name)
        else:
            yield from self._noted(name, in_rows(), looks)

    def read(self, name: str, *slab: Shape | None) -> Tensor:
        """Read a tensor whole, or the slab of an offset and a shape; errors as of `pieces`."""
        entry = self.tensors[name]
        if entry.read is None:
            raise ValueError(f"weights in the form '{entry.dtype}' are not read")
        (tensor,) = self._noted(name, starmap(entry.read, [slab]), is_whole=not slab)
        return tensor

    def _noted(
        self, name: str, pieces: Iterable[Tensor], looks: bool = True, is_whole: bool = True
    ) -> Iterator[Tensor]:
        self.seen.add(name)
        look: Look | None = None
        try:
            for piece in pieces:
                if looks:
                    whole = self.tensors[name].shape if is_whole else None
                    look = look or Look(piece.dtype, whole or tuple(piece.shape), is_whole=is_whole)
                    look.see(piece)
                yield piece
        except UNREADABLE as error:
            self.errors[name] = str(error)
            raise
        if look is not None:
            with self._noting:  # other threads read other slabs of it
                if not is_whole and (before := self.looks.get(name)) is not None:
                    look.bound(before.low, before.high)
                self.looks[name] = look

    @abstractmethod
    def base_of(self, name: str) -> str | None:
        """The tensor that a name repeats, embedding or head; None if it is not a copy."""

    @cached_property
    def plan(self) -> list[Rule]:
        """Rules of all tensors that the config requires, as far as they are known."""
        return []

    @cached_property
    def copies(self) -> dict[str, str]:
        """Tensors that repeat another one, each with the repeated tensor."""
        named = {name: base for name in self.tensors if (base := self.base_of(name)) is not None}
        for rule in self.plan:
            if isinstance(rule.map, Copies):
                first, *others = (tensor.name for tensor in rule.hf)
                named |= dict.fromkeys(others, first)
        held = self.tensors
        return {name: base for name, base in named.items() if name in held and base in held and name != base}

    def add(self, guess: str, says: str, advice: str = "", severity: str = ERROR, names: Iterable[str] = ()) -> None:
        """Add a finding."""
        self.findings.append(Finding(guess, says, advice, severity, tuple(names)))

    @cached_property
    def inside(self) -> InnerDrafter | None:
        """The drafter inside the model; None if there is none."""
        return InnerDrafter.of(self.kept_keys, (name.removeprefix(CARRIED) for name in self.tensors))

    @property
    @abstractmethod
    def kept_keys(self) -> Mapping[str, Any]:
        """Keys of the model's `config.json`, including those of its text model; empty if there is none."""

    @cached_property
    def depths(self) -> dict[int, list[str]]:
        """Names of the tensors of each MTP layer, by index."""
        return self.parts.numbered(DEPTH, self.tensors)

    @cached_property
    def trunk_layers(self) -> dict[int, list[str]]:
        """Names of the tensors of each layer of the trunk, by index."""
        return self.parts.numbered(TRUNK, self.tensors)

    @property
    def held_depths(self) -> int:
        """Number of MTP layers up to the last one that has a tensor."""
        return max(self.depths, default=-1) + 1

    @property
    def has_drafter(self) -> bool:
        """Whether it has a drafter's tensors, under Megatron's names."""
        return any(key.startswith(DRAFTER) for key in self.tensors)

    @property
    @abstractmethod
    def parts(self) -> Parts:
        """How its names are read."""


@dataclass
class HFSide(Opened):
    """A Hugging Face folder.

    Attributes:
        keys: keys of its `config.json`; empty if it cannot be read.
        config: the config with the defaults of its family; None if it has no `model_type`.
        family: family of its `model_type`; None if there is none.
        described: what is known about folders that do not convert; None if nothing is.
        folder: its tensors; None if the folder reader rejects it.
        words: tokens of its tokenizer that occur in text, by id, without special ones; empty without a vocabulary.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    config: HFConfig | None = None
    family: Family | None = None
    described: Described | None = None
    folder: HFFolder | None = None
    words: dict[int, str] = field(default_factory=dict)
    form = "Hugging Face"

    @cached_property
    def quantization(self) -> QuantizationSettings:
        """Quantization specified by config and side files; empty if they are damaged, which another finding reports."""
        with suppress(ValueError):
            return QuantizationSettings.of(self.path, self.keys)
        return QuantizationSettings()

    @property
    def quantized(self) -> dict[str, Quantized]:
        """Quantized weights, by name."""
        return {} if self.folder is None else self.folder.quantized

    def counts(self, *names: str) -> int | None:
        """Return the first of these config keys that has a number of layers; None if none has."""
        keys = {} if self.config is None else self.config.keys
        return next((value for value in map(keys.get, names) if is_count(value)), None)

    @property
    def layers(self) -> int | None:
        """Number of trunk layers in the config."""
        return self.counts("num_hidden_layers", "num_layers", "n_layer")

    @property
    def kept_keys(self) -> Mapping[str, Any]:
        """Keys of the config, including those of the text model."""
        return {} if self.config is None else self.config.keys

    @property
    def stored_as(self) -> Depths | Described | None:
        """How folders of the family store MTP layers; None if unknown."""
        return self.described if self.family is None else self.family.depths

    @cached_property
    def of_class(self) -> dict[str, Shape]:
        """Tensors of transformers' class, for a model whose layers no rule describes; empty without such a class."""
        carried = self.family is not None and self.family.untrainable is not None
        alone = self.family is None and self.described is None and self.inside is None
        return class_tensors(self.path) if carried or alone else {}

    @property
    def depth_key(self) -> str | None:
        """Config key with the number of MTP layers; None if there is none, or it counts the stages of a drafter."""
        if self.inside is not None:
            return None
        keys = DEPTH_KEYS if self.stored_as is None else self.stored_as.keys
        said = next((name for name in keys if self.counts(name) is not None), None)
        elsewhere, number = counted_elsewhere(self.kept_keys)
        return elsewhere if number and not (said and self.counts(said)) else said

    @property
    def said_depths(self) -> int | None:
        """Number of MTP layers in the config; None if no key has one."""
        key = self.depth_key
        said = None if key is None else self.counts(key)
        if key is not None and said is None:
            said = counted_elsewhere(self.kept_keys)[1]
        limit = None if self.described is None else self.described.limit
        return said if said is None or limit is None else min(said, limit)

    @property
    def drafts(self) -> dict[str, Any] | None:
        """What drafts in the model: its kind, its number, the config key that counts it, and how it is fed."""
        if self.inside is not None:
            counted = {"stages": len(self.inside.stages), "block": self.inside.block}
            return {"kind": TITLE, **counted, "key": next(iter(self.inside.keys), None)}
        form, count = self.stored_as, len(self.depths)
        if isinstance(form, Described) and form.at is None:
            return {"kind": "no MTP layers", "key": None}
        if not count and not self.said_depths:
            return None
        found = {"kind": "MTP", "depths": count, "key": self.depth_key}
        return found if form is None else found | {"halves": form.halves, "fed": form.fed}

    @property
    def tied(self) -> bool:
        """Whether the config ties embedding and output layer."""
        return self.config is not None and self.config.keys.get("tie_word_embeddings") is True

    @property
    def unties(self) -> bool:
        """Whether the config separates embedding and output layer."""
        return self.config is not None and self.config.keys.get("tie_word_embeddings") is False

    @property
    def repeats(self) -> bool:
        """Whether the config makes all MTP layers one layer."""
        keys = {} if self.config is None else self.config.keys
        return any(value and ONE_LAYER.match(name) for name, value in keys.items())

    @property
    def _class(self) -> str:
        """Return the model's class in lower case; empty if the config names none."""
        return next(iter(self.keys.get("architectures") or [""])).lower()

    @cached_property
    def parts(self) -> Parts:
        """How its names are read."""
        key = None if self.family is None or self.family.depths is None else self.family.depths.layers_key
        stages = frozenset() if self.inside is None else self.inside.names
        if key is None or self.config is None:
            return Parts(self.layers, stages=stages)
        pattern = next((self.config.keys[name] for name in (key, BLOCKS) if self.config.has(name)), "*E")
        return Parts(self.layers, len(pattern) if isinstance(pattern, str | list) and pattern else 1, stages=stages)

    @override
    def base_of(self, name: str) -> str | None:
        kind = self.parts.of(name).kind
        own = self.config is not None and (self.config.model_type or self._class).startswith(OWN)
        if kind == HEAD and self.tied:
            wanted = EMBEDDING
        elif kind != DEPTH or own or not name.endswith(OF_EMBEDDING + OF_HEAD):
            return None
        else:
            wanted = EMBEDDING if name.endswith(OF_EMBEDDING) or self.tied else HEAD
        return next((name for name in self.tensors if self.parts.of(name).kind == wanted), None)

    def layout(self, depths: int) -> Layout | None:
        """The layout that the tensor names imply, with this many MTP layers; None without a family whose rules fit."""
        if self.family is None or self.config is None:
            return None
        known, names = self.family.depths, [self.misnamed.get(name, name) for name in self.tensors]
        counts = {} if known is None else dict.fromkeys(known.keys, known.stored(names))
        with suppress(*UNFIT):
            found = self.family.layout(replace(self.config, keys={**self.config.keys, **counts}), names)
            return replace(found, depths=depths)
        return None

    def rules(self, depths: int = 0, reader: DistReader | None = None) -> list[Rule]:
        """Return the rules of all tensors that the config requires; empty without a family whose rules fit.

        Args:
            depths: minimum number of MTP layers.
            reader: a checkpoint whose forms the rules should match; None for those of the folder.
        """
        layout = self.layout(max(self.held_depths, depths, self.said_depths or 0))
        if self.family is None or self.config is None or layout is None:
            return []
        if reader is not None:
            features = (layout.features | set(zero_features(reader))) - lost_features(reader)
            layout = replace(layout, features=frozenset(features))
        with suppress(*UNFIT):
            return self.family.all_rules(self.config, layout)
        return []

    @override
    @cached_property
    def plan(self) -> list[Rule]:
        return self.rules()

    @cached_property
    def misnamed(self) -> dict[str, str]:
        """Tensors whose names no loader of the family looks for, each with the correct name."""
        if self.family is not None and self.config is not None:
            with suppress(*UNFIT):
                return self.family.misnamed(self.config, self.tensors)
        return {}

    def is_counterpart(self, key: str) -> bool:
        """Return whether a checkpoint's tensor belongs to the model rather than to a list or a drafter."""
        return not key.startswith((DRAFT_VOCABULARY, DRAFTER))


@dataclass
class DrafterSide(HFSide):
    """A drafter's folder.

    Attributes:
        drafter: its form; None if its config is unusable.
    """

    drafter: "DrafterForm | None" = None
    form = "Hugging Face drafter"
    has_drafter = True

    @cached_property
    def inside(self) -> None:
        """None: a drafter does not contain another one."""

    @cached_property
    def of_class(self) -> dict[str, Shape]:
        """Empty: the drafter's form lists its tensors, not transformers' class of its `model_type`."""
        return {}

    @property
    def layers(self) -> None:
        """A drafter's layers are not a trunk's."""

    @cached_property
    def parts(self) -> Parts:
        """How its names are read."""
        return Parts(None, drafter=True)

    def rules(self, depths: int = 0, reader: DistReader | None = None) -> list[Rule]:
        """Return the rules, also for a checkpoint whose drafter uses the trunk's output layer.

        Empty if the config is unusable.
        """
        from megatron_mtp.checkpoint.convert.drafter_form import head_key

        if self.drafter is None:
            return []
        return self.drafter.rules() if reader is None else self.drafter.rules(head_key(reader))

    def is_counterpart(self, key: str) -> bool:
        """Return whether a checkpoint's tensor belongs to a drafter."""
        return key.startswith(DRAFTER)


def is_count(value: Any) -> bool:
    """Return whether a setting is a possible number of layers of a trunk or an MTP block."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_LAYERS
