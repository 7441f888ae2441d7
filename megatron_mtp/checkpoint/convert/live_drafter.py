"""Export and load the weights of a drafter in memory, under the names of its folder that engines load."""

import json
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from safetensors.torch import save_file
from torch import Tensor

from megatron_mtp.checkpoint.convert.drafter_form import DrafterForm, form_of, head_key
from megatron_mtp.checkpoint.convert.drafters import config_keys
from megatron_mtp.checkpoint.convert.live import LiveReader, write_weights
from megatron_mtp.checkpoint.convert.stored import stored_key
from megatron_mtp.checkpoint.hf.config import CONFIG
from megatron_mtp.common.files import written_beside
from megatron_mtp.megatron.checkpoint import DRAFTER
from megatron_mtp.megatron.patterns import symbols_of_a_layer
from megatron_mtp.model.drafter import DrafterBlock
from megatron_mtp.model.stock_drafter import SPECS
from megatron_mtp.spec.head import HeadSpec

Chunks = torch.nn.Module | list[torch.nn.Module]


@torch.no_grad()
def export_drafter_weights(model: Chunks, head: str | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole tensors of the drafter's folder on every rank; all ranks must iterate together.

    Args:
        model: this rank's model with an attached drafter, or its chunks; wrapped or not.
        head: name of the drafter; None for the only one.

    Raises:
        ValueError: the model has no such drafter, or has several and none is named.
    """
    return _weights(*_read(model, head))


def export_drafter(model: Chunks, folder: Path, head: str | None = None) -> None:
    """Write the drafter's folder, which vLLM, SGLang and `convert attach-drafter` load. All ranks must call this.

    Args:
        model: this rank's model with an attached drafter, or its chunks; wrapped or not.
        folder: folder that rank 0 writes; an existing one is kept until the new one is complete.
        head: name of the drafter; None for the only one.

    Raises:
        ValueError: the model has no such drafter, or has several and none is named.
    """
    form, reader = _read(model, head)
    weights = {name: tensor.contiguous().cpu() for name, tensor in _weights(form, reader)}
    if torch.distributed.get_rank() != 0:
        return
    keys = config_keys(_arguments(_chunks(model)[0]), form)
    keys["torch_dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    with written_beside(folder) as made:
        made.mkdir(parents=True)
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        (made / CONFIG).write_text(json.dumps(keys, indent=2) + "\n")


@torch.no_grad()
def load_drafter_weights(model: Chunks, weights: Iterable[tuple[str, Tensor]], head: str | None = None) -> int:
    """Copy tensors of a drafter's folder into a model's drafter. All ranks must call this, with whole tensors.

    Args:
        model: model with a drafter.
        weights: as in `export_drafter_weights`. Tensors that the folder repeats from the trunk, such as the output
            layer of an EAGLE-3 folder, are ignored.
        head: name of the drafter; None for the only one.

    Returns:
        The number of tensors.

    Raises:
        ValueError: the model has no such drafter, or a tensor is not from its folder or has another shape.
    """
    form, reader = _read(model, head)
    rules = form.rules(head_key(reader))
    own = [rule for rule in rules if all(piece.key.startswith(DRAFTER) for piece in rule.mcore)]
    shared = {one.name for rule in rules if rule not in own for one in rule.hf}
    sent = ((name, tensor) for name, tensor in weights if name not in shared)
    return write_weights(reader, own, sent, "the drafter's folder")


@torch.no_grad()
def _weights(form: DrafterForm, reader: LiveReader) -> Iterator[tuple[str, Tensor]]:
    for rule in form.rules(head_key(reader)):
        if rule.hf:
            pieces = [reader.read(stored_key(piece, reader), None, piece.shape) for piece in rule.mcore]
            yield from zip((one.name for one in rule.hf), rule.to_hf(pieces), strict=True)


def _read(model: Chunks, head: str | None) -> tuple[DrafterForm, LiveReader]:
    """Return the form of a drafter's folder, with layers numbered as in a folder, and the model's tensors."""
    chunks = _chunks(model)
    drafters: dict[str, tuple[str, HeadSpec]] = {}
    for chunk in chunks:
        own = {name: block.drafter for name, block in chunk.named_children() if isinstance(block, DrafterBlock)}
        own |= getattr(chunk, SPECS, {})  # specs on a stage without drafters
        drafters |= {name.removeprefix("drafter_"): (name, drafter) for name, drafter in own.items()}
    if not drafters:
        raise ValueError("the model has no drafter; give attach settings with one, MTPConfig(drafter=...).")
    if head not in drafters and (head is not None or len(drafters) > 1):
        raise ValueError(f"head is {head!r}, and the model has the drafters {', '.join(drafters)}; give one of them.")
    module, drafter = drafters[head or next(iter(drafters))]
    symbols = symbols_of_a_layer(getattr(chunks[0], "hybrid_layer_pattern", None))
    kind = replace(drafter, layers=tuple(number // symbols for number in drafter.layers))
    reader = LiveReader(chunks, None, {f"{module}.": DRAFTER})
    return form_of(kind, chunks[0].config.hidden_size, reader), reader


def _chunks(model: Chunks) -> list[Any]:
    return [unwrap_model(one) for one in (model if isinstance(model, list) else [model])]


def _arguments(model: Any) -> Namespace:
    """Return the Megatron arguments that a folder's config needs."""
    return Namespace(
        num_layers=model.config.num_layers,
        hybrid_layer_pattern=getattr(model, "hybrid_layer_pattern", None),
        hidden_size=model.config.hidden_size,
        max_position_embeddings=model.max_sequence_length,
    )
