"""Consequences of kills for Megatron's saves: a helper process that stays, and an iteration that still looks whole.

Every rank starts a helper process at its first save, to hold a queue. Megatron's helper lives on when its rank is
killed, with half a gigabyte of memory. Here it ends with its rank. A process that has not used CUDA
forks it, since spawning imports everything a second time, which takes longer than the save.

A run that was killed between its save and the tracker's update is started again, and saves that iteration over
itself. `metadata.json`, which marks an iteration as whole, is removed first; Megatron leaves it in place all the time.
"""

import ctypes
import functools
import inspect
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.managers import SyncManager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

from megatron_mtp.patches.catalogue import CHECKSUMS, FORMAT, seal
from megatron_mtp.patches.patch import Function, names_in, with_globals

PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when its parent has ended (prctl(2))."""

BEFORE_SAVES: list[Callable[[Path], None]] = []
"""Functions that the first rank calls before every save, with the folder of all iterations."""

Save = Callable[..., Any]
"""`dist_checkpointing.save`: state, folder of the iteration, and settings; an AsyncRequest or None."""


def unmarked_meanwhile(save: Save) -> Save:
    """The same, into a folder that looks whole only when it is."""

    @functools.wraps(save)
    def saved(state: Any, checkpoint_dir: str, *rest: Any, **settings: Any) -> Any:
        if torch.distributed.get_rank() == 0:
            (Path(checkpoint_dir) / FORMAT).unlink(missing_ok=True)
        torch.distributed.barrier()
        return save(state, checkpoint_dir, *rest, **settings)

    return saved


def sealed(save: Save) -> Save:
    """The same, with a checksum of the catalogue beside it."""

    @functools.wraps(save)
    def saved(state: Any, checkpoint_dir: str, *rest: Any, **settings: Any) -> Any:
        folder, is_first = Path(checkpoint_dir), torch.distributed.get_rank() == 0
        if is_first:
            (folder / CHECKSUMS).unlink(missing_ok=True)
        request = save(state, checkpoint_dir, *rest, **settings)
        if is_first and request is None:
            seal(folder)
        elif is_first:
            request.finalize_fns.append(partial(seal, folder))
        return request

    return saved


def announced(save: Save) -> Save:
    """The same; the first rank calls `BEFORE_SAVES` before it."""

    @functools.wraps(save)
    def saved(state: Any, checkpoint_dir: str, *rest: Any, **settings: Any) -> Any:
        if torch.distributed.get_rank() == 0:
            for prepare in BEFORE_SAVES:
                prepare(Path(checkpoint_dir).parent)
        return save(state, checkpoint_dir, *rest, **settings)

    return saved


def queue_that_ends(get_queue: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of `get_write_results_queue`: one queue a process, kept where Megatron keeps it."""
    owner: Any = sys.modules[get_queue.__module__]

    def get(mp_mode: str = "spawn") -> Any:
        if owner._results_queue is None:
            manager = SyncManager(ctx=multiprocessing.get_context(mp_mode if torch.cuda.is_initialized() else "fork"))
            manager.start(initializer=end_with_parent, initargs=(os.getpid(),))
            owner._results_queue = manager.Queue()
        return owner._results_queue

    return get


def end_with_parent(parent: int) -> None:
    """Called in the new process. It needs Linux; on other systems it does nothing."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        return
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent had ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


# --- probes: is the fault there? -------------------------------------------------------------------------------------


def keeps_mark(save: Function) -> bool | None:
    """Return whether a folder that is saved to again is still marked as whole when the save begins."""
    reached: list[bool] = []

    def begin(*_: Any) -> None:
        reached.append(True)
        raise InterruptedError

    alone = SimpleNamespace(get_rank=lambda: 0, barrier=lambda *_: None, is_initialized=lambda: False)
    begun = with_globals(
        save, save_preprocess=begin, torch=SimpleNamespace(distributed=alone), logger=logging.Logger("probe", 100)
    )
    with TemporaryDirectory(prefix="megatron-mtp-") as folder:
        mark = Path(folder) / FORMAT
        mark.touch()
        with suppress(InterruptedError):
            begun({}, folder)
        return mark.exists() if reached else None


def seals_nothing(save: Function) -> bool:
    """Return whether a save makes no checksum of the catalogue by default."""
    settings = inspect.signature(save).parameters
    return "verify_integrity" not in settings or settings["verify_integrity"].default is False


def leaves_helper(get_queue: Function) -> bool:
    """Return whether the queue's process is a plain Manager, which nothing ends with its parent."""
    return "Manager" in names_in(get_queue)
