"""Rules between the tensors of a Hugging Face (HF) folder and a Megatron checkpoint, read in both directions.

A rule names some HF tensors, the pieces of Megatron tensors with the same values, and the map between them. The inverse
of a map is derived from the map; export is import read backwards. Every map but `Computed` only moves values, so a
round trip is bit-identical. torch is imported when a tensor is moved: listing the families does not need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from megatron_mtp.checkpoint.hf import Shape

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class HFTensor:
    """A tensor of the HF folder. Its shape is None for a carried tensor."""

    name: str
    shape: Shape | None


@dataclass(frozen=True)
class Piece:
    """A tensor of the Megatron checkpoint, or a slab of one.

    Attributes:
        key: name in Megatron's `sharded_state_dict`.
        shape: shape of this slab; None for a carried tensor.
        whole: shape of the whole tensor; None if this is all of it.
        offset: start of the slab in the whole tensor; None if this is all of it.
        aliases: other keys for the same values, because Megatron's modules with and without Transformer Engine use
            different ones; all are written, any one is read.
        padded: whether the stored tensor may have more rows, as Megatron's vocabularies do.
        wide: whether the tensor is stored in float32, whatever the folder's dtype.
    """

    key: str
    shape: Shape | None
    whole: Shape | None = None
    offset: Shape | None = None
    aliases: tuple[str, ...] = ()
    padded: bool = False
    wide: bool = False

    def fits(self, stored: Shape | None) -> bool:
        """Return whether the tensor with this piece may be stored in this shape."""
        wanted = self.whole or self.shape
        if wanted is None or stored == wanted or not self.padded:
            return wanted in (None, stored)
        return stored is not None and stored[:1] > wanted[:1] and stored[1:] == wanted[1:]


class Map(Protocol):
    """A map of numbers: `forward` from HF to Megatron, `backward` the inverse.

    Attributes:
        what: what `forward` does, in a few words; empty for a new name alone.
    """

    @property
    def what(self) -> str:
        """Description of `forward` in a few words; empty for a new name alone."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Convert HF tensors to Megatron's."""

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Convert Megatron's tensors to HF's."""


@dataclass(frozen=True)
class Same:
    """Each tensor under another name."""

    what = ""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    backward = forward


@dataclass(frozen=True)
class Concat:
    """Several tensors concatenated along `dim`, such as gate and up projection in `linear_fc1`."""

    sizes: tuple[int, ...]
    dim: int = 0
    what = "one after another"

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        from torch import cat

        return [cat(list(tensors), dim=self.dim)]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (one,) = tensors
        return list(one.split(self.sizes, dim=self.dim))


@dataclass(frozen=True)
class SwapHalves:
    """[a | b] to [b | a] along `dim`, for families with the hidden half of `eh_proj` first; its own inverse."""

    dim: int = 1
    what = "halves swapped"

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (one,) = tensors
        first, second = one.chunk(2, dim=self.dim)
        return Concat((), self.dim).forward([second, first])

    backward = forward


@dataclass(frozen=True)
class Axis:
    """Adds a first axis, for one of the experts in a stacked tensor."""

    what = "stacked"

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.unsqueeze(0) for tensor in tensors]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.squeeze(0) for tensor in tensors]


@dataclass(frozen=True)
class MergeQKV:
    """Query, key and value rows in Megatron's order: group by group, a group's queries, its key, its value.

    Two heads a group, two groups:   q1 q2 q3 q4, k1 k2, v1 v2   to   q1 q2 k1 v1 q3 q4 k2 v2
    With an output gate inside q_proj (Qwen3-Next) HF has q1 g1 q2 g2, and Megatron q1 q2 g1 g2 k1 v1.

    Attributes:
        heads: query heads.
        groups: key-value heads.
        widths: number of rows of a query, a key and a value head.
        gated: whether every query head has as many rows of an output gate.
    """

    heads: int
    groups: int
    widths: tuple[int, int, int]
    gated: bool = False
    what = "group by group"

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        query, key, value = tensors
        rest = query.shape[1:]
        if self.gated:
            query = self._by_kind(query, (self.heads // self.groups, 2))
        grouped = [rows.reshape(self.groups, -1, *rest) for rows in (query, key, value)]
        (merged,) = Concat((), dim=1).forward(grouped)
        return [merged.reshape(-1, *rest)]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (merged,) = tensors
        rest = merged.shape[1:]
        per_group = self.heads // self.groups * (2 if self.gated else 1)
        rows = (per_group * self.widths[0], self.widths[1], self.widths[2])
        parts = merged.reshape(self.groups, -1, *rest).split(rows, dim=1)
        query, key, value = (part.reshape(-1, *rest) for part in parts)
        if self.gated:
            query = self._by_kind(query, (2, self.heads // self.groups))
        return [query, key, value]

    def _by_kind(self, query: Tensor, order: tuple[int, int]) -> Tensor:
        """Within every group, swap the axes of heads and of (query, gate)."""
        grid = query.reshape(self.groups, *order, self.widths[0], *query.shape[1:])
        return grid.transpose(1, 2).reshape(query.shape)


@dataclass(frozen=True)
class Split:
    """Splits one HF tensor into several, such as a fused query-key-value projection; the inverse of `Concat`."""

    sizes: tuple[int, ...]
    what = "split"

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return Concat(self.sizes).backward(tensors)

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return Concat(self.sizes).forward(tensors)


@dataclass(frozen=True)
class Transposed:
    """Swaps the last two dimensions, for projections that HF stores as [input, output]; its own inverse."""

    what = "transposed"

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.transpose(-1, -2).contiguous() for tensor in tensors]

    backward = forward


@dataclass(frozen=True)
class InTurn:
    """Reorders alternating rows of two kinds along `dim` to all of the first kind, then all of the second.

    Gates and ups of three channels:   g1 u1 g2 u2 g3 u3   to   g1 g2 g3 u1 u2 u3
    """

    dim: int
    what = "gates, then ups"

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._exchanged(tensor, (-1, 2)) for tensor in tensors]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._exchanged(tensor, (2, -1)) for tensor in tensors]

    def _exchanged(self, tensor: Tensor, sizes: tuple[int, int]) -> Tensor:
        pairs = tensor.unflatten(self.dim, sizes).transpose(self.dim, self.dim + 1)
        return pairs.flatten(self.dim, self.dim + 1)


@dataclass(frozen=True)
class ByKind:
    """Splits one HF tensor, whose rows are ordered group by group, into one tensor per kind of row.

    Two groups of a query, a key and two values:   q1 k1 v1 v2 q2 k2 v3 v4   to   q1 q2, k1 k2, v1 v2 v3 v4

    Attributes:
        groups: number of groups.
        rows: number of rows of every kind in a group.
    """

    groups: int
    rows: tuple[int, ...]
    what = "kind by kind"

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (one,) = tensors
        parts = one.reshape(self.groups, sum(self.rows), *one.shape[1:]).split(self.rows, dim=1)
        return [part.flatten(0, 1) for part in parts]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (one,) = Concat((), dim=1).forward([part.unflatten(0, (self.groups, -1)) for part in tensors])
        return [one.flatten(0, 1)]


@dataclass(frozen=True)
class Computed:
    """The weight w of a module that Megatron computes differently: the float32 value `factor` w - `minus`.

    Rounding loses bits of w, so an import also stores w itself, and an export returns it. A checkpoint saved by
    Megatron after training has no such original.

    Attributes:
        original: whether the checkpoint also has w; it is the first of both tensors.
        factor: factor of a layer's output in HF that Megatron does not have.
        minus: 1 for a norm that multiplies by w in HF and by 1 + w in Megatron.
    """

    original: bool
    factor: float = 1.0
    minus: float = 0.0

    @property
    def what(self) -> str:
        return f"minus {self.minus:g}" if self.minus else f"times {self.factor:g}"

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (weight,) = tensors
        number = weight.double() * self.factor
        number = (number - self.minus if self.minus else number).float()  # no "- 0.0": -0.0 keeps its sign
        return [weight, number] if self.original else [number]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self.original:
            return [tensors[0]]
        number = tensors[0].double()
        return [((number + self.minus if self.minus else number) / self.factor).float()]


@dataclass(frozen=True)
class Copies:
    """A tensor that HF stores several times and Megatron once.

    Attributes:
        names: the HF tensors.
        tied: whether the config ties output layer and embedding.

    Raises:
        ValueError: on import, the copies differ.
    """

    names: tuple[str, ...]
    tied: bool = False

    @property
    def what(self) -> str:
        return "copies of one" if len(self.names) > 1 else ""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        first, *others = tensors
        for name, other in zip(self.names[1:], others, strict=True):
            if not first.equal(other):
                if self.tied:
                    raise ValueError(
                        f"'{name}' differs from '{self.names[0]}', but 'tie_word_embeddings' in config.json makes them "
                        "one; set it to false if the model has a head of its own, or fetch the folder again."
                    )
                raise ValueError(
                    f"'{name}' is not the copy of '{self.names[0]}' that this family shares between trunk and MTP "
                    "layers; give a checkpoint in which they are equal, since Megatron keeps one tensor for both."
                )
        return [first]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (one,) = tensors
        return [one] * len(self.names)


@dataclass(frozen=True)
class Zeros:
    """HF tensors of zeros that Megatron does not have, such as the router of a single expert.

    Raises:
        ValueError: on import, they are not zero.
    """

    shapes: tuple[Shape, ...]
    what = "zeros"

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if any(tensor.any() for tensor in tensors):
            raise ValueError("a tensor that this family's form keeps at zero is not; Megatron has no place for it.")
        return []

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        from torch import zeros

        return [zeros(shape) for shape in self.shapes]


@dataclass(frozen=True)
class Then:
    """Maps, applied one after another."""

    steps: tuple[Map, ...]

    @property
    def what(self) -> str:
        return ", ".join(step.what for step in self.steps if step.what)

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        out = list(tensors)
        for step in self.steps:
            out = step.forward(out)
        return out

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        out = list(tensors)
        for step in reversed(self.steps):
            out = step.backward(out)
        return out


@dataclass(frozen=True)
class Rule:
    """HF tensors, the Megatron pieces with the same values, and the map between them."""

    hf: tuple[HFTensor, ...]
    mcore: tuple[Piece, ...]
    map: Map = field(default_factory=Same)

    def to_mcore(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Convert HF tensors, in the order of `hf`, to Megatron's, in the order of `mcore`."""
        return self.map.forward(tensors)

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of `to_mcore`."""
        return self.map.backward(tensors)

    @property
    def rounds(self) -> bool:
        """Whether `to_hf` creates float32 values from which `to_mcore` does not restore the same bits."""
        return isinstance(self.map, Computed) and not self.map.original


def rename(name: str, key: str, shape: Shape | None, *aliases: str) -> Rule:
    """Return a rule for a tensor that only changes its name."""
    return Rule((HFTensor(name, shape),), (Piece(key, shape, aliases=aliases),))


def zeros(name: str, shape: Shape) -> Rule:
    """Return a rule for an HF tensor of float32 zeros that Megatron does not have."""
    return Rule((HFTensor(name, shape),), (), Zeros((shape,)))
