"""What kills do to Megatron's saves: a helper process that stays, and an iteration that still calls itself whole.

The helper, which every rank starts at its first save to hold a queue, ends here with its rank; Megatron's lives on when
a rank is killed: half a gigabyte each, until somebody finds it. And on a CPU it is forked, since spawning imports
everything a second time, which takes longer than the save.

An iteration that was whole but not yet named is saved again by the next run, over itself. Its `metadata.json`, which
says that it is whole, goes first; under Megatron's it stays all the time.
"""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch

from megatron_mtp.patches.checksums import CHECKSUMS

PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when the one that started it is gone (prctl(2))."""

BEFORE_SAVES: list[Callable[[Path], None]] = []
"""What the first rank calls before every save, with the folder of all iterations."""


def install(on_cpu: bool) -> None:
    """Replace Megatron's function for the queue, in synchronous saves, and put one before every save."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async.get_write_results_queue = partial(_results_queue, filesystem_async, on_cpu)
    dist_checkpointing.save = _save


def _save(sharded_state_dict: Any, checkpoint_dir: str, *rest: Any, **settings: Any) -> Any:
    """Megatron's `dist_checkpointing.save`, into a folder that says that it is whole only when it is."""
    from megatron.core.dist_checkpointing.serialization import save

    from megatron_mtp.patches.frozen_stages import with_optimizer
    from megatron_mtp.patches.unpickling import seal

    folder, is_first = Path(checkpoint_dir), torch.distributed.get_rank() == 0
    if is_first:
        for name in ("metadata.json", CHECKSUMS):
            (folder / name).unlink(missing_ok=True)
        for prepare in BEFORE_SAVES:
            prepare(folder.parent)
    torch.distributed.barrier()
    request = save(with_optimizer(sharded_state_dict), checkpoint_dir, *rest, **settings)
    if is_first and request is None:
        seal(folder)
    elif is_first:
        request.finalize_fns.append(partial(seal, folder))
    return request


def _results_queue(owner: Any, on_cpu: bool, mp_mode: str = "spawn") -> Any:
    """Megatron's `get_write_results_queue`: one queue a process, kept where Megatron keeps it."""
    if owner._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("fork" if on_cpu else mp_mode))
        manager.start(initializer=end_with_parent, initargs=(os.getpid(),))
        owner._results_queue = manager.Queue()
    return owner._results_queue


def end_with_parent(parent: int) -> None:
    """Called in the new process; elsewhere than on Linux it does nothing."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        return
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the call
        os.kill(os.getpid(), signal.SIGKILL)
