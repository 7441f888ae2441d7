"""Rules of the recurrent layers of a hybrid trunk: Gated DeltaNet and Mamba-2, with the norms before them.

Megatron's checkpoints hold the rows of a fused projection and of a convolution apart by what they make, in the order of
heads, so that any number of tensor-parallel ranks can take their heads.
Letters in comments: K key heads, V value heads, P channels of a head.
"""

from dataclasses import dataclass

from megatron_mtp.checkpoint.families.blocks import Place
from megatron_mtp.checkpoint.families.family import Layout
from megatron_mtp.checkpoint.families.rules import ByKind, HFTensor, Map, MinusOne, Piece, Rule, Shape, Split, rename
from megatron_mtp.checkpoint.families.trunk import ORIGINAL, ORIGINAL_NORMS


@dataclass(frozen=True)
class DeltaNet:
    """Gated DeltaNet (arXiv:2412.06464).

    Attributes:
        hidden: size of the hidden state.
        keys, values: number of key heads, which queries have too, and of value heads.
        key_width, value_width: size of a head.
        kernel: positions of the convolution.
        by_group: whether HF stores two projections, whose rows stand key head by key head (Qwen3-Next), or four.
    """

    hidden: int
    keys: int
    values: int
    key_width: int
    value_width: int
    kernel: int
    by_group: bool

    @property
    def rows(self) -> dict[str, int]:
        """Rows of the projection by what they make, under Megatron's names and in its order."""
        keys, values = self.keys * self.key_width, self.values * self.value_width
        return {"query": keys, "key": keys, "value": values, "z": values, "beta": self.values, "alpha": self.values}

    @property
    def convolved(self) -> dict[str, int]:
        """Those rows that the convolution takes."""
        return {part: self.rows[part] for part in ("query", "key", "value")}


def delta_rules(place: Place, d: DeltaNet, layout: Layout) -> list[Rule]:
    """Rules of Gated DeltaNet and of the norm before it, which Megatron's projection holds."""
    hf, mcore, rows = f"{place.hf}linear_attn.", f"{place.mcore}self_attention.", d.rows
    return [
        rename(f"{place.hf}input_layernorm.weight", f"{mcore}in_proj.layer_norm_weight", (d.hidden,)),
        *(_grouped if d.by_group else _by_kind)(hf, f"{mcore}in_proj.weight.", d),
        _split(f"{hf}conv1d.weight", f"{mcore}conv1d.weight.", d.convolved, (1, d.kernel)),
        rename(f"{hf}A_log", f"{mcore}A_log", (d.values,)),
        rename(f"{hf}dt_bias", f"{mcore}dt_bias", (d.values,)),
        _norm(f"{hf}norm.weight", f"{mcore}out_norm.weight", d.value_width, layout.has(ORIGINAL_NORMS)),
        rename(f"{hf}out_proj.weight", f"{mcore}out_proj.weight", (d.hidden, rows["z"])),
    ]


def _grouped(hf: str, mcore: str, d: DeltaNet) -> list[Rule]:
    """A key head's query, key, values and gates, then those of the next; and so its values' betas and alphas."""
    shared = d.values // d.keys
    in_group = {"query": d.key_width, "key": d.key_width, **dict.fromkeys(("value", "z"), shared * d.value_width)}
    of_values = {"beta": shared, "alpha": shared}
    rules = []
    for name, rows in {"in_proj_qkvz": in_group, "in_proj_ba": of_values}.items():
        whole = {part: d.rows[part] for part in rows}
        by_kind = ByKind(d.keys, tuple(rows.values()))
        rules.append(_split(f"{hf}{name}.weight", mcore, whole, (d.hidden,), by_kind))
    return rules


def _by_kind(hf: str, mcore: str, d: DeltaNet) -> list[Rule]:
    others = {"z": "in_proj_z", "beta": "in_proj_b", "alpha": "in_proj_a"}
    return [
        _split(f"{hf}in_proj_qkv.weight", mcore, d.convolved, (d.hidden,)),
        *(rename(f"{hf}{name}.weight", f"{mcore}{part}", (d.rows[part], d.hidden)) for part, name in others.items()),
    ]


@dataclass(frozen=True)
class Mamba:
    """Mamba-2 (arXiv:2405.21060).

    Attributes:
        hidden: size of the hidden state.
        heads, width: number of heads, and channels of a head.
        groups, state: number of groups of heads that share B and C, and size of a state.
        kernel: positions of the convolution.
    """

    hidden: int
    heads: int
    width: int
    groups: int
    state: int
    kernel: int

    @property
    def rows(self) -> dict[str, int]:
        """Rows of the projection by what they make, in the order of both sides."""
        inner, shared = self.heads * self.width, self.groups * self.state
        return {"z": inner, "x": inner, "B": shared, "C": shared, "dt": self.heads}


def mamba_rules(place: Place, m: Mamba) -> list[Rule]:
    """Rules of Mamba-2 without the norm before it, under the same names on both sides."""
    hf, mcore, rows = f"{place.hf}mixer.", f"{place.mcore}mixer.", m.rows
    return [
        _split(f"{hf}in_proj.weight", f"{mcore}in_proj.weight.", rows, (m.hidden,)),
        *(
            _split(f"{hf}conv1d.{kind}", f"{mcore}conv1d.{kind}.", {part: rows[part] for part in "xBC"}, rest)
            for kind, rest in {"weight": (1, m.kernel), "bias": ()}.items()
        ),
        *(rename(f"{hf}{name}", f"{mcore}{name}", (m.heads,)) for name in ("A_log", "dt_bias", "D")),
        rename(f"{hf}norm.weight", f"{mcore}norm.weight", (rows["z"],)),
        rename(f"{hf}out_proj.weight", f"{mcore}out_proj.weight", (m.hidden, rows["z"])),
    ]


def _split(hf: str, mcore: str, rows: dict[str, int], rest: Shape, how: Map | None = None) -> Rule:
    """One HF tensor, and Megatron's tensors of its parts, which follow each other in HF unless `how` says otherwise."""
    pieces = tuple(Piece(f"{mcore}{part}", (count, *rest)) for part, count in rows.items())
    return Rule((HFTensor(hf, (sum(rows.values()), *rest)),), pieces, how or Split(tuple(rows.values())))


def _norm(hf: str, mcore: str, width: int, original: bool) -> Rule:
    """Megatron's norm behind the delta rule is zero-centred as all others of the model are; HF's is not."""
    kept = [Piece(f"{ORIGINAL}{hf}", (width,))] * original
    return Rule((HFTensor(hf, (width,)),), (*kept, Piece(mcore, (width,), wide=True)), MinusOne(original))
