"""Which part of a model a tensor belongs to, by its name alone: a layer of the trunk, a depth, embedding, head, others.

model.layers.61.eh_proj.weight of a model of 61 layers      depth 0
mtp.layers.0.mlp.up_proj.weight, mtp.fc.weight               depth 0
decoder.layers.3.mlp.linear_fc1.weight                       trunk, layer 3
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_mtp.checkpoint.audit.side import HFSide, Side
from megatron_mtp.checkpoint.families import CARRIED
from megatron_mtp.checkpoint.families.trunk import ORIGINAL

TRUNK, DEPTH, EMBEDDING, HEAD, BESIDE = "trunk", "depth", "embedding", "head", "beside"
_BESIDE = re.compile(r"(^|\.|_)(vision|visual|audio|vit|mm_projector|multi_modal_projector|image_newline)")
_MTP = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.(?:layers\.)?(\d+\.)?")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|word_embeddings|embeddings|wte|tok_embeddings)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|output_layer|output|embed_out)\.weight$")
PROJECTION = re.compile(r"(eh_proj|e_proj|input_proj|(^|\.)mtp\.fc|mtp_linear_proj\.\d+)\.weight$")
"""Names of the projections that make a depth's input."""
BLOCKS = "mtp_layers_block_type"
"""Nemotron-H's other key of a depth's layers, which are attention and experts without one."""


@dataclass(frozen=True)
class Part:
    """A part of a model.

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

    @classmethod
    def of_side(cls, side: Side) -> "Parts":
        """As the config of the side says."""
        if not isinstance(side, HFSide):
            return cls(None)
        key = None if side.family is None or side.family.depths is None else side.family.depths.layers_key
        if key is None or side.config is None:
            return cls(side.layers)
        pattern = next((side.config.keys[name] for name in (key, BLOCKS) if side.config.has(name)), "*E")
        return cls(side.layers, len(pattern) if isinstance(pattern, str | list) and pattern else 1)

    def of(self, name: str) -> Part:
        """The part of a tensor."""
        name = name.removeprefix(CARRIED)
        if name.startswith(ORIGINAL) or _BESIDE.search(name):
            return Part(BESIDE)
        if match := _MTP.search(name):
            return Part(DEPTH, int((match.group(1) or "0.")[:-1]) // self.flat)
        if match := _LAYER.search(name):
            index = int(match.group(1))
            return (
                Part(TRUNK, index) if self.layers is None or index < self.layers else Part(DEPTH, index - self.layers)
            )
        kind = EMBEDDING if _EMBEDDING.search(name) else HEAD if _HEAD.search(name) else TRUNK
        return Part(kind)

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
