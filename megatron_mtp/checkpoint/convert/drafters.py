"""drafter-to-hf and attach-drafter: an EAGLE-3 drafter as engines load it, in a folder beside the trunk's.

    config.json          LlamaForCausalLMEagle3: a Llama of one layer, with the keys below
    model.safetensors    fc, midlayer.*, norm, lm_head; with a reduced vocabulary d2t and t2d

`eagle_aux_hidden_state_layer_ids` has the number of trunk layers before each state that is read, as vLLM counts;
`eagle_config` has the number of the layer that returns it, from 0, as SGLang and SpecForge count. d2t is what is added
to a draft index for its token, and t2d says of every token whether it is drafted. Letters in names: N drafted tokens,
V vocabulary, H hidden.
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
from megatron_mtp.checkpoint.hf.folder import EAGLE3, HFFolder
from megatron_mtp.checkpoint.mcore.reader import DistReader
from megatron_mtp.checkpoint.mcore.tokenizer import EMBEDDING
from megatron_mtp.config import DRAFTER_STEPS
from megatron_mtp.model.arguments import check_trainable
from megatron_mtp.model.draft_vocabulary import DRAFTER
from megatron_mtp.model.drafter import FEATURES, as_mtp_layers, can_read, default_layers

LAYERS = "eagle_aux_hidden_state_layer_ids"
VOCABULARY, HEAD, OUTPUT = f"{DRAFTER}draft_vocabulary", f"{DRAFTER}head", "output_layer.weight"
OTHER_FORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias")
"""Config keys of drafters that compute something else where they are true."""
LAYER = ("midlayer.", "layers.0.")
"""Names of the layer: as it is written, and another that is read."""


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


def rules_of(sizes: dict[str, Any], width: int, layer: str = LAYER[0]) -> list[Rule]:
    """What moves where, but the head and the vocabulary.

    Args:
        sizes: of `sizes_of`.
        width: of the MLP.
        layer: the layer's name in the folder.
    """
    hidden, heads, groups, channels = (
        sizes[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    place = Place(layer, f"{DRAFTER}tf_layer.")
    norms = {
        "input_layernorm": "input_layernorm.enorm",
        "hidden_norm": "input_layernorm.hnorm",
        "post_attention_layernorm": "pre_mlp_layernorm",
    }
    attention = gqa_rules(place, GQA(2 * hidden, heads, groups, (channels,) * 3))
    output = f"{place.mcore}self_attention.linear_proj.weight"
    return [
        rename("fc.weight", f"{DRAFTER}fc.weight", (hidden, FEATURES * hidden)),
        *(rename(f"{place.hf}{a}.weight", f"{place.mcore}{b}.weight", (hidden,)) for a, b in norms.items()),
        *(rule for rule in attention if rule.mcore[0].key != output),
        rename(f"{place.hf}self_attn.o_proj.weight", output, (hidden, heads * channels)),
        *mlp_rules(f"{place.hf}mlp.", f"{place.mcore}mlp.", hidden, width),
        rename("norm.weight", f"{DRAFTER}norm.weight", (hidden,)),
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
        EAGLE3,
        0,
        [groups],
        {"source": reader.fingerprint(), "config": keys},
        lambda folder, options: FolderFiles(folder, [groups], options),
        keep,
    )


def _config_keys(args: Namespace, reader: DistReader) -> dict[str, Any]:
    """The keys of config.json.

    Raises:
        ValueError: the layer has positions that this form does not say.
    """
    for name, plain in (("rotary_percent", 1.0), ("use_rope_scaling", False), ("rotary_interleaved", False)):
        if (found := getattr(args, name, plain)) not in (plain, None):
            raise ValueError(
                f"the drafter turns heads with {name} {found}, for which {EAGLE3} has no form; draft with it by "
                "megatron-mtp generate or serve."
            )
    drafted = reader.shape(VOCABULARY)[0] if reader.holds(VOCABULARY) else args.vocab_size
    return {
        "architectures": [EAGLE3],
        "model_type": "llama",
        **sizes_of(args),
        "intermediate_size": args.drafter_ffn_hidden_size or args.ffn_hidden_size,
        "max_position_embeddings": args.max_position_embeddings,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "target_hidden_size": args.hidden_size,
        "draft_vocab_size": drafted,
        LAYERS: [*args.drafter_layers],
        "eagle_config": {LAYERS: [number - 1 for number in args.drafter_layers], "use_aux_hidden_state": True},
    }


def _groups(args: Namespace, reader: DistReader, options: Options) -> list[Group]:
    """The tensors; a drafter with the trunk's head gets a copy of it."""

    def group(names: dict[str, Shape], keys: list[str], make: Callable[[list[Tensor]], list[Tensor]]) -> Group:
        kept = reader.dtype(keys[0])
        types = {name: options.cast(name, kept) for name in names}
        size = sum(prod(reader.shape(key)) * reader.dtype(key).itemsize for key in keys)
        entries = [Entry([name], shape, types[name]) for name, shape in names.items()]
        return Group(entries, size, lambda: make([reader.read(key) for key in keys]))

    hidden, tokens = args.hidden_size, args.vocab_size
    rules = rules_of(sizes_of(args), args.drafter_ffn_hidden_size or args.ffn_hidden_size)
    groups = [
        group({one.name: one.shape or () for one in rule.hf}, [piece.key for piece in rule.mcore], rule.to_hf)
        for rule in rules
    ]
    if not reader.holds(HEAD):
        owner = OUTPUT if reader.holds(OUTPUT) else EMBEDDING
        return [*groups, group({"lm_head.weight": (tokens, hidden)}, [owner], lambda head: [head[0][:tokens]])]
    (drafted,) = reader.shape(VOCABULARY)
    groups.append(group({"lm_head.weight": (drafted, hidden)}, [HEAD], list))
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
        layers: numbers of the trunk's layers that it reads.
        width: of its MLP.
        tokens_N: what it drafts, ascending; None for all.
        order_N: the row of the folder's head for each of these.
    """

    folder: HFFolder
    layers: tuple[int, ...]
    width: int
    rules: list[Rule]
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
    head_NH = given.folder.read("lm_head.weight")[given.order_N]
    made = [group_of(given.folder, rule, Options()) for rule in given.rules]
    for key, tensor in ((HEAD, head_NH), (VOCABULARY, given.tokens_N)):
        made.append(Group.single(key, tuple(tensor.shape), tensor.dtype, tensor.clone))
    arguments = {
        "drafter": "eagle3",
        "drafter_layers": [*given.layers],
        "drafter_steps": DRAFTER_STEPS,
        "drafter_ffn_hidden_size": None if given.width == args.ffn_hidden_size else given.width,
        **as_mtp_layers(DRAFTER_STEPS),
    }
    record = {
        "drafter": str(drafter.resolve()),
        "tensors": {name: one.shape for name, one in given.folder.tensors.items()},
    }
    return changed(reader, source, made, arguments, record, depths=0)


def described(path: Path) -> dict[str, Any]:
    """Facts about a drafter's folder, for `inspect`.

    Raises:
        ValueError: its tensors are not those that its config says, or it is of a form that is not known.
    """
    sizes = _sizes_in(read_json(path / CONFIG))
    of_trunk = Namespace(
        num_layers=sys.maxsize,
        hidden_size=sizes["hidden_size"],
        num_attention_heads=sizes["num_attention_heads"],
        group_query_attention=True,
        num_query_groups=sizes["num_key_value_heads"],
        kv_channels=sizes["head_dim"],
        layernorm_epsilon=sizes["rms_norm_eps"],
        rotary_base=sizes["rope_theta"],
        vocab_size=sizes["vocab_size"],
    )
    given = read_drafter(path, of_trunk)
    says = given.layers != default_layers(sys.maxsize)
    stored = given.folder.tensors.values()
    return {
        "form": "Hugging Face",
        "kind": EAGLE3,
        "reads the trunk after": " ".join(map(str, given.layers)) + " layers" if says else "engines' default layers",
        "drafts": f"{len(given.tokens_N)} of {sizes['vocab_size']} tokens",
        "tensors": len(stored),
        "bytes": sum(tensor.bytes for tensor in stored),
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in stored}),
    }


def read_drafter(path: Path, args: Namespace) -> Given:
    """A folder's drafter, checked against the trunk's arguments.

    Raises:
        ValueError: it is of another kind or of another trunk, or has tensors that are not known.
    """
    keys = _checked_config(path, args)
    folder, width = HFFolder(path), keys["intermediate_size"]
    layer = LAYER[1] if any(name.startswith(LAYER[1]) for name in folder.tensors) else LAYER[0]
    rules = rules_of(sizes_of(args), width, layer)
    wanted = {tensor.name: tensor.shape for rule in rules for tensor in rule.hf}
    drafted = int(keys.get("draft_vocab_size") or args.vocab_size)
    wanted["lm_head.weight"] = (drafted, args.hidden_size)
    has_list = "d2t" in folder.tensors
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
    return Given(folder, _layers_of(path, keys, args.num_layers), width, rules, tokens_N, order_N)


def _checked_config(path: Path, args: Namespace) -> dict[str, Any]:
    """The folder's keys, which agree with the trunk."""
    keys: dict[str, Any] = read_json(path / CONFIG)
    if EAGLE3 not in (keys.get("architectures") or []):
        raise ValueError(f"{path / CONFIG} has architectures {keys.get('architectures')}; give a {EAGLE3}.")
    if other := [name for name in OTHER_FORMS if keys.get(name)]:
        raise ValueError(f"{path / CONFIG} has {other[0]}, a form of drafters that is not known here; give another.")
    rope = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    if keys.get("num_hidden_layers", 1) != 1 or rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(
            f"{path / CONFIG} has several layers or a rope_scaling, which drafters here do not have; give another."
        )
    theirs = _sizes_in(keys)
    for name, own in sizes_of(args).items():
        if theirs[name] != own:
            raise ValueError(
                f"{path / CONFIG} has {name} {theirs[name]}, and the trunk {own}; give a drafter of this trunk, "
                "whose layer has the trunk's sizes and positions."
            )
    if not isinstance(keys.get("intermediate_size"), int):
        raise ValueError(f"{path / CONFIG} lacks intermediate_size; fetch the folder again.")
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


def _layers_of(path: Path, keys: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Numbers of the layers that are read, from any of the two keys; without one, engines' default."""
    inner = (keys.get("eagle_config") or {}).get(LAYERS)
    found = keys.get(LAYERS) or ([number + 1 for number in inner] if inner else default_layers(layers))
    if not can_read(found, layers):
        raise ValueError(
            f"{path / CONFIG} reads the layers {' '.join(map(str, found))}, and the trunk has {layers} layers; give a "
            "drafter of this trunk."
        )
    return tuple(found)
