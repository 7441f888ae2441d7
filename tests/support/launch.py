"""Run whole commands as a user would, in one or several processes; a failure shows the end of their output."""

import contextlib
import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import fork_server
import psutil
from torch.distributed import TCPStore

ROOT, TIMEOUT = fork_server.ROOT, fork_server.TIMEOUT
GRACE = 2.0
"""Seconds that other ranks have to exit after one failed."""

PLAIN_RUN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0"
).split()
TINY_RUN = [*PLAIN_RUN, "--mtp-num-layers", "2"]
"""A model that takes 30 ms per training step on two cores."""

MEASURED = {"step seconds", "peak memory bytes"}
"""Metrics of the machine instead of the model, which differ between two equal runs."""


@dataclass(frozen=True)
class Command:
    """A script, relative to the repository, with its arguments and number of processes."""

    script: str | Path
    arguments: tuple[str, ...]
    processes: int = 1


def python(script: str | Path, *arguments: str) -> Command:
    """Return the command of a single process."""
    return Command(script, arguments)


def torchrun(processes: int, script: str | Path, *arguments: str) -> Command:
    """Return the command of several processes on this machine."""
    return Command(script, arguments, processes)


def pretrain(*flags: str, processes: int = 1) -> Command:
    """Return the command that runs `pretrain_gpt.py` with the tiny model and these additional flags."""
    return Command("pretrain_gpt.py", (*TINY_RUN, *flags), processes)


class Ranks:
    """The processes of one command: forks with torchrun's environment for each rank, or a single process without it.

    Tests of torchrun itself, such as which rank it reports as killed, use `start_torchrun`.
    """

    def __init__(self, command: Command | list[str], stdout: IO[Any], stderr: int | IO[Any]) -> None:
        ranks = 1 if isinstance(command, list) else command.processes
        # on a free port, as torchrun does
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
        port = self._store.port if self._store else 0
        self._processes = [
            fork_server.start(_words(command), stdout=stdout, stderr=stderr, env=_environment(rank, ranks, port))
            for rank in range(ranks)
        ]
        self.pid = self._processes[0].pid

        self._failed = 0

    def poll(self) -> int | None:
        """When all ranks have ended, return the first nonzero status, or 0; before that, None."""
        found = [process.poll() for process in self._processes]
        self._failed = self._failed or next(filter(None, found), 0)
        return None if None in found else self._failed

    def wait(self, timeout: float | None = None) -> int:
        """Wait and return the status. If one rank fails, the others get `GRACE` seconds. Raise
        subprocess.TimeoutExpired.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline and not self._failed:
                raise subprocess.TimeoutExpired("ranks", timeout or 0)
            if self._failed:
                self._end(GRACE)
            time.sleep(0.005)
        return status

    def kill(self) -> None:
        self._end(0)

    def _end(self, grace: float) -> None:
        deadline = time.monotonic() + grace
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
            process.kill()
            process.wait()


def start(command: Command | list[str], log: Path) -> Ranks:
    """Start a command; its output goes to `log`."""
    with open(log, "ab", buffering=0) as output:
        output.truncate(0)
        return Ranks(command, output, subprocess.STDOUT)


def start_torchrun(command: Command, log: Path) -> "subprocess.Popen[bytes]":
    """Start a command with torchrun itself, with a new process for every rank."""
    words = "-m torch.distributed.run --standalone --nproc-per-node".split()
    with open(log, "wb") as output:
        return subprocess.Popen(
            [sys.executable, *words, str(command.processes), *_words(command)[1:]],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**fork_server.without_ranks(), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def _words(command: Command | list[str]) -> list[str]:
    if isinstance(command, list):
        return command
    return [sys.executable, str(ROOT / command.script), *command.arguments]


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return torchrun's variables for a rank; empty for a single process."""
    common = fork_server.without_ranks()
    if ranks == 1:
        return common
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {**common, **meeting, "WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill torchrun and every process that it started: its workers have their own process groups."""
    for each in (*psutil.Process(process.pid).children(recursive=True), process):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def finish(process: Ranks, log: Path, timeout: float = TIMEOUT) -> str:
    """Return the output of a started command after it succeeded. Raise AssertionError otherwise."""
    try:
        status: str | int = process.wait(timeout)
    except subprocess.TimeoutExpired:
        status = f"killed after {timeout} s"
    finally:
        process.kill()
    return _printed(status, log)


def run(command: Command | list[str], log: Path, timeout: float = TIMEOUT) -> str:
    """Run a command and return its output after it succeeded."""
    return finish(start(command, log), log, timeout)


def output(command: Command | list[str], log: Path) -> str:
    """Return a command's standard output; the rest goes to `log`."""
    with tempfile.TemporaryFile() as out, open(log, "ab", buffering=0) as errors:
        finish(Ranks(command, out, errors), log)
        out.seek(0)
        return out.read().decode()


def _printed(status: str | int, log: Path) -> str:
    printed = log.read_text(errors="replace")
    assert status == 0, f"exit status {status}; the end of {log}:\n{printed[-4000:]}"
    return printed


def learned(folder: Path) -> dict[int, dict[str, float]]:
    """Return losses and acceptance at every training step; for a repeated step, the last ones."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    training = {row.pop("iteration"): row for row in rows if row.pop("split") == "training"}
    return {step: {name: row[name] for name in row.keys() - MEASURED} for step, row in training.items()}
