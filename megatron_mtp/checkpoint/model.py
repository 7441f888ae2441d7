"""A model built from what a checkpoint says of itself, in one process: for proofs, not for training."""

import contextlib
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.arguments import validate_args
from torch import Tensor

from megatron_mtp.checkpoint.dist_store import DistReader, stored_draft_vocabulary
from megatron_mtp.checkpoint.integrity import read_errors
from megatron_mtp.checkpoint.megatron_args import MODEL_ARGUMENTS, check_trainable, parse_flags
from megatron_mtp.config import MTPConfig
from megatron_mtp.model.trunk import MTPGPTModel, MTPGPTModelBuilder, MTPGPTModelConfig

ONE_PROCESS = (
    "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-rope-fusion --no-persist-layer-norm --transformer-impl local --distributed-backend gloo "
    "--moe-token-dispatcher-type allgather --eval-interval 1000"
)


def load_model(folder: Path) -> MTPGPTModel:
    """The model of a distributed checkpoint, in float32 and evaluation mode.

    Raises:
        ValueError: the checkpoint is damaged, or Megatron cannot run its model.
    """
    reader = DistReader(folder)
    args = reader.common()["args"]
    check_trainable(args, str(folder))
    model = build(args, stored_draft_vocabulary(reader.folder))
    fill(model, reader)
    return model


def build(stored: Namespace, draft_vocabulary: Tensor | None = None) -> MTPGPTModel:
    """A model from the arguments that a checkpoint keeps, in evaluation mode; Megatron's list of them is not shown."""
    with contextlib.redirect_stdout(io.StringIO()):
        join_world_of_one()
        config = model_config(stored)
        config.draft_vocabulary = draft_vocabulary
        model = MTPGPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    assert isinstance(model, MTPGPTModel)
    return model.cuda().eval()


def fill(model: MTPGPTModel, reader: DistReader, parts: tuple[str, ...] = ("",)) -> None:
    """Load the parameters whose names begin so, by Megatron's own loader."""
    metadata = dist_checkpointing.load_content_metadata(str(reader.folder)) or {}
    every = model.sharded_state_dict(metadata=metadata)
    entries: dict[str, Any] = {"model": {name: every[name] for name in every if name.startswith(parts)}}
    _drop_extra_states(entries["model"])
    with read_errors(f"{reader.folder} cannot be loaded"):
        loaded = dist_checkpointing.load(entries, str(reader.folder))
    model.load_state_dict(loaded["model"], strict=False)


def completed(stored: Namespace) -> Namespace:
    """All of Megatron's arguments, from those of a checkpoint that say what its model computes."""
    args = parse_flags(ONE_PROCESS.split())
    for name in MODEL_ARGUMENTS:
        if getattr(stored, name, None) is not None:
            setattr(args, name, getattr(stored, name))
    validate_args(args)
    return args


def model_config(stored: Namespace) -> MTPGPTModelConfig:
    """The configuration of a model from the arguments that a checkpoint keeps."""
    return config_of(completed(stored))


def config_of(args: Namespace, **gpt_config: Any) -> MTPGPTModelConfig:
    """The same from all of Megatron's arguments, for what a model computes: nothing of its training.

    Args:
        gpt_config: further arguments of Megatron's `gpt_config_from_args`.
    """
    config: MTPGPTModelConfig = gpt_config_from_args(args, **{"model_config_cls": MTPGPTModelConfig, **gpt_config})
    config.rope_scaling_factor = args.rope_scaling_factor  # Megatron's own builder keeps the default
    config.true_vocab_size = args.vocab_size
    config.mtp = MTPConfig(mtp_architecture=getattr(args, "mtp_architecture", None) or "sequential")
    return config


def join_world_of_one() -> None:
    """A process group of this process alone, with Megatron's parallel state, unless there is one."""
    if torch.distributed.is_initialized():
        return
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)


def _drop_extra_states(entries: dict[str, Any]) -> None:
    """Kernels' own state, which only they write."""
    for name in [name for name in entries if name.endswith("_extra_state")]:
        del entries[name]
