"""A run: results of the parts, in a folder that shows the progress at any time.

    PART.json    its record, from its start
    PART.log     its output; LINE.log for the fork servers
    events       one JSON object per line: imports, lines, parts that started and ended

First the parts of kind `together` run concurrently, as many as there are cores; then the timed parts, one at a time.
"""

import os
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import PARTS, record
from benchmarks.gpu.lines import CPU, Lines, lines_of, open_lines, touches_cuda

ENVIRONMENT = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # makes is_available not initialize CUDA
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
}
SPARE, LEAST = 8.0, 15.0
"""Seconds before its kill at which a part should end, and seconds that a run needs to start a part."""


@dataclass(frozen=True)
class Run:
    """Parts to run, and the deadline (`time.monotonic`).

    Attributes:
        folder: for all files.
        parts: names of the parts.
        command: as shown on the page.
        quick: whether sizes are tiny.
        short: whether parts have the sizes and limits of a short run.
    """

    folder: Path
    parts: tuple[str, ...]
    command: str
    quick: bool
    short: bool
    on_cpu: bool
    deadline: float

    def carry_out(self) -> None:
        """Import torch, fork the lines, and run the parts. Raise RuntimeError if torch cannot use the device so."""
        begun = time.monotonic()
        os.environ.update(ENVIRONMENT | ({"CUDA_VISIBLE_DEVICES": ""} if self.on_cpu else {}))
        import torch

        record.event(self.folder, "imported", module="torch", seconds=round(time.monotonic() - begun, 1))
        if not (self.on_cpu or torch.cuda.is_available()):
            raise RuntimeError("this torch finds no CUDA device; its build may lack CUDA.")
        if touches_cuda():
            raise RuntimeError("the import of torch has started CUDA, so that no part can be a fork.")
        processes, address = lines_of(self.on_cpu), f"megatron-mtp-gpu-{os.getpid()}"
        needed = {processes[PARTS[name].line] for name in self.parts} | {CPU}
        open_lines(address, needed, self.folder)
        of_parts = {name: Lines(address, processes[PARTS[name].line]) for name in self.parts}
        for cores, alone in ((len(os.sched_getaffinity(0)), False), (1, True)):
            with ThreadPoolExecutor(cores) as side_by_side:
                chosen = [name for name in self.parts if PARTS[name].alone is alone]
                list(side_by_side.map(lambda name: self.run(name, of_parts[name]), chosen))
        record.event(self.folder, "all ended", seconds=round(time.monotonic() - begun, 1))

    def run(self, name: str, lines: Lines) -> None:
        """Run a part; its record has the result in any case."""
        limit = PARTS[name].limit(self.short)
        seconds = min(limit, self.deadline - time.monotonic())
        started, begun = record.begin(name, self.command), time.monotonic()
        if seconds < min(LEAST, limit):
            record.end(self.folder, started | {"status": "not run", "why": "no time was left"})
            return
        record.write(self.folder, started)
        record.event(self.folder, "begins", part=name)
        why = self.outcome(name, lines, seconds)
        ended = record.read(self.folder / f"{name}.json")
        if ended["status"] == "running":
            status = "killed" if why.startswith("killed") else "failed"
            why = f"{why}: {_end_of(self.folder / f'{name}.log')}"
            ended |= {"status": status, "why": why, "seconds": round(time.monotonic() - begun, 1)}
        record.end(self.folder, ended)

    def outcome(self, name: str, lines: Lines, seconds: float) -> str:
        """Run a part and describe how its process ended; every process that it started is killed."""
        own_time = max(seconds - SPARE, seconds / 2)
        sizes = [size for size in ("quick", "short") if getattr(self, size)]
        with tempfile.TemporaryDirectory(record.SCRATCH, dir=self.folder) as scratch:
            words = [name, self.folder, scratch, f"{own_time}", lines.address, lines.own, *sizes]
            try:
                process = lines.start(["-m", "benchmarks.gpu.worker", *words], self.folder / f"{name}.log")
            except OSError as error:
                return f"not started, see {lines.own}.log ({error})"
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                return f"killed after {seconds:.0f} s"
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"


def _end_of(log: Path) -> str:
    said = log.read_text(errors="replace").split() if log.exists() else []
    return " ".join(said)[-300:] or "it printed nothing"
