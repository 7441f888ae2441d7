"""Fork servers ("lines"): each has imported torch, Megatron and the package without touching the device.

    cpu      Megatron over gloo, without a device
    local    Megatron's own modules, Transformer Engine hidden
    te       Transformer Engine's modules

A first import takes a minute from a cold disk, and two minutes in twenty processes; a fork takes no time. Each line
listens at an address of its run, and ends with the run (tests/support/fork_server.py). Once CUDA is initialized, forks
cannot use the device: then a line starts a new process for every command.
"""

import ctypes
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import fork_server

from benchmarks.gpu import record

CPU = "cpu"
LINES = {CPU: {"CUDA_VISIBLE_DEVICES": "", "MEGATRON_MTP_ALLOW_CPU": "1"}, "local": {}, "te": {}}
"""Environment variables of each line's commands."""

USED = "losses drafting divergence replays training serving suite".split()
"""Modules of this package that parts need."""


@dataclass(frozen=True)
class Lines:
    """Addresses of a run's fork servers ("lines"), and the caller's own line."""

    address: str
    own: str

    def start(self, words: Sequence[object], log: Path, line: str | None = None) -> fork_server.Fork:
        """Start Python with `words` in a fork, with its output in the log.

        Raises:
            OSError: the line has ended; its log has the reason.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(place(self.address, line or self.own))
        with open(log, "wb") as out:
            command = [sys.executable, *map(str, words)]
            return fork_server.fork(connection, command, subprocess.DEVNULL, out, subprocess.STDOUT, os.environ)


def place(address: str, line: str) -> str:
    """Return an address in Linux's abstract socket namespace."""
    return f"\0{address}-{line}"


def lines_of(on_cpu: bool) -> dict[str, str]:
    """Return the process of each line: without Transformer Engine two are the same, without a device all are."""
    if on_cpu:
        return dict.fromkeys(LINES, CPU)
    return {line: line for line in LINES} | ({} if find_spec("transformer_engine") else {"te": "local"})


def open_lines(address: str, lines: set[str], folder: Path) -> None:
    """Fork the lines' processes, which listen at once and respond after importing everything."""
    of_run = os.getpid()
    for line in sorted(lines):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(place(address, line))
            listening.listen(64)
            if os.fork() == 0:
                be(line, listening, of_run, folder)


def be(line: str, listening: socket.socket, of_run: int, folder: Path) -> None:
    """Run the process of a line."""
    begun = time.monotonic()
    try:
        log = os.open(folder / f"{line}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        take(line)
        fork_server.import_all()
        for name in ("torch._dynamo", "torch._inductor.compile_fx", *(f"benchmarks.gpu.{one}" for one in USED)):
            import_module(name)
        touched, seconds = touches_cuda(), round(time.monotonic() - begun, 1)
        forks = "new processes, since an import has started CUDA" if touched else "forks"
        record.event(folder, "ready", line=line, seconds=seconds, threads=fork_server.threads(), commands=forks)
        fork_server.serve(listening, of_run, (lambda *words: anew(line, *words)) if touched else fork_server.run_main)
    except BaseException as error:
        traceback.print_exc()
        record.event(folder, "line failed", line=line, why=f"{type(error).__name__}: {error}"[:500])
    finally:
        os._exit(1)


def take(line: str) -> None:
    """Configure this process for the line, before it imports Megatron."""
    from megatron_mtp.megatron.runtime import hide_transformer_engine

    os.environ.update(LINES[line])
    if line != "te":
        hide_transformer_engine()


def touches_cuda() -> bool:
    """Return whether this process has initialized the CUDA driver, even if torch has not."""
    import torch

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    not_initialized = 3
    return torch.cuda.is_initialized() or driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != not_initialized


def anew(line: str, *words: str) -> None:
    """Replace this process by a new Python that runs the words."""
    path = [str(fork_server.ROOT), str(fork_server.ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu.lines", line, *words])


if __name__ == "__main__":
    take(sys.argv[1])
    fork_server.run_main(*sys.argv[2:])
