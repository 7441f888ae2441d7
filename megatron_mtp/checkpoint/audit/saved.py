"""A Megatron checkpoint as saved by any program: Megatron-LM, Megatron-Bridge, ms-swift, this package.

The model's arguments are in the checkpoint itself or in Megatron-Bridge's `run_config.yaml`; without them, the tensors
are described only by their keys.
"""

from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, override

import torch
import yaml

from megatron_mtp.checkpoint.audit.side import HFSide, Opened, Parts, StoredTensor, is_count
from megatron_mtp.checkpoint.hf.config import CONFIG, HFConfig, read_json
from megatron_mtp.megatron.checkpoint import EMBEDDING, HF_FILES, OUTPUT, RELEASE
from megatron_mtp.megatron.checkpoint.catalogue import read_catalogue
from megatron_mtp.megatron.checkpoint.iterations import another, named_iteration
from megatron_mtp.megatron.checkpoint.reader import DistReader, check_files
from megatron_mtp.spec.head import only_drafter

if TYPE_CHECKING:
    from megatron_mtp.checkpoint.convert.drafter_form import DrafterForm

NESTED = "language_model."
"""Key prefixes of the text model in checkpoints of multimodal models; left out of `tensors`."""
RUN_CONFIG = "run_config.yaml"
FROM_CHECKPOINT = "the checkpoint"


@dataclass
class MegatronSide(Opened):
    """A distributed checkpoint of Megatron.

    Attributes:
        reader: its reader; None if not even the list of its tensors can be read.
        args: the model's arguments; None if it stores none.
        args_from: where the arguments were read from.
        kept: the `config.json` that a conversion stored with it; empty if there is none.
        iteration: number of its iteration.
    """

    reader: DistReader | None = None
    args: Namespace | None = None
    args_from: str = ""
    kept: Mapping[str, Any] = field(default_factory=dict)
    iteration: int | None = None
    form = "Megatron distributed checkpoint"

    def argument(self, *names: str) -> Any:
        """Return the first of these arguments that is set."""
        return next((value for name in names if (value := getattr(self.args, name, None)) is not None), None)

    @property
    def pattern(self) -> str | None:
        """Layers of a hybrid model (`--hybrid-layer-pattern`); None for a GPT."""
        found = self.argument("hybrid_layer_pattern", "hybrid_override_pattern")
        return found if isinstance(found, str) else None

    @property
    def layers(self) -> int | None:
        """Number of trunk layers, from the arguments, or from the config of a model that Megatron cannot run."""
        runs = self.runs or self.args is None
        found = self.argument("num_layers") if runs else self.kept.get("num_hidden_layers")
        return found if is_count(found) else None

    @property
    def said_depths(self) -> int | None:
        """Number of MTP layers in the arguments; a repeated layer serves them all."""
        found = 0 if self.args is not None and only_drafter(self.args) else self.argument("mtp_num_layers")
        if not is_count(found):
            return None if self.args is None else 0
        return min(found, 1) if self.argument("mtp_use_repeated_layer") else found

    @property
    def tied(self) -> bool | None:
        """Whether embedding and output layer are tied; None if no argument specifies it."""
        shares = self.argument("share_embeddings_and_output_weights")  # Megatron-Bridge's name
        unties = self.argument("untie_embeddings_and_output_weights")
        return shares if shares is not None else None if unties is None else not unties

    @property
    def unties(self) -> bool:
        """Whether the arguments specify that embedding and output layer are separate."""
        return self.tied is False

    @property
    def repeats(self) -> bool:
        """Whether all MTP layers are one repeated layer."""
        return bool(self.argument("mtp_use_repeated_layer"))

    @override
    def base_of(self, name: str) -> str | None:
        return EMBEDDING if name == OUTPUT and self.tied and EMBEDDING in self.tensors else None

    @property
    def runs(self) -> bool:
        """Whether Megatron can run the model, so that its modules determine the expected tensors."""
        return self.args is not None and not getattr(self.args, "megatron_mtp_untrainable", None)

    @property
    def drafter(self) -> "DrafterForm | None":
        """Form of the drafter named in the arguments; None if there is none."""
        from megatron_mtp.checkpoint.convert.drafter_form import stored_form

        if self.reader is None or self.args is None or not self.runs or not self.argument("drafter"):
            return None
        return stored_form(self.args, self.reader)

    @cached_property
    def parts(self) -> Parts:
        """How its keys are read: Megatron's MTP layers are `mtp.layers`; carried ones have the folder's names."""
        stages = frozenset() if self.inside is None else self.inside.names
        return Parts(None if self.runs else self.layers, stages=stages)

    @property
    def kept_keys(self) -> Mapping[str, Any]:
        """Keys of the config that a conversion stored."""
        return self.kept


Side = HFSide | MegatronSide


def open_saved(path: Path) -> MegatronSide:
    """Open a checkpoint."""
    side = MegatronSide(path)
    try:
        side.reader = reader = DistReader(path, whole=False)
    except ValueError as error:
        inner = path
        with suppress(ValueError):
            inner = named_iteration(path)
        side.add("damaged file", f"The checkpoint cannot be read: {error}", f"{another(inner)}, or fetch it again")
        return side
    try:
        check_files(reader.folder, read_catalogue(reader.folder).storage_data)
    except ValueError as error:
        side.add("damaged file", f"{error}", f"fetch that file again, or {another(reader.folder)}")
    _read_arguments(side, reader)
    number = reader.folder.name.removeprefix("iter_")
    side.iteration = 0 if number == RELEASE else int(number) if number.isdecimal() else None
    with suppress(ValueError):
        side.kept = HFConfig.from_keys(read_json(reader.home / HF_FILES / CONFIG)).keys
    side.tensors = {key.removeprefix(NESTED): _entry(reader, key) for key in reader.keys}
    return side


def _entry(reader: DistReader, key: str) -> StoredTensor:
    shape, dtype = tuple(reader.shape(key)), reader.dtype(key)
    size = torch.Size(shape).numel() * dtype.itemsize
    return StoredTensor(shape, str(dtype).removeprefix("torch."), size, partial(reader.read, key))


def _read_arguments(side: MegatronSide, reader: DistReader) -> None:
    try:
        side.args, side.args_from = reader.common()["args"], FROM_CHECKPOINT
        return
    except (ValueError, OSError) as error:
        says = f"The arguments of the model are not known, so tensors are described by their keys alone: {error}"
    for folder in (reader.folder, reader.home):
        with suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
            whole = yaml.safe_load((folder / RUN_CONFIG).read_text(encoding="utf-8"))
            model = whole.get("model") if isinstance(whole, dict) else None
            if isinstance(model, dict):
                plain = {name: value for name, value in model.items() if isinstance(value, int | float | str | list)}
                side.args, side.args_from = Namespace(**{str(name): value for name, value in plain.items()}), RUN_CONFIG
                return
    side.add("damaged config", says, "audit a checkpoint that Megatron saved whole")
