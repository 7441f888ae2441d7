"""Free space on the disk of --save: checked before the first step, and to explain a failed save.

A checkpoint has all weights and, for trained parameters, the optimizer state: two moments for Adam or one for SGD, and
float32 weights if training uses fewer bits.
"""

import errno
import shutil
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

import torch
from megatron.core import mpu

from megatron_mtp.common.errors import InputError
from megatron_mtp.megatron.checkpoint.damage import root_of
from megatron_mtp.training.short_log import say

MOMENTS = {"adam": 2, "sgd": 1}
"""Float32 numbers that an optimizer keeps for each trained parameter; optimizers that are not listed count as zero."""

LEFT = 2**20
"""Free bytes below which a disk counts as full: the files of a checkpoint have buffers of about this size."""


def check_room(args: Namespace, chunks: Iterable[torch.nn.Module], has_optimizer: bool) -> None:
    """Check that the disk has space for the run's checkpoints. All ranks call it before the first step.

    Raises:
        InputError: the disk has no space for one checkpoint.
    """
    if args.save is None or "://" in args.save:
        return
    size = torch.tensor([checkpoint_bytes(args, chunks, has_optimizer), 0], dtype=torch.int64).cuda()
    torch.distributed.all_reduce(size, group=mpu.get_model_parallel_group())
    size[1] = shutil.disk_usage(there(Path(args.save))).free
    torch.distributed.broadcast(size, 0)
    one, free = size.tolist()
    saves = 1 if args.save_retain_interval else -(-(args.train_iters - args.iteration) // args.save_interval)
    if free < one:
        raise InputError(
            f"--save is {args.save}, where {gib(free)} are free, and a checkpoint of this run takes {gib(one)}; free "
            "some, or name a folder on another disk."
        )
    if free < saves * one and args.rank == 0:
        say(
            f"> {saves} checkpoints of {gib(one)} will be saved, and {gib(free)} are free at {args.save}; give a "
            "larger --save-interval, or remove old iterations in time"
        )


def checkpoint_bytes(args: Namespace, chunks: Iterable[torch.nn.Module], has_optimizer: bool) -> int:
    """Return the bytes that this rank's parameters add to a checkpoint, with experts of all expert-parallel ranks."""
    bytes_of_state = 4 * MOMENTS.get(args.optimizer, 0)
    total = 0
    for parameter in (one for chunk in chunks for one in chunk.parameters()):
        each = parameter.element_size()
        if parameter.requires_grad and has_optimizer and not args.no_save_optim:
            each += bytes_of_state + (4 if parameter.element_size() < 4 else 0)
        copies = 1 if getattr(parameter, "allreduce", True) else mpu.get_expert_model_parallel_world_size()
        total += parameter.numel() * each * copies
    return total


def is_full(folder: Path, error: BaseException) -> bool:
    """Return whether a save failed because the disk is full. torch reports a file of unexpected size in that case."""
    root = root_of(error)
    by_number = isinstance(root, OSError) and root.errno in (errno.ENOSPC, errno.EDQUOT)
    return by_number or shutil.disk_usage(there(folder)).free < LEFT


def there(folder: Path) -> Path:
    """Return the folder, or its nearest ancestor that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def gib(size: int) -> str:
    """Format a size for a message."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
