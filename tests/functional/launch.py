"""Runs whole commands the way a user would, one or several processes; a failure shows the end of what they printed."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import forks
import psutil
import torch

from megatron_mtp.platform import cpu

ROOT = Path(__file__).parents[2]
TIMEOUT = 300
"""Seconds after which a command counts as hanging."""

TINY_RUN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --mtp-num-layers 2 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0"
).split()
"""A model that trains in 30 ms a step on two cores."""

MEASURED = {"step seconds", "peak memory bytes"}
"""What the metrics say of the machine instead of the model: two runs of the same steps differ in it."""


@dataclass(frozen=True)
class Command:
    """A script, relative to the repository, with its arguments, in so many processes."""

    script: str | Path
    arguments: tuple[str, ...]
    processes: int = 1


def words(command: Command | list[str]) -> list[str]:
    """A command as a user types it; torchrun finds a port that is free."""
    if isinstance(command, list):
        return command
    torchrun = [*"-m torch.distributed.run --standalone --nproc-per-node".split(), str(command.processes)]
    launcher = torchrun if command.processes > 1 else []
    return [sys.executable, *launcher, str(ROOT / command.script), *command.arguments]


def python(script: str | Path, *arguments: str) -> Command:
    """The command of a single process."""
    return Command(script, arguments)


def torchrun(processes: int, script: str | Path, *arguments: str) -> Command:
    """The command of several processes on this machine."""
    return Command(script, arguments, processes)


def pretrain(*flags: str, processes: int = 1) -> Command:
    """`pretrain_gpt.py` with the tiny model and these flags beside."""
    return Command("pretrain_gpt.py", (*TINY_RUN, *flags), processes)


def start(command: Command | list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command as a user would, torchrun included; everything it prints goes to `log`."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ranks}
    with open(log, "wb") as output:
        return subprocess.Popen(
            words(command),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a command at once, with every process that it has started: torchrun's workers have groups of their own."""
    for each in (*psutil.Process(process.pid).children(recursive=True), process):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def finish(process: subprocess.Popen[bytes], log: Path, timeout: float = TIMEOUT) -> str:
    """What a command that was started has printed, once it has ended well; AssertionError otherwise."""
    try:
        status: str | int = process.wait(timeout)
    except subprocess.TimeoutExpired:
        kill(process)
        status = f"killed after {timeout} s"
    return _printed(status, log)


def run(command: Command | list[str], log: Path, timeout: float = TIMEOUT) -> str:
    """What a command printed; scripts run in forks, which have Megatron imported but cannot share a CUDA device."""
    has_device = torch.cuda.is_available() and not cpu.installed()  # which answers for a device that is not there
    if isinstance(command, list) or has_device:
        return finish(start(command, log), log, timeout)
    status = forks.run(ROOT / command.script, command.arguments, command.processes, log, timeout)
    return _printed(status, log)


def _printed(status: str | int, log: Path) -> str:
    printed = log.read_text(errors="replace")
    assert status == 0, f"exit status {status}; the end of {log}:\n{printed[-4000:]}"
    return printed


def learned(folder: Path) -> dict[int, dict[str, float]]:
    """Losses and acceptance at every training step; one that was taken twice counts as it was the last time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    training = {row.pop("iteration"): row for row in rows if row.pop("split") == "training"}
    return {step: {name: row[name] for name in row.keys() - MEASURED} for step, row in training.items()}
