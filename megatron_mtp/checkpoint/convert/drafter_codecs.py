"""What the folder of a drafter says and holds, one class a kind; CODECS is the table.

Letters in names: N drafted tokens, V vocabulary, H hidden, M rank of the bias.
"""

import sys
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, override

from torch import Tensor

from megatron_mtp.checkpoint.families.blocks import GQA, MLA, Place, gqa_rules, mla_rules, mlp_rules
from megatron_mtp.checkpoint.families.rules import HFTensor, Piece, Rule, rename
from megatron_mtp.checkpoint.hf import Shape
from megatron_mtp.checkpoint.hf.config import CONFIG
from megatron_mtp.megatron.checkpoint import DRAFTER
from megatron_mtp.model.arguments import layers_to_read
from megatron_mtp.spec.attention import CAUSAL, CAUSAL_IN_WINDOWS, AttentionSizes
from megatron_mtp.spec.head import HeadSpec, TrunkSpec
from megatron_mtp.spec.kinds import (
    CANDIDATES,
    CHANNELS_OF_A_KERNEL,
    DRAFTERS,
    EAGLE3_LAYERS,
    TAPS,
    DrafterKind,
    engine_layers,
)

AUX_LAYERS, TARGET_LAYERS = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"
STATE_KEYS, OUTPUT_KEYS = (AUX_LAYERS, "aux_hidden_state_layer_ids"), (TARGET_LAYERS, "dspark_target_layer_ids")
"""Config keys with the layers that are read. The first two count states: the number is that of the layers before the
state, as vLLM and speculators count. The others, and `AUX_LAYERS` within `eagle_config`, count outputs: the number is
that of the layer that returns the state, from 0, as SGLang and SpecForge count."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""Types of layers."""
INNER = OF_ONE_LAYER, OF_BLOCKS, OF_LAYERS = "eagle_config", "dflash_config", "transformer_layer_config"
"""Config keys with further keys in them: SpecForge's, z-lab's and speculators'."""
CAUSAL_KEYS, NON_CAUSAL = ("is_causal", "causal"), "sliding_window_non_causal"
"""Config keys of causality, of all layers and, in speculators, of windowed ones."""
KV_RANK = "kv_lora_rank"
LATENT_KEYS = "q_lora_rank", KV_RANK, "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
"""Config keys of `LatentSizes`, in its order."""
COUNTS = {"outputs": 1, "states": 0}
"""What layer ids may count, and what makes the layers before a state of one."""


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Rows in the order of a folder's drafts, to the order of their tokens; `order_N` has the row of each token."""

    order_N: Tensor
    what = "by ascending token"

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The rows as a checkpoint has them."""
        return [rows[self.order_N] for rows in tensors]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The rows as the folder has them."""
        return [rows[self.order_N.argsort()] for rows in tensors]


class DrafterCodec(ABC):
    """A kind's keys of config.json and tensors.

    Attributes:
        has_own_head: whether the folder always has a head, which is otherwise the trunk's without a draft vocabulary.
        has_embedding: whether an exported folder has a copy of the trunk's embedding.
        stores_steps: whether the folder has the number of drafts.
        whole_numbers: config keys that it must have as integers.
        layer_names: beginnings of the names of its one layer: as it is written, and others that are read.
        own_forms: config keys that other kinds do not have, with the value that it must have; None for any.
    """

    has_own_head = False
    has_embedding = False
    stores_steps = True
    whole_numbers: tuple[str, ...] = ("hidden_size", "intermediate_size")
    layer_names: tuple[str, ...] = ("midlayer.", "layers.0.")
    own_forms: ClassVar[dict[str, Any]] = {}

    def keys(self, kind: HeadSpec) -> dict[str, Any]:
        """Keys beside those of the sizes."""
        if kind.window is None:
            return {}
        types = [FULL if number in kind.full_layers else SLIDING for number in range(1, kind.depth + 1)]
        return {"layer_types": types, "sliding_window": kind.window, "use_sliding_window": True}

    @abstractmethod
    def rules(self, kind: HeadSpec, sizes: dict[str, Any], layer: str, rows: TokenOrder) -> list[Rule]:
        """The rules of what only drafters of this kind have.

        Args:
            kind: the drafter.
            sizes: of `drafter_form.sizes_of`.
            layer: the name of its one layer in the folder.
            rows: the order of the drafted tokens.
        """

    def layers(self, keys: dict[str, Any], layers: int, count: str | None) -> list[int]:
        """Numbers of the layers that are read of a trunk of so many, from any of the keys.

        Args:
            count: of `COUNTS`, what the numbers count; None for what their key says.

        Raises:
            ValueError: the key says one and the numbers look like the other.
        """
        for names, says in ((STATE_KEYS, "states"), (OUTPUT_KEYS, "outputs")):
            for name in names:
                if keys.get(name):
                    return [number + COUNTS[count or says] for number in keys[name]]
        return []

    @abstractmethod
    def sizes(self, path: Path, row: DrafterKind, keys: dict[str, Any], args: Namespace) -> dict[str, Any]:
        """Settings that drafters of this kind have and others do not, by the names of their flags.

        Raises:
            ValueError: the trunk of these arguments has no such drafter.
        """

    def has_unknown_layers(self, keys: dict[str, Any]) -> bool:
        """Return whether it has more layers than drafters of its kind have."""
        return False


class OneLayer(DrafterCodec):
    """EAGLE-3, which does not say with how many steps it was trained."""

    has_own_head = True
    stores_steps = False
    own_forms: ClassVar[dict[str, Any]] = {"num_aux_hidden_states": EAGLE3_LAYERS}

    @override
    def keys(self, kind: HeadSpec) -> dict[str, Any]:
        returns = [number - 1 for number in kind.layers]
        own = {AUX_LAYERS: [*kind.layers], OF_ONE_LAYER: {AUX_LAYERS: returns, "use_aux_hidden_state": True}}
        return super().keys(kind) | own | ({"norm_before_residual": True} if kind.norm_before_residual else {})

    @override
    def rules(self, kind: HeadSpec, sizes: dict[str, Any], layer: str, rows: TokenOrder) -> list[Rule]:
        norms = {"input_layernorm": "input_layernorm.enorm", "hidden_norm": "input_layernorm.hnorm"}
        return [
            *_input_and_output(sizes, len(kind.layers)),
            *_layer_rules(Place(layer, f"{DRAFTER}tf_layer."), sizes, kind, norms, inputs=2),
        ]

    @override
    def layers(self, keys: dict[str, Any], layers: int, count: str | None) -> list[int]:
        inner = (keys.get(OF_ONE_LAYER) or {}).get(AUX_LAYERS)
        if inner and count is None and inner in (keys.get(AUX_LAYERS), [*engine_layers(layers)]):
            raise ValueError(
                f"has {AUX_LAYERS} {' '.join(map(str, inner))} within {OF_ONE_LAYER}, where numbers count the outputs "
                "of layers from 0, and these look like states after so many layers; choose with "
                "--drafter-layer-ids-count outputs or states, by the acceptance."
            )
        found = super().layers(keys, layers, count)
        if not found and inner:
            return [number + COUNTS[count or "outputs"] for number in inner]
        return found or [*engine_layers(layers)]

    @override
    def sizes(self, path: Path, row: DrafterKind, keys: dict[str, Any], args: Namespace) -> dict[str, Any]:
        return {}

    @override
    def has_unknown_layers(self, keys: dict[str, Any]) -> bool:
        return bool(keys.get("num_hidden_layers", 1) != 1)


class StateLayer(OneLayer):
    """EAGLE: one layer as in Llama, which has no norm before attention and none before the head.

    SGLang knows a folder by the first name of `architectures`, vLLM by the second.
    """

    has_own_head = False
    has_embedding = True
    layer_names = ("layers.0.",)
    own_forms: ClassVar[dict[str, Any]] = dict.fromkeys(
        ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm")
    )

    @override
    def keys(self, kind: HeadSpec) -> dict[str, Any]:
        row = DRAFTERS[kind.kind]
        return super().keys(kind) | {"architectures": [row.architecture, row.published_as]}

    @override
    def rules(self, kind: HeadSpec, sizes: dict[str, Any], layer: str, rows: TokenOrder) -> list[Rule]:
        hidden = sizes["hidden_size"]
        return [
            rename("fc.weight", f"{DRAFTER}fc.weight", (hidden, 2 * hidden)),
            *_layer_rules(Place(layer, f"{DRAFTER}tf_layer."), sizes, kind, {}),
        ]

    @override
    def layers(self, keys: dict[str, Any], layers: int, count: str | None) -> list[int]:
        return []


class Blocks(DrafterCodec):
    """DFlash, whose `block_size` counts the rows that draft nothing too."""

    whole_numbers: tuple[str, ...] = (*DrafterCodec.whole_numbers, "num_hidden_layers", "block_size", "mask_token_id")

    @override
    def keys(self, kind: HeadSpec) -> dict[str, Any]:
        rows = kind.drafts + kind.idle_rows
        is_causal: dict[str, Any] = {"is_causal": bool(kind.causal)}
        inner = {**self.inner(kind), "causal": bool(kind.causal)}
        if kind.causal == CAUSAL_IN_WINDOWS:  # engines take layers so where no key is for them all
            is_causal = {NON_CAUSAL: False}
            del inner["causal"]
        if kind.window is not None:
            inner |= {"swa_window_size": kind.window, **({} if kind.full_layers else {"use_swa": True})}
        if kind.has_sinks:
            inner["attention_sink_bias"] = True
        return super().keys(kind) | {"block_size": rows, **is_causal, OF_BLOCKS: inner}

    def inner(self, kind: HeadSpec) -> dict[str, Any]:
        """What engines look for in `OF_BLOCKS`."""
        return {TARGET_LAYERS: [number - 1 for number in kind.layers], "mask_token_id": kind.mask_token}

    @override
    def rules(self, kind: HeadSpec, sizes: dict[str, Any], layer: str, rows: TokenOrder) -> list[Rule]:
        rules = _input_and_output(sizes, len(kind.layers))
        rules.append(rename("hidden_norm.weight", f"{DRAFTER}hidden_norm.weight", (sizes["hidden_size"],)))
        for number in range(kind.depth):
            place = Place(f"layers.{number}.", f"{DRAFTER}layers.{number}.")
            norms = {"input_layernorm": "input_layernorm"}
            rules += _layer_rules(place, sizes, kind, norms, normalizes_heads=True)
        return rules

    @override
    def sizes(self, path: Path, row: DrafterKind, keys: dict[str, Any], args: Namespace) -> dict[str, Any]:
        mask, has_choice = keys["mask_token_id"], "drafter_idle_rows" in row.settings
        if keys.get("sample_from_anchor") and not has_choice:
            raise ValueError(
                f"{path / CONFIG} has sample_from_anchor, and the newest token's row of {row.called} drafts nothing; "
                "give another."
            )
        idle = int(has_choice and keys.get("sample_from_anchor") is False)
        steps = keys["block_size"] - row.idle_rows - idle
        if not 0 <= mask < args.vocab_size:
            raise ValueError(
                f"{path / CONFIG} has mask_token_id {mask}, and the vocabulary has {args.vocab_size} tokens; give a "
                "drafter of this trunk."
            )
        if not 1 <= steps <= args.max_position_embeddings:
            raise ValueError(
                f"{path / CONFIG} has block_size {keys['block_size']}, of {steps} drafts, and the trunk has "
                f"{args.max_position_embeddings} positions; fetch the folder again."
            )
        return {
            "drafter_steps": steps,
            "drafter_num_layers": keys["num_hidden_layers"],
            "drafter_mask_token": mask,
            "drafter_markov_rank": keys.get("markov_rank"),
            "drafter_idle_rows": idle if has_choice else None,
        }


class BiasedBlocks(Blocks):
    """DSpark, with a bias by the token before and a confidence; every row of its block drafts."""

    own_forms: ClassVar[dict[str, Any]] = {"projector_type": "dspark"}
    whole_numbers = (*Blocks.whole_numbers, "markov_rank")

    @override
    def keys(self, kind: HeadSpec) -> dict[str, Any]:
        return {
            **super().keys(kind),
            **self.inner(kind),
            **{"markov_rank": kind.markov_rank, "markov_head_type": "vanilla"},
            **{"enable_confidence_head": True, "confidence_head_with_markov": True},
            **({"sample_from_anchor": False} if kind.idle_rows else {}),
        }

    @override
    def rules(self, kind: HeadSpec, sizes: dict[str, Any], layer: str, rows: TokenOrder) -> list[Rule]:
        hidden, rank, drafted = sizes["hidden_size"], kind.markov_rank, len(rows.order_N)
        assert rank is not None
        return [
            *super().rules(kind, sizes, layer, rows),
            rename("markov_head.markov_w1.weight", f"{DRAFTER}markov_w1", (sizes["vocab_size"], rank)),
            by_token("markov_head.markov_w2.weight", f"{DRAFTER}markov_w2", (drafted, rank), rows),
            rename("confidence_head.proj.weight", f"{DRAFTER}confidence_weight", (1, hidden + rank)),
            rename("confidence_head.proj.bias", f"{DRAFTER}confidence_bias", (1,)),
        ]


class ConvolvedBlocks(Blocks):
    """DFlash2, with convolutions along the block and a choice among likely tokens; it has no draft vocabulary."""

    own_forms: ClassVar[dict[str, Any]] = {
        "conv_kernel_size": TAPS,
        "conv_group_size": CHANNELS_OF_A_KERNEL,
        "selector_rank": None,
        "selector_top_k": CANDIDATES,
    }
    whole_numbers = (*Blocks.whole_numbers, *own_forms)

    @override
    def inner(self, kind: HeadSpec) -> dict[str, Any]:
        rows = kind.drafts + kind.idle_rows
        return {**super().inner(kind), **self.own_forms, "selector_rank": kind.markov_rank, "block_size": rows}

    @override
    def rules(self, kind: HeadSpec, sizes: dict[str, Any], layer: str, rows: TokenOrder) -> list[Rule]:
        hidden, rank, vocabulary = sizes["hidden_size"], kind.markov_rank, sizes["vocab_size"]
        assert rank is not None
        kernels = 2 * TAPS * (hidden // CHANNELS_OF_A_KERNEL), hidden
        rules = super().rules(kind, sizes, layer, rows)
        for number in range(kind.depth):
            for name, part in (("attention_conv", "self_attention"), ("mlp_conv", "mlp")):
                hf, own = f"layers.{number}.{name}.", f"{DRAFTER}layers.{number}.{part}.conv."
                rules.append(rename(f"{hf}base_kernel", f"{own}base_kernel", (2, TAPS, hidden)))
                rules.append(rename(f"{hf}kernel_projection.weight", f"{own}kernel_projection", kernels))
        selector = "candidate_selector."
        return [
            *rules,
            rename(f"{selector}predecessor_codebook", f"{DRAFTER}markov_w1", (vocabulary, rank)),
            rename(f"{selector}successor_codebook", f"{DRAFTER}markov_w2", (vocabulary, rank)),
            rename(f"{selector}hidden_projection.weight", f"{DRAFTER}markov_projection", (rank, hidden)),
        ]

    @override
    def sizes(self, path: Path, row: DrafterKind, keys: dict[str, Any], args: Namespace) -> dict[str, Any]:
        if keys.get("draft_vocab_size") not in (None, args.vocab_size):
            raise ValueError(
                f"{path / CONFIG} has draft_vocab_size {keys['draft_vocab_size']}, and {row.called} chooses among all "
                f"{args.vocab_size} tokens; give another."
            )
        return {**super().sizes(path, row, keys, args), "drafter_markov_rank": keys["selector_rank"]}


CODECS: dict[str, DrafterCodec] = {
    "eagle3": OneLayer(),
    "eagle": StateLayer(),
    "dflash": Blocks(),
    "dspark": BiasedBlocks(),
    "dflash2": ConvolvedBlocks(),
}
"""By the names of `spec.kinds.DRAFTERS`."""


def with_inner(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config with those that some forms have one level down."""
    return {**(keys.get(OF_LAYERS) or {}), **keys, **(keys.get(OF_BLOCKS) or {})}


def kind_in(
    path: Path,
    row: DrafterKind,
    keys: dict[str, Any],
    attention: AttentionSizes,
    args: Namespace,
    count: str | None = None,
) -> HeadSpec:
    """The drafter that the keys of a config describe, on the trunk of these arguments.

    Args:
        attention: what the keys say of its attention.
        count: what its layer ids count, of `COUNTS`; None for what their key says.

    Raises:
        ValueError: a key is missing, or the drafter is of another trunk.
    """
    codec = CODECS[row.name]
    if lacks := [key for key in codec.whole_numbers if type(keys.get(key)) is not int]:
        raise ValueError(f"{path / CONFIG} lacks {lacks[0]}; fetch the folder again.")
    layers = layers_to_read(args) or sys.maxsize
    try:
        found = codec.layers(keys, layers, count)
    except ValueError as error:
        raise ValueError(f"{path / CONFIG} {error}") from None
    if row.reads is not None and len(found) != row.reads:
        raise ValueError(
            f"{path / CONFIG} reads {len(found)} layers ({' '.join(map(str, found))}), and {row.called} here reads "
            f"{row.reads}; give another."
        )
    if not row.can_read(found, layers):
        raise ValueError(
            f"{path / CONFIG} reads the layers {' '.join(map(str, found))}, and the trunk has {layers} layers; give a "
            "drafter of this trunk."
        )
    given = {
        "drafter_layers": found,
        **codec.sizes(path, row, keys, args),
        **_layers_in(path, row, keys),
        **({} if attention.latents is None else {"drafter_multi_latent_attention": []}),
    }
    own = TrunkSpec(layers, args.vocab_size, keys["hidden_size"], keys["intermediate_size"], attention)
    try:
        return HeadSpec.resolve(row.name, given, own)
    except ValueError as error:
        raise ValueError(f"{path / CONFIG} has sizes that no drafter has: {error}") from None


@dataclass(frozen=True)
class LayerView:
    """What the rows of a layer attend to.

    Attributes:
        window: a row at position p attends to positions above p less this number; None for all positions.
        causal: whether the row of a block sees only the rows before it.
    """

    window: int | None
    causal: bool


def layer_views(keys: Mapping[str, Any], fills_blocks: bool) -> list[LayerView]:
    """What each layer of a drafter attends to, as engines read the keys of its config (`with_inner`).

    A layer that drafts token by token is causal. In blocks, `is_causal` and `causal` are for all layers;
    `sliding_window_non_causal`, which speculators writes, is for windowed layers, and its full layers are never causal.
    Without a key, layers that `layer_types` calls windowed are causal.

    Raises:
        ValueError: the keys contradict one another, or leave open what layers attend to.
    """
    types = _layer_types(keys)
    listed = keys.get("layer_types") or [FULL] * len(types)
    widths = {name: keys[name] for name in ("swa_window_size", "sliding_window") if keys.get(name) is not None}
    width = next(iter(widths.values()), None)
    if SLIDING in types:
        if len({*widths.values()}) > 1:
            raise ValueError(f"has {_both(widths)}, two widths of one window; remove the one that was not trained.")
        if type(width) is not int or width < 1:
            raise ValueError(f"has sliding_window {width!r:.40}, which is a number from 1 on.")
    if not fills_blocks:
        return [LayerView(width if one == SLIDING else None, causal=True) for one in types]
    said = {name: [bool(keys[name])] * len(types) for name in CAUSAL_KEYS if keys.get(name) is not None}
    if SLIDING in types and keys.get(NON_CAUSAL) is not None:
        said[NON_CAUSAL] = [one == SLIDING and not keys[NON_CAUSAL] for one in types]
    if len({*map(tuple, said.values())}) > 1:
        raise ValueError(
            f"has {_both({name: keys[name] for name in said})}, which differ on which layers are causal "
            f"({NON_CAUSAL} leaves full layers non-causal); keep the key by which the drafter was trained."
        )
    if not said and len({*types}) > 1:
        raise ValueError(
            "lacks is_causal, and engines take windowed layers as causal and others not; add the key as the drafter "
            f"was trained: is_causal for all layers, {NON_CAUSAL} for windowed ones alone."
        )
    causal = next(iter(said.values()), [one == SLIDING for one in listed])
    return [LayerView(width if one == SLIDING else None, own) for one, own in zip(types, causal, strict=True)]


def _layer_types(keys: Mapping[str, Any]) -> list[str]:
    """The type of each layer, of `FULL` and `SLIDING`; `use_swa` gives every layer a window."""
    count, types = keys.get("num_hidden_layers", 1), keys.get("layer_types")
    if types is None:
        if keys.get("use_sliding_window") and not keys.get("use_swa"):
            raise ValueError("has use_sliding_window without layer_types; give the type of each layer.")
        return [SLIDING if keys.get("use_swa") else FULL] * count
    if len(types) != count or {*types} - {FULL, SLIDING}:
        raise ValueError(f"has layer_types {types!r:.80}, which is no {FULL} or {SLIDING} a layer.")
    if keys.get("use_swa") and {*types} == {FULL, SLIDING}:
        raise ValueError(
            "has use_swa and layer_types with both kinds of layers, and engines differ on which of the two they take; "
            "remove use_swa, or give every layer a window."
        )
    return [SLIDING] * count if keys.get("use_swa") else [*types]


def _both(said: Mapping[str, Any]) -> str:
    return " and ".join(f"{name} {value}" for name, value in said.items())


def _layers_in(path: Path, row: DrafterKind, keys: dict[str, Any]) -> dict[str, Any]:
    """The settings, by the names of their flags, that say what its layers attend and add to, as engines read them.

    Raises:
        ValueError: they are not said, contradict one another, or the kind has no such layers.
    """
    try:
        views = layer_views(keys, row.fills_blocks)
    except ValueError as error:
        raise ValueError(f"{path / CONFIG} {error}") from None
    has_sinks = bool(keys.get("attention_sink_bias") or keys.get("add_swa_attention_sink_bias"))
    if has_sinks and "drafter_softmax_type" not in row.settings:
        raise ValueError(f"{path / CONFIG} has attention_sink_bias, which {row.called} does not have; give another.")
    is_before = bool(keys.get("norm_before_residual"))
    if is_before and "drafter_norm_before_residual" not in row.settings:
        raise ValueError(f"{path / CONFIG} has norm_before_residual, which {row.called} does not have; give another.")
    found: dict[str, Any] = {
        "drafter_softmax_type": "learnable" if has_sinks else None,
        "drafter_norm_before_residual": int(is_before),
    }
    if (window := next((one.window for one in views if one.window is not None), None)) is not None:
        full = tuple(number for number, one in enumerate(views, start=1) if one.window is None)
        found |= {"drafter_window_size": window, "drafter_full_layers": full}
    if row.fills_blocks and any(one.causal for one in views):
        found["drafter_causal"] = CAUSAL if all(one.causal for one in views) else CAUSAL_IN_WINDOWS
    return found


def _own_key(rule: Rule) -> Rule:
    """The rule without the keys of Transformer Engine's modules, which drafters do not have."""
    return replace(rule, mcore=tuple(replace(piece, aliases=()) for piece in rule.mcore))


def by_token(name: str, key: str, shape: Shape, rows: TokenOrder) -> Rule:
    """A matrix with a row for each draft; the trunk's head may have more rows."""
    return Rule((HFTensor(name, shape),), (Piece(key, shape, padded=True),), rows)


def _input_and_output(sizes: dict[str, Any], inputs: int) -> list[Rule]:
    """Rules of what makes a feature of so many states, and of the norm before the head."""
    hidden = sizes["hidden_size"]
    return [
        rename("fc.weight", f"{DRAFTER}fc.weight", (hidden, inputs * hidden)),
        rename("norm.weight", f"{DRAFTER}norm.weight", (hidden,)),
    ]


def _layer_rules(
    place: Place,
    sizes: dict[str, Any],
    kind: HeadSpec,
    norms: dict[str, str],
    inputs: int = 1,
    normalizes_heads: bool = False,
) -> list[Rule]:
    """Rules of one layer, whose attention takes so many inputs of the hidden size side by side."""
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if KV_RANK in sizes:
        latents = [sizes[name] for name in LATENT_KEYS]
        attention, channels = mla_rules(place, MLA(inputs * hidden, heads, *latents)), latents[-1]
    else:
        groups, channels = sizes["num_key_value_heads"], sizes["head_dim"]
        attention = gqa_rules(place, GQA(inputs * hidden, heads, groups, (channels,) * 3, norms=normalizes_heads))
    output, sink = (
        f"{place.mcore}self_attention.{name}" for name in ("linear_proj.weight", "core_attention.softmax_offset")
    )
    named = {**norms, "post_attention_layernorm": "pre_mlp_layernorm"}
    return [
        *(rename(f"{place.hf}{a}.weight", f"{place.mcore}{b}.weight", (hidden,)) for a, b in named.items()),
        *(_own_key(rule) for rule in attention if rule.mcore[0].key != output),
        rename(f"{place.hf}self_attn.o_proj.weight", output, (hidden, heads * channels)),
        *mlp_rules(f"{place.hf}mlp.", f"{place.mcore}mlp.", hidden, kind.ffn),
        *([rename(f"{place.hf}self_attn.attention_sink_bias", sink, (heads,))] if kind.has_sinks else []),
    ]
