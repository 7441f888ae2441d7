"""Format of a drafter's folder, which engines load together with the trunk's: its config, and the rule of every tensor.

    config.json          the architecture of its kind, and the keys below
    model.safetensors    tensors of its kind (`heads/KIND/folder.py`); for a draft vocabulary lm_head, d2t and t2d

`eagle_aux_hidden_state_layer_ids` has the number of trunk layers before each state that is read, as in vLLM;
`eagle_config` and `target_layer_ids` have the index of the layer that returns it, from 0, as in SGLang and SpecForge.
`block_size` counts rows: the newest token's drafts in DSpark, but not in DFlash. d2t is added to a draft index to get
its token, and t2d has a flag for every token in the draft vocabulary. Letters in names: N draft vocabulary, V
vocabulary, H hidden.
"""

import sys
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.checkpoint.convert.drafter_codec import (
    CODECS,
    INNER,
    KV_RANK,
    LATENT_KEYS,
    OF_ONE_LAYER,
    OUTPUT_KEYS,
    STATE_KEYS,
    TokenOrder,
    by_token,
    with_inner,
)
from megatron_mtp.checkpoint.convert.drafter_views import layers_in, settings_in
from megatron_mtp.checkpoint.families.rules import HFTensor, Piece, Rule
from megatron_mtp.checkpoint.hf.config import CONFIG, read_json, rope_said_twice
from megatron_mtp.checkpoint.hf.folder import HFFolder, drafter_kind
from megatron_mtp.megatron.checkpoint import DRAFTER, EMBEDDING, OUTPUT
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.model.arguments import layers_to_read, trunk_spec
from megatron_mtp.spec.attention import AttentionSizes, LatentSizes
from megatron_mtp.spec.head import HeadSpec, TrunkSpec
from megatron_mtp.spec.kinds import DRAFTERS, DrafterKind
from megatron_mtp.spec.rope_scaling import scaling_of

ROPE, SIZES = ("rope_scaling", "rope_parameters"), ("hidden_size", "num_attention_heads")
VOCABULARY, HEAD = f"{DRAFTER}draft_vocabulary", f"{DRAFTER}head"
FOLDER_HEAD, LISTS = "lm_head.weight", ("d2t", "t2d")
OTHER_FORMS: dict[str, Any] = {
    **dict.fromkeys(("norm_before_fc", "fc_norm", "use_aux_norm", "norm_output"), False),
    "attention_value_scale": 1,
    **dict.fromkeys(("attention_bias", "mlp_bias", "has_embed_tokens"), False),
    **dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), True),
    **dict.fromkeys(("is_neox_style", "rope_is_neox_style"), True),
    **dict.fromkeys((KV_RANK, "conv_kernel_size", "selector_rank", "aux_hidden_stream"), None),
    **dict.fromkeys(("input_embedding_scale", "output_multiplier", "final_logit_softcapping"), None),
    **{"markov_head_type": "vanilla", "attention_mode": "gqa", "projector_type": "dflash", "hidden_act": "silu"},
    **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"), True),
    **{"use_mtp_layernorm": False, "parallel_draft_step": 1, "quantization_config": None},
}
"""Config keys with the only supported value; with another one, drafters compute something else or have other tensors.
"""
INTERLEAVED = {"rope_interleave": True}
"""Latent attention here rotates adjacent channels."""
WORDS = "embed_tokens.weight"
"""A copy of the trunk's embedding in a folder; a checkpoint stores it once."""


def sizes_of(drafter: HeadSpec, hidden: int) -> dict[str, Any]:
    """Return the config keys of a drafter's sizes."""
    sizes = drafter.attention
    latents = None if sizes.latents is None else dict(zip(LATENT_KEYS, astuple(sizes.latents), strict=True))
    return {
        "hidden_size": hidden,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.groups,
        **({"head_dim": sizes.channels} if latents is None else {**latents, **INTERLEAVED}),
        "rms_norm_eps": sizes.epsilon,
        "rope_theta": sizes.theta,
        **({} if sizes.scaling is None else {"rope_scaling": sizes.scaling}),
        "vocab_size": drafter.vocabulary,
    }


@dataclass(frozen=True, eq=False)
class Lists:
    """Converts a folder's lists d2t and t2d to the ids of the draft vocabulary [N].

    Without d2t, all tokens are drafted.
    """

    names: tuple[str, ...]
    order_N: Tensor
    vocabulary: int
    what = "to ids"

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the ids, ascending."""
        offsets_N = dict(zip(self.names, tensors, strict=True)).get("d2t", torch.zeros(len(self.order_N)).long())
        return [(offsets_N + torch.arange(len(self.order_N)))[self.order_N]]

    def backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the folder's lists."""
        (tokens_N,) = tensors
        offsets_N = tokens_N[self.order_N.argsort()] - torch.arange(len(tokens_N))
        made = {"d2t": offsets_N, "t2d": torch.isin(torch.arange(self.vocabulary), tokens_N)}
        return [made[name] for name in self.names]


@dataclass(frozen=True)
class DrafterForm:
    """A drafter, and how its folder stores it.

    Attributes:
        kind: description of the drafter.
        hidden: hidden size.
        order_N: row of the folder's output layer for each token of the draft vocabulary, ascending.
        has_head: whether the folder has an output layer.
        lists: the ones of `LISTS` that the folder has.
        layer: prefix of the names of its single layer in the folder.
        has_embedding: whether the folder has a copy of the trunk's embedding.
    """

    kind: HeadSpec
    hidden: int
    order_N: Tensor
    has_head: bool
    lists: tuple[str, ...] = ()
    layer: str = "midlayer."
    has_embedding: bool = False

    @property
    def sizes(self) -> dict[str, Any]:
        """Config keys of its sizes."""
        return sizes_of(self.kind, self.hidden)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of its computation, by name; an EAGLE-3 folder does not store the number of steps in training."""
        kind, apart = self.kind, ("attention", "own")
        own = {one.name: getattr(kind, one.name) for one in fields(kind) if one.name not in apart} | {**kind.own}
        return {**self.sizes, **own, "drafts": kind.drafts if CODECS[kind.kind].stores_steps else None}

    @property
    def says(self) -> str:
        """One line with kind, trunk layers, tokens and blocks."""
        kind, drafted = self.kind, len(self.order_N)
        tokens = "all" if drafted == self.kind.vocabulary else drafted
        is_default = [*kind.layers] == CODECS[kind.kind].layers({}, sys.maxsize, None)
        layers = "engines' default" if kind.layers and is_default else " ".join(map(str, kind.layers))
        reads = f"the trunk after {layers} layers" if layers else "the trunk's last state"
        block = "" if kind.mask_token is None else f", {kind.drafts} at once behind mask token {kind.mask_token}"
        return f"{kind.kind}, reads {reads}, drafts {tokens} tokens{block}"

    @property
    def architecture(self) -> str:
        """Its first entry of `architectures`."""
        row = DRAFTERS[self.kind.kind]
        return row.architecture if self.kind.attention.latents is None else row.latent_architectures[0]

    def rules(self, head: str = HEAD) -> list[Rule]:
        """Return the rule of every tensor.

        `head` is the key of the output layer, the trunk's if the drafter has none.
        """
        hidden, kind, drafted, vocabulary = self.hidden, self.kind, len(self.order_N), self.kind.vocabulary
        rows = TokenOrder(self.order_N)
        rules = CODECS[kind.kind].rules(kind, self.sizes, self.layer, rows)
        if self.has_embedding:
            shape = vocabulary, hidden
            rules.append(Rule((HFTensor(WORDS, shape),), (Piece(EMBEDDING, shape, padded=True),)))
        if self.has_head:
            rules.append(by_token(FOLDER_HEAD, head, (drafted, hidden), rows))
        if self.has_head and head == HEAD:
            shapes = {"d2t": (drafted,), "t2d": (vocabulary,)}
            named = tuple(HFTensor(name, shapes[name]) for name in self.lists)
            rules.append(Rule(named, (Piece(VOCABULARY, (drafted,)),), Lists(self.lists, self.order_N, vocabulary)))
        return rules


def stored_form(args: Namespace, reader: DistReader) -> DrafterForm:
    """Return the format for the drafter of a checkpoint.

    EAGLE-3 gets a copy of the trunk's output layer if it has none.
    """
    return form_of(HeadSpec.resolve(args.drafter, vars(args), trunk_spec(args)), args.hidden_size, reader)


def form_of(kind: HeadSpec, hidden: int, reader: DistReader) -> DrafterForm:
    """Return the format for a drafter with the draft vocabulary and output layer of a checkpoint."""
    drafted = reader.shape(VOCABULARY)[0] if reader.holds(VOCABULARY) else kind.vocabulary
    lists, codec = LISTS if drafted < kind.vocabulary else (), CODECS[kind.kind]
    has_head = reader.holds(HEAD) or codec.has_own_head
    return DrafterForm(kind, hidden, torch.arange(drafted), has_head, lists, codec.layer_names[0], codec.has_embedding)


def head_key(reader: DistReader) -> str:
    """Return the key of the output layer that a checkpoint's drafter uses."""
    return next((key for key in (HEAD, OUTPUT) if reader.holds(key)), EMBEDDING)


# --- reading a folder ------------------------------------------------------------------------------------------------


def trunk_of(path: Path) -> Namespace:
    """Return the trunk facts in a drafter's config; without `num_target_layers`, any depth fits."""
    keys = with_inner(_config(path))
    return Namespace(
        num_layers=keys.get("num_target_layers") or sys.maxsize,
        hidden_size=keys.get("hidden_size"),
        vocab_size=_vocabulary(keys),
        max_position_embeddings=keys.get("max_position_embeddings") or sys.maxsize,
    )


def read_drafter(path: Path, args: Namespace, count: str | None = None) -> DrafterForm:
    """Read the format of a folder's drafter, and check it against the trunk's arguments and the folder's tensors.

    Args:
        count: one of `COUNTS`, what its layer ids count; None for the meaning of their key.

    Raises:
        ValueError: it is of another kind or for another trunk, or has unknown tensors.
    """
    folder = HFFolder(path)
    form = form_in(path, args, folder.tensors, count)
    wanted = {tensor.name: tensor.shape for rule in form.rules() for tensor in rule.hf}
    found = {name: stored.shape for name, stored in folder.tensors.items()}
    if found != wanted:
        name = min(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
        raise ValueError(
            f"{path}: '{name}' is {found.get(name, 'absent')}, and a drafter of this trunk has it as "
            f"{wanted.get(name, 'none')}; give a drafter that was trained for this trunk."
        )
    try:
        return in_order(form, {name: folder.read(name) for name in form.lists})
    except ValueError as error:
        raise ValueError(f"{path}: {error}.") from None


def form_in(path: Path, args: Namespace, names: Collection[str], count: str | None = None) -> DrafterForm:
    """Return the format of a folder's drafter from its config and tensor names, assuming ascending token order.

    Raises:
        ValueError: the config lacks something, or is of another kind or for another trunk.
    """
    keys = _checked_config(path, args)
    attention, vocabulary = attention_in(path, keys, _has_latent_architecture(path, keys)), args.vocab_size
    kind = kind_in(path, DRAFTERS[str(drafter_kind(path))], keys, attention, args, count)
    drafted = int(keys.get("draft_vocab_size") or vocabulary)
    has_list = "d2t" in names or drafted < vocabulary
    lists = tuple(name for name in LISTS if name in names or (name == "d2t" and has_list))
    codec = CODECS[kind.kind]
    has_head = codec.has_own_head or has_list or FOLDER_HEAD in names
    held = (one for one in codec.layer_names if any(name.startswith(one) for name in names))
    layer = next(held, codec.layer_names[0])
    return DrafterForm(kind, keys["hidden_size"], torch.arange(drafted), has_head, lists, layer, WORDS in names)


def kind_in(
    path: Path,
    row: DrafterKind,
    keys: dict[str, Any],
    attention: AttentionSizes,
    args: Namespace,
    count: str | None = None,
) -> HeadSpec:
    """Resolve the drafter that config keys describe, for the trunk of these arguments.

    Args:
        attention: attention settings in the keys.
        count: one of `COUNTS`, what its layer ids count; None for the meaning of their key.

    Raises:
        ValueError: a key is missing, or the drafter is for another trunk.
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
        **layers_in(path, row, keys),
        **settings_in(path, row, keys),
        **({} if attention.latents is None else {"drafter_multi_latent_attention": []}),
    }
    own = TrunkSpec(layers, args.vocab_size, keys["hidden_size"], keys["intermediate_size"], attention)
    try:
        return HeadSpec.resolve(row.name, given, own)
    except ValueError as error:
        raise ValueError(f"{path / CONFIG} has sizes that no drafter has: {error}") from None


def in_order(form: DrafterForm, lists: Mapping[str, Tensor]) -> DrafterForm:
    """Return the format with the order of the draft vocabulary in these lists.

    Raises:
        ValueError: they name a token twice, an unknown one, or different ones.
    """
    tokens_N = torch.arange(len(form.order_N)) + lists.get("d2t", 0)
    order_N = tokens_N.argsort()
    tokens_N = tokens_N[order_N]
    if tokens_N[0] < 0 or tokens_N[-1] >= form.kind.vocabulary or (tokens_N.diff() == 0).any():
        raise ValueError("d2t names a token twice, or one that the trunk does not have; fetch the folder again")
    if "t2d" in lists and not torch.equal(lists["t2d"].nonzero()[:, 0], tokens_N):
        raise ValueError(
            "d2t and t2d name different tokens; d2t has for each draft its token's id less the draft's index"
        )
    return replace(form, order_N=order_N)


def _checked_config(path: Path, args: Namespace) -> dict[str, Any]:
    """Return the folder's keys, nested ones included, after checking them against the trunk."""
    keys = with_inner(_config(path))
    is_latent = _has_latent_architecture(path, keys)
    own = CODECS[str(drafter_kind(path))].own_forms | ({KV_RANK: None, **INTERLEAVED} if is_latent else {})
    said = {**(keys.get(OF_ONE_LAYER) or {}), **keys}
    if other := [key for key, plain in OTHER_FORMS.items() if key not in own and said.get(key) not in (None, plain)]:
        raise ValueError(f"{path / CONFIG} has {other[0]}, a form of drafters that is not known here; give another.")
    for name, needed in own.items():
        if needed is not None and said.get(name) not in (None, needed):
            raise ValueError(
                f"{path / CONFIG} has {name} {said[name]}, which is {needed} in drafters that are known here."
            )
    if CODECS[str(drafter_kind(path))].has_unknown_layers(keys):
        raise ValueError(
            f"{path / CONFIG} has num_hidden_layers {keys['num_hidden_layers']}, and drafters of its kind have one "
            "layer here; give another."
        )
    of_trunk = {"hidden_size": args.hidden_size, "vocab_size": args.vocab_size, "target_hidden_size": args.hidden_size}
    said = {**keys, "vocab_size": _vocabulary(keys)}
    for name, own in of_trunk.items():
        if said.get(name) != own and (name != "target_hidden_size" or said.get(name) is not None):
            raise ValueError(
                f"{path / CONFIG} has {name} {said.get(name)}, and the trunk {own}; give a drafter of this trunk."
            )
    return keys


def _vocabulary(keys: dict[str, Any]) -> Any:
    return keys.get("target_vocab_size") if keys.get("vocab_size") is None else keys["vocab_size"]


def _config(path: Path) -> dict[str, Any]:
    """Return the keys of a drafter's folder, after checking the types of keys that are read."""
    keys: dict[str, Any] = read_json(path / CONFIG)
    if drafter_kind(path) is None:
        raise ValueError(
            f"{path / CONFIG} has architectures {keys.get('architectures')}; give a "
            f"{', '.join(row.architecture for row in DRAFTERS.values())}."
        )
    objects = {name: keys.get(name) or {} for name in (*INNER, *ROPE)}
    wrong = {name: value for name, value in objects.items() if not isinstance(value, dict)}
    for said in [] if wrong else [keys, *objects.values()]:
        wrong |= {name: said[name] for name in SIZES if type(said.get(name) or 0) is not int}
        lists = {name: said.get(name) or [] for name in (*STATE_KEYS, *OUTPUT_KEYS)}
        wrong |= {name: of for name, of in lists.items() if type(of) is not list or {*map(type, of)} - {int}}
    for name, value in wrong.items():
        raise ValueError(f"{path / CONFIG} has {name} {value!r}, which no drafter has; fetch the folder again.")
    for _, says in rope_said_twice(with_inner(keys)):
        raise ValueError(f"{path / CONFIG}: {says}.")
    return keys


def _has_latent_architecture(path: Path, keys: dict[str, Any]) -> bool:
    names = DRAFTERS[str(drafter_kind(path))].latent_architectures
    return not {*names}.isdisjoint(keys["architectures"])


def attention_in(path: Path, keys: dict[str, Any], is_latent: bool) -> AttentionSizes:
    """Return the attention settings of a config, with the defaults of its class."""
    rope: dict[str, Any] = next(filter(None, map(keys.get, ROPE)), {})
    try:
        scaling = scaling_of({"partial_rotary_factor": keys.get("partial_rotary_factor"), **rope}, is_latent)
    except ValueError as error:
        raise ValueError(f"{path / CONFIG} has {error}; give another drafter.") from None
    heads = keys.get("num_attention_heads") or 1
    made: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        **(dict.fromkeys(LATENT_KEYS) if is_latent else {"head_dim": keys["hidden_size"] // heads}),
        "rms_norm_eps": 1e-6,
        "rope_theta": rope.get("rope_theta", 10000),
    }
    made |= {name: keys[name] for name in made if keys.get(name) is not None}
    for name, value in made.items():
        if name == LATENT_KEYS[0] and not value:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < sys.maxsize:
            raise ValueError(
                f"{path / CONFIG} has {name} {value!r:.40}, which is not a number above 0; fetch it again."
            )
    epsilon, theta = made["rms_norm_eps"], made["rope_theta"]
    if is_latent:
        latents = LatentSizes(*(made[name] for name in LATENT_KEYS))
        return AttentionSizes(heads, heads, latents.channels, epsilon, theta, scaling, latents)
    return AttentionSizes(heads, made["num_key_value_heads"], made["head_dim"], epsilon, theta, scaling)
