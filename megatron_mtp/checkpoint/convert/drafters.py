"""drafter-to-hf and attach-drafter: a drafter as engines load it, in a folder beside the trunk's.

    config.json          LlamaForCausalLMEagle3, DFlashDraftModel or Qwen3DSparkModel, with the keys below
    model.safetensors    fc, norm and
        EAGLE-3          midlayer.*, lm_head; with a reduced vocabulary d2t and t2d
        DFlash, DSpark   hidden_norm, layers.*; with a reduced vocabulary lm_head, d2t and t2d
        DSpark           markov_head.markov_w1, markov_w2, confidence_head.proj

`eagle_aux_hidden_state_layer_ids` has the number of trunk layers before each state that is read, as vLLM counts;
`eagle_config` has the number of the layer that returns it, from 0, as SGLang and SpecForge count, and so has
`target_layer_ids`. `block_size` counts rows: the newest token's drafts in DSpark, and not in DFlash. d2t is what is
added to a draft index for its token, and t2d says of every token whether it is drafted. Letters in names: N drafted
tokens, V vocabulary, H hidden, M rank of the bias.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.checkpoint.convert.edit import changed
from megatron_mtp.checkpoint.convert.export_hf import FolderFiles
from megatron_mtp.checkpoint.convert.import_hf import group_of
from megatron_mtp.checkpoint.convert.stream import Conversion, Entry, Group, Options
from megatron_mtp.checkpoint.families.blocks import GQA, Place, gqa_rules, mlp_rules
from megatron_mtp.checkpoint.families.rules import Rule, Shape, rename
from megatron_mtp.checkpoint.hf.config import CONFIG, read_json
from megatron_mtp.checkpoint.hf.folder import DRAFTER_KINDS, HFFolder, drafter_kind
from megatron_mtp.checkpoint.mcore.keys import EMBEDDING
from megatron_mtp.checkpoint.mcore.reader import DistReader
from megatron_mtp.config import BLOCK_LAYERS, DFLASH, DRAFTER_STEPS, DSPARK, EAGLE3, MARKOV_RANK
from megatron_mtp.model.arguments import check_trainable
from megatron_mtp.model.draft_vocabulary import DRAFTER
from megatron_mtp.model.drafter import as_mtp_layers, can_read, default_layers

ARCHITECTURES = {kind: name for name, kind in DRAFTER_KINDS.items()}
LAYERS, BLOCK_LAYERS_READ = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"
VOCABULARY, HEAD, OUTPUT = f"{DRAFTER}draft_vocabulary", f"{DRAFTER}head", "output_layer.weight"
OTHER_FORMS: dict[str, Any] = {
    **dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window", "use_swa", "is_causal", "causal"), False),
    **{"sample_from_anchor": True, "markov_head_type": "vanilla", "conv_kernel_size": None},
}
"""Config keys of drafters that compute something else with another value than this one."""
LAYER = ("midlayer.", "layers.0.")
"""Names of an EAGLE-3 drafter's layer: as it is written, and another that is read."""


@dataclass(frozen=True)
class Kind:
    """What a drafter is, beside its trunk's sizes.

    Attributes:
        name: of `config.DRAFTERS`.
        layers: numbers of the trunk's layers that it reads.
        width: of its MLPs.
        steps: tokens that it drafts at once, or was trained to draft.
        depth: its own layers.
        mask_token: of its blocks; None without blocks.
        rank: of the bias by the token before; None without.
    """

    name: str
    layers: tuple[int, ...]
    width: int
    steps: int = DRAFTER_STEPS
    depth: int = 1
    mask_token: int | None = None
    rank: int | None = None

    @classmethod
    def of(cls, args: Namespace) -> "Kind":
        """That of a checkpoint's drafter, from its arguments."""
        name, width = args.drafter, args.drafter_ffn_hidden_size or args.ffn_hidden_size
        known = name, tuple(args.drafter_layers), width, args.drafter_steps or DRAFTER_STEPS
        if name == EAGLE3:
            return cls(*known)
        mask = args.vocab_size - 1 if args.drafter_mask_token is None else args.drafter_mask_token
        rank = (args.drafter_markov_rank or MARKOV_RANK) if name == DSPARK else None
        return cls(*known, args.drafter_num_layers or BLOCK_LAYERS, mask, rank)

    def arguments(self, args: Namespace) -> dict[str, Any]:
        """The arguments of a checkpoint that has it beside the trunk of these."""
        fills_blocks = self.mask_token is not None
        return {
            "drafter": self.name,
            "drafter_layers": [*self.layers],
            "drafter_steps": self.steps,
            "drafter_ffn_hidden_size": None if self.width == args.ffn_hidden_size else self.width,
            "drafter_num_layers": self.depth if fills_blocks else None,
            "drafter_mask_token": self.mask_token,
            "drafter_markov_rank": self.rank,
            **as_mtp_layers(self.steps),
        }

    def keys(self) -> dict[str, Any]:
        """Keys of config.json that only drafters of its kind have."""
        returns = [number - 1 for number in self.layers]
        if self.mask_token is None:
            return {LAYERS: [*self.layers], "eagle_config": {LAYERS: returns, "use_aux_hidden_state": True}}
        inner = {BLOCK_LAYERS_READ: returns, "mask_token_id": self.mask_token}
        if self.rank is None:
            return {"block_size": self.steps + 1, "dflash_config": inner}
        return {
            **{"block_size": self.steps, "dflash_config": inner, **inner},
            **{"markov_rank": self.rank, "markov_head_type": "vanilla"},
            **{"enable_confidence_head": True, "confidence_head_with_markov": True},
        }


def sizes_of(args: Namespace) -> dict[str, Any]:
    """The config keys in which a drafter has to agree with its trunk, from the trunk's arguments."""
    heads = args.num_attention_heads
    return {
        "hidden_size": args.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": args.num_query_groups if args.group_query_attention else heads,
        "head_dim": args.kv_channels or args.hidden_size // heads,
        "rms_norm_eps": args.layernorm_epsilon,
        "rope_theta": args.rotary_base,
        "vocab_size": args.vocab_size,
    }


def rules_of(sizes: dict[str, Any], kind: Kind, drafted: int, layer: str = LAYER[0]) -> list[Rule]:
    """What moves where, but the head and the vocabulary.

    Args:
        sizes: of `sizes_of`.
        drafted: tokens that it drafts.
        layer: the name of an EAGLE-3 drafter's layer in the folder.
    """
    hidden = sizes["hidden_size"]
    rules = [
        rename("fc.weight", f"{DRAFTER}fc.weight", (hidden, len(kind.layers) * hidden)),
        rename("norm.weight", f"{DRAFTER}norm.weight", (hidden,)),
    ]
    if kind.name == EAGLE3:
        norms = {"input_layernorm": "input_layernorm.enorm", "hidden_norm": "input_layernorm.hnorm"}
        return rules + _layer_rules(Place(layer, f"{DRAFTER}tf_layer."), sizes, kind.width, norms, 2)
    rules.append(rename("hidden_norm.weight", f"{DRAFTER}hidden_norm.weight", (hidden,)))
    for number in range(kind.depth):
        place = Place(f"layers.{number}.", f"{DRAFTER}layers.{number}.")
        rules += _layer_rules(place, sizes, kind.width, {"input_layernorm": "input_layernorm"}, 1)
    if (rank := kind.rank) is not None:
        shapes = {
            "markov_head.markov_w1.weight": ("markov_w1", (sizes["vocab_size"], rank)),
            "markov_head.markov_w2.weight": ("markov_w2", (drafted, rank)),
            "confidence_head.proj.weight": ("confidence_weight", (1, hidden + rank)),
            "confidence_head.proj.bias": ("confidence_bias", (1,)),
        }
        rules += [rename(name, f"{DRAFTER}{key}", shape) for name, (key, shape) in shapes.items()]
    return rules


def _layer_rules(place: Place, sizes: dict[str, Any], width: int, norms: dict[str, str], inputs: int) -> list[Rule]:
    """Of one layer, whose attention takes so many inputs of the hidden size side by side."""
    hidden, heads, groups, channels = (
        sizes[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    attention = gqa_rules(place, GQA(inputs * hidden, heads, groups, (channels,) * 3, norms=inputs == 1))
    output = f"{place.mcore}self_attention.linear_proj.weight"
    named = {**norms, "post_attention_layernorm": "pre_mlp_layernorm"}
    return [
        *(rename(f"{place.hf}{a}.weight", f"{place.mcore}{b}.weight", (hidden,)) for a, b in named.items()),
        *(rule for rule in attention if rule.mcore[0].key != output),
        rename(f"{place.hf}self_attn.o_proj.weight", output, (hidden, heads * channels)),
        *mlp_rules(f"{place.hf}mlp.", f"{place.mcore}mlp.", hidden, width),
    ]


# --- a folder of a checkpoint's drafter -------------------------------------------------------------------------------


def plan_drafter(source: Path, options: Options) -> Conversion:
    """`drafter-to-hf`: the drafter of a checkpoint as a folder that vLLM, SGLang and others load beside the trunk's.

    Raises:
        ValueError: the checkpoint has no drafter, or engines have no form for it.
    """
    reader = DistReader(source)
    if not reader.has_drafter:
        raise ValueError(
            f"{source} has no drafter; train one with megatron-mtp train --drafter eagle3 --load {source}."
        )
    args = reader.common()["args"]
    keys, groups = _config_keys(args, reader), _groups(args, reader, options)
    keys["torch_dtype"] = str(groups[0].entries[0].dtype).removeprefix("torch.")

    def keep(folder: Path) -> None:
        (folder / CONFIG).write_text(json.dumps(keys, indent=2) + "\n")

    return Conversion(
        (source,),
        ARCHITECTURES[args.drafter],
        0,
        [groups],
        {"source": reader.fingerprint(), "config": keys},
        lambda folder, options: FolderFiles(folder, [groups], options),
        keep,
    )


def _drafted(args: Namespace, reader: DistReader) -> int:
    return int(reader.shape(VOCABULARY)[0] if reader.holds(VOCABULARY) else args.vocab_size)


def _config_keys(args: Namespace, reader: DistReader) -> dict[str, Any]:
    """The keys of config.json.

    Raises:
        ValueError: the layer has positions that this form does not say.
    """
    kind = Kind.of(args)
    for name, plain in (("rotary_percent", 1.0), ("use_rope_scaling", False), ("rotary_interleaved", False)):
        if (found := getattr(args, name, plain)) not in (plain, None):
            raise ValueError(
                f"the drafter turns heads with {name} {found}, for which {ARCHITECTURES[kind.name]} has no form; draft "
                "with it by megatron-mtp generate or serve."
            )
    return {
        "architectures": [ARCHITECTURES[kind.name]],
        "model_type": "llama" if kind.name == EAGLE3 else "qwen3",
        **sizes_of(args),
        "intermediate_size": kind.width,
        "max_position_embeddings": args.max_position_embeddings,
        "num_hidden_layers": kind.depth,
        "num_target_layers": args.num_layers,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "target_hidden_size": args.hidden_size,
        "draft_vocab_size": _drafted(args, reader),
        **kind.keys(),
    }


def _groups(args: Namespace, reader: DistReader, options: Options) -> list[Group]:
    """The tensors; an EAGLE-3 drafter with the trunk's head gets a copy of it, which block drafters share."""

    def group(names: dict[str, Shape], keys: list[str], make: Callable[[list[Tensor]], list[Tensor]]) -> Group:
        kept = reader.dtype(keys[0])
        types = {name: options.cast(name, kept) for name in names}
        size = sum(prod(reader.shape(key)) * reader.dtype(key).itemsize for key in keys)
        entries = [Entry([name], shape, types[name]) for name, shape in names.items()]
        return Group(entries, size, lambda: make([reader.read(key) for key in keys]))

    hidden, tokens, kind, drafted = args.hidden_size, args.vocab_size, Kind.of(args), _drafted(args, reader)
    groups = [
        group({one.name: one.shape or () for one in rule.hf}, [piece.key for piece in rule.mcore], rule.to_hf)
        for rule in rules_of(sizes_of(args), kind, drafted)
    ]
    if reader.holds(HEAD):
        groups.append(group({"lm_head.weight": (drafted, hidden)}, [HEAD], list))
    elif kind.name == EAGLE3:
        owner = OUTPUT if reader.holds(OUTPUT) else EMBEDDING
        groups.append(group({"lm_head.weight": (tokens, hidden)}, [owner], lambda head: [head[0][:tokens]]))
    if drafted < tokens:
        drafted_N = reader.read(VOCABULARY)
        drafts_V = torch.zeros(tokens, dtype=torch.bool).index_fill_(0, drafted_N, True)
        groups.append(Group.single("d2t", (drafted,), torch.int64, lambda: drafted_N - torch.arange(drafted)))
        groups.append(Group.single("t2d", (tokens,), torch.bool, drafts_V.clone))
    return groups


# --- a checkpoint with a folder's drafter -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """A folder's drafter, by what a checkpoint has of it.

    Attributes:
        kind: what it is.
        has_head: whether it has a head of its own.
        tokens_N: what it drafts, ascending.
        order_N: the row of the folder's head for each of these.
    """

    folder: HFFolder
    kind: Kind
    rules: list[Rule]
    has_head: bool
    tokens_N: Tensor
    order_N: Tensor


def plan_attaching_drafter(source: Path, drafter: Path) -> Conversion:
    """`attach-drafter`, from names and shapes alone.

    Args:
        source: the trunk's checkpoint; MTP layers or another drafter in it are left out.
        drafter: the drafter's folder.

    Raises:
        ValueError: the drafter is of another kind or of another trunk, or Megatron cannot run the trunk.
    """
    reader = DistReader(source)
    args = reader.common()["args"]
    check_trainable(args, str(source))
    given = read_drafter(drafter, args)
    record = {
        "drafter": str(drafter.resolve()),
        "tensors": {name: one.shape for name, one in given.folder.tensors.items()},
    }
    return changed(reader, source, stored_groups(given), given.kind.arguments(args), record, depths=0)


def stored_groups(given: Given) -> list[Group]:
    """The tensors of a checkpoint with this drafter; rows of drafted tokens in ascending order."""
    made = []
    for rule in given.rules:
        group = group_of(given.folder, rule, Options())
        if rule.mcore[0].key == f"{DRAFTER}markov_w2":
            rows_NM = given.folder.read(rule.hf[0].name)[given.order_N]
            group = Group.single(rule.mcore[0].key, tuple(rows_NM.shape), rows_NM.dtype, rows_NM.clone)
        made.append(group)
    if given.has_head:
        head_NH = given.folder.read("lm_head.weight")[given.order_N]
        for key, tensor in ((HEAD, head_NH), (VOCABULARY, given.tokens_N)):
            made.append(Group.single(key, tuple(tensor.shape), tensor.dtype, tensor.clone))
    return made


def described(path: Path) -> dict[str, Any]:
    """Facts about a drafter's folder, for `inspect`.

    Raises:
        ValueError: its tensors are not those that its config says, or it is of a form that is not known.
    """
    sizes = _sizes_in(read_json(path / CONFIG))
    given = read_drafter(path, trunk_of(path))
    kind, stored = given.kind, given.folder.tensors.values()
    says = kind.name != EAGLE3 or kind.layers != default_layers(sys.maxsize)
    facts = {
        "form": "Hugging Face",
        "kind": ARCHITECTURES[kind.name],
        "reads the trunk after": " ".join(map(str, kind.layers)) + " layers" if says else "engines' default layers",
        "drafts": f"{len(given.tokens_N)} of {sizes['vocab_size']} tokens",
    }
    if kind.mask_token is not None:
        bias = "" if kind.rank is None else f", a bias of rank {kind.rank}"
        facts["blocks"] = f"{kind.steps} drafts, mask token {kind.mask_token}, {kind.depth} layers{bias}"
    return {
        **facts,
        "tensors": len(stored),
        "bytes": sum(tensor.bytes for tensor in stored),
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in stored}),
    }


def trunk_of(path: Path) -> Namespace:
    """What a drafter's config says of its trunk, as arguments; any number of layers."""
    keys = read_json(path / CONFIG)
    sizes = _sizes_in(keys)
    return Namespace(
        num_layers=sys.maxsize,
        hidden_size=sizes["hidden_size"],
        num_attention_heads=sizes["num_attention_heads"],
        group_query_attention=True,
        num_query_groups=sizes["num_key_value_heads"],
        kv_channels=sizes["head_dim"],
        layernorm_epsilon=sizes["rms_norm_eps"],
        rotary_base=sizes["rope_theta"],
        vocab_size=sizes["vocab_size"],
        max_position_embeddings=keys.get("max_position_embeddings") or sys.maxsize,
    )


def read_drafter(path: Path, args: Namespace) -> Given:
    """A folder's drafter, checked against the trunk's arguments.

    Raises:
        ValueError: it is of another kind or of another trunk, or has tensors that are not known.
    """
    keys = _checked_config(path, args)
    folder, kind = HFFolder(path), _kind_in(path, keys, args)
    layer = LAYER[1] if any(name.startswith(LAYER[1]) for name in folder.tensors) else LAYER[0]
    drafted = int(keys.get("draft_vocab_size") or args.vocab_size)
    rules = rules_of(sizes_of(args), kind, drafted, layer)
    wanted = {tensor.name: tensor.shape for rule in rules for tensor in rule.hf}
    has_list = "d2t" in folder.tensors
    has_head = kind.name == EAGLE3 or has_list or drafted < args.vocab_size or "lm_head.weight" in folder.tensors
    wanted |= {"lm_head.weight": (drafted, args.hidden_size)} if has_head else {}
    wanted |= {"d2t": (drafted,)} if has_list or drafted < args.vocab_size else {}
    found = {name: stored.shape for name, stored in folder.tensors.items() if name != "t2d"}
    if found != wanted:
        name = min(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
        raise ValueError(
            f"{path}: '{name}' is {found.get(name, 'absent')}, and a drafter of this trunk has it as "
            f"{wanted.get(name, 'none')}; give a drafter that was trained for this trunk."
        )
    tokens_N = torch.arange(drafted)
    if has_list:
        tokens_N = tokens_N + folder.read("d2t")
    order_N = tokens_N.argsort()
    tokens_N = tokens_N[order_N]
    if tokens_N[0] < 0 or tokens_N[-1] >= args.vocab_size or (tokens_N.diff() == 0).any():
        raise ValueError(
            f"{path}: d2t names a token twice, or one that the trunk does not have; fetch the folder again."
        )
    drafts_V = folder.read("t2d") if "t2d" in folder.tensors else None
    if drafts_V is not None and not torch.equal(drafts_V.nonzero()[:, 0], tokens_N):
        raise ValueError(
            f"{path}: d2t and t2d name different tokens; d2t has for each draft its token's id less the draft's index."
        )
    return Given(folder, kind, rules, has_head, tokens_N, order_N)


def _checked_config(path: Path, args: Namespace) -> dict[str, Any]:
    """The folder's keys, which agree with the trunk."""
    keys: dict[str, Any] = read_json(path / CONFIG)
    name = drafter_kind(path)
    if name is None:
        raise ValueError(
            f"{path / CONFIG} has architectures {keys.get('architectures')}; give a {', '.join(DRAFTER_KINDS)}."
        )
    said = {**keys, **(keys.get("dflash_config") or {})}
    if other := [key for key, plain in OTHER_FORMS.items() if said.get(key) not in (None, plain)]:
        raise ValueError(f"{path / CONFIG} has {other[0]}, a form of drafters that is not known here; give another.")
    rope = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    several = name == EAGLE3 and keys.get("num_hidden_layers", 1) != 1
    if several or rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(
            f"{path / CONFIG} has several layers or a rope_scaling, which drafters here do not have; give another."
        )
    theirs = _sizes_in(keys)
    for size, own in sizes_of(args).items():
        if theirs[size] != own:
            raise ValueError(
                f"{path / CONFIG} has {size} {theirs[size]}, and the trunk {own}; give a drafter of this trunk, "
                "whose layer has the trunk's sizes and positions."
            )
    return keys


def _sizes_in(keys: dict[str, Any]) -> dict[str, Any]:
    """What a config says of the keys of `sizes_of`, with the defaults of its class."""
    heads, rope = keys.get("num_attention_heads") or 1, keys.get("rope_parameters") or {}
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": (keys.get("hidden_size") or 0) // heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": rope.get("rope_theta", 10000),
        "vocab_size": keys.get("target_vocab_size"),
    }
    names = "hidden_size", "num_attention_heads", *defaults
    return {name: defaults.get(name) if keys.get(name) is None else keys[name] for name in names}


def _kind_in(path: Path, keys: dict[str, Any], args: Namespace) -> Kind:
    """What a config says that a drafter is."""
    name = str(drafter_kind(path))
    said = {**keys, **(keys.get("dflash_config") or {})}
    needed = ["intermediate_size"]
    if name != EAGLE3:
        needed += ["num_hidden_layers", "block_size", "mask_token_id", *(["markov_rank"] if name == DSPARK else [])]
    if lacks := [key for key in needed if type(said.get(key)) is not int]:
        raise ValueError(f"{path / CONFIG} lacks {lacks[0]}; fetch the folder again.")
    layers, width = _layers_of(path, said, args.num_layers, name), said["intermediate_size"]
    if name == EAGLE3:
        return Kind(name, layers, width)
    mask, steps = said["mask_token_id"], said["block_size"] - (name == DFLASH)
    if not 0 <= mask < args.vocab_size:
        raise ValueError(
            f"{path / CONFIG} has mask_token_id {mask}, and the vocabulary has {args.vocab_size} tokens; give a "
            "drafter of this trunk."
        )
    if not 1 <= steps <= args.max_position_embeddings:
        raise ValueError(
            f"{path / CONFIG} has block_size {said['block_size']}, of {steps} drafts, and the trunk has "
            f"{args.max_position_embeddings} positions; fetch the folder again."
        )
    return Kind(name, layers, width, steps, said["num_hidden_layers"], mask, said.get("markov_rank"))


def _layers_of(path: Path, keys: dict[str, Any], layers: int, name: str) -> tuple[int, ...]:
    """Numbers of the layers that are read, from any of the keys; without one, engines' default."""
    if name == EAGLE3:
        inner = (keys.get("eagle_config") or {}).get(LAYERS)
        found = keys.get(LAYERS) or ([number + 1 for number in inner] if inner else default_layers(layers))
    else:
        found = [number + 1 for number in keys.get(BLOCK_LAYERS_READ) or ()]
    if not can_read(found, layers, name):
        raise ValueError(
            f"{path / CONFIG} reads the layers {' '.join(map(str, found))}, and the trunk has {layers} layers; give a "
            "drafter of this trunk."
        )
    return tuple(found)
