"""What a part is given and what it returns, and the commands that it may run.

Importing it prepares Megatron for this machine.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Goal
from megatron_mtp.runtime import prepare

ON_CPU = prepare()

ROOT = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cpu" if ON_CPU else "cuda")


class NotRunError(Exception):
    """Why a part did not run."""


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Found:
    """What a part found; `not_run` names pieces of it that did not run, and why."""

    results: dict[str, Any]
    goals: list[Goal] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """How much is run, where files go, until when (`time.monotonic`), and what keeps figures before the part ends."""

    quick: bool
    folder: Path
    deadline: float
    keep: Callable[[Found], None] = lambda _: None

    @property
    def left(self) -> float:
        return max(self.deadline - time.monotonic(), 1.0)


def start(command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    with open(log, "wb") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def finish(process: subprocess.Popen[bytes], log: Path, seconds: float, well: Sequence[int] = (0,)) -> str:
    """What it printed; RuntimeError where it did not end well, or in time."""
    try:
        status: int | str = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        status = f"killed after {seconds:.0f} s"
    printed = log.read_text(errors="replace")
    if status not in well:
        print(printed[-4000:], file=sys.stderr)
        raise RuntimeError(f"status {status}: {' '.join(printed.split())[-300:]}")
    return printed
