"""Export and load weights under Hugging Face names for a model in memory, without a checkpoint.

The ranks' parts are read like the chunks of a checkpoint (`LiveReader`), so rules, form and bits are those of
mcore-to-hf.
"""

import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_mtp.checkpoint.convert.export_hf import Export
from megatron_mtp.checkpoint.convert.hf_form import form_of, hf_folder_form
from megatron_mtp.checkpoint.convert.stored import stored_key
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.hf import Shape
from megatron_mtp.megatron.checkpoint import EMBEDDING, OUTPUT
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.model.stock_drafter import SPECS

_HERE = Path("the model")


@torch.no_grad()
def export_hf_weights(
    model: torch.nn.Module | list[torch.nn.Module],
    args: Namespace | None = None,
    like: Path | None = None,
    family: str | None = None,
    only_mtp: bool = False,
    bucket_bytes: int = 2**30,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole tensors as mcore-to-hf would write them, on every rank and on the model's device.

    All ranks must iterate together. The tensors of a bucket are gathered from all ranks before the first of them is
    yielded, so a rank holds one bucket, and what a layer needs, in addition to the model.

    Args:
        model: this rank's model chunks, wrapped or not; any layout.
        args: Megatron's arguments, from which the form is derived as in mcore-to-hf; None if `like` is given.
        like: Hugging Face folder of the same model, such as the imported one, whose names are used.
        family: `model_type` of the form; None for the one that fits.
        only_mtp: whether to yield only what an engine's draft module loads: MTP layers, embedding and output layer.
        bucket_bytes: size of a bucket; a larger tensor is a bucket of its own.
        dtype: dtype of the tensors, except of those that stay in float32; None for the model's.

    Raises:
        ValueError: no family supports the model, or neither arguments nor a folder are given.
    """
    reader = LiveReader(model if isinstance(model, list) else [model], args)
    if args is None and like is None:
        raise ValueError("neither args nor like was given; give Megatron's arguments, or a folder of the same model.")
    form = hf_folder_form(like) if args is None and like is not None else form_of(reader, like, family)
    export, options = Export.of(reader, _HERE, form), Options(dtype=dtype)
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for rule in export.rules:
        if only_mtp and not any(one.key.startswith("mtp.") or one.key in (EMBEDDING, OUTPUT) for one in rule.mcore):
            continue
        group = export.group(rule, options)
        made = zip(group.entries, group.make(), strict=True)
        tensors = [(entry.keys[0], value.to(reader.device, entry.dtype).contiguous()) for entry, value in made]
        size = sum(tensor.nbytes for _, tensor in tensors)
        if bucket and held + size > bucket_bytes:
            yield from _emptied(bucket)
            held = 0
        bucket += tensors
        held += size
        del made, tensors
    yield from _emptied(bucket)


@torch.no_grad()
def load_hf_weights(
    model: torch.nn.Module, weights: Iterable[tuple[str, Tensor]], source: Path | None = None, like: Path | None = None
) -> int:
    """Copy tensors with Hugging Face names into a model. All ranks must call it; each copies its own part.

    Args:
        model: the whole model on this pipeline stage.
        weights: whole tensors, such as those of `export_hf_weights`. If only some are given, only these change.
        source: checkpoint that the model was loaded from, which determines the tensor names.
        like: Hugging Face folder of the same model that determines the names instead.

    Returns:
        The number of tensors.

    Raises:
        ValueError: a tensor does not belong to this model, has another shape, or lacks those that form one weight with
            it. Earlier tensors have been copied.
    """
    if like is None and source is None:
        raise ValueError("neither source nor like was given; give the model's checkpoint, or a folder like it.")
    reader = LiveReader([model], None)
    form = hf_folder_form(like) if like is not None else form_of(source or _HERE)
    return write_weights(reader, Export.of(reader, _HERE, form).rules, weights, f"a folder like {like or source}")


def write_weights(
    reader: "LiveReader", rules: Iterable[Rule], weights: Iterable[tuple[str, Tensor]], folder: str
) -> int:
    """Copy whole tensors with a folder's names into the model of `reader`, by that folder's rules.

    Args:
        folder: name of the folder in messages.

    Returns:
        The number of tensors.

    Raises:
        ValueError: as in `load_hf_weights`.
    """
    rule_of = {tensor.name: rule for rule in rules for tensor in rule.hf}
    waiting: dict[str, Tensor] = {}
    count = 0
    for name, value in weights:
        count += 1
        rule = rule_of.get(name)
        if rule is None:
            raise ValueError(f"'{name}' is not a tensor of this model; send those of {folder}.")
        shape = next(tensor.shape for tensor in rule.hf if tensor.name == name)
        if shape is not None and shape != tuple(value.shape):
            raise ValueError(f"'{name}' has the shape {tuple(value.shape)}, and the model's is {shape}.")
        waiting[name] = value
        if all(tensor.name in waiting for tensor in rule.hf):
            made = rule.to_mcore([waiting.pop(tensor.name) for tensor in rule.hf])
            for piece, own in zip(rule.mcore, made, strict=True):
                reader.write(stored_key(piece, reader), piece.offset, own)
    if waiting:
        name = next(iter(waiting))
        raise ValueError(f"'{name}' came without the tensors that make one weight with it; send them too.")
    return count


def _emptied(bucket: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the pairs in order, and drop each one."""
    bucket.reverse()
    while bucket:
        yield bucket.pop()


class LiveReader(DistReader):
    """Reads a model's tensors from the ranks that hold them. All ranks must call `read` together.

    Args:
        chunks: this rank's model chunks, wrapped or not.
        args: Megatron's arguments; None for none.
        renamed: replacements of key prefixes.
    """

    def __init__(
        self, chunks: list[torch.nn.Module], args: Namespace | None, renamed: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.folder, self._args = _HERE, args
        entries: dict[str, Any] = {str(i): unwrap_model(chunk).sharded_state_dict() for i, chunk in enumerate(chunks)}
        apply_factories(entries)
        attached = {f"{name}." for chunk in chunks for name in getattr(unwrap_model(chunk), SPECS, {})}
        left_out = tuple(attached - renamed.keys())  # drafters, which are exported to their own folders
        self._held: dict[tuple[str, Shape], Tensor] = {}
        described: list[tuple[str, Shape, Shape, Shape, torch.dtype]] = []
        for entry in nested_values(entries):
            if isinstance(entry, ShardedTensor) and not entry.key.startswith(left_out):
                assert entry.data is not None
                for given, own in renamed.items():
                    entry.key = re.sub(f"^{re.escape(given)}", own, entry.key)
                held, offset = entry.data.detach()[(None,) * entry.prepend_axis_num], tuple(entry.global_offset)
                self._held[entry.key, offset] = held
                described.append((entry.key, tuple(entry.global_shape), offset, tuple(held.shape), held.dtype))
        self.device = next(iter(self._held.values())).device
        ranks = [described]
        if torch.distributed.is_initialized():
            ranks = [[]] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(ranks, described)
        self._owner: dict[tuple[str, Shape], int] = {}
        catalogue: dict[str, TensorStorageMetadata] = {}  # checkpoint metadata; of equal chunks, the first rank's
        for rank, chunks_of_rank in enumerate(ranks):
            for key, whole, offset, shape, dtype in chunks_of_rank:
                if (key, offset) in self._owner:
                    continue
                self._owner[key, offset] = rank
                if key not in catalogue:
                    catalogue[key] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(whole), [])
                catalogue[key].chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)))
        self._index(catalogue)

    @property
    def home(self) -> Path:
        """None: there is no folder for a model in memory."""
        return _HERE

    def _slab(self, key: str, offset: Shape, shape: Shape) -> Tensor:
        out = torch.empty(shape, dtype=self.dtype(key), device=self.device)
        wanted = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
        for item in create_read_items_for_chunk_list(key, self._tensors[key], [wanted]):
            assert item.storage_index.offset is not None
            place = key, tuple(item.storage_index.offset)
            target = narrow_tensor_by_index(out, item.dest_offsets, item.lengths)
            part = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
            if place in self._held:
                part.copy_(narrow_tensor_by_index(self._held[place], item.storage_offsets, item.lengths))
            if torch.distributed.is_initialized():
                torch.distributed.broadcast(part, self._owner[place])
            if part is not target:
                target.copy_(part)
        return out

    def write(self, key: str, offset: Shape | None, value: Tensor) -> None:
        """Copy this rank's parts of a tensor, or of a slab of it."""
        stacked, layer = self._layers.get(key, (key, None))
        low = offset or (0,) * value.dim()
        if layer is not None:
            low, value = (layer, *low), value.unsqueeze(0)
        for (name, start), held in self._held.items():
            if name != stacked:
                continue
            spans = [
                (max(a, b), min(a + m, b + n)) for a, m, b, n in zip(low, value.shape, start, held.shape, strict=True)
            ]
            if all(first < end for first, end in spans):
                target, given = (
                    tuple(slice(first - at, end - at) for (first, end), at in zip(spans, origin, strict=True))
                    for origin in (start, low)
                )
                held[target].copy_(value[given])

    def state(self) -> dict[str, Any]:
        """State other than tensors: the arguments."""
        return {"args": self._args or Namespace()}
