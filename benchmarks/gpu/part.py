"""What a part receives, and the commands that it may run.

Importing it prepares Megatron for this machine.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import fork_server
import torch

from benchmarks.gpu.lines import Lines
from benchmarks.harness import Found
from megatron_mtp.megatron.runtime import prepare

ON_CPU = prepare()

ROOT = fork_server.ROOT
DEVICE = torch.device("cpu" if ON_CPU else "cuda")


class NotRunError(Exception):
    """Raised with the reason if a part does not run."""


@dataclass(frozen=True)
class Command:
    """A running command, and where its output goes."""

    process: fork_server.Fork
    log: Path

    def printed(self, seconds: float, well: Sequence[int] = (0,)) -> str:
        """Return the output after the process ended. Raise RuntimeError if it failed or exceeded its time."""
        try:
            status: int | str = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = f"killed after {seconds:.0f} s"
        printed = self.log.read_text(errors="replace")
        if status not in well:
            print(printed[-4000:], file=sys.stderr)
            raise RuntimeError(f"status {status}: {' '.join(printed.split())[-300:]}")
        return printed


@dataclass(frozen=True)
class Setting:
    """Inputs of a part.

    Attributes:
        name: name of the part.
        quick: whether sizes are tiny.
        folder: for files; deleted when the part ends.
        deadline: time limit (`time.monotonic`).
        lines: fork servers for its commands.
        keep: saves results before the part ends.
        short: whether the run is a short one.
    """

    name: str
    quick: bool
    folder: Path
    deadline: float
    lines: Lines
    keep: Callable[[Found], None] = lambda _: None
    short: bool = False

    @property
    def left(self) -> float:
        return max(self.deadline - time.monotonic(), 1.0)

    def start(self, name: str, words: Sequence[object], line: str | None = None) -> Command:
        """Start Python with `words`, whose output goes to NAME.log."""
        log = self.folder / f"{name}.log"
        return Command(self.lines.start(words, log, line), log)

    def run(self, name: str, words: Sequence[object], line: str | None = None) -> str:
        """Run a command and return its output. Raise RuntimeError if it failed or exceeded its time."""
        return self.start(name, words, line).printed(self.left)
