"""A model as its checkpoint describes it, in one process: for proofs, not for training."""

import contextlib
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from torch import Tensor

from megatron_mtp.checkpoint.mcore.integrity import read_errors
from megatron_mtp.checkpoint.mcore.stored_depths import stored_draft_vocabulary
from megatron_mtp.checkpoint.mcore.tensors import DistReader
from megatron_mtp.model.arguments import completed
from megatron_mtp.model.build import MTPGPTModelConfig, build, config_of, join_world
from megatron_mtp.model.trunk import MTPGPTModel


def load_model(folder: Path) -> MTPGPTModel:
    """The model of a distributed checkpoint, in float32 and evaluation mode.

    Raises:
        ValueError: the checkpoint is damaged, or Megatron cannot run its model.
    """
    reader = DistReader(folder)
    args = reader.common()["args"]
    check_trainable(args, str(folder))
    model = model_of(args, stored_draft_vocabulary(reader.folder))
    fill(model, reader)
    return model


def model_of(stored: Namespace, draft_vocabulary: Tensor | None = None) -> MTPGPTModel:
    """A model from the arguments that a checkpoint keeps, in evaluation mode; Megatron's list of them is not shown."""
    with contextlib.redirect_stdout(io.StringIO()):
        join_world(alone=True)
        config = model_config(stored)
        config.draft_vocabulary = draft_vocabulary
        return build(config).cuda().eval()


def model_config(stored: Namespace) -> MTPGPTModelConfig:
    """The configuration of a model from the arguments that a checkpoint keeps."""
    return config_of(completed(stored))


def fill(model: MTPGPTModel, reader: DistReader, parts: tuple[str, ...] = ("",)) -> None:
    """Load the parameters whose names begin so, by Megatron's own loader."""
    metadata = dist_checkpointing.load_content_metadata(str(reader.folder)) or {}
    every = model.sharded_state_dict(metadata=metadata)
    entries: dict[str, Any] = {"model": {name: every[name] for name in every if name.startswith(parts)}}
    _drop_extra_states(entries["model"])
    with read_errors(f"{reader.folder} cannot be loaded"):
        loaded = dist_checkpointing.load(entries, str(reader.folder))
    model.load_state_dict(loaded["model"], strict=False)


def _drop_extra_states(entries: dict[str, Any]) -> None:
    """Kernels' own state, which only they write."""
    for name in [name for name in entries if name.endswith("_extra_state")]:
        del entries[name]


def check_trainable(args: Namespace, name: str) -> None:
    """Refuse the arguments of a conversion that Megatron has no model for.

    Args:
        name: of the checkpoint, as messages call it.

    Raises:
        ValueError: it is one.
    """
    reason = getattr(args, "megatron_mtp_untrainable", None)
    if reason:
        why = f": it has {reason}" if isinstance(reason, str) else ""  # older conversions do not say why
        raise ValueError(
            f"{name} was converted from a model that Megatron cannot run{why}; mcore-to-hf converts it back."
        )
