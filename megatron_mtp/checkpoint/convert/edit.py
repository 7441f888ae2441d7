"""attach-mtp, drop-mtp and draft-vocab: a Megatron checkpoint with other depths; the trunk is copied unchanged.

`last-layer` makes each depth a copy of the trunk's last layer and final norm, with input norms of 1 and
eh_proj = [0 | I], which passes the hidden state on. `fitted` is the same with the eh_proj of fitting.py. `random` draws
each depth as in a new model. A depth of a hybrid is a stack of the trunk's last attention and its last MLP or MoE:

    GEGEGE*E    becomes    GEGEGE*E/*E    with the weights of layers 6 and 7 in the depth

With a draft vocabulary the head of the depths has one row for each token that they may draft, so a draft of few tokens
costs little. The generated text is not restricted: the trunk verifies with the whole vocabulary.
"""

import hashlib
import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

import torch
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from torch import Tensor

from megatron_mtp.checkpoint.convert.export_hf import kept_origin
from megatron_mtp.checkpoint.convert.fitting import Fit, FitData
from megatron_mtp.checkpoint.convert.import_hf import SHARES, UNROLL
from megatron_mtp.checkpoint.convert.stream import (
    Converted,
    Group,
    Options,
    PartialFolder,
    keep_files,
    write_checkpoint,
)
from megatron_mtp.checkpoint.families import CARRIED, family_of
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.checkpoint.mcore.iterations import HF_FILES, ORIGIN
from megatron_mtp.checkpoint.mcore.reader import DistReader, StoredDepths, depth_of
from megatron_mtp.checkpoint.mcore.writer import Chunk, write_chunk
from megatron_mtp.data.checks import check_data_prefixes
from megatron_mtp.data.frequent_tokens import FILE, SIZE, most_frequent, tokens_of_file
from megatron_mtp.model.arguments import check_trainable
from megatron_mtp.model.draft_vocabulary import DRAFT_VOCABULARY, DRAFTER
from megatron_mtp.model.mtp import SHARDED_TF_LAYER
from megatron_mtp.model.pattern import SHARDED_STACK, without_stages
from megatron_mtp.model.random_weights import RandomWeights

ONE_PASS: dict[str, Any] = {UNROLL: None, SHARES: False}
"""Arguments of depths that are no repeated layer."""


@dataclass(frozen=True)
class Init:
    """How the weights of new depths are made.

    Attributes:
        name: "last-layer", "fitted" or "random".
        seed: of "random".
        data: of "fitted".
    """

    name: str
    seed: int = 0
    data: FitData | None = None


@dataclass(frozen=True)
class Source:
    """A tensor of the new checkpoint, and the function that makes it when it is written."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Size in memory, bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def write(self, stream: IO[bytes], file: str) -> list[Chunk]:
        """Make the tensor and append it to an open file of this name."""
        return [write_chunk(stream, file, self.key, self.shape, (0,) * len(self.shape), self.make())]


@dataclass(frozen=True)
class Change:
    """A checkpoint with other depths, before any of it is written.

    Attributes:
        reader: the checkpoint that is copied.
        trunk, made: tensors of the new checkpoint: the trunk's, and the depths'.
        common: what the new checkpoint stores beside tensors.
        plan: everything except the source that determines the output.
        before, depths: number of depths in the old and in the new checkpoint.
        dropped: names of carried tensors that are left out.
        fitted: makes eh_proj from text once, and returns it again; None where no weights are fitted.
    """

    reader: DistReader
    trunk: list[Source]
    made: list[Source]
    common: dict[str, Any]
    plan: dict[str, Any]
    before: int
    depths: int
    dropped: frozenset[str] = frozenset()
    fitted: Callable[[], Tensor] | None = None

    @property
    def left_out(self) -> list[str]:
        """Keys of the old checkpoint that the new one lacks."""
        new = {entry.key for entry in (*self.trunk, *self.made)}
        return [key for key in self.reader.keys if key not in new]


def attach_depths(source: Path, target: Path, depths: int, init: Init, options: Options) -> Converted:
    """Copy a checkpoint that has no depths, and add some.

    Args:
        source: the checkpoint.
        target: the checkpoint to make.
        depths: number of depths to add.
        init: how their weights are made.
        options: number of workers, and whether to resume.

    Raises:
        ValueError: as `plan_attaching`, or the target is taken, or there is no text to fit on.
    """
    return write_change(plan_attaching(source, depths, init, options.quiet), source, target, options)


def drop_depths(source: Path, target: Path, keep: int, options: Options) -> Converted:
    """Copy a checkpoint with the first `keep` of its depths.

    Raises:
        ValueError: as `plan_dropping`, or the target is taken.
    """
    return write_change(plan_dropping(source, keep), source, target, options)


def plan_attaching(source: Path, depths: int, init: Init, quiet: bool = False) -> Change:
    """What `attach_depths` will write, from names and shapes alone.

    Args:
        source: the checkpoint.
        depths: number of depths to add.
        init: how their weights are made.
        quiet: whether to show no progress bar when they are fitted.

    Raises:
        ValueError: Megatron cannot run the model, the checkpoint has depths already, it has no layer to copy, or
            `random` cannot draw the weights of its last layer.
    """
    reader = DistReader(source)
    check_trainable(reader.common()["args"], str(source))
    if any(key.startswith("mtp.") for key in reader.keys):
        raise ValueError(f"{source} has MTP depths already; drop-mtp makes a checkpoint without them.")
    template = Template.of(reader)
    changes: dict[str, Any] = {} if template.pattern is None else {"hybrid_layer_pattern": template.with_depths(depths)}
    changes |= {
        "drafter": None,
        "mtp_num_layers": depths,
        "mtp_use_repeated_layer": False,
        "mtp_architecture": "sequential",
        **ONE_PASS,
    }
    args = changed_args(reader, **changes)
    fitted = None
    if init.data is not None:
        fit = Fit(reader, args["args"], next(iter(template.stack)), init.data, init.seed)
        fitted = cache(partial(fit.projection, quiet))
    made = [entry for depth in range(depths) for entry in _depth(reader, depth, template, init, fitted)]
    plan = {"depths": depths, "init": init.name, "seed": init.seed} | (asdict(init.data) if init.data else {})
    return Change(reader, trunk_of(reader), made, args, plan, before=0, depths=depths, fitted=fitted)


def plan_dropping(source: Path, keep: int) -> Change:
    """What `drop_depths` will write, from names and shapes alone.

    Raises:
        ValueError: the checkpoint has no depths, or fewer than `keep` + 1.
    """
    reader = DistReader(source)
    depths = StoredDepths.of(reader.keys).layers
    if not depths:
        raise ValueError(f"{source} has no MTP depths; there is nothing to drop.")
    if not 0 <= keep < depths:
        raise ValueError(f"--keep is {keep}, but {source} has {depths} MTP depth(s); keep 0 to {depths - 1} of them.")
    kept = [
        copied(reader, key)
        for key in reader.keys
        if ((depth := depth_of(key)) is not None and depth < keep) or (key == DRAFT_VOCABULARY and keep)
    ]
    args = changed_args(reader, mtp_num_layers=keep or None, **ONE_PASS, **_pattern(reader, keep))
    dropped = _carried_parts(reader, source, keep)
    return Change(reader, trunk_of(reader, dropped), kept, args, {"depths": keep}, depths, keep, dropped)


def _pattern(reader: DistReader, keep: int) -> dict[str, str]:
    """The changed argument of a hybrid model: its pattern names the layers of every depth behind a slash."""
    pattern = getattr(reader.common()["args"], "hybrid_layer_pattern", None)
    return {} if pattern is None else {"hybrid_layer_pattern": "/".join(pattern.split("/")[: 1 + keep])}


def trunk_of(reader: DistReader, dropped: frozenset[str] = frozenset()) -> list[Source]:
    """All tensors except the depths', a drafter's and the dropped carried ones."""
    drafts = "mtp.", DRAFTER
    keys = (key for key in reader.keys if not key.startswith(drafts) and key.removeprefix(CARRIED) not in dropped)
    return [copied(reader, key) for key in keys]


def copied(reader: DistReader, key: str) -> Source:
    """A tensor as it is."""
    return Source(key, tuple(reader.shape(key)), reader.dtype(key), partial(reader.read, key))


def _carried_parts(reader: DistReader, source: Path, keep: int) -> frozenset[str]:
    """Tensors of depths after the first `keep` that Megatron has no module for: names in the Hugging Face folder.

    Raises:
        ValueError: there are carried tensors, but no config that describes them.
    """
    carried = [key.removeprefix(CARRIED) for key in reader.keys if key.startswith(CARRIED)]
    if not carried:
        return frozenset()
    config = HFConfig.read(source / HF_FILES)
    stored = family_of(config).depths
    if stored is None:
        return frozenset()
    return frozenset(name for name in carried if (depth := stored.depth_of(config, name)) is not None and depth >= keep)


def write_change(change: Change, source: Path, target: Path, options: Options) -> Converted:
    """Write the new checkpoint."""
    reader = change.reader
    folder = PartialFolder(target, source, {"source": reader.fingerprint(), **change.plan}, options.resume)
    if change.fitted is not None:
        change.fitted()  # here, not in a worker, which Ctrl-C does not stop
    files = {"__trunk_0.distcp": change.trunk, **({"__depths_0.distcp": change.made} if change.made else {})}
    groups = {name: [Group(entry.size, entry.write) for entry in entries] for name, entries in files.items()}
    chunks = write_checkpoint(folder, groups, change.common, options)
    keep_files(reader.folder.parent, folder.path)
    correct_origin(folder.path / HF_FILES, change.depths, change.dropped)
    folder.finish()
    return Converted("Megatron", change.depths, len(chunks), sum(chunk.length for chunk in chunks))


def correct_origin(
    kept: Path, depths: int, dropped: frozenset[str] = frozenset(), added: frozenset[str] = frozenset()
) -> None:
    """Correct the record of the tensors in the kept files: number of depths, dropped tensors, added forms."""
    origin = kept_origin(kept)
    if not origin:
        return
    layout = origin.get("layout", {})
    carried = [name for name in layout.get("carried", []) if name not in dropped]
    changed = {"depths": depths, "carried": carried, "features": sorted({*layout.get("features", []), *added})}
    (kept / ORIGIN).write_text(json.dumps({**origin, "layout": {**layout, **changed}}, indent=2) + "\n")


@dataclass(frozen=True)
class Template:
    """The layers of a trunk that a new depth is made like.

    Attributes:
        layers: number of the trunk's layers.
        stack: by index of a layer of the trunk, the prefix of its copy inside a depth.
        norm: prefix of the trunk's final norm.
        pattern: of a hybrid trunk; None for a GPT's.
    """

    layers: int
    stack: dict[int, str]
    norm: str
    pattern: str | None

    @classmethod
    def of(cls, reader: DistReader) -> "Template":
        """Raises ValueError if the trunk of the checkpoint has no layers."""
        numbers = [int(key.split(".")[2]) for key in reader.keys if key.startswith("decoder.layers.")]
        if not numbers:
            raise ValueError(f"{reader.folder} has no transformer layer that depths could be made from.")
        count = max(numbers) + 1
        pattern = getattr(reader.common()["args"], "hybrid_layer_pattern", None)
        if pattern is None:
            return cls(count, {count - 1: f"{SHARDED_TF_LAYER}."}, "decoder.final_layernorm.", None)
        pattern = pattern.split(Symbols.MTP_SEPARATOR)[0]
        stack = {layer: f"{SHARDED_STACK}.layers.{index}." for index, layer in enumerate(_last_of_kinds(pattern))}
        return cls(count, stack, "decoder.final_norm.", pattern)

    def with_depths(self, depths: int) -> str:
        """The pattern of the hybrid trunk with so many depths."""
        assert self.pattern is not None
        kinds = without_stages(self.pattern)
        return Symbols.MTP_SEPARATOR.join([self.pattern, *["".join(kinds[layer] for layer in self.stack)] * depths])


def _last_of_kinds(pattern: str) -> list[int]:
    """Indices of a trunk's last attention and its last MLP or MoE, those that exist; else of its last layer."""
    kinds = without_stages(pattern)
    attention = Symbols.ATTENTION + Symbols.MLA + Symbols.DS_ATTENTION
    last = [max(map(kinds.rfind, group)) for group in (attention, Symbols.MLP + Symbols.MOE)]
    return [index for index in last if index >= 0] or [len(kinds) - 1]


def _depth(
    reader: DistReader, depth: int, template: Template, init: Init, fitted: Callable[[], Tensor] | None
) -> Iterator[Source]:
    """The tensors of the depth of this index, from 0.

    Raises:
        ValueError: `random` has no rule for a tensor of the trunk's layers.
    """
    weights = RandomWeights.of(reader.common()["args"], template.layers, init.seed)
    for key, pattern, shape in _keys(reader, depth, template):
        dtype = reader.dtype(pattern)
        if init.name == "random" and weights.draw(key, (1,) * len(shape)) is None:
            raise ValueError(f"--mtp-init random cannot draw '{key}'; give --mtp-init last-layer.")
        if init.name == "random" or ".enorm." in key or ".hnorm." in key:
            make = partial(_drawn, weights, key, shape, dtype)
        elif key.endswith("eh_proj.weight"):
            make = partial(_in_type, fitted or partial(_pass_hidden_state, shape), dtype)
        else:
            make = partial(reader.read, pattern)
        yield Source(key, shape, dtype, make)


def _keys(reader: DistReader, depth: int, template: Template) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Key, key of the corresponding tensor of the trunk, and shape of every tensor of a depth."""
    mcore, norm = f"mtp.layers.{depth}.", template.norm
    copies = {f"decoder.layers.{layer}.": f"{mcore}{inside}" for layer, inside in template.stack.items()}
    for key in reader.keys:
        if key.startswith(norm):
            for name in ("enorm", "hnorm", "final_layernorm"):
                yield f"{mcore}{name}.{key.removeprefix(norm)}", key, tuple(reader.shape(key))
        for layer, copied in copies.items():
            if key.startswith(layer):
                yield f"{copied}{key.removeprefix(layer)}", key, tuple(reader.shape(key))
    hidden = reader.shape(f"{norm}weight")[0]
    yield f"{mcore}eh_proj.weight", f"{norm}weight", (hidden, 2 * hidden)


def _drawn(weights: RandomWeights, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    drawn = weights.draw(key, shape)
    assert drawn is not None
    return drawn.to(dtype)


def _in_type(make: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
    return make().to(dtype)


def _pass_hidden_state(shape: tuple[int, ...]) -> Tensor:
    """[0 | I]"""
    hidden, _ = shape
    return torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1)


def changed_args(reader: DistReader, **changes: Any) -> dict[str, Any]:
    """What the new checkpoint stores beside tensors, with changed arguments."""
    common = reader.common()
    args = Namespace(**{**vars(common["args"]), **changes})
    kept: dict[str, Any] = {name: common[name] for name in ("checkpoint_version", "megatron_mtp") if name in common}
    return kept | {"args": args}


@dataclass(frozen=True)
class DraftTokens:
    """Which tokens the depths may draft: the most frequent ones of a corpus, or those in a file.

    Attributes:
        size: how many of the corpus.
        data_path: prefix of the corpus's .bin and .idx.
        file: a token id on every line, in place of the two others.
    """

    size: int | None = None
    data_path: str | None = None
    file: Path | None = None

    def chosen(self, vocabulary: int) -> tuple[list[int], str]:
        """Ids below `vocabulary` in ascending order, and what they are, for people.

        Raises:
            ValueError: neither size and corpus nor a file, or both; one is unreadable; fewer tokens in the vocabulary.
        """
        if self.file is not None:
            if self.size or self.data_path:
                raise ValueError(
                    f"{FILE} is {self.file}, which lists the tokens itself; leave {SIZE} and --data-path out."
                )
            return tokens_of_file(self.file, vocabulary), f"those of {self.file}"
        if self.size is None or self.data_path is None:
            raise ValueError(f"tokens are counted in text or listed in a file; give {SIZE} and --data-path, or {FILE}.")
        if self.size > vocabulary:
            raise ValueError(f"{SIZE} is {self.size}, and the model has {vocabulary} tokens; give at most that.")
        check_data_prefixes([self.data_path], vocabulary)
        tokens, share = most_frequent([self.data_path], None, self.size, vocabulary)
        return tokens, f"the most frequent, {share:.1%} of {self.data_path}"


def plan_drafts(source: Path, wanted: DraftTokens) -> tuple[Change, str]:
    """The checkpoint with this draft vocabulary in place of its own, and what its tokens are, for people.

    Raises:
        ValueError: the checkpoint has no depths, or as `DraftTokens.chosen`.
    """
    reader = DistReader(source)
    depths = StoredDepths.of(reader.keys).layers
    if not depths:
        raise ValueError(f"{source} has no MTP depths, which alone draft; attach-mtp adds some.")
    tokens, said = wanted.chosen(reader.common()["args"].padded_vocab_size)
    drafted_N = torch.tensor(tokens)
    made = [copied(reader, key) for key in reader.keys if key.startswith("mtp.") and key != DRAFT_VOCABULARY]
    made.append(Source(DRAFT_VOCABULARY, (len(tokens),), drafted_N.dtype, partial(Tensor.clone, drafted_N)))
    common = changed_args(reader, mtp_draft_vocab_size=None, mtp_draft_vocab_file=None)
    plan = {"depths": depths, "drafts": hashlib.sha256(drafted_N.numpy().tobytes()).hexdigest()}
    return Change(reader, trunk_of(reader), made, common, plan, depths, depths), f"{len(tokens)} tokens, {said}"
