"""Config keys and tensors of a drafter's folder: base classes for the formats of all kinds, and common rules.

The table row of a kind names its format; `CODECS` has all of them. Letters in names: N draft vocabulary, H hidden.
"""

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, override

from torch import Tensor

from megatron_mtp.checkpoint.convert.drafter_views import FULL, NON_CAUSAL, SLIDING, keys_of_settings
from megatron_mtp.checkpoint.families.blocks import GQA, MLA, Place, gqa_rules, mla_rules, mlp_rules
from megatron_mtp.checkpoint.families.rules import HFTensor, Piece, Rule, rename
from megatron_mtp.checkpoint.hf import Shape
from megatron_mtp.checkpoint.hf.config import CONFIG
from megatron_mtp.megatron.checkpoint import DRAFTER
from megatron_mtp.spec.attention import CAUSAL_IN_WINDOWS
from megatron_mtp.spec.head import HeadSpec
from megatron_mtp.spec.kinds import DRAFTERS, DrafterKind
from megatron_mtp.spec.registry import Imported

AUX_LAYERS, TARGET_LAYERS = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"
STATE_KEYS, OUTPUT_KEYS = (AUX_LAYERS, "aux_hidden_state_layer_ids"), (TARGET_LAYERS, "dspark_target_layer_ids")
"""Config keys with the layers that are read. The first two count states: the number of layers before the state, as in
vLLM and speculators. The others, and `AUX_LAYERS` within `eagle_config`, count outputs: the index of the layer that
returns the state, from 0, as in SGLang and SpecForge.
"""
INNER = OF_ONE_LAYER, OF_BLOCKS, OF_LAYERS = "eagle_config", "dflash_config", "transformer_layer_config"
"""Config keys with nested keys: SpecForge's, z-lab's and speculators'."""
KV_RANK = "kv_lora_rank"
LATENT_KEYS = "q_lora_rank", KV_RANK, "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
"""Config keys of `LatentSizes`, in order."""
COUNTS = {"outputs": 1, "states": 0}
"""What layer ids may count, and the conversion to the number of layers before a state."""


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Reorders rows from the folder's draft order to ascending tokens; `order_N` has the row of each token."""

    order_N: Tensor
    what = "by ascending token"

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows in the checkpoint's order."""
        return [rows[self.order_N] for rows in tensors]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows in the folder's order."""
        return [rows[self.order_N.argsort()] for rows in tensors]


class DrafterCodec(ABC):
    """Config keys and tensors of a kind of drafter.

    Attributes:
        has_own_head: whether the folder always has an output layer; otherwise the trunk's is used without a draft
            vocabulary.
        has_embedding: whether an exported folder has a copy of the trunk's embedding.
        stores_steps: whether the folder stores the number of draft tokens.
        whole_numbers: config keys that must be integers.
        layer_names: prefixes of the names of its single layer: the one that is written, then others that are read.
        own_forms: config keys that other kinds do not have, with the required value; None for any.
    """

    has_own_head = False
    has_embedding = False
    stores_steps = True
    whole_numbers: tuple[str, ...] = ("hidden_size", "intermediate_size")
    layer_names: tuple[str, ...] = ("midlayer.", "layers.0.")
    own_forms: ClassVar[dict[str, Any]] = {}

    def keys(self, kind: HeadSpec) -> dict[str, Any]:
        """Return config keys other than those of the sizes."""
        made = keys_of_settings(kind)
        if kind.window is None:
            return made
        types = [FULL if number in kind.full_layers else SLIDING for number in range(1, kind.depth + 1)]
        return made | {"layer_types": types, "sliding_window": kind.window, "use_sliding_window": True}

    @abstractmethod
    def rules(self, kind: HeadSpec, sizes: dict[str, Any], layer: str, rows: TokenOrder) -> list[Rule]:
        """Return the rules of tensors that only this kind has.

        Args:
            kind: the drafter.
            sizes: result of `drafter_form.sizes_of`.
            layer: name of its single layer in the folder.
            rows: order of the draft vocabulary.
        """

    def layers(self, keys: dict[str, Any], layers: int, count: str | None) -> list[int]:
        """Return the numbers of the layers that are read from a trunk with this many layers, from any of the keys.

        Args:
            count: one of `COUNTS`, what the numbers count; None for the meaning of their key.

        Raises:
            ValueError: the key has one meaning and the numbers look like the other.
        """
        for names, says in ((STATE_KEYS, "states"), (OUTPUT_KEYS, "outputs")):
            for name in names:
                if keys.get(name):
                    return [number + COUNTS[count or says] for number in keys[name]]
        return []

    @abstractmethod
    def sizes(self, path: Path, row: DrafterKind, keys: dict[str, Any], args: Namespace) -> dict[str, Any]:
        """Return the settings that only this kind has, by flag name, except those with a `Setting.key`.

        Raises:
            ValueError: the trunk of these arguments does not support such a drafter.
        """

    def has_unknown_layers(self, keys: dict[str, Any]) -> bool:
        """Return whether the folder has more layers than this kind of drafter."""
        return False


class OneLayerCodec(DrafterCodec):
    """Format of drafters with one layer, which does not store the number of steps in training."""

    stores_steps = False

    @override
    def sizes(self, path: Path, row: DrafterKind, keys: dict[str, Any], args: Namespace) -> dict[str, Any]:
        return {}

    @override
    def has_unknown_layers(self, keys: dict[str, Any]) -> bool:
        return bool(keys.get("num_hidden_layers", 1) != 1)


class BlockCodec(DrafterCodec):
    """Format of block drafters; `block_size` also counts rows that draft nothing."""

    whole_numbers: tuple[str, ...] = (*DrafterCodec.whole_numbers, "num_hidden_layers", "block_size", "mask_token_id")

    @override
    def keys(self, kind: HeadSpec) -> dict[str, Any]:
        rows = kind.drafts + kind.idle_rows
        is_causal: dict[str, Any] = {"is_causal": bool(kind.causal)}
        inner = {**self.inner(kind), "causal": bool(kind.causal)}
        if kind.causal == CAUSAL_IN_WINDOWS:  # what engines assume without a key for all layers
            is_causal = {NON_CAUSAL: False}
            del inner["causal"]
        if kind.window is not None:
            inner |= {"swa_window_size": kind.window, **({} if kind.full_layers else {"use_swa": True})}
        if kind.has_sinks:
            inner["attention_sink_bias"] = True
        return super().keys(kind) | {"block_size": rows, **is_causal, OF_BLOCKS: inner}

    def inner(self, kind: HeadSpec) -> dict[str, Any]:
        """Return the keys that engines look for in `OF_BLOCKS`."""
        return {TARGET_LAYERS: [number - 1 for number in kind.layers], "mask_token_id": kind.mask_token}

    @override
    def rules(self, kind: HeadSpec, sizes: dict[str, Any], layer: str, rows: TokenOrder) -> list[Rule]:
        rules = input_and_output(sizes, len(kind.layers))
        rules.append(rename("hidden_norm.weight", f"{DRAFTER}hidden_norm.weight", (sizes["hidden_size"],)))
        for number in range(kind.depth):
            place = Place(f"layers.{number}.", f"{DRAFTER}layers.{number}.")
            norms = {"input_layernorm": "input_layernorm"}
            rules += layer_rules(place, sizes, kind, norms, normalizes_heads=True)
        return rules

    @override
    def sizes(self, path: Path, row: DrafterKind, keys: dict[str, Any], args: Namespace) -> dict[str, Any]:
        mask, has_choice = keys["mask_token_id"], "drafter_idle_rows" in row.settings
        if row.drafts_all and keys.get("draft_vocab_size") not in (None, args.vocab_size):
            raise ValueError(
                f"{path / CONFIG} has draft_vocab_size {keys['draft_vocab_size']}, and {row.called} drafts from all "
                f"{args.vocab_size} tokens; give another."
            )
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
            "drafter_idle_rows": idle if has_choice else None,
        }


CODECS: Imported[DrafterCodec] = Imported({row.name: row.folder for row in DRAFTERS.values()})
"""Folder formats by kind."""


def with_inner(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a config, including those that some formats nest one level down."""
    return {**(keys.get(OF_LAYERS) or {}), **keys, **(keys.get(OF_BLOCKS) or {})}


def _own_key(rule: Rule) -> Rule:
    """Return the rule without the keys of Transformer Engine's modules, which drafters do not have."""
    return replace(rule, mcore=tuple(replace(piece, aliases=()) for piece in rule.mcore))


def by_token(name: str, key: str, shape: Shape, rows: TokenOrder) -> Rule:
    """Return the rule of a matrix with a row for each draft token; the trunk's output layer may have more rows."""
    return Rule((HFTensor(name, shape),), (Piece(key, shape, padded=True),), rows)


def input_and_output(sizes: dict[str, Any], inputs: int) -> list[Rule]:
    """Return rules of the projection of this many states to a feature, and of the norm before the output layer."""
    hidden = sizes["hidden_size"]
    return [
        rename("fc.weight", f"{DRAFTER}fc.weight", (hidden, inputs * hidden)),
        rename("norm.weight", f"{DRAFTER}norm.weight", (hidden,)),
    ]


def layer_rules(
    place: Place,
    sizes: dict[str, Any],
    kind: HeadSpec,
    norms: dict[str, str],
    inputs: int = 1,
    normalizes_heads: bool = False,
) -> list[Rule]:
    """Return rules of a layer whose attention takes this many inputs of the hidden size side by side."""
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
