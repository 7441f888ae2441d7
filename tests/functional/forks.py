"""Whole commands without starting Python for each: every rank is a fork of one process that has imported Megatron.

A rank gets what torchrun gives it (arguments, environment, standard streams, a session of its own), runs the script as
`__main__`, and ends as Python would. What torchrun itself does, such as to end all ranks over one, is for
`launch.start`.
"""

import atexit
import os
import runpy
import sys
import time
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver, get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from torch.distributed import TCPStore

GRACE = 5.0
"""Seconds that the other ranks have to end after one that failed."""

_CONTEXT = get_context("forkserver")


@dataclass(frozen=True)
class Rank:
    """What one process of a command is."""

    script: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    log: Path

    def __call__(self) -> None:
        os.setsid()
        with open(self.log, "ab", buffering=0) as output:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
        os.chdir(self.folder)
        os.environ.update(self.environment)
        sys.argv = [self.script, *self.arguments]
        sys.path.insert(0, str(Path(self.script).parent))
        try:
            runpy.run_path(self.script, run_name="__main__")
        finally:
            atexit._run_exitfuncs()


def run(script: Path, arguments: tuple[str, ...], ranks: int, log: Path, timeout: float) -> str | int:
    """The exit status of a command over so many ranks; where it hangs, how long it was waited for."""
    log.write_bytes(b"")
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # on a port that is free, as torchrun's
    processes = [_start(Rank(str(script), arguments, each, os.getcwd(), log)) for each in _environments(ranks, store)]
    try:
        return _status(processes, time.monotonic() + timeout, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


@cache
def _server() -> None:
    """Start the process that forks; it finds `loaded` on PYTHONPATH alone."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([] if path is None else [path])])
    _CONTEXT.set_forkserver_preload(["loaded"])
    forkserver.ensure_running()
    if path is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = path


def _start(rank: Rank) -> BaseProcess:
    _server()
    process = _CONTEXT.Process(target=rank)
    process.start()
    return process


def _status(processes: list[BaseProcess], deadline: float, timeout: float) -> str | int:
    """The first status that is not 0, once all ranks have ended or had the time to."""
    status = 0
    while running := [process for process in processes if process.exitcode is None]:
        left = deadline - time.monotonic()
        if left <= 0:
            return status or f"killed after {timeout} s"
        wait([process.sentinel for process in running], left)
        failed = [process.exitcode for process in processes if process.exitcode]
        if failed and not status:
            status, deadline = int(failed[0] or 0), min(deadline, time.monotonic() + GRACE)
    return status


def _environments(ranks: int, store: TCPStore) -> list[dict[str, str]]:
    """What torchrun sets for each rank; of a single process nothing."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    common = {name: value for name, value in os.environ.items() if name not in names} | {"OMP_NUM_THREADS": "1"}
    if ranks == 1:
        return [common]
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place["WORLD_SIZE"] = str(ranks)
    return [common | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
