"""Build a model from the arguments of its checkpoint in one process, for verification, not for training."""

import contextlib
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor

from megatron_mtp.megatron.checkpoint import other_key
from megatron_mtp.megatron.checkpoint.damage import read_errors
from megatron_mtp.megatron.checkpoint.reader import DistReader, check_query_norms, stored_draft_vocabulary
from megatron_mtp.model.arguments import check_trainable, config_of
from megatron_mtp.model.build import build, join_world
from megatron_mtp.model.stored_arguments import alone, completed


def load_model(folder: Path) -> LanguageModule:
    """Load a checkpoint's model in float32 and evaluation mode. Raise ValueError if Megatron cannot run it.

    If the checkpoint has MTP layers and a drafter, the drafter is left out.
    """
    reader = DistReader(folder)
    args = alone(reader.common()["args"], is_drafter=False)
    check_trainable(args, str(folder))
    model = model_of(args, stored_draft_vocabulary(reader.folder, getattr(args, "drafter", None) is not None))
    fill(model, reader)
    return model


def model_of(stored: Namespace, draft_vocabulary: Tensor | None = None) -> LanguageModule:
    """Build a model from the arguments of a checkpoint, with random weights and in evaluation mode.

    `draft_vocabulary` has the ids [N] of the tokens that the MTP layers may draft; None for all.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # Megatron prints all arguments
        join_world(alone=True)
        config = config_of(completed(stored))
        config.draft_vocabulary = draft_vocabulary
        return build(config).cuda().eval()


def fill(model: LanguageModule, reader: DistReader, parts: tuple[str, ...] = ("",)) -> None:
    """Load the parameters whose names begin with one of `parts`, by Megatron's loader. Raise ValueError on faults."""
    check_query_norms(reader, str(reader.folder))
    metadata = dist_checkpointing.load_content_metadata(str(reader.folder)) or {}
    every = model.sharded_state_dict(metadata=metadata)
    entries: dict[str, Any] = {"model": {name: every[name] for name in every if name.startswith(parts)}}
    for name in [name for name in entries["model"] if name.endswith("_extra_state")]:
        del entries["model"][name]  # kernel state, which checkpoints from other kernels lack
    for entry in entries["model"].values():
        if isinstance(entry, ShardedTensor) and not reader.holds(entry.key):
            other = other_key(entry.key)
            if other is not None and reader.holds(other):
                entry.key = other  # local and TE modules save norms under different keys
    with read_errors(f"{reader.folder} cannot be loaded"):
        loaded = dist_checkpointing.load(entries, str(reader.folder))
    model.load_state_dict(loaded["model"], strict=False)
