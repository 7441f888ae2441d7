"""The MTP layers that a checkpoint holds: counted by their names, compared with what a run asks for."""

import re
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megatron_mtp.checkpoint.mcore.iterations import FORMAT
from megatron_mtp.checkpoint.mcore.tensors import DistReader
from megatron_mtp.model.draft_vocabulary import DRAFT_VOCABULARY
from megatron_mtp.patches.unpickling import read_catalogue

_MTP_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.(\w+)")


@dataclass(frozen=True)
class StoredDepths:
    """The MTP layers of a checkpoint.

    Attributes:
        layers: physical layers; one where a repeated layer serves all depths.
        chained: whether they merge embeddings (the sequential architecture); None without layers.
    """

    layers: int
    chained: bool | None


def stored_depths(folder: Path) -> StoredDepths | None:
    """The MTP layers of the checkpoint in an iteration's folder; None where it is not a distributed checkpoint."""
    if not (folder / FORMAT).is_file():
        return None
    found = [match.groups() for key in read_catalogue(folder).state_dict_metadata if (match := _MTP_LAYER.match(key))]
    layers = len({index for index, _ in found})
    return StoredDepths(layers, any(name == "eh_proj" for _, name in found) if layers else None)


def absent_layers(folder: Path, layers: int, chained: bool, init: str | None) -> tuple[int, ...]:
    """Indices of the MTP layers that the checkpoint lacks, and that `--mtp-init` must make.

    Args:
        folder: of one iteration.
        layers: physical MTP layers of the model to be built.
        chained: whether its architecture is the sequential one.
        init: what `--mtp-init` says.

    Raises:
        ValueError: the checkpoint has other depths than the model, and nothing says how to make the missing ones.
    """
    stored = stored_depths(folder)
    if stored is None:
        return ()
    if stored.layers > layers:
        raise ValueError(
            f"--mtp-num-layers asks for {layers} MTP layer(s), but the checkpoint {folder} (--load) has "
            f"{stored.layers}; give --mtp-num-layers {stored.layers}, or --mtp-use-repeated-layer if it was trained so."
        )
    if stored.layers and stored.chained != chained:
        trained = "sequential" if stored.chained else "parallel"
        raise ValueError(
            f"--mtp-architecture does not fit the checkpoint {folder} (--load), whose depths are {trained}; give "
            f"--mtp-architecture {trained}."
        )
    absent = tuple(range(stored.layers, layers))
    if absent and init is None:
        has = f"has {stored.layers} MTP layer(s)" if stored.layers else "has no MTP weights"
        raise ValueError(
            f"--mtp-num-layers asks for {layers} MTP layer(s), but the checkpoint {folder} (--load) {has}; say with "
            "--mtp-init random or --mtp-init last-layer how to initialise the missing ones."
        )
    return absent


def stored_draft_vocabulary(folder: Path) -> Tensor | None:
    """The tokens [N] that the depths of the checkpoint in an iteration's folder draft; None where they draft all, or
    the checkpoint is no distributed one."""
    if not (folder / FORMAT).is_file():
        return None
    reader = DistReader(folder)
    return reader.read(DRAFT_VOCABULARY) if reader.holds(DRAFT_VOCABULARY) else None
