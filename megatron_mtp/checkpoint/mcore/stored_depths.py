"""The MTP layers that a checkpoint holds, counted by the names of its tensors: every count of the package is this one.

A name such as `mtp.layers.1.eh_proj.weight` belongs to the layer of index 1. Only the sequential architecture has
`eh_proj`, which merges the embedding into the hidden state; parallel heads do without.
"""

import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_mtp.checkpoint.mcore.tensors import DistReader
from megatron_mtp.model.draft_vocabulary import DRAFT_VOCABULARY
from megatron_mtp.patches.saving import FORMAT
from megatron_mtp.patches.unpickling import read_catalogue

_MTP_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.(\w+)")


@dataclass(frozen=True)
class StoredDepths:
    """The MTP layers of a checkpoint.

    Attributes:
        layers: number of physical layers; one if a repeated layer serves all depths.
        sequential: whether the architecture is the sequential one; None without layers.
    """

    layers: int
    sequential: bool | None

    @classmethod
    def of(cls, keys: Iterable[str]) -> "StoredDepths":
        """Count the layers among the names of a checkpoint's tensors."""
        found = [match.groups() for key in keys if (match := _MTP_LAYER.match(key))]
        layers = len({index for index, _ in found})
        return cls(layers, any(name == "eh_proj" for _, name in found) if layers else None)


def depth_of(key: str) -> int | None:
    """Index (from 0) of the MTP layer that a tensor belongs to; None for any other tensor."""
    match = _MTP_LAYER.match(key)
    return None if match is None else int(match.group(1))


def stored_depths(folder: Path) -> StoredDepths | None:
    """The MTP layers of the checkpoint in an iteration's folder; None if its format has no list of tensors."""
    if (folder / FORMAT).is_file():
        return StoredDepths.of(read_catalogue(folder).state_dict_metadata)
    older = older_tensors(folder)
    return None if older is None else StoredDepths.of(older)


def older_tensors(folder: Path) -> dict[str, Tensor] | None:
    """The tensors of an iteration saved by `--ckpt-format torch`, by name, of all ranks; None if it was not."""
    found: dict[str, Tensor] = {}
    files = sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))
    for file in files:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        for part, tensors in state.items():
            if part.startswith("model"):
                found |= tensors
    return found if files else None


def absent_layers(folder: Path, layers: int, sequential: bool, init: str | None) -> tuple[int, ...]:
    """Indices of the MTP layers that the checkpoint lacks, so that `--mtp-init` must make them.

    Args:
        folder: of an iteration.
        layers: physical MTP layers of the model to be built.
        sequential: whether the model's architecture is the sequential one.
        init: the value of `--mtp-init`; None if it was not given.

    Raises:
        ValueError: the checkpoint has other depths than the model, and `init` is None where some are missing.
    """
    stored = stored_depths(folder)
    if stored is None:
        return ()
    if stored.layers > layers:
        raise ValueError(
            f"the checkpoint {folder} (--load) has {stored.layers} MTP layers, and the model is to have {layers}; give "
            f"--mtp-num-layers {stored.layers} without --mtp-use-repeated-layer, or take the others out with "
            f"megatron-mtp convert drop-mtp --keep {layers}."
        )
    if stored.layers and stored.sequential != sequential:
        trained = "sequential" if stored.sequential else "parallel"
        raise ValueError(
            f"--mtp-architecture does not fit the checkpoint {folder} (--load), whose depths are {trained}; give "
            f"--mtp-architecture {trained}."
        )
    absent = tuple(range(stored.layers, layers))
    if absent and init is None:
        has = f"has {stored.layers} MTP layer(s)" if stored.layers else "has no MTP weights"
        repeats = ""
        if stored.layers == 1 and sequential:
            repeats = ", or give --mtp-use-repeated-layer for one layer in all depths"
        raise ValueError(
            f"--mtp-num-layers asks for {layers} MTP layer(s), but the checkpoint {folder} (--load) {has}; say with "
            f"--mtp-init random or --mtp-init last-layer how to initialise the missing ones{repeats}."
        )
    return absent


def stored_draft_vocabulary(folder: Path) -> Tensor | None:
    """Ids [N] of the tokens that the depths of the checkpoint in an iteration's folder draft.

    Returns None if they draft all tokens, or if the format has no list of tensors.
    """
    if not (folder / FORMAT).is_file():
        return (older_tensors(folder) or {}).get(DRAFT_VOCABULARY)
    reader = DistReader(folder)
    return reader.read(DRAFT_VOCABULARY) if reader.holds(DRAFT_VOCABULARY) else None
