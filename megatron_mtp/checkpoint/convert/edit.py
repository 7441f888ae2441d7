"""attach-mtp, drop-mtp and draft-vocab: write a checkpoint with other MTP layers and an unchanged trunk.

`last-layer` makes each MTP layer a copy of the trunk's last layer and final norm, with input norms of 1 and eh_proj =
[0 | I], which passes on the hidden state. `fitted` is the same with the eh_proj of fitting.py. `random` draws each MTP
layer as in a new model. An MTP layer of a hybrid model is a stack of the trunk's last attention and its last MLP or
MoE:

    GEGEGE*E    becomes    GEGEGE*E/*E    with the weights of layers 6 and 7 in the depth

With a draft vocabulary, the output layer of the MTP layers has one row for each token that they may draft, so a draft
costs less. The output is not restricted: the trunk verifies with the whole vocabulary.
"""

import hashlib
import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Set
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from torch import Tensor

from megatron_mtp.checkpoint.convert.fitting import Fit, FitData
from megatron_mtp.checkpoint.convert.hf_form import kept_origin, pattern_of
from megatron_mtp.checkpoint.convert.import_hf import SHARES, UNROLL
from megatron_mtp.checkpoint.convert.plan import counted, unnumbered
from megatron_mtp.checkpoint.convert.stream import CheckpointFiles, Conversion, Group, keep_files
from megatron_mtp.checkpoint.families import CARRIED, family_of
from megatron_mtp.checkpoint.families.inside import INNER_KEYS, STAGES, InnerDrafter, check_no_drafter
from megatron_mtp.checkpoint.hf import Shape
from megatron_mtp.checkpoint.hf.config import CONFIG, HFConfig, read_json, text_key
from megatron_mtp.data.checks import FILE, SIZE, check_data_prefixes, most_frequent
from megatron_mtp.megatron.checkpoint import DRAFT_VOCABULARY, DRAFTER, HF_FILES, ORIGIN
from megatron_mtp.megatron.checkpoint.reader import DistReader, StoredDepths, depth_of
from megatron_mtp.megatron.patterns import SHARDED_STACK, without_stages
from megatron_mtp.model.arguments import check_trainable
from megatron_mtp.model.draft_vocabulary import tokens_of_file
from megatron_mtp.model.initialize import RandomWeights
from megatron_mtp.model.mtp import SHARDED_TF_LAYER
from megatron_mtp.spec.head import NO_DRAFTER

ONE_PASS: dict[str, Any] = {UNROLL: None, SHARES: False}
"""Arguments of MTP layers that are not repeated."""
OF_DEPTHS: dict[str, Any] = {
    "mtp_num_layers": None,
    "mtp_use_repeated_layer": False,
    "mtp_architecture": "sequential",
    "mtp_draft_vocab_size": None,
    "mtp_draft_vocab_file": None,
    **ONE_PASS,
}
"""Arguments that come with MTP layers, and their values for new ones."""


@dataclass(frozen=True)
class Init:
    """How new MTP layers are initialized: "last-layer", "fitted" to data, or "random" with a seed."""

    name: str
    seed: int = 0
    data: FitData | None = None


@dataclass(frozen=True)
class NewDrafts:
    """MTP layers or drafter of an edited copy of a checkpoint, and how it differs from the checkpoint.

    Attributes:
        depths: number of MTP layers.
        made: tensors of the MTP layers or drafter.
        record: everything except the source that determines the output.
        arguments: arguments that change.
        dropped: names of carried tensors that are left out.
        unkeyed: keys removed from the stored config.
        notes, begin: as in `Conversion`.
    """

    depths: int
    made: list[Group]
    record: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    unkeyed: tuple[str, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)
    begin: Callable[[], object] | None = None


def changed(reader: DistReader, source: Path, drafts: NewDrafts) -> Conversion:
    """Copy a checkpoint's trunk with other MTP layers or drafters; `source` is the path given by the user."""
    arguments = drafts.arguments
    if reader.has_drafter:
        arguments = NO_DRAFTER | arguments
    trunk = [key for key in reader.keys if not key.startswith(("mtp.", DRAFTER))]
    kept = [copied(reader, key) for key in trunk if key.removeprefix(CARRIED) not in drafts.dropped]
    parts = [part for part in (kept, drafts.made) if part]
    new = {key for part in parts for group in part for entry in group.entries for key in entry.keys}

    def names(keys: list[str]) -> list[str] | str:
        return counted(unnumbered([key]) for key in keys) or "nothing"

    def keep(folder: Path) -> None:
        keep_files(reader.home, folder)
        correct_origin(folder / HF_FILES, drafts.depths, drafts.dropped)
        if drafts.unkeyed:
            _drop_keys(folder / HF_FILES / CONFIG, drafts.unkeyed)

    return Conversion(
        (source,),
        "Megatron",
        drafts.depths,
        parts,
        {"source": reader.fingerprint(), **drafts.record},
        lambda folder, _: CheckpointFiles(folder.path, changed_args(reader, **arguments)),
        keep,
        facts={
            "MTP layers before": StoredDepths.of(reader.keys).layers,
            "new": names(sorted(new - {*reader.keys})),
            "left out": names([key for key in reader.keys if key not in new]),
        },
        notes=drafts.notes,
        begin=drafts.begin,
    )


def _drop_keys(file: Path, names: tuple[str, ...]) -> None:
    """Remove keys from a config and from its text model's."""
    keys = read_json(file)
    for part in (keys, keys.get(text_key(keys) or "", {})):
        for name in names:
            part.pop(name, None)
    file.write_text(json.dumps(keys, indent=2) + "\n")


def plan_attaching(source: Path, depths: int, init: Init, quiet: bool = False) -> Conversion:
    """Plan `attach-mtp` of this many MTP layers, from names and shapes alone; `quiet` fits without a progress bar.

    Raises:
        ValueError: Megatron cannot run the model, the checkpoint already has MTP layers, it has no layer to copy, or
            `random` cannot draw the weights of its last layer.
    """
    reader = DistReader(source)
    check_trainable(reader.common()["args"], str(source))
    check_no_drafter(_carried(reader), source, "drop-mtp --keep 0 writes a copy without it")
    if any(key.startswith("mtp.") for key in reader.keys):
        raise ValueError(f"{source} has MTP layers already; drop-mtp writes a copy without them.")
    template = Template.of(reader)
    arguments: dict[str, Any] = {**OF_DEPTHS, "mtp_num_layers": depths}
    if template.pattern is not None:
        arguments["hybrid_layer_pattern"] = template.with_depths(depths)
    fitted = None
    if init.data is not None:
        stored = changed_args(reader, **arguments)["args"]
        fitted = cache(partial(Fit(reader, stored, next(iter(template.stack)), init.data, init.seed).projection, quiet))
    made = [group for depth in range(depths) for group in _depth(reader, depth, template, init, fitted)]
    record = {"depths": depths, "init": init.name, "seed": init.seed} | (asdict(init.data) if init.data else {})
    return changed(reader, source, NewDrafts(depths, made, record, arguments, begin=fitted))


def plan_dropping(source: Path, keep: int) -> Conversion:
    """Plan `drop-mtp`, from names and shapes alone. Raise ValueError if there are fewer than `keep` + 1 MTP layers."""
    reader = DistReader(source)
    depths = StoredDepths.of(reader.keys).layers
    if not depths and not keep and (inner := InnerDrafter.of({}, _carried(reader))) is not None:
        none = NewDrafts(0, [], {"depths": 0}, dropped=inner.names, unkeyed=(*INNER_KEYS, *STAGES))
        return changed(reader, source, none)
    if not depths:
        check_no_drafter(_carried(reader), source, "--keep 0 writes a copy without it")
        raise ValueError(f"{source} has no MTP layers; there is nothing to drop.")
    if not 0 <= keep < depths:
        raise ValueError(f"--keep is {keep}, but {source} has {depths} MTP depth(s); keep 0 to {depths - 1} of them.")
    kept = [
        copied(reader, key)
        for key in reader.keys
        if ((depth := depth_of(key)) is not None and depth < keep) or (key == DRAFT_VOCABULARY and keep)
    ]
    arguments: dict[str, Any] = {"mtp_num_layers": keep or None, **ONE_PASS}
    if (pattern := pattern_of(reader)) is not None:  # it names the layers of each MTP layer after a slash
        arguments["hybrid_layer_pattern"] = "/".join(pattern.split("/")[: 1 + keep])
    dropped = _carried_parts(reader, source, keep)
    return changed(reader, source, NewDrafts(keep, kept, {"depths": keep}, arguments, dropped))


def copied(reader: DistReader, key: str) -> Group:
    """Return the rule that copies a tensor."""
    return Group.single(key, reader.shape(key), reader.dtype(key), partial(reader.read, key))


def _carried(reader: DistReader) -> list[str]:
    """Return the Hugging Face names of carried tensors."""
    return [key.removeprefix(CARRIED) for key in reader.keys if key.startswith(CARRIED)]


def _carried_parts(reader: DistReader, source: Path, keep: int) -> frozenset[str]:
    """Return Hugging Face names of tensors in MTP layers after `keep` for which Megatron has no module."""
    carried = _carried(reader)
    config = HFConfig.read(source / HF_FILES) if carried else None
    stored = None if config is None else family_of(config).depths
    if config is None or stored is None:
        return frozenset()
    return frozenset(name for name in carried if (depth := stored.depth_of(config, name)) is not None and depth >= keep)


def correct_origin(
    kept: Path,
    depths: int,
    dropped: Set[str] = frozenset(),
    added: Set[str] = frozenset(),
    carried: Set[str] = frozenset(),
) -> None:
    """Update the record of the tensors in the stored Hugging Face files.

    Args:
        kept: folder of these files.
        depths: number of MTP layers.
        dropped, carried: names of carried tensors that were removed and added.
        added: forms that were added.
    """
    if origin := kept_origin(kept):
        layout = origin.get("layout", {})
        names = sorted({*layout.get("carried", []), *carried} - dropped)
        changed = {"depths": depths, "carried": names, "features": sorted({*layout.get("features", []), *added})}
        (kept / ORIGIN).write_text(json.dumps({**origin, "layout": {**layout, **changed}}, indent=2) + "\n")


@dataclass(frozen=True)
class Template:
    """Trunk layers from which a new MTP layer is copied.

    Attributes:
        layers: number of trunk layers.
        stack: prefix of the copy inside an MTP layer, by index of a trunk layer.
        norm: prefix of the trunk's final norm.
        pattern: pattern of a hybrid trunk; None for a GPT.
    """

    layers: int
    stack: dict[int, str]
    norm: str
    pattern: str | None

    @classmethod
    def of(cls, reader: DistReader) -> "Template":
        """Create from a checkpoint. Raise ValueError if its trunk has no layers."""
        numbers = [int(key.split(".")[2]) for key in reader.keys if key.startswith("decoder.layers.")]
        if not numbers:
            raise ValueError(f"{reader.folder} has no transformer layer that MTP layers could be made from.")
        count = max(numbers) + 1
        if (pattern := pattern_of(reader)) is None:
            return cls(count, {count - 1: f"{SHARDED_TF_LAYER}."}, "decoder.final_layernorm.", None)
        pattern = pattern.split(Symbols.MTP_SEPARATOR)[0]
        stack = {layer: f"{SHARDED_STACK}.layers.{index}." for index, layer in enumerate(_last_of_kinds(pattern))}
        return cls(count, stack, "decoder.final_norm.", pattern)

    def with_depths(self, depths: int) -> str:
        """Return the pattern of the hybrid trunk with this many MTP layers."""
        assert self.pattern is not None
        kinds = without_stages(self.pattern)
        return Symbols.MTP_SEPARATOR.join([self.pattern, *["".join(kinds[layer] for layer in self.stack)] * depths])


def _last_of_kinds(pattern: str) -> list[int]:
    """Return indices of a trunk's last attention and last MLP or MoE, if they exist; else of its last layer."""
    kinds = without_stages(pattern)
    attention = Symbols.ATTENTION + Symbols.MLA + Symbols.DS_ATTENTION
    last = [max(map(kinds.rfind, group)) for group in (attention, Symbols.MLP + Symbols.MOE)]
    return [index for index in last if index >= 0] or [len(kinds) - 1]


def _depth(
    reader: DistReader, depth: int, template: Template, init: Init, fitted: Callable[[], Tensor] | None
) -> Iterator[Group]:
    """Return the tensors of the depth with this index, from 0. Raise ValueError if `random` has no rule for one."""
    weights = RandomWeights.of(reader.common()["args"], template.layers, init.seed)
    for key, pattern, shape in _keys(reader, depth, template):
        dtype = reader.dtype(pattern)
        if init.name == "random" and weights.draw(key, (1,) * len(shape)) is None:
            raise ValueError(f"--mtp-init random cannot draw '{key}'; give --mtp-init last-layer.")
        if init.name == "random" or ".enorm." in key or ".hnorm." in key:
            make: Callable[[], Any] = partial(weights.draw, key, shape)
        elif key.endswith("eh_proj.weight"):
            make = fitted or partial(_pass_hidden_state, shape)
        else:
            make = partial(reader.read, pattern)
        yield Group.single(key, shape, dtype, lambda make=make, dtype=dtype: make().to(dtype))  # type: ignore[misc]


def _keys(reader: DistReader, depth: int, template: Template) -> Iterator[tuple[str, str, Shape]]:
    """Return key, key of the matching trunk tensor, and shape of every tensor of an MTP layer."""
    mcore, norm = f"mtp.layers.{depth}.", template.norm
    copies = {norm: [f"{name}." for name in ("enorm", "hnorm", "final_layernorm")]}
    copies |= {f"decoder.layers.{layer}.": [inside] for layer, inside in template.stack.items()}
    for key in reader.keys:
        for prefix, names in copies.items():
            if key.startswith(prefix):
                for name in names:
                    yield f"{mcore}{name}{key.removeprefix(prefix)}", key, reader.shape(key)
    hidden = reader.shape(f"{norm}weight")[0]
    yield f"{mcore}eh_proj.weight", f"{norm}weight", (hidden, 2 * hidden)


def _pass_hidden_state(shape: Shape) -> Tensor:
    """[0 | I]"""
    return torch.eye(*shape).roll(shape[0], dims=1)


def changed_args(reader: DistReader, **changes: Any) -> dict[str, Any]:
    """Return the new checkpoint's common state with changed arguments."""
    common = reader.common()
    args = Namespace(**{**vars(common["args"]), **changes})
    kept: dict[str, Any] = {name: common[name] for name in ("checkpoint_version", "megatron_mtp") if name in common}
    return kept | {"args": args}


def plan_drafts(source: Path, size: int | None, data_path: str | None, file: Path | None) -> Conversion:
    """Plan `draft-vocab`: replace the draft vocabulary of a checkpoint.

    Args:
        source: the checkpoint.
        size, data_path: number of tokens, the most frequent ones of a corpus.
        file: alternatively, a file with one token id per line.

    Raises:
        ValueError: the checkpoint has no MTP layers, or the flags do not select existing tokens.
    """
    reader = DistReader(source)
    vocabulary, depths = reader.common()["args"].padded_vocab_size, StoredDepths.of(reader.keys).layers
    if not depths:
        raise ValueError(f"{source} has no MTP layers, which alone draft; attach-mtp adds some.")
    tokens, said = drafted_tokens(size, data_path, file, vocabulary)
    drafted_N = torch.tensor(tokens)
    made = [copied(reader, key) for key in reader.keys if key.startswith("mtp.") and key != DRAFT_VOCABULARY]
    made.append(Group.single(DRAFT_VOCABULARY, (len(tokens),), drafted_N.dtype, drafted_N.clone))
    record = {"depths": depths, "drafts": hashlib.sha256(drafted_N.numpy().tobytes()).hexdigest()}
    arguments = {"mtp_draft_vocab_size": None, "mtp_draft_vocab_file": None}
    notes = {"draft vocabulary": f"{len(tokens)} tokens, {said}"}
    return changed(reader, source, NewDrafts(depths, made, record, arguments, notes=notes))


def drafted_tokens(
    size: int | None, data_path: str | None, file: Path | None, vocabulary: int
) -> tuple[list[int], str]:
    """Return the ids of a draft vocabulary, ascending, and how they were chosen.

    Arguments and errors as in `plan_drafts`.
    """
    if file is not None:
        if size or data_path:
            raise ValueError(f"{FILE} is {file}, which lists the tokens; leave {SIZE} and --data-path out.")
        return tokens_of_file(file, vocabulary), f"those of {file}"
    if size is None or data_path is None:
        raise ValueError(f"tokens are counted in text or listed in a file; give {SIZE} and --data-path, or {FILE}.")
    if size > vocabulary:
        raise ValueError(f"{SIZE} is {size}, and the model has {vocabulary} tokens; give at most that.")
    check_data_prefixes([data_path], vocabulary)
    tokens, share = most_frequent([data_path], None, size, vocabulary)
    return tokens, f"the most frequent, {share:.1%} of {data_path}"
