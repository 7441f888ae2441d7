"""gpt-to-hybrid and hybrid-to-gpt: convert a model to Megatron's other class, with MTP layers and optimizer state.

In:  a distributed checkpoint. Out: a checkpoint of the same iteration with the same tensors, optimizer state, random
states and learning rate, bit by bit, under the other class's keys, and with arguments for that class.

A GPT's layer corresponds to two symbols of a hybrid's pattern:

    two layers, the second with experts, and two MTP layers   <->   *-*E/*E/*E

decoder.layers.3.self_attention.linear_qkv.weight   <->   decoder.layers.6.self_attention.linear_qkv.weight
decoder.layers.3.mlp.linear_fc2.weight              <->   decoder.layers.7.mlp.linear_fc2.weight
mtp.layers.0.transformer_layer.mlp.router.weight    <->   mtp.layers.0.mtp_model_layer.layers.1.mlp.router.weight
decoder.final_layernorm.weight                      <->   decoder.final_norm.weight
"""

import re
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from torch import Tensor

from megatron_mtp.checkpoint.convert.partial_folder import PartialFolder
from megatron_mtp.checkpoint.convert.plan import moved
from megatron_mtp.checkpoint.convert.stream import (
    UNTRAINED,
    CheckpointFiles,
    Conversion,
    Entry,
    Group,
    Options,
    keep_files,
)
from megatron_mtp.checkpoint.families.blocks import mlp_norm_keys
from megatron_mtp.megatron.checkpoint import FUSED_NORM, HEAD_STATE, OWN_NORM, RELEASE, STATE
from megatron_mtp.megatron.checkpoint.reader import BY_PARAMETER, DistReader, StoredDepths, sharding_type
from megatron_mtp.megatron.patterns import KINDS, SHARDED_STACK, trunk_and_depths
from megatron_mtp.model.arguments import check_trainable

FILE_BYTES = 2**30
"""Size of a part, unless a single tensor is larger; at most this much is repeated after an interruption."""
BY_BUCKET = "dp_reshardable"
"""The distributed optimizer's default format: flat buffers of the parameters, in the model's order."""
UNEVEN = (
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_model_parallel_layout "
    "virtual_pipeline_model_parallel_size account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split"
).split()
"""Arguments that give pipeline stages other layers than an even split."""


def plan_migration(source: Path, to_hybrid: bool) -> Conversion:
    """Plan `gpt-to-hybrid` or `hybrid-to-gpt`, from names and shapes alone.

    Raise ValueError if there is no such form.
    """
    reader = DistReader(source)
    common = reader.common()
    old = common["args"]
    check_trainable(old, str(source))
    if getattr(old, "drafter", None) is not None:
        raise ValueError(f"{source} has a drafter, which a hybrid cannot have; give a checkpoint of the trunk alone.")
    new = (hybrid_arguments if to_hybrid else gpt_arguments)(old, str(source))
    pattern = (new if to_hybrid else old).hybrid_layer_pattern
    _check_optimizer(common, pattern, str(source))
    halves = Halves.of(pattern)
    renamed = (lambda key: [halves.hybrid_key(key)]) if to_hybrid else halves.gpt_keys
    keys: dict[str, list[str]] = {}
    taken: set[str] = set()
    for key in (*reader.keys, *reader.state_keys):
        if taken.isdisjoint(names := renamed(key)):  # if two old keys name the same tensor, keep the first
            keys[key] = names
            taken.update(names)
    depths = 1 if old.mtp_num_layers and getattr(old, "mtp_use_repeated_layer", False) else old.mtp_num_layers or 0
    halves.check((key for names in keys.values() for key in names) if to_hybrid else keys, depths, str(source))
    metadata = {**UNTRAINED["content_metadata"], **(common.get("content_metadata") or {})}
    metadata |= {} if (form := sharding_type(common)) is None else {"distrib_optim_sharding_type": form}
    metadata |= {} if to_hybrid else {"non_homogeneous_layers": True}  # layers are stored as separate tensors
    common = {**common, "args": new, "content_metadata": metadata}
    kept = ((key, stored) for key, stored in reader.objects.items() if to_hybrid or key != HEAD_STATE)
    objects = {name: stored for key, stored in kept for name in renamed(key)}
    iteration = RELEASE if reader.folder.name == RELEASE else str(common["iteration"])

    def files(folder: PartialFolder, _: Options) -> CheckpointFiles:
        held = {key: reader.stored_bytes(stored) for key, stored in objects.items()}
        return CheckpointFiles(folder.path, common, iteration, held)

    return Conversion(
        (source,),
        f"hybrid of layers {pattern}" if to_hybrid else "GPT",
        StoredDepths.of(reader.keys).layers,
        _parts(reader, keys),
        {"source": reader.fingerprint(), "hybrid": to_hybrid},
        files,
        partial(keep_files, reader.home),
        facts={
            "layers": pattern,
            "of the optimizer's state": len(reader.state_keys),
            "names": moved(([key], [name]) for key, names in keys.items() for name in names),
        },
    )


def _check_optimizer(common: dict[str, Any], pattern: str, source: str) -> None:
    """Raise ValueError if the other form would order the optimizer's state differently."""
    form, args = sharding_type(common), common["args"]
    remedy = "save it again by megatron-mtp train with --dist-ckpt-optim-fully-reshardable, and convert that"
    if form not in (*BY_PARAMETER, BY_BUCKET):
        raise ValueError(f"{source} holds the optimizer's state in the format {form}, which cannot be moved; {remedy}.")
    stages = [len(stage) for stage in pattern.split("/")[0].split("|")]
    even = len(set(stages)) == 1 and len(stages) in (1, args.pipeline_model_parallel_size)
    if form == BY_BUCKET and (not even or any(getattr(args, name, None) for name in UNEVEN)):
        raise ValueError(
            f"{source} holds the optimizer's state in buffers for each pipeline stage (format {form}), and its stages "
            f"were not cut evenly; {remedy}."
        )


def _parts(reader: DistReader, keys: dict[str, list[str]]) -> list[list[Group]]:
    """Group stored pieces of all tensors, under their new keys, into parts; each part has as many as fit a file."""
    parts: list[list[Group]] = [[]]
    room = FILE_BYTES
    for key, names in keys.items():
        for offset, shape in reader.slabs(key):
            entry = Entry(names, shape, reader.dtype(key), reader.shape(key), offset)
            size = entry.bytes // len(names)
            if parts[-1] and size > room:
                parts.append([])
                room = FILE_BYTES
            parts[-1].append(Group([entry], size, partial(_read, reader, key, offset, shape)))
            room -= size
    return parts


def _read(reader: DistReader, *piece: Any) -> list[Tensor]:
    return [reader.read(*piece)]


ATTENTION = (Symbols.ATTENTION, Symbols.MLA)
CHANNELS = (Symbols.MLP, Symbols.MOE)
"""Symbols of the first and the second half of a GPT's layer."""

STAYS, DAMAGED = "it has to stay", "the checkpoint is damaged"
POSITIONS = ("rope", "learned_absolute", "none")
"""Position embeddings that both forms compute in the same way."""

NOT_IN_HYBRIDS = (
    "use_rope_scaling no_rope_freq window_attn_skip_freq experimental_attention_variant "
    "heterogeneous_layers_config_path use_mup spec"
).split()
"""Arguments that a hybrid does not read, or whose layers it counts differently."""


def hybrid_arguments(args: Namespace, source: str) -> Namespace:
    """Return the arguments of the hybrid that is equivalent to this GPT. Raise ValueError if there is none."""
    if (pattern := getattr(args, "hybrid_layer_pattern", None)) is not None:
        raise ValueError(f"{source} is already a hybrid model of layers {pattern}; for the reverse, use hybrid-to-gpt.")
    given = {name: getattr(args, name, None) for name in NOT_IN_HYBRIDS}
    wrong = [name for name, value in given.items() if (any(value) if isinstance(value, list) else value)]
    if args.position_embedding_type not in POSITIONS:
        wrong.append(f"position_embedding_type {args.position_embedding_type}")
    if wrong:
        flag, says = wrong[0].replace("_", "-"), "which a hybrid model does not compute as a GPT does"
        raise ValueError(f"{source} was trained with --{flag}, {says}; {STAYS} a GPT.")
    _check_layers(args, source)
    layers = _layers(args)
    depths = [layers[-1]] * (args.mtp_num_layers or 0)
    return _changed(args, hybrid_layer_pattern="/".join(["".join(layers), *depths]), moe_layer_freq=1)


def gpt_arguments(args: Namespace, source: str) -> Namespace:
    """Return the arguments of the GPT that is equivalent to this hybrid. Raise ValueError if there is none."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if pattern is None:
        raise ValueError(f"{source} is already a GPT; for the reverse, use gpt-to-hybrid.")
    trunk, depths = trunk_and_depths(pattern)
    _check_order(trunk, f"{source} has the layers {pattern}")
    if not trunk:
        raise ValueError(f"the arguments in {source} have a pattern without layers; {DAMAGED}.")
    if (other := next((depth for depth in depths if depth != trunk[-2:]), None)) is not None:
        raise ValueError(
            f"{source} has the layers {pattern}, whose MTP layers are {other}, but a GPT's MTP layers are like the "
            f"last layer of its trunk, {trunk[-2:]} here; {STAYS} a hybrid."
        )
    if (Symbols.MLA in trunk) != bool(args.multi_latent_attention):
        says = f"its arguments have multi_latent_attention {args.multi_latent_attention}"
        raise ValueError(f"{source} has the layers {pattern}, but {says}; {DAMAGED}.")
    moe = [int(symbol == Symbols.MOE) for symbol in trunk[1::2]]
    experts = {"num_experts": args.num_experts if any(moe) else None}
    return _changed(args, hybrid_layer_pattern=None, moe_layer_freq=moe if 0 < sum(moe) < len(moe) else 1, **experts)


def _check_layers(args: Namespace, source: str) -> None:
    """Raise ValueError if the arguments of a GPT do not determine its layers."""
    layers, frequency = args.num_layers, args.moe_layer_freq
    counts = {"num_layers": layers, "mtp_num_layers": args.mtp_num_layers or 1}
    if isinstance(frequency, int):
        counts["moe_layer_freq"] = frequency
    wrong = next((name for name, value in counts.items() if not isinstance(value, int) or value < 1), None)
    if wrong is None and not isinstance(frequency, int) and len(frequency or ()) != layers:
        wrong = "moe_layer_freq"
    if wrong is not None:
        raise ValueError(f"the arguments in {source} have {wrong} {getattr(args, wrong)!r}; {DAMAGED}.")


def _check_order(trunk: str, said: str) -> None:
    """Raise ValueError at the first symbol that is not half of a GPT layer, or is out of order."""
    for index, symbol in enumerate(trunk):
        if symbol not in ATTENTION + CHANNELS:
            kind = KINDS.get(symbol, "no layer of Megatron")
            raise ValueError(f"{said}, and no GPT has {symbol} ({kind}); {STAYS} a hybrid.")
        if symbol not in (CHANNELS if index % 2 else ATTENTION):
            raise ValueError(
                f"{said}, whose symbol {index + 1} is {symbol} ({KINDS[symbol]}), but a GPT's layers are attention "
                f"(* or +) followed by an MLP (-) or MoE (E); {STAYS} a hybrid."
            )
    if len(trunk) % 2:
        raise ValueError(f"{said}, whose last {trunk[-1]} is half of a GPT's layer; {STAYS} a hybrid.")


def _layers(args: Namespace) -> list[str]:
    """Return the symbols of every layer: attention, and an MLP or, by --moe-layer-freq, experts."""
    attention = Symbols.MLA if args.multi_latent_attention else Symbols.ATTENTION
    layers, frequency = range(args.num_layers), args.moe_layer_freq
    moe = [n % frequency == 0 for n in layers] if isinstance(frequency, int) else frequency
    return [attention + (Symbols.MOE if args.num_experts and moe[n] else Symbols.MLP) for n in layers]


def _changed(args: Namespace, hybrid_layer_pattern: str | None, **changes: Any) -> Namespace:
    """Return the arguments with another pattern (None: of a GPT), and the matching number of layers."""
    changes["hybrid_layer_pattern"] = hybrid_layer_pattern
    layers = args.num_layers * 2 if hybrid_layer_pattern else args.num_layers // 2
    changes |= {name: layers for name in ("num_layers", "encoder_num_layers") if getattr(args, name, None) is not None}
    return Namespace(**{**vars(args), **changes})


_STATE = rf"((?:{STATE}state\.\w+\.)?)"
_GPT_LAYER = re.compile(_STATE + r"decoder\.layers\.(\d+)\.(.+)")
_GPT_DEPTH = re.compile(_STATE + r"(mtp\.layers\.\d+\.)transformer_layer\.(.+)")
_GPT_NORM = re.compile(_STATE + r"decoder\.final_layernorm\.(.+)")
_DEPTH = re.compile(_STATE + rf"(mtp\.layers\.\d+\.){SHARDED_STACK}\.layers\.(\d+)\.(.+)")
_NORM = re.compile(_STATE + r"decoder\.final_norm\.(.+)")
_MLP_NORM = re.compile(rf"(?:{re.escape(FUSED_NORM)}|{re.escape(OWN_NORM)})(weight|bias)")
HALVES = {"input_layernorm": 0, "self_attention": 0, "pre_mlp_layernorm": 1, "mlp": 1}
"""Which of the two symbols of a GPT's layer a module belongs to."""
WITNESSES = {
    Symbols.ATTENTION: "self_attention.linear_qkv.weight",
    Symbols.MLA: "self_attention.linear_kv_up_proj.weight",
    Symbols.MLP: "mlp.linear_fc2.weight",
    Symbols.MOE: "mlp.router.weight",
}
"""A tensor that only a layer of this kind has."""


@dataclass(frozen=True)
class Halves:
    """Layers of a model that is both a GPT and a hybrid.

    Attributes:
        trunk: symbols of the trunk.
        depth: symbols of an MTP layer; empty if there are none.
    """

    trunk: str
    depth: str

    @classmethod
    def of(cls, pattern: str) -> "Halves":
        """Return the layers that a hybrid's pattern names."""
        trunk, depths = trunk_and_depths(pattern)
        return cls(trunk, depths[0] if depths else "")

    def hybrid_key(self, key: str) -> str:
        """Return the hybrid's key of a GPT's tensor. Raise ValueError if the model lacks its layer."""
        if match := _GPT_LAYER.fullmatch(key):
            state, layer, rest = match.groups()
            half = 2 * int(layer) + _half(rest, key)
            return f"{state}decoder.layers.{half}.{_in_hybrid(rest, self._symbol(half, key))}"
        if match := _GPT_DEPTH.fullmatch(key):
            state, depth, rest = match.groups()
            half = _half(rest, key)
            return f"{state}{depth}{SHARDED_STACK}.layers.{half}.{_in_hybrid(rest, self.depth[half])}"
        return _GPT_NORM.sub(r"\1decoder.final_norm.\2", key)

    def gpt_keys(self, key: str) -> list[str]:
        """Return the GPT's keys of a hybrid's tensor: several if modules with and without TE use different names."""
        if match := _GPT_LAYER.fullmatch(key):
            state, half, rest = match.groups()
            layer = int(half) // 2
            self._symbol(int(half), key)
            symbols, place = self.trunk[2 * layer : 2 * layer + 2], f"{state}decoder.layers.{layer}."
        elif match := _DEPTH.fullmatch(key):
            state, depth, _, rest = match.groups()
            symbols, place = self.depth, f"{state}{depth}transformer_layer."
        else:
            return [_NORM.sub(r"\1decoder.final_layernorm.\2", key)]
        norm = _MLP_NORM.fullmatch(rest)
        if norm is None:
            return [place + rest]
        names = mlp_norm_keys(mla=symbols[0] == Symbols.MLA, moe=symbols[1] == Symbols.MOE)
        return [f"{place}{name}{norm.group(1)}" for name in names]

    def check(self, keys: Iterable[str], depths: int, source: str) -> None:
        """Raise ValueError if a hybrid checkpoint with these keys lacks a layer of its arguments."""
        held = set(keys)
        layers = {f"decoder.layers.{index}.": symbol for index, symbol in enumerate(self.trunk)}
        for depth in range(depths):
            stack = f"mtp.layers.{depth}.{SHARDED_STACK}.layers."
            layers |= {f"{stack}{index}.": symbol for index, symbol in enumerate(self.depth)}
        for place, symbol in layers.items():
            if place + WITNESSES[symbol] not in held:
                raise ValueError(
                    f"{source} lacks '{place}{WITNESSES[symbol]}' (its key in a hybrid), which its arguments call "
                    f"for; {DAMAGED}."
                )

    def _symbol(self, index: int, key: str) -> str:
        if index >= len(self.trunk):
            raise ValueError(f"'{key}' is behind the last of the trunk's layers {self.trunk}; {DAMAGED}.")
        return self.trunk[index]


def _half(rest: str, key: str) -> int:
    half = HALVES.get(rest.partition(".")[0])
    if half is None:
        raise ValueError(f"'{key}' has no place in a hybrid model; the checkpoint has to stay a GPT.")
    return half


def _in_hybrid(rest: str, symbol: str) -> str:
    """Return a layer part's name in a hybrid, where the norm before experts is a separate module."""
    norm = _MLP_NORM.fullmatch(rest)
    return rest if norm is None else (OWN_NORM if symbol == Symbols.MOE else FUSED_NORM) + norm.group(1)
