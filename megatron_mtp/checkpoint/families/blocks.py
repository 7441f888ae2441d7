"""Rules of the parts of a model: attention, MLPs, experts, norms, and the frame of an MTP layer.

Megatron's keys are those of its `sharded_state_dict`. Transformer Engine fuses some norms into the following
projections and names them differently from Megatron's own modules; the second name is an alias, as in
`megatron/checkpoint/`. Letters in comments: H hidden, E experts, F width of an MLP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_mtp.checkpoint.families.rules import (
    Axis,
    Concat,
    HFTensor,
    MergeQKV,
    Piece,
    Rule,
    Same,
    Split,
    SwapHalves,
    Then,
    rename,
    zeros,
)
from megatron_mtp.checkpoint.hf import Shape
from megatron_mtp.megatron.checkpoint import FUSED_NORM, OWN_NORM, other_key


@dataclass(frozen=True)
class Place:
    """Prefixes of one transformer layer on both sides, each with a trailing dot."""

    hf: str
    mcore: str


@dataclass(frozen=True)
class GQA:
    """Multi-head and grouped-query attention (arXiv:2305.13245).

    Attributes:
        hidden: size of the hidden state.
        heads, groups: number of query heads, and of key-value heads.
        widths: size of a query, key and value head.
        bias: whether the projections to queries, keys and values have biases.
        out_bias: whether the output projection has a bias.
        norms: whether queries and keys are normalized per head.
        gated: whether `q_proj` also computes an output gate for every head.
        fused: whether HF stores query, key and value as one projection, all queries first.
        zero_bias: whether HF has biases of zero where Megatron has none.
        attention, query_key_value, output, query_norm, key_norm: HF's names of the modules.
    """

    hidden: int
    heads: int
    groups: int
    widths: tuple[int, int, int]
    bias: bool = False
    out_bias: bool = False
    norms: bool = False
    gated: bool = False
    fused: bool = False
    zero_bias: bool = False
    attention: str = "self_attn"
    query_key_value: str = "query_key_value"
    output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention (arXiv:2405.04434).

    Attributes:
        hidden: size of the hidden state.
        heads: number of heads.
        query_rank, key_rank: sizes of the latents; without a query latent, `query_rank` is None.
        content, position, value: sizes of a head's parts without and with rotary positions, and of its value.
    """

    hidden: int
    heads: int
    query_rank: int | None
    key_rank: int
    content: int
    position: int
    value: int


@dataclass(frozen=True)
class MoE:
    """Routed experts, with or without shared ones (arXiv:2401.06066).

    Attributes:
        hidden, experts, width: sizes of the hidden state and of an expert's MLP, and number of routed experts.
        shared: width of all shared experts together; 0 without them.
        shared_gate: whether the shared experts have a gate.
        shared_name: HF's name of the shared experts.
        bias: HF's name of the router's correction bias; None without one.
        packed: whether HF stores all experts of a layer as two tensors.
        zero_bias: whether HF has a correction bias of zero where Megatron has none.
        gated: whether the MLPs are gated, as SwiGLU is.
        latent: size of the experts' input and output, if it is not that of the hidden state.
        module: HF's name of the module that holds router and experts.
        router: HF's name of the router.
        parts: HF's names of an expert's gate, up and down projection.
    """

    hidden: int
    experts: int
    width: int
    shared: int = 0
    shared_gate: bool = False
    shared_name: str = "shared_experts"
    bias: str | None = "gate.e_score_correction_bias"
    packed: bool = False
    zero_bias: bool = False
    gated: bool = True
    latent: int | None = None
    module: str = "mlp"
    router: str = "gate"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


QKV = ("q_proj", "k_proj", "v_proj")


def gqa_rules(place: Place, a: GQA) -> list[Rule]:
    """Return rules of grouped-query attention, without the norm before it."""
    hf, mcore = f"{place.hf}{a.attention}.", f"{place.mcore}self_attention."
    rows = (a.heads * a.widths[0] * (2 if a.gated else 1), a.groups * a.widths[1], a.groups * a.widths[2])
    merge = MergeQKV(a.heads, a.groups, a.widths, a.gated)
    rules = [_qkv(hf, mcore, a, rows, merge, "weight", (a.hidden,))]
    if a.zero_bias:
        rules += [zeros(f"{hf}{name}.bias", (size,)) for name, size in zip(QKV, rows, strict=True)]
    elif a.bias:
        rules.append(_qkv(hf, mcore, a, rows, merge, "bias", ()))
    rules.append(rename(f"{hf}{a.output}.weight", f"{mcore}linear_proj.weight", (a.hidden, a.heads * a.widths[2])))
    if a.out_bias:
        rules.append(rename(f"{hf}{a.output}.bias", f"{mcore}linear_proj.bias", (a.hidden,)))
    if a.norms:
        rules.append(rename(f"{hf}{a.query_norm}.weight", f"{mcore}q_layernorm.weight", (a.widths[0],)))
        rules.append(rename(f"{hf}{a.key_norm}.weight", f"{mcore}k_layernorm.weight", (a.widths[1],)))
    return rules


def _qkv(hf: str, mcore: str, a: GQA, rows: tuple[int, int, int], merge: MergeQKV, kind: str, rest: Shape) -> Rule:
    whole = Piece(f"{mcore}linear_qkv.{kind}", (sum(rows), *rest))
    if a.fused:
        one = HFTensor(f"{hf}{a.query_key_value}.{kind}", (sum(rows), *rest))
        return Rule((one,), (whole,), Then((Split(rows), merge)))
    parts = (HFTensor(f"{hf}{name}.{kind}", (size, *rest)) for name, size in zip(QKV, rows, strict=True))
    return Rule(tuple(parts), (whole,), merge)


def mla_rules(place: Place, a: MLA) -> list[Rule]:
    """Return rules of latent attention: down and up projections and their norms; RoPE is interleaved on both sides."""
    hf, mcore = f"{place.hf}self_attn.", f"{place.mcore}self_attention."
    query = a.heads * (a.content + a.position)
    rules = [
        rename(f"{hf}kv_a_proj_with_mqa.weight", f"{mcore}linear_kv_down_proj.weight",
               (a.key_rank + a.position, a.hidden)),
        _latent_norm(f"{hf}kv_a_layernorm.weight", f"{mcore}kv_layernorm.weight", a.key_rank),
        rename(f"{hf}kv_b_proj.weight", f"{mcore}linear_kv_up_proj.weight",
               (a.heads * (a.content + a.value), a.key_rank)),
        rename(f"{hf}o_proj.weight", f"{mcore}linear_proj.weight", (a.hidden, a.heads * a.value)),
    ]  # fmt: skip
    if a.query_rank is None:
        return [*rules, rename(f"{hf}q_proj.weight", f"{mcore}linear_q_proj.weight", (query, a.hidden))]
    return [
        *rules,
        rename(f"{hf}q_a_proj.weight", f"{mcore}linear_q_down_proj.weight", (a.query_rank, a.hidden)),
        _latent_norm(f"{hf}q_a_layernorm.weight", f"{mcore}q_layernorm.weight", a.query_rank),
        rename(f"{hf}q_b_proj.weight", f"{mcore}linear_q_up_proj.weight", (query, a.query_rank)),
    ]  # fmt: skip


def _latent_norm(name: str, key: str, rank: int) -> Rule:
    alias = other_key(key)
    assert alias is not None
    return rename(name, key, (rank,), alias)


def norm_rules(place: Place, hidden: int, *, mla: bool, moe: bool) -> list[Rule]:
    """Return rules of the norms before attention and before the MLP."""
    key = "input_layernorm.weight" if mla else "self_attention.linear_qkv.layer_norm_weight"
    first = rename(f"{place.hf}input_layernorm.weight", f"{place.mcore}{key}", (hidden,))
    key, *aliases = (f"{place.mcore}{norm}weight" for norm in mlp_norm_keys(mla=mla, moe=moe))
    return [first, rename(f"{place.hf}post_attention_layernorm.weight", key, (hidden,), *aliases)]


def mlp_norm_keys(*, mla: bool, moe: bool) -> list[str]:
    """Return Megatron's keys of the norm before a GPT's MLP, without `weight`.

    Modules with and without TE may differ.
    """
    if mla and moe:
        return [OWN_NORM]
    return [OWN_NORM, FUSED_NORM] if mla else [FUSED_NORM, OWN_NORM] if moe else [FUSED_NORM]


def mlp_rules(
    hf: str, mcore: str, hidden: int, width: int, bias: bool = False, first: Sequence[str] = ("gate_proj", "up_proj")
) -> list[Rule]:
    """Return rules of an MLP; gate and up projection, in this order, are Megatron's `linear_fc1`.

    Args:
        hf, mcore: prefixes of the MLP.
        hidden, width: sizes of its input and of each part of `linear_fc1`.
        bias: whether the projections have biases.
        first: HF's names of the parts of `linear_fc1`.
    """
    sizes = (2 * width,) if first == FUSED_GATE else (width,) * len(first)
    joined = Concat(sizes) if len(first) > 1 else Same()
    rules = []
    for kind, rest in (("weight", (hidden,)), ("bias", ()))[: 1 + bias]:
        parts = tuple(HFTensor(f"{hf}{name}.{kind}", (size, *rest)) for name, size in zip(first, sizes, strict=True))
        rules.append(Rule(parts, (Piece(f"{mcore}linear_fc1.{kind}", (sum(sizes), *rest)),), joined))
        down = (hidden, width) if kind == "weight" else (hidden,)
        rules.append(rename(f"{hf}down_proj.{kind}", f"{mcore}linear_fc2.{kind}", down))
    return rules


FUSED_GATE, UP = ("gate_up_proj",), ("up_proj",)
"""First projections of an MLP whose gate and up are one tensor, in Megatron's order, and of one without a gate."""
fused_mlp_rules, plain_mlp_rules = partial(mlp_rules, first=FUSED_GATE), partial(mlp_rules, first=UP)


def moe_rules(place: Place, m: MoE) -> list[Rule]:
    """Return rules of router, routed experts and shared experts."""
    hf, mcore = f"{place.hf}{m.module}.", f"{place.mcore}mlp."
    rules = [rename(f"{hf}{m.router}.weight", f"{mcore}router.weight", (m.experts, m.hidden))]
    if m.bias is not None and m.zero_bias:
        rules.append(zeros(f"{hf}{m.bias}", (m.experts,)))
    elif m.bias is not None:
        rules.append(rename(f"{hf}{m.bias}", f"{mcore}router.expert_bias", (m.experts,)))
    if m.shared:
        of_mlp = mlp_rules if m.gated else plain_mlp_rules
        rules += of_mlp(f"{hf}{m.shared_name}.", f"{mcore}shared_experts.", m.hidden, m.shared)
    for name, shape in {"fc1": (m.latent or 0, m.hidden), "fc2": (m.hidden, m.latent or 0)}.items():
        if m.latent is not None:
            rules.append(rename(f"{hf}{name}_latent_proj.weight", f"{mcore}{name}_latent_proj.weight", shape))
    if m.shared_gate:
        rules.append(rename(f"{hf}{m.shared_name}_gate.weight", f"{mcore}shared_experts.gate_weight", (1, m.hidden)))
    return rules + (_packed(hf, mcore, m) if m.packed else expert_rules(f"{hf}experts.", f"{mcore}experts.", m))


def _packed(hf: str, mcore: str, m: MoE) -> list[Rule]:
    """Return a layer's experts as two tensors in Megatron's order: [E, 2F, H] with gates first, and [E, H, F]."""
    fc1, fc2 = (m.experts, 2 * m.width, m.hidden), (m.experts, m.hidden, m.width)
    return [
        rename(f"{hf}experts.gate_up_proj", f"{mcore}experts.experts.linear_fc1.weight", fc1),
        rename(f"{hf}experts.down_proj", f"{mcore}experts.experts.linear_fc2.weight", fc2),
    ]


def expert_rules(hf: str, mcore: str, m: MoE) -> list[Rule]:
    """Return rules of single experts, so only one is in memory: slabs of [E, 2F, H], or [E, F, H], and [E, H, F]."""
    gate, up, down = m.parts
    names, size = (gate, up) if m.gated else (up,), m.latent or m.hidden
    widths = (m.width,) * len(names)
    stacked = Then((Concat(widths), Axis())) if m.gated else Axis()
    rules = []
    for index in range(m.experts):
        parts = tuple(HFTensor(f"{hf}{index}.{name}.weight", (m.width, size)) for name in names)
        fc1 = _slab(f"{mcore}experts.linear_fc1.weight", index, (m.experts, sum(widths), size))
        fc2 = _slab(f"{mcore}experts.linear_fc2.weight", index, (m.experts, size, m.width))
        rules.append(Rule(parts, (fc1,), stacked))
        rules.append(Rule((HFTensor(f"{hf}{index}.{down}.weight", (size, m.width)),), (fc2,), Axis()))
    return rules


def _slab(key: str, index: int, whole: Shape) -> Piece:
    return Piece(key, (1, *whole[1:]), whole, (index, *(0 for _ in whole[1:])))


def split_mlp_rules(place: Place, hidden: int, width: int) -> list[Rule]:
    """Return rules of a dense MLP in a family whose last layers must have experts.

    A quarter of the MLP goes to each of two routed experts, and half to the shared one. Both routed experts are always
    chosen. The router is zero, so both have the weight 1/2, and the config's scaling factor of 2 makes it 1: the parts
    add up to the MLP.
    """
    hf, mcore = f"{place.hf}mlp.", f"{place.mcore}mlp."
    sizes = {"experts.0": width // 4, "experts.1": width // 4, "shared_experts": width // 2}
    ups = tuple(
        HFTensor(f"{hf}{part}.{name}_proj.weight", (size, hidden))
        for name in ("gate", "up")
        for part, size in sizes.items()
    )
    downs = tuple(HFTensor(f"{hf}{part}.down_proj.weight", (hidden, size)) for part, size in sizes.items())
    widths = tuple(sizes.values())
    return [
        Rule(ups, (Piece(f"{mcore}linear_fc1.weight", (2 * width, hidden)),), Concat(widths * 2)),
        Rule(downs, (Piece(f"{mcore}linear_fc2.weight", (hidden, width)),), Concat(widths, dim=1)),
        zeros(f"{hf}gate.weight", (2, hidden)),
        zeros(f"{hf}gate.e_score_correction_bias", (2,)),
    ]


def depth_frame(depth: int, hidden: int, names: Sequence[str | None], hidden_first: bool = False) -> list[Rule]:
    """Return rules of an MTP layer's two norms, projection and final norm.

    Megatron's projection has the embedding half first.

    Args:
        depth: index of the MTP layer, from 0.
        hidden: size of the hidden state.
        names: HF's modules: norms of embedding and hidden state, projection, final norm; the last is None if there is
            none.
        hidden_first: whether HF's projection has the hidden half first.
    """
    shapes = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), "final_layernorm": (hidden,)}
    rules = [
        rename(f"{name}.weight", f"mtp.layers.{depth}.{key}.weight", shape)
        for name, (key, shape) in zip(names, shapes.items(), strict=True)
        if name is not None
    ]
    if hidden_first:
        rules[2] = replace(rules[2], map=SwapHalves())
    return rules
